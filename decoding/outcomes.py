"""What the steps of a trace came to: tokens and milliseconds by drafter, and what false copies cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoding.gates import COPY

if TYPE_CHECKING:
    from decoding.costs import CostTable
    from decoding.trace import StepRecord

NOTHING = "no draft"


@dataclass(frozen=True)
class Outcome:
    """The steps of one kind. Milliseconds are shared where several requests stood in one forward."""

    name: str
    """The drafters whose tokens were verified, joined by +, or "no draft"."""
    kept: bool
    """Whether a drafted token was kept."""
    steps: int
    tokens: int
    """Committed by those steps: kept drafts, and one of the target's own at each step."""
    milliseconds: float

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where no time was measured."""
        return 1e3 * self.tokens / self.milliseconds if self.milliseconds > 0 else 0.0


def kind_of(record: StepRecord) -> str:
    """The drafters whose tokens a step verified, joined by +, or "no draft"."""
    return "+".join(dict.fromkeys(record.source)) or NOTHING


def milliseconds_of(record: StepRecord) -> float:
    """What a step took of its requests' shared time: all of it for a single request."""
    return record.milliseconds / record.rows


def outcomes(records: Iterable[StepRecord]) -> list[Outcome]:
    """Steps by drafter and by whether a drafted token was kept, in the order in which each kind first occurs."""
    found: dict[tuple[str, bool], list[StepRecord]] = {}
    for record in records:
        found.setdefault((kind_of(record), bool(record.accepted)), []).append(record)
    return [
        Outcome(name, kept, len(of), sum(len(r.accepted) + 1 for r in of), sum(map(milliseconds_of, of)))
        for (name, kept), of in found.items()
    ]


@dataclass(frozen=True)
class FalseCopies:
    """Steps that verified copied tokens alone and kept none: each gave the one token that a step without a draft gives,
    and took longer."""

    steps: int
    copy_steps: int
    """All steps that verified copied tokens, those that kept some included."""
    milliseconds: float
    """What the false ones took."""
    lost_ms: float
    """Of that, what a step without a draft at the same context would not have taken, by the cost table."""
    lost_tokens: float
    """What steps without a draft would have written in the lost time."""


def false_copies(records: Iterable[StepRecord], costs: CostTable) -> FalseCopies:
    """What false copies cost beside drafting nothing there. Where a head would have drafted instead, more is lost."""
    copied = [r for r in records if COPY in r.source]
    false = [r for r in copied if not r.accepted and set(r.source) == {COPY}]
    plain = [costs.verify(1, r.position + 1) for r in false]
    took = [milliseconds_of(r) for r in false]
    lost = [spent - alone for spent, alone in zip(took, plain, strict=True)]
    return FalseCopies(
        steps=len(false),
        copy_steps=len(copied),
        milliseconds=sum(took),
        lost_ms=sum(lost),
        lost_tokens=sum(ms / alone for ms, alone in zip(lost, plain, strict=True)),
    )
