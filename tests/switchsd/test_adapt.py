"""One command from a target to its own probe and head, on a small base model with sliding windows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from switchsd.cli import FAILURE, INTERRUPTED, OK, USAGE, main

WINDOW = 16
PROMPT = "abcd abcd abcd abcd abcd " * 3
SMALL = ["--dtype", "float32", "--limit", "24", "--max-new-tokens", "24", "--tokens", "300", "--passes", "1"]


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3: 8 blocks, the sixth of them with full attention, bytes as tokens, and no chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gemma")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=WINDOW, max_position_embeddings=8192, eos_token_id=1,
        bos_token_id=0, pad_token_id=None, initializer_range=0.12,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, " ".join(captured.err.split())

    return call


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def found(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == OK, err
    made: dict[str, Any] = json.loads(out)
    return made


@pytest.mark.slow
def test_a_probe_and_a_head_are_made_and_found(run: Run, gemma_folder: Path, own_cache: Path) -> None:
    name = str(gemma_folder)
    made = found(run, "adapt", name, *SMALL)
    assert made["capture"]["documents"] == 24
    assert made["text"]["tokens"] >= 300
    assert made["plan"]["text_bytes"] > 0 and made["plan"]["head_seconds"] > 0
    artifacts = own_cache / "artifacts" / gemma_folder.name
    assert Path(made["probe"]["folder"]) == artifacts / "probes"
    assert Path(made["head"]["folder"]) == artifacts / "eagle3"
    root = own_cache / "adapt" / gemma_folder.name
    assert size(root / "captures") < made["plan"]["capture_bytes"]
    assert 0.4 < size(root / "text") / made["plan"]["text_bytes"] < 1.2
    assert 0.9 < size(artifacts / "eagle3") / made["plan"]["head_bytes"] < 1.2

    common = ["generate", PROMPT, "--target", name, "--dtype", "float32", "--max-new-tokens", "60"]
    alone = found(run, *common, "--mode", "ar")["tokens"]
    for more in ([], ["--mode", "eagle"], ["--mode", "copy"], ["--neural", "none"], ["--tau", "0.0"]):
        assert found(run, *common, *more)["tokens"] == alone, more
    assert len(alone) + len(PROMPT) > 2 * WINDOW

    before = {f: f.stat().st_mtime_ns for f in artifacts.rglob("*.safetensors") if "probes" in f.parts}
    again = found(run, "adapt", name, *SMALL)
    assert {f: f.stat().st_mtime_ns for f in before} == before, "a probe of this very store is not fitted again"
    assert again["probe"] == made["probe"] and again["capture"] == made["capture"] and again["text"] == made["text"]
    assert again["head"]["rows"] == made["head"]["rows"]
    assert again["plan"]["capture_seconds"] == again["plan"]["text_seconds"] == 0


def test_without_a_head_for_people(run: Run, gemma_folder: Path, tmp_path: Path, own_cache: Path) -> None:
    code, out, err = run("adapt", str(gemma_folder), *SMALL, "--no-head", "--out", str(tmp_path / "here"))
    assert code == OK, err
    assert "captures for the probe" in err and "text for the head" not in err
    assert "not shown to be better than chance" in out and "--gate match" in out, "its weights are random"
    assert "24 answers" in out and "AUC on prompts it never saw" in out and "--neural none" in out
    assert (tmp_path / "here" / "captures" / "manifest.json").is_file()
    assert not (tmp_path / "here" / "text").exists()
    assert [p.name for p in (own_cache / "artifacts" / gemma_folder.name).iterdir()] == ["probes"]


def test_an_interrupted_command_goes_on(
    run: Run, gemma_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from activations.store import StoreWriter

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("probes.train.train", interrupted)
        code, out, err = run("adapt", str(gemma_folder), *SMALL, "--no-head")
    assert (code, out) == (INTERRUPTED, "")
    assert "the same command goes on" in err
    monkeypatch.setattr(StoreWriter, "write", interrupted)  # the captures are there
    made = found(run, "adapt", str(gemma_folder), *SMALL, "--no-head")
    assert made["capture"]["documents"] == 24 and "head" not in made
    assert made["plan"]["capture_seconds"] == made["plan"]["text_bytes"] == 0
    assert (own_cache / "artifacts" / gemma_folder.name / "probes" / "best" / "config.json").is_file()


def test_what_cannot_be_done_is_told_first(
    run: Run, tiny_folder: Path, gemma_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for option in ("--limit", "--tokens", "--passes"):
        code, _, err = run("adapt", str(gemma_folder), option, "-1")
        assert (code, f"{option} is -1" in err) == (USAGE, True)
    code, _, err = run("adapt", str(gemma_folder), "--max-new-tokens", "0")
    assert (code, "max_new_tokens is 0" in err) == (USAGE, True)
    flat = Path(shutil.copytree(tiny_folder, tmp_path / "flat"))
    shape = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2)).save_pretrained(flat)
    code, _, err = run("adapt", str(flat), *SMALL)
    assert (code, "no head can be made" in err and "use --no-head" in err) == (USAGE, True)
    monkeypatch.setattr("activations.store.free_bytes", lambda folder: 2**20)
    code, _, err = run("adapt", str(gemma_folder), *SMALL)
    assert (code, "a lower --limit or --tokens, or --no-head" in err) == (FAILURE, True)
