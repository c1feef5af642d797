"""The gate that weighs drafts by their expected tokens per millisecond, from a length head's survival estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decoding.budgets import FixedBudget
from decoding.gates import COPY, Choice, Decision, Situation
from probes.length_head import LengthHead
from probes.surface import sureness, surface

if TYPE_CHECKING:
    from decoding.costs import CostTable
    from decoding.trace import StepRecord


@dataclass(frozen=True)
class LengthGateConfig:
    widths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15, 19, 23, 31)
    """Copy nodes to choose from: with the pending token, widths that the cost table knows well."""
    rate: float = 0.15
    """How fast a request's own outcomes shift the estimates (step of the log-odds)."""
    decay: float = 0.02
    """How fast such a shift is forgotten, a step."""
    neural_rate: float = 0.05
    hybrid: bool = True
    """Whether copies and the head's tree may be verified together."""
    overlap: float = 1.0
    cap: float = 0.0
    mix: float = 0.0
    extra: int = 0
    fill: bool = True


@dataclass
class _Last:
    """What was believed at a step, to be compared with what came."""

    candidate: Sequence[int] = ()
    copy: Sequence[float] = ()
    neural: Sequence[float] = ()


@dataclass
class _Shifts:
    copy: float = 0.0
    neural: float = 0.0
    last: _Last = field(default_factory=_Last)


@dataclass
class LengthGate:
    costs: CostTable
    head: LengthHead
    copy: Choice
    neural: Choice | None = None
    config: LengthGateConfig = field(default_factory=LengthGateConfig)

    def __post_init__(self) -> None:
        self._requests: dict[int, _Shifts] = {}
        b = self.neural.budget if self.neural else None
        self._nodes = 0.75 * b.nodes if b else 0.0
        self._levels = float(b.depth) if b else 0.0

    def choose(self, situation: Situation) -> Decision:
        state = self._requests.setdefault(situation.request, _Shifts())
        head, costs, context, c = self.head, self.costs, situation.length, self.config
        candidate = situation.candidates[0] if situation.candidates else ()
        features = (
            *surface(situation.matches, situation.candidates, situation.prompt),
            *sureness(*(situation.summary or (0.5, 0.0, 0.0))),
        )
        room = max(situation.room, 1)
        copied: list[float] = []
        if candidate:
            copied = head.survival(COPY, situation.readings, features, state.copy)[: min(len(candidate), room)]
        drafted: list[float] = []
        if self.neural is not None:
            drafted = head.survival(self.neural.name, situation.readings, features, state.neural)[:room]
        state.last = _Last(candidate, copied, drafted)

        found: list[tuple[float, float, int, bool]] = [(1.0, costs.verify(1, context), 0, False)]
        draft_ms = 0.0
        if self.neural is not None:
            draft_ms = costs.draft(self.neural.name, min(self._levels, room))
            found.append((1 + sum(drafted), draft_ms + costs.verify(1 + self._nodes, context), 0, True))
        total = both = 1.0
        heads = len({x[0] for x in situation.candidates if x})
        extra = min(c.extra, max(heads - 1, 0))
        for k, p in enumerate(copied):
            total += p
            q = drafted[k] if k < len(drafted) else 0.0
            both += p + c.overlap * q * (1 - p)
            width = k + 1
            if width not in c.widths and width != len(copied) or width > self.copy.budget.nodes:
                continue
            found.append((total, costs.verify(1 + width+extra, context), width, False))
            if c.hybrid and self.neural is not None:
                rest = c.overlap * sum(drafted[k + 1 :])
                found.append((both + rest, draft_ms + costs.verify(1 + width+extra + self._nodes, context), width, True))
        price = max(tokens / time for tokens, time, _, _ in found)
        if c.cap: price = min(price, c.cap)
        if c.mix: price *= c.mix
        tokens, time, width, neural = max(found, key=lambda o: o[0] - price * o[1])
        drafts = []
        if width:
            nodes = width+extra
            if c.fill:
                while nodes < self.copy.budget.nodes and costs.verify(2 + nodes, context) <= 1.001 * costs.verify(1 + width+extra, context): nodes += 1
            drafts.append((self.copy.name, FixedBudget(nodes, width)))
        if neural:
            drafts.append((self.neural.name, self.neural.budget))
        return Decision(tuple(drafts), _told(tokens / time) if drafts else "no draft is worth its time")

    def observe(self, record: StepRecord) -> None:
        state = self._requests.get(record.request)
        if state is None:
            return
        c = self.config
        last = state.last
        written = [*(record.tokens[i] for i in record.accepted), record.pending]
        push, alive = 0.0, 1.0
        for p, token, came in zip(last.copy, last.candidate, written, strict=False):
            hazard = p / alive if alive > 0 else 0.0
            push += (token == came) - hazard
            alive = p
            if token != came:
                break
        state.copy = state.copy * (1 - c.decay) + c.rate * push
        names = set(record.drafters)
        if self.neural is not None and self.neural.name in names and len(names) == 1:
            depth = record.depth
            push, alive = 0.0, 1.0
            for k, p in enumerate(last.neural[:depth]):
                hazard = p / alive if alive > 0 else 0.0
                push += (len(record.accepted) > k) - hazard
                alive = p
                if len(record.accepted) <= k:
                    break
            state.neural = state.neural * (1 - c.decay) + c.neural_rate * push
            self._nodes += (len(record.tokens) - self._nodes) / 16
            self._levels += (depth - self._levels) / 16


def _told(rate: float) -> str:
    return f"{rate * 1e3:.0f} tokens/s expected"
