"""`switchsd chat` from a pipe."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decoding.trace import Trace
from switchsd.cli import FAILURE, INTERRUPTED

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
    assert "unknown command /what" in told
    texts = Trace.load(trace).texts
    assert len(texts) == 3 and len(texts[2].prompt) < len(texts[1].prompt), "what was said before /reset is kept"


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError("broken")])
def test_what_was_said_is_kept_whatever_ends_the_chat(
    run: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def lines() -> Iterator[str]:
        yield "one one"
        raise end

    monkeypatch.setattr("switchsd.commands.chat._lines", lines)
    trace = tmp_path / "steps.parquet"
    code, _, told = run("chat", "--target", tiny_folder, "--mode", "ar", "--max-new-tokens", "4", "--trace", trace)
    assert code in (FAILURE, INTERRUPTED) and "shows it" in told
    assert len(Trace.load(trace).texts) == 1


def test_a_chat_without_a_turn_overwrites_nothing(run: Run, tiny_folder: Path, typed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "steps.parquet"
    trace.write_bytes(b"of another day")
    typed("/quit\n")
    code, _, told = run("chat", "--target", tiny_folder, "--mode", "ar", "--trace", trace)
    assert (code, f"nothing was said: {trace} is not written" in told) == (0, True)
    assert trace.read_bytes() == b"of another day"


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
