"""`switchsd train draft`, from a capture of whole texts to a draft model that loads."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from switchsd import artifacts
from switchsd.artifacts import cached, candidates
from switchsd.cli import FAILURE, INTERRUPTED, OK, USAGE, main

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


def test_a_draft_goes_on_from_another_with_questions(run: Run, whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = ("train", "draft", whole, "--target", tiny_folder, *QUICK)
    assert run(*command, "--out", first, "--cut", "0,3")[0] == OK
    more = ("--out", second, "--continue-from", first, "--questions", 20, "--question-share", 0.6, "--json")
    code, out, err = run(*command, *more)
    assert code == OK, err
    saved = json.loads((second / "draft.json").read_text())
    assert saved["blocks"] == [0, 3] and saved["runs"][-1]["config"]["questions"] == 20
    assert json.loads(out)["answers"].keys() >= {"sum", "reverse"}
    code, _, err = run(*command, *more, "--cut", "0,1")
    assert (code, "holds blocks [0, 3], not [0, 1]: name those, or none" in err) == (FAILURE, True), err
    code, _, err = run(*command, "--out", second, "--continue-from", tmp_path)
    assert (code, "is no draft model" in err) == (FAILURE, True), err


@pytest.mark.parametrize(
    ("more", "wanted", "message"),
    [
        (("--question-share", 1), USAGE, "question_share is 1.0; it must be 0 or more and below 1"),
        (("--cut", "0;1"), USAGE, "--cut '0;1' is no list of block numbers"),
        (("--cut", "5,2"), USAGE, "--cut '5,2' is no list of increasing block numbers"),
        (("--cut", "2,2"), USAGE, "--cut '2,2' is no list of increasing block numbers"),
        (("--cut=-1,2",), USAGE, "--cut '-1,2' is no list of increasing block numbers"),
        (("--cut", "0,8"), USAGE, "--cut 0,8: the blocks of"),
        (("--blocks", 9), USAGE, "--blocks 9: "),
        (("--checkpoint-seconds", 0), USAGE, "checkpoint_seconds is 0.0; it must be above 0"),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("calls", "told"), [(1, "no state to go on from yet"), (3, "go on from the last state in")])
def test_an_interrupted_training_says_what_it_left(
    run: Run,
    whole: Path,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    calls: int,
    told: str,
) -> None:
    import decoding.draft.training as module

    compute, count = module.loss_of, []

    def asked_to_stop(*arguments: Any) -> Any:
        count.append(1)
        if len(count) == calls:
            os.kill(os.getpid(), number)
        return compute(*arguments)

    command = ("train", "draft", whole, "--target", tiny_folder, "--out", tmp_path / "draft", *QUICK, "--json")
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(module, "loss_of", asked_to_stop)
        code, _, err = run(*command, "--tokens", 500)
    signal.signal(signal.SIGINT, ctrl_c)
    assert (code, told in err, len(count)) == (INTERRUPTED, True, calls), err
    assert signal.getsignal(signal.SIGTERM) is before
    code, out, err = run(*command, "--tokens", 500)
    assert code == OK and json.loads(out)["rows"] >= 500, err
    assert ("\ntokens=0 " in f"\n{err}") == (calls == 1), "it went on from there"


def test_a_run_that_reads_its_text_too_often_says_so(
    run: Run, whole: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoding.training import rows_of_a_pass
    from switchsd.commands import train

    there = rows_of_a_pass([whole], [1])
    command = ("train", "draft", whole, "--target", tiny_folder, *QUICK)
    monkeypatch.setattr(train, "OFTEN", 3)
    code, _, err = run(*command, "--out", tmp_path / "one", "--tokens", 3 * there)
    assert code == OK and "note:" not in err
    code, _, err = run(*command, "--out", tmp_path / "two", "--tokens", 5 * there)
    assert code == OK and err.count("note:") == 1
    assert f"hold {there} tokens to train on, and this run reads them 5 times" in err
    assert "switchsd write --tokens" in err and f"--tokens {3 * there})" in err
    code, _, err = run(*command, "--out", tmp_path / "three", "--tokens", 5 * there, "--minutes", 9)
    assert code == OK and err.count("note:") == 1 and "less time (--minutes, now 9)" in err


def test_what_the_command_says_of_itself(run: Run, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = artifacts.candidates
    monkeypatch.setattr(artifacts, "candidates", lambda kind, name: [] if kind == "draft" else found(kind, name))
    assert "draft model" in " ".join(run("train", "--help")[1].split())
    advice = json.loads(run("doctor", "--json")[1])["advice"]
    (line,) = (line for line in advice if "no draft model for smollm2" in line)
    from decoding.modes import DRAFT, MODES

    assert all(name in line for name, mode in MODES.items() if mode.neural == DRAFT) and "switchsd train draft" in line
