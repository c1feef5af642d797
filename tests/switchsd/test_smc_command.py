"""Mode smcsd on the command line: it says that it is not lossless, and what it cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from activations.target import load_target
from decoding.draft.model import cut, save_draft
from switchsd.artifacts import cached
from switchsd.cli import OK, USAGE

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def options(tiny_folder: Path, own_cache: Path) -> list[object]:
    target = load_target(tiny_folder, dtype="float32")
    save_draft(cached("draft", target.name), cut(target, range(5)), range(5), target)
    return ["--target", tiny_folder, "--dtype", "float32", "--max-new-tokens", 20, "--mode", "smcsd"]


def test_it_writes_the_same_text_at_the_same_seed_and_says_what_it_is(
    run: Run, options: list[object], tmp_path: Path
) -> None:
    sampled = ["generate", "abcd abcd", *options, "--temperature", 0.8, "--particles", 3, "--draft-tokens", 4]
    (code, out, err), again, other = (run(*sampled, "--json", "--seed", seed) for seed in (1, 1, 2))
    assert code == OK, err
    found = json.loads(out)
    assert found["mode"] == "smcsd" and found["lossless"] is False
    assert found["tokens"] == json.loads(again[1])["tokens"] != json.loads(other[1])["tokens"]
    trace = tmp_path / "trace.parquet"
    code, _, err = run(*sampled, "--seed", 1, "--trace", trace)
    assert code == OK and "smcsd (not lossless)" in err
    rate = re.search(r"([\d.]+) tokens per step", err)
    assert rate and float(rate[1]) == pytest.approx((len(found["tokens"]) - 1) / found["steps"], abs=0.01)
    assert trace.is_file()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "use a temperature of 0.1 or more (0.7, say), or mode sd"),
        (["--temperature", "0.05"], "at temperature 0.05 nearly every weight is 0 or infinite"),
        (["--temperature", "0.7", "--particles", "0"], "particles is 0"),
        (["--temperature", "0.7", "--resampling", "dice"], "unknown resampling 'dice': use systematic or multinomial"),
        (["--temperature", "0.7", "--ess-threshold", "2"], "ess_threshold is 2"),
        (["--temperature", "0.7", "--power", "0"], "power is 0"),
        (["--temperature", "0.7", "--lookahead", "1"], "lookahead is 1"),
        (["--temperature", "0.7", "--acceptance", "rejection"], "acceptance=rejection is not for mode 'smcsd'"),
    ],
)
def test_what_cannot_be(run: Run, options: list[object], more: list[object], text: str) -> None:
    code, _, err = run("generate", "x", *options, *more)
    assert (code, text in " ".join(err.split())) == (USAGE, True), err
