"""Notebooks: each is a percent script and an executed notebook with the same cells, small, whole and free of noise.

That they run is tested by `make test-notebooks`; `make notebooks` runs them and writes what they show.
"""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="the extra notebooks is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
MOST_BYTES = 400_000
VIEWER_BYTES = 1_500_000
"""Of a notebook that shows a trace inline."""
WIDEST = 1000
"""Pixels of a picture."""
PLACES = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|usr|opt)/|site-packages|[A-Z]:\\\\")
NOISE = re.compile(r"Warning|Traceback|\bit/s\b|\d+%\|| object at 0x[0-9a-f]+")


def read(script: Path) -> Any:
    return jupytext.read(script.with_suffix(".ipynb"))


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(output: Any) -> list[str]:
    """What an output says in letters; pictures and HTML are none."""
    if output.output_type == "stream":
        return [output.text]
    return [value for kind, value in output.get("data", {}).items() if kind in ("text/plain", "text/markdown")]


def test_they_are_numbered_from_one() -> None:
    names = [script.stem for script in SCRIPTS]
    assert [name[:3] for name in names] == [f"{n:02}_" for n in range(1, len(names) + 1)]
    assert all(re.fullmatch(r"\d\d(_[a-z]+)+", name) for name in names), names
    assert {file.name for file in FOLDER.iterdir() if not file.name.startswith((".", "__"))} == {
        f"{name}{suffix}" for name in names for suffix in (".py", ".ipynb")
    }, "there is something beside the notebooks, or one without its script"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
class TestNotebook:
    def test_both_files_have_the_same_cells(self, script: Path) -> None:
        mine = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
        theirs = [(cell.cell_type, cell.source) for cell in read(script).cells]
        assert mine == theirs, "run `make notebooks`"

    def test_it_was_run_from_top_to_bottom(self, script: Path) -> None:
        cells = [cell for cell in read(script).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert not [o.evalue for cell in cells for o in cell.outputs if o.output_type == "error"]

    def test_it_asks_a_question_and_says_its_limits(self, script: Path) -> None:
        cells = jupytext.read(script).cells
        assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
        assert "?**" in cells[0].source, "the question stands at the top, in bold"
        assert cells[1].source.startswith("%matplotlib inline"), "figures at the end of a cell are shown"
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for part in ("## What we saw", "**Limits.**", "**What to try next.**"):
            assert part in prose, part

    def test_it_is_small(self, script: Path) -> None:
        notebook = script.with_suffix(".ipynb")
        shown = any("text/html" in output.get("data", {}) for output in outputs(read(script)))
        assert notebook.stat().st_size <= (VIEWER_BYTES if shown else MOST_BYTES)
        for output in outputs(read(script)):
            if png := output.get("data", {}).get("image/png"):
                width, _ = struct.unpack(">II", base64.b64decode(png)[16:24])
                assert width <= WIDEST

    def test_it_has_no_noise(self, script: Path) -> None:
        found = outputs(read(script))
        assert not [output.text for output in found if output.output_type == "stream" and output.name == "stderr"]
        for text in (text for output in found for text in texts(output)):
            said = text.replace("<IPython.core.display.Markdown object>", "").replace("<Figure size", "")
            assert not PLACES.search(said), said
            assert not NOISE.search(said), said

    def test_its_metadata_is_clean(self, script: Path) -> None:
        notebook = read(script)
        assert set(notebook.metadata) <= {"jupytext", "kernelspec", "language_info"}
        assert notebook.metadata.kernelspec.name == "python3"
        assert all(set(cell.metadata) <= {"tags", "lines_to_next_cell"} for cell in notebook.cells)


def test_what_counts_as_noise() -> None:
    for said in (
        "<decoding.trace.Trace object at 0x7f0a>",
        "UserWarning: x",
        " 40%|####  | 4/10 [00:01<00:01, 3.9it/s]",
    ):
        assert NOISE.search(said), said
    for said in ("/home/me/x.py", "in /tmp/a", "lib/site-packages/x"):
        assert PLACES.search(said), said
    assert not NOISE.search("40 % of the steps") and not PLACES.search("tokens/s and km/h, and/or w/work")
