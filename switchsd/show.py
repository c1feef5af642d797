"""What commands print: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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

out = Console(highlight=False)
notes = Console(stderr=True, highlight=False)

COLOURS = {"target": "default", "copy": "bold green", "eagle": "bold blue", "draft": "bold magenta"}


def colour(source: str) -> str:
    """Style of a token that `source` drafted."""
    return COLOURS.get(source, "bold yellow")


def as_json(value: object) -> None:
    """One JSON object on standard output, without colours or wrapping."""
    print(json.dumps(value, ensure_ascii=False, default=str))


def table(heads: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*map(str, row))
    return made


class Bar:
    """A progress bar; `to` moves it, `say` changes its text."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def to(self, done: float, total: float | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)


@contextmanager
def bar(text: str, total: float | None = None) -> Iterator[Bar]:
    """A progress bar on standard error; without a total it only shows that work goes on."""
    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}")]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=notes, transient=not notes.is_terminal) as progress:
        yield Bar(progress, progress.add_task(text, total=total))
