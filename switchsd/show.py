"""What commands print: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]

# A pipe or file has no width: tables then take what they need. Names that users give may hold brackets and colons, so
# that neither console reads markup or emoji where it is not asked to.
out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
notes = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

LINE_SECONDS = 30.0
COLOURS = {"target": "default", "copy": "bold green", "eagle": "bold blue", "draft": "bold magenta"}


def colour(source: str) -> str:
    """Style of a token that `source` drafted."""
    return COLOURS.get(source, "bold yellow")


def counted(number: int, noun: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_json(value: object) -> None:
    """One JSON object on standard output, without colours or wrapping."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # names of files may be no text, and a terminal may know few letters
        text = json.dumps(value, default=str)
    print(text)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*map(str, row))
    return made


class Bar:
    """A progress bar; `to` moves it, `say` changes its text. Without a terminal, a line now and then."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._told = monotonic()

    def to(self, done: float, total: float | None = None) -> None:
        """Move it to `done` of `total`; a total that is not given stays."""
        self._progress.update(self._task, completed=done, total=total)
        if not notes.is_terminal and monotonic() - self._told > LINE_SECONDS:
            self._told = monotonic()
            task = self._progress.tasks[self._task]
            notes.print(f"{task.description}: {done:.0f} of {task.total:.0f}")

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)


@contextmanager
def bar(text: str, total: float | None = None) -> Iterator[Bar]:
    """A progress bar on standard error; without a total it only shows that work goes on."""
    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns.append(TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        yield Bar(progress, progress.add_task(text, total=total))
