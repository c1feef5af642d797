"""`switchsd train draft`, from a capture of whole texts to a draft model that loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from switchsd.artifacts import cached, candidates
from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Four whole texts with the last states."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{letter * 3} {letter} ?"}) for letter in "abcd"))
    arguments = ["--prompts", prompts, "--max-new-tokens", 12, "--batch", 2, "--dtype", "float32"]
    arguments += ["--target", tiny_folder, "--sites", "eagle", "--selection", "all"]
    assert main(["capture", str(folder / "store"), *map(str, arguments)]) == OK
    return folder / "store"


QUICK = ("--tokens", 60, "--validation-documents", 1, "--batch-tokens", 64, "--frequent", 16, "--sampled", 16)


def test_a_draft_trains_into_the_users_cache_and_is_found_there(run: Run, whole: Path, tiny_folder: Path) -> None:
    from activations.target import load_target
    from decoding.draft.model import load_draft

    code, out, err = run("train", "draft", whole, "--target", tiny_folder, *QUICK)
    assert code == OK, err
    where = cached("draft", str(tiny_folder))
    assert where.name == "draft" and str(where) in out.replace("\n", "") and "acceptance" in out
    assert list(candidates("draft", str(tiny_folder))) == [where]
    target = load_target(tiny_folder)
    draft = load_draft(where, target)
    assert draft.blocks == 2 and draft.head.weight.shape == target.head.weight.shape


def test_blocks_by_number_and_the_answer_for_machines(run: Run, whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    command = ("train", "draft", whole, "--target", tiny_folder, "--out", tmp_path / "draft", "--json", *QUICK)
    code, out, err = run(*command, "--cut", "0,1,7")
    assert code == OK, err
    found = json.loads(out)
    assert found["folder"] == str(tmp_path / "draft") and 0 <= found["acceptance"] <= 1
    assert json.loads((tmp_path / "draft" / "draft.json").read_text())["blocks"] == [0, 1, 7]


@pytest.mark.parametrize(
    ("more", "wanted", "message"),
    [
        (("--cut", "0;1"), USAGE, "--cut '0;1' is no list of block numbers"),
        (("--cut", "0,8"), FAILURE, "choose increasing numbers from 0 to 7"),
        (("--blocks", 9), FAILURE, "cannot be cut from a target of 8"),
        (("--variation", 2), USAGE, "variation is 2.0; it must lie in [0, 1]"),
    ],
)
def test_wrong_settings(
    run: Run, whole: Path, tiny_folder: Path, tmp_path: Path, more: tuple[object, ...], wanted: int, message: str
) -> None:
    code, _, err = run("train", "draft", whole, "--target", tiny_folder, "--out", tmp_path / "draft", *QUICK, *more)
    assert (code, message in err) == (wanted, True), err
    assert not (tmp_path / "draft").exists()


def test_stores_that_are_none_or_of_another_target(run: Run, whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    code, _, err = run("train", "draft", tmp_path, "--target", tiny_folder, *QUICK)
    assert (code, "is no capture store" in err) == (FAILURE, True), err
    other = tmp_path / "other"
    other.mkdir()
    manifest = json.loads((whole / "manifest.json").read_text())
    manifest["target"]["width"] = 1
    (other / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    code, _, err = run("train", "draft", other, "--target", tiny_folder, *QUICK)
    assert (code, "written by another target" in err, "width: 64 and 1" in err) == (USAGE, True, True), err
    (other / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "selection": "anchors"}))
    code, _, err = run("train", "draft", other, "--target", tiny_folder, *QUICK)
    assert (code, "switchsd write" in err) == (USAGE, True), err
