"""A few steps made by hand: a copy, a false copy, a tree of the head, and a step without a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decoding.trace import StepRecord


def record(step: int, source: tuple[str, ...], accepted: int, **changes: Any) -> StepRecord:
    """A step that drafted a chain and kept its first tokens."""
    count = len(source)
    return replace(
        StepRecord(
            request=0, step=step, start=float(step), position=10 + step, mode="switchsd",
            drafters=tuple(dict.fromkeys(source)), reason="intent", intent=0.5, match_length=2, match_start=3,
            tokens=tuple(range(count)), parents=tuple(range(-1, count - 1)), source=source, logq=(0.0,) * count,
            accepted=tuple(range(accepted)), pending=7, rows=1, draft_ms=1.0, verify_ms=20.0, overhead_ms=0.5,
        ),
        **changes,
    )  # fmt: skip


RECORDS = [
    record(0, ("copy",) * 6, 4, intent=0.9),
    record(1, ("copy",) * 6, 0, intent=0.6),
    record(2, ("eagle", "eagle"), 1, intent=0.1, match_length=0),
    record(3, (), 0, intent=None, match_length=0),
]
