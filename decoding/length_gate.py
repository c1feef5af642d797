"""The cost gate: takes the drafts with the most expected tokens for their milliseconds, as a length head sees them.

Weighed at each step: nothing, the head's tree, a copy of n tokens, and both in one tree. Where the head drafts, the
merged tree is trimmed to the nodes that are worth verifying once it is known where the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from decoding.budgets import FixedBudget
from decoding.gates import COPY, Choice, Decision, Situation
from decoding.joint import path_probabilities, worthwhile
from probes.length_head import LengthHead
from probes.surface import sureness, surface

if TYPE_CHECKING:
    from decoding.costs import CostTable
    from decoding.trace import StepRecord
    from decoding.tree import DraftTree

FLAT = 1.001
"""A wider copy that costs less than this many times as much is free."""
KEPT = 0.8
"""Share of a merged tree's planned nodes that trimming leaves, before it was seen."""
RECENT = 16
"""Steps that the running sizes of the head's trees remember."""
UNKNOWN = (0.5, 0.0, 0.0)
"""Summary of logits that nobody read."""


@dataclass(frozen=True)
class LengthGateConfig:
    """How the length head's estimates are used."""

    widths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15, 19, 23, 31)
    """Copies to choose from, in tokens: with the pending one, widths that the cost table knows well."""
    rate: float = 0.15
    """By how much an unexpected outcome shifts the log-odds of a request's later drafts of the same drafter."""
    decay: float = 0.02
    """Share of such a shift that is forgotten at each step."""


class Option(NamedTuple):
    """Something to do at a step."""

    tokens: float
    """Expected, the target's own one included."""
    milliseconds: float
    copied: int = 0
    """Tokens of the copy; 0 = none."""
    neural: bool = False


@dataclass
class _Request:
    """What the gate remembers of a request: shifts of the log-odds, and what it believed at the last step."""

    shifts: dict[str, float] = field(default_factory=dict)
    candidate: Sequence[int] = ()
    copied: Sequence[float] = ()
    drafted: Sequence[float] = ()
    planned: float = 0.0
    """Nodes that the last merged tree was weighed with, before trimming; 0 = there was none."""


class LengthGate:
    """Chooses by expected tokens per millisecond. One gate serves the requests of one plan."""

    def __init__(
        self,
        costs: CostTable,
        head: LengthHead,
        copy: Choice,
        neural: Choice | None = None,
        config: LengthGateConfig | None = None,
    ) -> None:
        self.costs, self.head, self.copy = costs, head, copy
        self.neural = neural if neural is not None and head.knows(neural.name) else None
        self.config = config or LengthGateConfig()
        self._requests: dict[int, _Request] = {}
        if self.neural is not None:  # running sizes of the head's trees: budgets may leave them smaller
            self._nodes = float(min(self.neural.budget.nodes, 5))
            self._levels = float(self.neural.budget.depth)
            self._kept = KEPT
            self._joint = head.joint(self.neural.name)

    # -- choosing -----------------------------------------------------------------------------------

    def choose(self, situation: Situation) -> Decision:
        request = self._requests.setdefault(situation.request, _Request())
        candidate = situation.candidates[0] if situation.candidates else ()
        features = (
            *surface(situation.matches, situation.candidates, situation.prompt),
            *sureness(*(situation.summary or UNKNOWN)),
        )
        room = max(situation.room, 1)
        shift = request.shifts.get(COPY, 0.0)
        hazards = self.head.hazards(COPY, situation.readings, features, shift) if candidate else []
        request.candidate, request.planned = candidate, 0.0
        request.copied = self.head.chances(COPY, hazards)[: min(len(candidate), room)] if candidate else []
        request.drafted = []
        if self.neural is not None:
            name = self.neural.name
            odds = self.head.hazards(name, situation.readings, features, request.shifts.get(name, 0.0))
            request.drafted = self.head.chances(name, odds)[:room]
        options = self.options(request.copied, request.drafted, situation.length)
        best = max(options, key=lambda o: o.tokens / o.milliseconds)
        price = best.tokens / best.milliseconds
        return self._decide(best, request, hazards, price, situation.length)

    def options(self, copied: Sequence[float], drafted: Sequence[float], context: int) -> list[Option]:
        """Everything to choose from, given P(at least k tokens accepted) of the copy and of the head's tree."""
        costs = self.costs
        found = [Option(1.0, costs.verify(1, context))]
        draft_ms = 0.0
        if self.neural is not None:
            draft_ms = costs.draft(self.neural.name, min(self._levels, len(drafted)))
            alone = draft_ms + costs.verify(1 + self._nodes, context)
            found.append(Option(1 + sum(drafted), alone, 0, True))
        tokens = both = 1.0
        limit = min(self.copy.budget.nodes, len(copied))
        for width in range(1, limit + 1):
            p, q = copied[width - 1], drafted[width - 1] if width <= len(drafted) else 0.0
            tokens += p
            both += p + q - p * q  # as if the two were independent
            if width not in self.config.widths and width < limit:
                continue
            found.append(Option(tokens, costs.verify(1 + width, context), width))
            if self.neural is not None:
                nodes = self._kept * (width + self._nodes)
                time = draft_ms + costs.verify(1 + nodes, context)
                found.append(Option(both + sum(drafted[width:]), time, width, True))
        return found

    def _decide(
        self, best: Option, request: _Request, hazards: Sequence[float], price: float, context: int
    ) -> Decision:
        drafts = []
        trim = None
        if best.neural:
            assert self.neural is not None
            drafts.append((self.neural.name, self.neural.budget))
            candidate = request.candidate if best.copied else ()

            def trim(tree: DraftTree) -> DraftTree:
                return self._trim(tree, candidate, hazards, price, context)

        if best.copied and best.neural:
            request.planned = best.copied + self._nodes
        if best.copied:
            # trimming decides how much of a copy is verified beside the head's tree
            depth = min(self.copy.budget.nodes, len(request.copied)) if best.neural else best.copied
            nodes, limit = depth, FLAT * self.costs.verify(1 + depth, context)
            while nodes < self.copy.budget.nodes and self.costs.verify(2 + nodes, context) <= limit:
                nodes += 1  # other candidates, where they cost nothing
            drafts.append((self.copy.name, FixedBudget(nodes, depth)))
        if not drafts:
            return Decision((), "no draft is worth its time")
        return Decision(tuple(drafts), f"{1e3 * best.tokens / best.milliseconds:.0f} tokens/s expected", trim)

    def _trim(
        self,
        tree: DraftTree,
        candidate: Sequence[int],
        hazards: Sequence[float],
        price: float,
        context: int,
    ) -> DraftTree:
        """The nodes worth verifying."""
        paths = path_probabilities(tree, candidate, hazards, self._joint)
        return tree.part(worthwhile(paths, price, lambda nodes: self.costs.verify(1 + nodes, context)))

    # -- learning -----------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Every committed token also tells how far the copy would have been followed, drafted or not."""
        request = self._requests.get(record.request)
        if request is None:
            return
        written = [*(record.tokens[i] for i in record.accepted), record.pending]
        outcomes = [a == b for a, b in zip(request.candidate, written, strict=False)]
        self._shift(request, COPY, request.copied, outcomes)
        if self.neural is None or self.neural.name not in record.drafters:
            return
        if len(record.drafters) == 1:
            kept = len(record.accepted)
            self._shift(
                request, self.neural.name, request.drafted, [k < kept for k in range(min(kept + 1, record.depth))]
            )
            self._nodes += (len(record.tokens) - self._nodes) / RECENT
            self._levels += (record.depth - self._levels) / RECENT
        elif request.planned:
            self._kept += (len(record.tokens) / request.planned - self._kept) / RECENT

    def _shift(self, request: _Request, name: str, chances: Sequence[float], outcomes: Sequence[bool]) -> None:
        """One step of gradient ascent on the likelihood of what came, in the shift of the log-odds."""
        push, before = 0.0, 1.0
        for chance, came in zip(chances, outcomes, strict=False):
            push += came - chance / max(before, 1e-9)
            before = chance
            if not came:
                break
        old = request.shifts.get(name, 0.0)
        request.shifts[name] = old * (1 - self.config.decay) + self.config.rate * push
