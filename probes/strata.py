"""Whether a number holds in each kind of row, or comes from the difference between kinds.

A pooled AUC can come from the domain alone; a small model that repeats itself makes copying easy to foretell. So
every stratum stands beside the pooled number with its own base rate.

Columns that a store may lack: `pending_class` (word, number, punctuation, whitespace or special; the class of the
pending token, to be stored when the tokenizer is at hand, so that none is needed here).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes.evaluation import Interval, differences
from probes.rows import Rows
from probes.task import Task

LENGTHS = (1, 3, 5, 6, 8, 12, 16, 32)
"""Match lengths at which a stratum begins."""
LOOP_DISTANCE = 64
"""A match in the output itself that began at most so many tokens ago is called a loop."""
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
"""Positions at which a stratum of context lengths begins."""
RESAMPLES = 300
DRAFTED = 10
"""Tokens that a copy drafter drafts at once."""
TOKEN_CLASSES = ("word", "number", "punctuation", "whitespace", "special")


@dataclass(frozen=True)
class Stratum:
    """One kind of test rows."""

    by: str
    """What the rows are told apart by: match_length, family, source, loop, context, asked or token_class."""
    value: str
    """Which kind this is."""
    rows: int
    """Rows of this kind."""
    documents: int
    """Documents they are of."""
    positives: int
    """Rows whose label is 1."""
    base_rate: Interval
    """Share of them."""
    roc_auc: Interval
    """ROC AUC of the probe within this kind; undefined where only one class occurs."""
    average_precision: Interval
    """Average precision of the probe within this kind."""
    over_baseline: Interval | None
    """ROC AUC of the probe minus that of the baseline, on the same rows."""

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}


def loops(rows: Rows) -> NDArray[np.bool_]:
    """Rows [rows] whose suffix match is the target repeating itself: in its own output, a short way back."""
    found: NDArray[np.bool_] = (rows["source"] == "output") & (rows["distance"] <= LOOP_DISTANCE)
    return found


def asked(rows: Rows, match: int) -> NDArray[np.bool_]:
    """Rows [rows] at which a decoder would ask, were every match of at least `match` tokens copied: the others lie
    inside a copy that was drafted before and kept. A text's rows stand together, in order."""
    found = np.zeros(len(rows["position"]), dtype=bool)
    document, due = None, 0
    columns = ("document", "position", "match_length", "accepted")
    for row, (number, position, length, accepted) in enumerate(zip(*(rows[c].tolist() for c in columns), strict=True)):
        if number != document:
            document, due = number, position
        if position >= due:
            found[row] = True
            due = position + 1 + (min(accepted, DRAFTED) if length >= match else 0)
    return found


def kinds(rows: Rows, match: int) -> dict[str, NDArray[np.str_]]:
    """For each way to tell rows apart, the kind of each row [rows]."""
    length, source = rows["match_length"], rows["source"].astype(str)
    found = {
        "match_length": _buckets(length, LENGTHS, "none"),
        "family": rows["family"].astype(str),
        "source": np.where(length > 0, np.where(source == "", "unknown", source), "none"),
        "loop": np.where(length == 0, "no match", np.where(loops(rows), "loop", "no loop")),
        "context": _buckets(rows["position"] + 1, CONTEXTS, f"1 to {CONTEXTS[0] - 1}"),
        "asked": np.where(asked(rows, match), "where a decoder asks", "inside a copy"),
    }
    if "pending_class" in rows:
        found["token_class"] = rows["pending_class"].astype(str)
    return found


def strata(task: Task, score: NDArray[np.floating], baseline: NDArray[np.floating] | None) -> dict[str, list[Stratum]]:
    """Of each scope of the test rows, every kind of row with both classes and the others with their base rate.

    `score` and `baseline`, which it is compared with, are [rows].
    """
    found: dict[str, list[Stratum]] = {}
    told = kinds(task.rows, task.asked.match)
    for scope, where in task.tests.items():
        found[scope] = []
        for by, values in told.items():
            for value in _ordered(values[where]):
                there = where & (values == value)
                mine = task.on(there, score, resamples=RESAMPLES)
                other = None if baseline is None else task.on(there, baseline, resamples=RESAMPLES)
                over = None if other is None else differences(mine, other)["roc_auc"]
                found[scope].append(
                    Stratum(
                        by, value, mine.rows, mine.documents, int(task.y[there].sum()),
                        mine.base_rate, mine.roc_auc, mine.average_precision, over,
                    )
                )  # fmt: skip
    return found


def skipped(rows: Rows) -> list[str]:
    """What cannot be told apart, and what the store would need for it."""
    if "pending_class" in rows:
        return []
    classes = ", ".join(TOKEN_CLASSES)
    return [f"strata by token class: the store has no column pending_class: capture again to have it ({classes})"]


def _buckets(values: NDArray[Any], starts: tuple[int, ...], below: str) -> NDArray[np.str_]:
    names = [below, *(f"{a} to {b - 1}" if b - a > 1 else str(a) for a, b in pairwise(starts)),
             f"{starts[-1]} and more"]  # fmt: skip
    found: NDArray[np.str_] = np.array(names)[np.searchsorted(starts, values, side="right")]
    return found


def _ordered(values: NDArray[np.str_]) -> list[str]:
    """Distinct values; those that begin with a number by that number."""
    return sorted(set(values.tolist()), key=lambda v: (v[:1].isdigit(), int(v.split()[0]) if v[:1].isdigit() else 0, v))
