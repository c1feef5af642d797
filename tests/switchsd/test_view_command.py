"""`switchsd view`: a trace of `generate` becomes a page; what cannot be shown is said before anything is written."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decoding.trace import Trace
from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def traces(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two modes on one prompt."""
    folder = tmp_path_factory.mktemp("traces")
    found = []
    for mode in ("copy", "ar"):
        file = folder / f"{mode}.parquet"
        arguments = ["generate", "abab abab", "--target", str(tiny_folder), "--mode", mode, "--trace", str(file)]
        assert main([*arguments, "--max-new-tokens", "24", "--kappa", "1", "--dtype", "float32"]) == OK
        found.append(file)
    return found[0], found[1]


def test_generate_says_how_to_see_its_trace(tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "a trace.parquet"
    common = ["generate", "abab", "--target", tiny_folder, "--mode", "ar", "--max-new-tokens", "4", "--trace", file]
    assert f"switchsd view '{file}' shows it" in run(*common)[2]
    assert "view" not in run(*common, "--json")[2]


def data(file: Path) -> dict[str, object]:
    text = file.read_text(encoding="utf-8")
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])


def test_a_page(traces: tuple[Path, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("view", traces[0])
    assert (code, out) == (OK, "trace.html: open it in a browser\n")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.html"], "scratch was left behind"
    [trace] = data(tmp_path / "trace.html")["traces"]  # type: ignore[misc]
    assert trace["name"] == "copy.parquet"
    assert "".join(trace["texts"][0]["pieces"]) == "".join(Trace.load(traces[0]).texts[0].pieces)


def test_for_machines(traces: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    code, out, _ = run("view", traces[0], "--out", tmp_path / "page.html", "--json")
    told = json.loads(out)
    assert code == OK and told["file"] == str(tmp_path / "page.html")
    [text] = told["traces"][0]["texts"]
    trace = Trace.load(traces[0])
    assert text["steps"] == len(trace) and text["copied"] == sum(r.copies for r in trace) > 0


def test_two_traces(traces: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    for arguments in (["--compare", *traces], [*traces, "--compare"]):
        assert run("view", *arguments, "--out", tmp_path / "page.html")[0] == OK
        shown = data(tmp_path / "page.html")["traces"]
        assert [trace["name"] for trace in shown] == ["copy.parquet", "ar.parquet"]  # type: ignore[attr-defined]


def test_which_text_is_first(tmp_path: Path, run: Run) -> None:
    from decoding.request import Request

    trace = Trace()
    for number in (4, 4, 5):  # two turns of a chat, and something else
        request = Request(number, [1, 2])
        request.tokens, request.sources = [1, 2, 3], ["target"]
        trace.begin(request)
    trace.save(tmp_path / "t.parquet")
    page = tmp_path / "page.html"
    for options, first in (([], 1), (["--text", 1], 0), (["--text", 3], 2)):
        assert run("view", tmp_path / "t.parquet", "--out", page, *options)[0] == OK
        assert data(page)["text"] == first
    for wrong in (0, 4, -1):
        code, _, told = run("view", tmp_path / "t.parquet", "--out", page, "--text", wrong)
        assert (code, f"--text is {wrong}; the trace holds 3 texts: say 1 to 3" in told) == (USAGE, True)


def test_what_cannot_be_shown(traces: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    first, second = traces
    (tmp_path / "broken.parquet").write_bytes(b"no trace")
    page = tmp_path / "page.html"
    cases: list[tuple[int, str, list[object]]] = [
        (USAGE, "nowhere.parquet is not there", [tmp_path / "nowhere.parquet"]),
        (USAGE, f"{tmp_path} is no file: name a trace", [tmp_path]),
        (USAGE, "add --compare", [first, second]),
        (USAGE, "--compare takes two traces, and 1 is named", ["--compare", first]),
        (USAGE, "--compare takes two traces, and 3 are named", ["--compare", first, second, first]),
        (USAGE, "is named twice", ["--compare", first, first]),
        (USAGE, "--out is", [first, "--out", first]),
        (USAGE, "no such folder", [first, "--out", tmp_path / "none" / "page.html"]),
        (USAGE, "is no file", [first, "--out", tmp_path]),
        (USAGE, "name it ar.html", [first, "--out", second]),
        (FAILURE, "cannot read the trace", [tmp_path / "broken.parquet"]),
    ]
    before = [trace.read_bytes() for trace in traces]
    for wanted, says, arguments in cases:
        given = arguments if "--out" in arguments else [*arguments, "--out", page]
        code, out, told = run("view", *given)
        assert (code, out) == (wanted, "") and says in told, told
    assert not page.exists() and [trace.read_bytes() for trace in traces] == before


def test_a_folder_that_cannot_be_written_to_is_a_usage_error(
    traces: tuple[Path, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda place, way: way != os.W_OK)
    code, _, told = run("view", traces[0], "--out", tmp_path / "page.html")
    assert code == USAGE and f"{tmp_path} cannot be written to" in told


def test_only_the_page_is_written(traces: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    """Files beside it are the user's; a name may be any that the system knows."""
    mine = tmp_path / "page.html.tmp"
    mine.write_text("mine")
    trace = tmp_path / os.fsdecode(b'n\xff "><b>.parquet')
    trace.write_bytes(traces[0].read_bytes())
    code, out, _ = run("view", trace, "--out", tmp_path / "page.html", "--json")
    assert code == OK and json.loads(out)["traces"][0]["trace"] == str(trace)
    assert run("view", "--compare", trace, traces[1], "--out", tmp_path / "page.html")[0] == OK
    assert mine.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_terminal_that_lacks_letters(
    traces: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    page = tmp_path / os.fsdecode("caf\u00e9 ".encode() + b"\xff.html")
    for options in ([], ["--json"]):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["view", str(traces[0]), "--out", str(page), *options]) == OK
        stdout.flush()
        said = stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert (
            json.loads(said)["file"] == str(page) if options else said.endswith("\\udcff.html: open it in a browser\n")
        )


def test_a_page_that_cannot_be_written_whole_leaves_the_former_one(
    traces: tuple[Path, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("former")

    def full(file: Path, *_: object, **__: object) -> int:
        file.touch()
        raise OSError(errno.ENOSPC, "no space", str(file))

    monkeypatch.setattr(Path, "write_text", full)
    code, _, told = run("view", traces[0], "--out", page)
    assert code == FAILURE and "the disk is full" in told
    assert page.read_text() == "former" and [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_trace_without_texts_is_shown(tmp_path: Path, run: Run) -> None:
    Trace().save(tmp_path / "empty.parquet")
    assert run("view", tmp_path / "empty.parquet", "--out", tmp_path / "page.html")[0] == OK
    code, _, told = run("view", tmp_path / "empty.parquet", "--out", tmp_path / "page.html", "--text", 1)
    assert code == USAGE and "the trace holds no texts" in told
