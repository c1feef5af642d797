"""`switchsd chat` from a pipe."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_lines_are_turns_that_share_their_states(run: Run, tiny_folder: Path, typed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    typed("one one one\n\nand one\n/what\n/reset\none\n/quit\nnever\n")
    trace = tmp_path / "steps.parquet"
    code, _, told = run(
        "chat",
        "--target",
        tiny_folder,
        "--mode",
        "copy",
        "--max-new-tokens",
        "8",
        "--dtype",
        "float32",
        "--trace",
        trace,
    )
    assert code == 0 and "Traceback" not in told
    counts = [line for line in told.splitlines() if "prompt tokens were there" in line]
    assert len(counts) == 3
    first, second, third = (int(line.split()[0]) for line in counts)
    assert first == third == 0 and second > 0
    assert "unknown command /what" in told and trace.is_file()


def test_a_wrong_mode_is_a_usage_error(run: Run, tiny_folder: Path, typed) -> None:  # type: ignore[no-untyped-def]
    typed("hello\n")
    code, _, told = run("chat", "--target", tiny_folder, "--mode", "fast")
    assert code == 2 and "fast" in told


def test_json_is_one_object_a_turn(run: Run, tiny_folder: Path, typed) -> None:  # type: ignore[no-untyped-def]
    typed("one one\none one\n")
    code, said, _ = run("chat", "--target", tiny_folder, "--mode", "ar", "--max-new-tokens", "4", "--json")
    turns = [json.loads(line) for line in said.splitlines()]
    assert code == 0 and len(turns) == 2
    assert turns[0]["reused_tokens"] == 0 < turns[1]["reused_tokens"] < turns[1]["prompt_tokens"]
