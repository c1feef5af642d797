"""What cannot be done is said in words, with exit code 2 for what was asked and 1 for what is broken."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments) -> exit code and standard error on one line."""

    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert "SWITCHSD_DEBUG" not in error  # a foreseen error, not one that only its kind is known of
        return code, " ".join(error.split())

    return call


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small target, to be damaged."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "target"))


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_tensors(folder: Path) -> None:
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "layers.3.mlp" not in k}
    save_file(kept, file, {"format": "pt"})


def recurrent(folder: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=258, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(folder)


def no_blocks(folder: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True)
    BertLMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: half(f / "model.safetensors"), "its weights"),
        (lambda f: (f / "model.safetensors").unlink(), "its weights"),
        (lambda f: half(f / "config.json"), "its configuration"),
        (lambda f: (f / "config.json").write_text('{"model_type": "zorp"}'), "zorp"),
        (lambda f: [file.unlink() for file in f.glob("token*")], "its tokenizer"),
        (lambda f: edit(f / "config.json", intermediate_size=96), "24 tensors have another shape, model.layers.0.mlp"),
        (drop_tensors, "3 tensors are missing, model.layers.3.mlp.down_proj.weight"),
        (recurrent, "keeps a recurrent state"),
        (no_blocks, "BertLMHeadModel, whose blocks cannot be found"),
    ],
)
def test_a_target_that_cannot_be_used(run: Run, folder: Path, damage: Callable[[Path], object], text: str) -> None:
    damage(folder)
    code, error = run("generate", "x", "--target", folder)
    assert code == USAGE
    assert text in error
    assert str(folder) in error


def test_a_chat_template_that_refuses(run: Run, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('system role not supported') }}")
    code, error = run("generate", "x", "--system", "y", "--target", folder)
    assert (code, "refuses messages of system, user: system role not supported" in error) == (USAGE, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "1e-40"], "temperature is 1e-40"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--probe", "nope"], "no probe 'nope'"),
        (["--drafter", "nope"], "nope holds no EAGLE head"),
        (["--trace", "/dev/null"], "/dev/null is there and is no file"),
        (["--trace", "/"], "is no file"),
    ],
)
def test_options_that_cannot_be(run: Run, tiny_folder: Path, options: list[str], text: str) -> None:
    code, error = run("generate", "x", "--target", tiny_folder, "--mode", "ar", "--max-new-tokens", "2", *options)
    assert (code, text in error) == (USAGE, True), error


def test_prompts_that_are_no_text(run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--target", tiny_folder, "--mode", "ar"]
    code, error = run("generate", "\udcff", *options)  # how Python shows a byte that is no UTF-8
    assert (code, r"'\udcff' at character" in error) == (USAGE, True), error
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"\xff"), encoding="utf-8"))
    code, error = run("generate", "-", *options)
    assert (code, "it is no UTF-8 text" in error) == (USAGE, True), error


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("capture store --sites ,", "no sites"),
        ("capture store --batch 0", "batch is 0"),
        ("capture store --max-new-tokens 0", "max_new_tokens is 0"),
        ("capture store --temperature nan", "temperature is nan"),
        ("capture store --limit -1", "--limit is -1"),
        ("capture store --split test", "unknown split 'test': use train or validation, or leave --split out for both"),
        ("capture store --prompts=", "--prompts is empty: name a source, or leave it out"),
        ("sites {file}", "{file} is a file: name the folder"),
        ("capture {file}", "{file} is there and is no folder"),
        ("capture {file}/below", "{file} is there and is no folder"),
        ("write store --tokens 0", "tokens is 0"),
        ("write store --greedy nan", "greedy is nan"),
        ("write store --benchmark {file}", "{file}:1: not JSON"),
        ("write {file}", "{file} is there and is no folder"),
        ("train probe store --l2 nan", "l2 is (nan,)"),
        ("train probe store --seed -1", "seed is -1"),
        ("train probe store --out {file}", "{file} is there and is no folder"),
        ("train eagle store --steps 0", "steps is 0"),
        ("train eagle store --unrolled-share 7", "unrolled_share is 7.0"),
        ("train eagle store --learning-rate nan", "learning_rate is nan"),
        ("bench --modes ar,ar", "'ar' is named twice"),
        ("bench --suite {file}", "{file}:1: not JSON"),
        ("bench --out {file}", "{file} is there and is no folder"),
        ("profile --seconds nan", "--seconds is nan"),
        ("profile --out {file}/below", "no such folder: {file}"),
        ("demo --max-new-tokens 1", "--max-new-tokens is 1"),
    ],
)
def test_refused_before_any_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    code, error = run(*command.format(file=file).split())
    assert (code, text.format(file=file) in error) == (USAGE, True), error
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_prompt_that_is_too_long_stops_nothing_half_way(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("short", "x" * 5000)))
    code, error = run("capture", tmp_path / "store", "--prompts", file, "--target", tiny_folder, "--sites", "embed")
    assert (code, "prompt some-2: the prompt has 50" in error) == (USAGE, True), error
    assert not (tmp_path / "store").exists()
    bench = ["bench", "--suite", file, "--target", tiny_folder, "--modes", "ar", "--out", tmp_path / "run"]
    code, error = run(*bench)
    assert (code, "some:some-2: the prompt has 50" in error) == (USAGE, True), error
    assert not (tmp_path / "run" / "rows.jsonl").exists()


def test_a_damaged_row_of_a_benchmark_is_named(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    for line in (b"no json", b'{"key": 1}', b"[]", b"\xff"):
        (tmp_path / "rows.jsonl").write_bytes(line + b"\n")
        code, error = run("bench", "--limit", "1", "--target", tiny_folder, "--modes", "ar", "--out", tmp_path)
        assert (code, "rows.jsonl:1 is damaged" in error) == (FAILURE, True), error


@pytest.fixture(scope="module")
def store(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of six prompts in three shards."""
    root = tmp_path_factory.mktemp("stores")
    file = root / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i} abc abc"}) for i in range(6)))
    assert main(["capture", str(root / "store"), *capture_options(tiny_folder, file)]) == OK
    return root / "store"


def capture_options(target: Path, prompts: Path) -> list[str]:
    options = ["--target", str(target), "--prompts", str(prompts), "--sites", "embed", "--max-new-tokens", "6"]
    return [*options, "--batch", "2", "--dtype", "float32"]


def shards(folder: Path) -> list[bytes]:
    return [p.read_bytes() for p in sorted(folder.rglob("0*"))] + [(folder / "manifest.json").read_bytes()]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 0xFF
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("part", ["rows/00001.parquet", "states/00001.safetensors", "states/00002.safetensors"])
@pytest.mark.parametrize("damage", [half, flip])
def test_a_damaged_shard_is_found_and_made_again(
    run: Run, store: Path, tiny_folder: Path, tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    whole = shards(copied)
    damage(copied / part)
    code, error = run("train", "probe", copied)
    assert (code, f"{copied / part} is missing, or not as it was written" in error) == (FAILURE, True), error
    assert "delete this file" in error
    (copied / part).unlink()
    assert run("capture", copied, *capture_options(tiny_folder, store.parent / "prompts.jsonl"))[0] == OK
    assert shards(copied) == whole


@pytest.mark.parametrize(
    "values",
    [{"target": None}, {"shards": 5}, {"shards": [{}]}, {"sites": None}, {"shards": None}],
    ids=lambda v: json.dumps(v),
)
def test_a_damaged_manifest(run: Run, store: Path, tmp_path: Path, values: dict[str, object]) -> None:
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    edit(copied / "manifest.json", **values)
    code, error = run("train", "probe", copied)
    assert (code, "manifest.json is damaged" in error) == (FAILURE, True), error


def test_a_store_of_the_other_kind(run: Run, store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    code, error = run("train", "eagle", store, "--target", tiny_folder)
    assert (code, "switchsd write" in error) == (USAGE, True), error
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    edit(copied / "manifest.json", selection="all")
    code, error = run("train", "probe", copied)
    assert (code, "switchsd capture" in error) == (USAGE, True), error
    edit(copied / "manifest.json", target={**json.loads((copied / "manifest.json").read_text())["target"], "width": 1})
    code, error = run("train", "eagle", copied, "--target", tiny_folder)
    assert (code, "written by another target" in error, "width: 64 and 1" in error) == (USAGE, True, True), error


@pytest.fixture
def head(tiny_folder: Path, tmp_path: Path) -> Path:
    """A random head that says it is the small target's."""
    from activations.target import load_target
    from decoding.eagle.head import EagleHead, HeadConfig

    made = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=32))
    made.set_vocabulary(torch.arange(32))
    made.save(tmp_path / "head", switchsd={"target": load_target(tiny_folder).fingerprint.to_dict()})
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: half(f / "config.json"), "config.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda f: half(f / "model.safetensors"), "cannot read the weights"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: edit(f / "config.json", hidden_size=32), "do not fit its config.json"),
        (lambda f: edit(f / "config.json", rope_theta="x"), "rope_theta 'x', which is no number"),
    ],
)
def test_a_damaged_head(run: Run, tiny_folder: Path, head: Path, damage: Callable[[Path], object], text: str) -> None:
    command = ["generate", "x", "--target", tiny_folder, "--drafter", head, "--mode", "eagle", "--max-new-tokens", "2"]
    assert run(*command)[0] == OK
    damage(head)
    code, error = run(*command)
    assert (code, text in error, "train the head again" in error) == (FAILURE, True, True), error


def test_a_head_of_another_target(run: Run, tiny_folder: Path, head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    config["switchsd"]["target"]["revision"] = "other"
    (head / "config.json").write_text(json.dumps(config))
    code, error = run("generate", "x", "--target", tiny_folder, "--drafter", head)
    assert code == USAGE
    assert f"{head} was trained for another target than {tiny_folder}" in error
    assert "revision: other and" in error
