"""`switchsd train-policy`: from questions to a policy that loads, and what it says of what cannot be."""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("stable_baselines3")

from switchsd.artifacts import cached, candidates
from switchsd.cli import FAILURE, INTERRUPTED, OK, USAGE, main
from switchsd.commands.train_policy import Clock, follow, kinds_of
from switchsd.options import UsageError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pictures and means take longer than these trainings. Gives the function that draws."""
    from decoding.ltd import training as ltd
    from decoding.policies import training

    draw = training.draw_curves
    monkeypatch.setattr(training, "draw_curves", lambda records, file: None)
    monkeypatch.setattr(ltd, "SAMPLES", 64)
    return draw


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A draft of the small target's first and last block, as they are."""
    from activations.target import load_target
    from decoding.draft.model import cut, save_draft

    target = load_target(tiny_folder)
    folder = tmp_path_factory.mktemp("draft")
    save_draft(folder, cut(target, [0, 7]), [0, 7], target, frequent=list(range(2, 90)))
    return folder


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of random models are right as their letters have it."""
    from decoding.cospec import branches

    monkeypatch.setattr(branches, "right", lambda question, text: zlib.crc32(text.encode()) % 3 == 0)


COSPEC = (
    "--count", 24, "--kinds", "sum,item:2", "--first", 1, "--max-new-tokens", 8, "--draft-tokens", 3, "--timesteps", 64,
    "--environments", 4, "--steps", 8, "--batch", 16, "--group", 2, "--hidden", 4, "--warm-epochs", 3, "--epochs", 1,
)  # fmt: skip


def test_a_policy_of_cospec_trains_into_the_users_cache_and_is_found_there(
    run: Run, tiny_folder: Path, draft_folder: Path, judged: None, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoding.policies import training
    from switchsd.loading import load

    monkeypatch.setattr(training, "draw_curves", quick)
    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, *COSPEC)
    code, out, err = run(*command)
    assert code == OK, err
    where = cached("cospec", str(tiny_folder))
    assert str(where) in out.replace("\n", "") and "not the target's text" in out
    assert f"switchsd generate --target {tiny_folder} --mode cospec\n" in out
    assert "24 questions: the target and the draft answer each" in err
    assert "only the draft" in err and err.count("stage=ppo") == 1 == err.count("stage=branches")
    assert out.count("policy of warm") == 11 + out.count("policy of warm at")
    assert list(candidates("cospec", str(tiny_folder))) == [where]
    for name in ("ppo/curves.png", "ppo/log.jsonl", "policy.safetensors"):
        assert (where / name).is_file()
    decoder = load(tiny_folder, draft=draft_folder)
    policy = decoder.policies["cospec"]
    policy.check("cospec", decoder.target, decoder.neural["draft"])
    assert policy.record["config"]["timesteps"] == 64
    before = (where / "policy.safetensors").read_bytes()
    code, out, err = run(*command, "--json")  # what is finished is not done again
    assert code == OK, err
    found = json.loads(out)
    assert (code, found["folder"], found["lossless"]) == (OK, str(where), False) and 0 <= found["threshold"] <= 1
    assert (where / "policy.safetensors").read_bytes() == before


def test_questions_that_nobody_can_answer(run: Run, tiny_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, "--out", tmp_path / "p")
    code, _, err = run(*command, *COSPEC, "--kinds", "convert:3")
    assert (code, "error: no answer is right: of 18 questions the target answers 0.0% right" in err) == (
        FAILURE,
        True,
    ), err
    assert not (tmp_path / "p" / "policy.json").exists()


def test_another_run_in_the_folder(
    run: Run, tiny_folder: Path, draft_folder: Path, tmp_path: Path, judged: None
) -> None:
    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, "--out", tmp_path, *COSPEC)
    assert run(*command)[0] == OK
    before = (tmp_path / "policy.json").read_bytes()
    command = (*command, "--learning-rate")
    code, _, err = run(*command, 0.5)
    assert (code, " and 0.5): give the same settings to go on with it, or choose another" in err) == (FAILURE, True), (
        err
    )
    assert "was begun otherwise (learning_rate: " in err
    assert (tmp_path / "policy.json").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_goes_on(
    run: Run, tiny_folder: Path, draft_folder: Path, tmp_path: Path, judged: None, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:  # fmt: skip
    from decoding.policies import training

    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, *COSPEC)
    assert run(*command, "--out", tmp_path / "whole")[0] == OK
    iterate, count = training._iterate, []

    def stopped(*arguments: Any) -> None:
        iterate(*arguments)
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), number)

    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(training, "_iterate", stopped)
            code, _, err = run(*command, "--out", tmp_path / "cut")
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert (code, f"go on from what is in {tmp_path / 'cut'}" in err) == (INTERRUPTED, True), err
    assert not (tmp_path / "cut" / "policy.json").exists()
    assert json.loads((tmp_path / "cut" / "ppo" / "state.json").read_text())["iteration"] == 1
    assert run(*command, "--out", tmp_path / "cut")[0] == OK
    one, other = ((tmp_path / name / "policy.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--kinds", "nonsense"), "unknown kind of question 'nonsense': choose from extract"),
        (("--kinds", "sum:x"), "--kinds 'sum:x': 'x' is no level; write sum:1,sum:2,lookup"),
        (("--kinds", "sum:0"), "the level of 'sum' is (0,); it must be 1 or more"),
        (("--kinds", ""), "unknown kind of question ''"),
        (("--count", 0), "count is 0; ask for 1 question or more"),
        (("--batch", 60), "batch is 60; it must be 2 or more and divide environments x steps = 4 x 8 = 32"),
        (("--timesteps", 0), "timesteps is 0"),
        (("--validation", 1), "validation is 1.0; it must be a share"),
        (("--hidden", "8,x"), "--hidden"),
        (("--ties", "maybe"), "'maybe'"),
        (("--draft", "/nowhere/at/all"), "cannot draft"),
        (("--target", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--out", __file__), "is there and is no folder"),
        (("--prompts", __file__), "--prompts and --kinds were both given"),
    ],
)
def test_wrong_settings(
    run: Run, tiny_folder: Path, draft_folder: Path, tmp_path: Path, more: tuple[object, ...], told: str
) -> None:
    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, "--out", tmp_path / "p")
    code, _, err = run(*command, *COSPEC, *more)
    assert (code, told in err) == (USAGE, True), err
    assert not (tmp_path / "p").exists()


QUESTION = {"question": "What is 1 and 1?", "answer": "It is\n#### 2"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read the questions in"),
        ("", "holds no question: name another file"),
        ("{", "line 1, holds no `question` and `answer`"),
        (json.dumps({**QUESTION, "answer": "2"}), "line 1: the answer does not end with `#### number`"),
        (b"\xff\xff", "questions.jsonl is no UTF-8 text"),
    ],
)
def test_files_without_questions(run: Run, tmp_path: Path, content: str | bytes | None, told: str) -> None:
    file = tmp_path / "questions.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = run("train-policy", "cospec", "--prompts", file)
    assert (code, told in err) == (USAGE, True), err


def test_questions_of_a_file(run: Run, tmp_path: Path, tiny_folder: Path, draft_folder: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(QUESTION))
    command = ("train-policy", "cospec", "--target", tiny_folder, "--draft", draft_folder, "--out", tmp_path / "p")
    code, _, err = run(*command, "--prompts", file)
    assert (code, "1 different questions cannot be divided into 75% to train" in err) == (FAILURE, True), err


def test_without_a_draft_model(run: Run, tiny_folder: Path) -> None:
    code, _, err = run("train-policy", "cospec", "--target", tiny_folder, *COSPEC)
    assert (code, "make one (switchsd train draft), or name one (--draft)" in err) == (USAGE, True), err


# -- Learning to Draft -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A random head that says it was made for the small target."""
    import torch

    from activations.target import load_target
    from decoding.eagle.head import EagleHead, HeadConfig

    torch.manual_seed(0)
    head = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=32))
    head.set_vocabulary(torch.arange(226, 258))
    folder = tmp_path_factory.mktemp("head")
    head.save(folder, switchsd={"target": load_target(tiny_folder).fingerprint.to_dict()})
    return folder


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten short prompts from two sources, one of them in two files."""
    folder = tmp_path_factory.mktemp("prompts")
    files = [folder / "notes.jsonl", folder / "mail.jsonl", folder / "more" / "notes.jsonl"]
    for file, letters in zip(files, ("abcd", "fghij", "e"), strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(json.dumps({"prompt": f"{letter * 3} {letter} ?"}) for letter in letters))
    return files


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost table that nobody measures."""
    from decoding import decoder
    from decoding.costs import CostTable

    table = CostTable({"machine": "none"}, [1, 40], [64], [[10.0, 30.0]], {"eagle": [1.0, 2.0, 3.0]}, 0.0, 0.0)
    monkeypatch.setattr(decoder, "get_costs", lambda *arguments: table)


LTD = (
    "--depth", 3, "--sizes", 4, "--rounds", 1, "--max-new-tokens", 12, "--rows", 4, "--size-timesteps", 64,
    "--depth-timesteps", 64, "--environments", 4, "--steps", 8, "--batch", 16, "--epochs", 1, "--hidden", 4,
)  # fmt: skip


def ltd_command(tiny_folder: Path, head_folder: Path, prompt_files: list[Path]) -> tuple[object, ...]:
    prompts = [part for file in prompt_files for part in ("--prompts", file)]
    return ("train-policy", "ltd", "--target", tiny_folder, "--drafter", head_folder, *prompts, *LTD)


def test_policies_of_a_tree_train_into_the_users_cache_and_are_found_there(
    run: Run, tiny_folder: Path, head_folder: Path, prompt_files: list[Path], priced: None
) -> None:
    from switchsd.loading import load

    command = ltd_command(tiny_folder, head_folder, prompt_files)
    code, out, err = run(*command)
    assert code == OK, err
    where = cached("ltd", str(tiny_folder))
    assert str(where) in out.replace("\n", "") and "over the best fixed tree" in out and "--mode ltd" in out
    assert "size only" in out and "depth only" in out and "independent" in out and "oracle" in out
    assert "10 prompts: an answer to each" in err and "256 decisions in 4 stages" in err
    assert all(err.count(f"stage={name} ") == 1 for name in ("log", "grid", "size", "depth", "depth-1", "size-1"))
    assert "stage=replay" not in err
    assert list(candidates("ltd", str(tiny_folder))) == [where]
    decoder = load(tiny_folder, drafter=head_folder)
    policy = decoder.policies["ltd"]
    policy.check("ltd", decoder.target, decoder.neural["eagle"])
    assert policy.settings["depth"] == 3 and set(policy.record["sources"]) <= {"notes", "mail"}
    texts = [decoder.generate("aaa", mode=mode, max_new_tokens=12).text for mode in ("ar", "ltd")]
    assert texts[0] == texts[1]
    before = (where / "policy.safetensors").read_bytes()
    code, out, err = run(*command, "--json")
    assert code == OK, err
    found = json.loads(out)
    assert found["folder"] == str(where) and found["stage"] == "done" and len(found["record"]["stages"]) == 5
    assert (where / "policy.safetensors").read_bytes() == before


def test_an_interrupted_training_of_a_tree_goes_on(
    run: Run, tiny_folder: Path, head_folder: Path, prompt_files: list[Path], priced: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from decoding.policies import training

    command = ltd_command(tiny_folder, head_folder, prompt_files)
    assert run(*command, "--out", tmp_path / "whole")[0] == OK
    for stop in (1, 4):  # an iteration of the first stage, and one of the third that is left then
        iterate, count = training._iterate, []

        def stopped(*arguments: Any, stop: int = stop, iterate: Any = iterate, count: list[int] = count) -> None:
            count.append(1)
            if len(count) == stop + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            iterate(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(training, "_iterate", stopped)
            code, _, err = run(*command, "--out", tmp_path / "cut")
        assert (code, f"go on from what is in {tmp_path / 'cut'}" in err) == (INTERRUPTED, True), err
        assert not (tmp_path / "cut" / "policy.json").exists()
    code, out, err = run(*command, "--out", tmp_path / "cut")
    assert (code, f"--mode ltd --policy {tmp_path / 'cut'}\n" in out) == (OK, True), out
    made = json.loads((tmp_path / "cut" / "policy.json").read_text())["record"]
    [chosen] = [r for r in made["stages"] if r["name"] == made["chosen"]]
    assert ("it is slower than the best fixed tree" in err) == (chosen["over_fixed"] < 1)
    one, other = ((tmp_path / name / "policy.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


@pytest.mark.parametrize(
    ("more", "wanted", "told"),
    [
        (("--depth", 1), USAGE, "depth is 1; a tree of one level leaves no depth to decide"),
        (("--sizes", 1), USAGE, "sizes is 1; it must be 2 or more"),
        (("--rounds", -1), USAGE, "rounds is -1"),
        (("--batch", 60), USAGE, "batch is 60; it must be 2 or more and divide environments x steps = 4 x 8 = 32"),
        (("--reward", "luck"), USAGE, "'luck'"),
        (("--learning-rate", "nan"), USAGE, "learning_rate is nan; it must be above 0"),
        (("--drafter", "/nowhere/at/all"), USAGE, "/nowhere/at/all holds no EAGLE head"),
        (("--prompts", ""), USAGE, "--prompts is empty"),
        (("--out", __file__), USAGE, "is there and is no folder"),
    ],
)
def test_wrong_settings_of_a_tree(
    run: Run, tiny_folder: Path, head_folder: Path, prompt_files: list[Path], priced: None, tmp_path: Path,
    more: tuple[object, ...], wanted: int, told: str,
) -> None:  # fmt: skip
    code, _, err = run(*ltd_command(tiny_folder, head_folder, prompt_files), "--out", tmp_path / "p", *more)
    assert (code, told in err) == (wanted, True), err
    assert not (tmp_path / "p").exists()


def test_too_few_prompts_and_no_head(
    run: Run, tiny_folder: Path, head_folder: Path, prompt_files: list[Path], priced: None, tmp_path: Path
) -> None:
    command = ltd_command(tiny_folder, head_folder, prompt_files[1:2])
    code, _, err = run(*command, "--out", tmp_path)
    assert (code, "error: 5 prompts are too few: give 8 or more" in err) == (USAGE, True), err
    code, _, err = run("train-policy", "ltd", "--target", tiny_folder)
    assert (code, "make one (switchsd train eagle), or name one (--drafter)" in err) == (USAGE, True), err


# -- both ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltd", "cospec"])
def test_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] in ("stable_baselines3", "decoding")]:
        if module.split(".")[0] != "decoding" or module == "decoding.policies.ppo":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    code, out, err = run("train-policy", name)
    assert (code, out) == (FAILURE, "")
    assert err == "error: training a policy needs stable_baselines3: pip install 'switchsd[rl]'\n"
    assert main(["train-policy", name, "--help"]) == OK


def test_levels_of_kinds() -> None:
    assert kinds_of("sum:1,sum:2, lookup") == {"sum": (1, 2), "lookup": (1,)}
    with pytest.raises(UsageError, match="'sum:a': 'a' is no level"):
        kinds_of("sum:a")


def test_what_takes_long_is_said_once_a_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 10.0, 30.0, 60.0, 61.0, 82.0, 90.0, 111.0])
    monkeypatch.setattr("switchsd.commands.train_policy.time.monotonic", lambda: next(now))
    clock = Clock()
    for done in (10, 20, 40, 70):  # 30 in 30 s
        clock.tell("branches", done, 340)
    clock.tell("ppo", 5, 10)
    clock.tell("ppo", 9, 10)
    clock.tell("size", 0, 10)
    clock.tell("size", 2, 10)
    assert capsys.readouterr().err == (
        "branches: about 5 minutes to go\nppo: less than a minute to go\nsize: about 1 minute to go\n"
    )


def test_a_training_that_is_stopped_before_anything_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing() -> Iterator[dict[str, Any]]:
        yield {"stage": "shares", "of": "training", "questions": 1, "both": 0.5}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(nothing(), tmp_path / "x", 10)  # type: ignore[arg-type]
    assert "stopped before anything was done: the same command begins anew" in capsys.readouterr().err
