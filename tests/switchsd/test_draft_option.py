"""Draft models on the command line: named, found, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import switchsd
from activations.target import Target, load_target
from decoding.draft.drafter import DraftModelDrafter
from decoding.draft.model import cut, save_draft
from switchsd.artifacts import cached
from switchsd.cli import FAILURE, OK, USAGE

Run = Callable[..., tuple[int, str, str]]
PROMPT = "abcd abcd abcd abcd abcd"


@pytest.fixture(scope="module")
def other(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another language model with the same tokenizer: the target's first blocks."""
    folder = tmp_path_factory.mktemp("other")
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.model.layers = model.model.layers[:5]
    model.config.num_hidden_layers = 5
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def options(tiny_folder: Path) -> list[object]:
    return ["--target", tiny_folder, "--dtype", "float32", "--max-new-tokens", 24, "--neural-tree", "fixed"]


@pytest.fixture
def made(tiny_folder: Path, own_cache: Path) -> Path:
    """A draft model where `switchsd train draft` would leave it."""
    target = load_target(tiny_folder, dtype="float32")
    folder = cached("draft", target.name)
    save_draft(folder, cut(target, range(5)), range(5), target)
    return folder


def told(run: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == OK, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.9", "--seed", "3"]])
def test_a_named_model_drafts(run: Run, other: Path, options: list[object], sampling: list[object]) -> None:
    common = ["generate", PROMPT, *options, *sampling]
    alone = told(run, *common, "--mode", "ar")
    for more in (["--mode", "sd"], ["--mode", "switchsd", "--neural", "draft", "--gate", "match"]):
        found = told(run, *common, "--draft", other, *more)
        assert found["tokens"] == alone["tokens"] and found["lossless"] is True
        assert "draft" in found["sources"] and found["steps"] < alone["steps"]
    one = told(run, *common, "--draft", other, "--mode", "sd", "--draft-tokens", 1)
    assert one["tokens"] == alone["tokens"] and one["steps"] >= len(one["tokens"]) / 2 - 1
    rejected = told(run, *common, "--draft", other, "--mode", "sd", "--acceptance", "rejection")
    assert (rejected["tokens"] == alone["tokens"]) == (not sampling)


def test_the_one_that_was_made_is_found(run: Run, made: Path, tiny_folder: Path, options: list[object]) -> None:
    alone = told(run, "generate", PROMPT, *options, "--mode", "ar")
    found = told(run, "generate", PROMPT, *options, "--mode", "sd")
    assert found["tokens"] == alone["tokens"] and "draft" in found["sources"]
    decoder = switchsd.load(tiny_folder, dtype="float32")
    drafter = decoder.neural["draft"]
    assert isinstance(drafter, DraftModelDrafter) and drafter.model.blocks == 5
    assert drafter.model.embed.weight.data_ptr() == decoder.target.embed.weight.data_ptr()
    assert "draft" not in switchsd.load(tiny_folder, draft=None).neural
    assert switchsd.load(tiny_folder, draft=made, neural="draft").settings.neural == "draft"
    code, out, _ = run("doctor", "--json")
    assert code == OK and {"kind": "draft", "folder": str(made)}.items() <= {
        k: v for a in json.loads(out)["artifacts"] if a["kind"] == "draft" for k, v in a.items()
    }.items()  # fmt: skip


def test_nothing_is_loaded_that_is_not_used(
    run: Run, made: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import decoding.draft.model

    def never(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(decoding.draft.model, "load_draft", never)
    for mode in ("ar", "copy"):
        assert run("generate", PROMPT, *options, "--mode", mode, "--json")[0] == OK
    assert "loaded" in run("generate", PROMPT, *options, "--mode", "sd")[2]


def test_a_chat_and_a_cost_table_know_it(
    run: Run, made: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("one one\none one\n"))
    options = ["--target", tiny_folder, "--dtype", "float32", "--max-new-tokens", 8, "--neural-tree", "fixed"]
    code, said, err = run("chat", *options, "--mode", "sd", "--json")
    turns = [json.loads(line) for line in said.splitlines()]
    assert code == OK and len(turns) == 2, err
    assert turns[1]["reused_tokens"] > 0
    file = tmp_path / "costs.json"
    found = told(run, "profile", tiny_folder, "--dtype", "float32", "--seconds", 0.2, "--out", file)
    assert list(found["draft_ms"]) == ["draft"] and len(found["draft_ms"]["draft"]) == 8
    assert found["key"]["drafters"]["draft"] == {"blocks": 5, "width": 64, "outputs": 258}


def test_a_benchmark_compares_it(run: Run, made: Path, tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": [PROMPT]}) + "\n")
    code, out, err = run(
        "bench", "--target", tiny_folder, "--dtype", "float32", "--suite", prompts, "--out", tmp_path / "bench",
        "--modes", "ar,sd,switchsd/neural=draft/gate=match", "--baselines", "", "--neural-tree", "fixed",
        "--max-new-tokens", 12, "--json",
    )  # fmt: skip
    assert code == OK, err
    same = json.loads(out)["equality"]["modes"]
    assert {name: s["different"] for name, s in same.items()} == {"sd": 0, "switchsd/neural=draft/gate=match": 0}


def wrong_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    words = data["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(data))


def smaller(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(200)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "text"),
    [(wrong_tokenizer, "2 tokens have other ids"), (smaller, "knows 200 token ids and the target 258")],
)
def test_a_model_of_other_tokens(
    run: Run, other: Path, tmp_path: Path, options: list[object], damage: Callable[[Path], None], text: str
) -> None:
    folder = Path(shutil.copytree(other, tmp_path / "draft"))
    damage(folder)
    code, _, err = run("generate", "x", *options, "--mode", "sd", "--draft", folder)
    assert (code, text in " ".join(err.split())) == (USAGE, True), err
    assert err.count("cannot draft") == 1


def test_one_that_was_made_for_another_target(run: Run, made: Path, other: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "draft"))
    code, _, err = run("generate", "x", "--target", other, "--mode", "ar", "--draft", folder)
    assert code == USAGE and "trained for another target" in err and "blocks: 8 and 5" in err


def test_damaged_files(run: Run, made: Path, options: list[object]) -> None:
    file = made / "draft.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    code, _, err = run("generate", "x", *options, "--mode", "sd")
    assert code == FAILURE and "cannot read" in err


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--mode", "sd"], "mode 'sd' needs a draft model"),
        (
            ["--mode", "sd"],
            "(switchsd write, then switchsd train draft), or name a small model with the same tokenizer (--draft)",
        ),
        (["--neural", "draft", "--gate", "match"], "the neural side 'draft' needs a draft model"),
        (["--mode", "ar", "--draft", "nope"], "'nope' cannot draft: unknown target 'nope'"),
        (["--mode", "ar", "--draft", "./nope"], "'./nope' cannot draft: no such folder"),
        (["--mode", "copy", "--acceptance", "rejection"], "acceptance=rejection is not for mode 'copy'"),
        (["--mode", "sd", "--acceptance", "luck"], "unknown acceptance 'luck': use keyed or rejection"),
        (["--mode", "sd", "--draft-tokens", "0"], "draft_tokens is 0"),
    ],
)
def test_what_cannot_be(run: Run, options: list[object], more: list[object], text: str) -> None:
    code, _, err = run("generate", "x", *options, *more)
    assert (code, text in " ".join(err.split())) == (USAGE, True), err


def test_in_python(tiny_folder: Path, other: Path) -> None:
    target: Target = load_target(tiny_folder, dtype="float32")
    decoder = switchsd.load(target, draft=other, neural="draft", gate="match", neural_tree="fixed")
    texts = [decoder.generate(PROMPT, mode=m, max_new_tokens=20).tokens for m in ("ar", "sd", "switchsd")]
    assert texts[0] == texts[1] == texts[2]
    assert torch.equal(target.embed.weight, load_target(tiny_folder, dtype="float32").embed.weight)
