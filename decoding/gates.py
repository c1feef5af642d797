"""Gates: which drafter drafts at a step, how much, or that none does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from activations.matching.match import Matches
from decoding.budgets import Budget, FixedBudget
from decoding.readings import Summary
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.costs import CostTable
    from decoding.trace import StepRecord

BINS = 10
"""Cells of copy intent in which the cost gate keeps its estimates."""
COPY = "copy"
"""Name of the copy drafter, which gates single out."""


@dataclass(frozen=True)
class Decision:
    """Drafters and their budgets, in the order in which their trees are merged; none = abstain."""

    drafts: tuple[tuple[str, Budget], ...]
    reason: str
    trim: Callable[[DraftTree], DraftTree] | None = None
    """Which part of the merged tree is worth verifying; None = all of it."""

    @property
    def copies(self) -> bool:
        return any(name == COPY for name, _ in self.drafts)


@dataclass(frozen=True)
class Situation:
    """What a gate may know at a step: nothing later than the anchor's state and the pending token."""

    length: int
    """Tokens so far, the pending one included."""
    room: int
    """How deep a draft can still be of use."""
    match_length: int = 0
    """Length of the longest suffix match among the candidates, pending token included; 0 = none of at least kappa."""
    intent: float | None = None
    """The probe's output at the anchor."""
    request: int = 0
    """Number of the request, which a step's record repeats."""
    prompt: int = 0
    """Tokens of the prompt."""
    matches: Matches | None = None
    """All suffix matches."""
    candidates: Sequence[Sequence[int]] = ()
    """Their tokens, as the copy drafter takes them: that of the longest match first."""
    summary: Summary | None = None
    """The anchor's logits, where a length head asks for them."""
    readings: Sequence[float] = ()
    """What the length head's `project` gave for the anchor."""


class Gate(Protocol):
    def choose(self, situation: Situation) -> Decision: ...

    def observe(self, record: StepRecord) -> None:
        """Learn from a committed step."""
        ...


class _Still:
    """A gate that learns nothing."""

    def observe(self, record: StepRecord) -> None: ...


@dataclass(frozen=True)
class Choice:
    """A drafter and its budget."""

    name: str
    budget: Budget

    def decide(self, reason: str) -> Decision:
        return Decision(((self.name, self.budget),), reason)


def _neural(choice: Choice | None, reason: str) -> Decision:
    return choice.decide(reason) if choice else Decision((), reason)


class Never(_Still):
    """The target alone."""

    def choose(self, situation: Situation) -> Decision:
        return Decision((), "never")


class Always(_Still):
    """One drafter at every step."""

    def __init__(self, choice: Choice) -> None:
        self._decision = choice.decide("always")

    def choose(self, situation: Situation) -> Decision:
        return self._decision


class MatchLengthGate(_Still):
    """Copy iff a suffix match of at least `length` tokens exists; else the neural side."""

    def __init__(self, copy: Choice, neural: Choice | None = None, length: int = 0) -> None:
        self.length = max(length, 1)
        self._copy = copy.decide("match")
        self._other = _neural(neural, "no match")

    def choose(self, situation: Situation) -> Decision:
        return self._copy if situation.match_length >= self.length else self._other


class ProbeGate(_Still):
    """SwitchSD's rule: copy iff a suffix match exists and the probe's output at the anchor reaches tau; else the
    neural side."""

    def __init__(self, copy: Choice, neural: Choice | None, tau: float) -> None:
        if not 0 <= tau <= 1:
            raise ValueError(f"tau is {tau}; a threshold of a probability lies in [0, 1]")
        self.tau = tau
        self._copy = copy.decide("intent")
        self._no_match = _neural(neural, "no match")
        self._no_intent = _neural(neural, "no intent")

    def choose(self, situation: Situation) -> Decision:
        if situation.match_length == 0:
            return self._no_match
        if situation.intent is None:
            raise ValueError("the probe gate needs the probe's output: build the mode with a probe")
        return self._copy if situation.intent >= self.tau else self._no_intent


class BanditGate:
    """Learns which drafter pays without looking at the text: an upper confidence bound over the drafters.

    Reward is tokens per millisecond, over the best rate seen so far. Where nothing can be copied the neural side
    drafts, and nothing is learnt.
    """

    def __init__(self, copy: Choice, neural: Choice | None = None, exploration: float = 0.3) -> None:
        """`exploration` weighs the confidence bound."""
        self.exploration = exploration
        self._arms = {COPY: copy.decide("bandit"), "neural": _neural(neural, "bandit")}
        self._no_match = _neural(neural, "no match")
        self._tokens = dict.fromkeys(self._arms, 0.0)
        self._time = dict.fromkeys(self._arms, 0.0)
        self._pulls = dict.fromkeys(self._arms, 0)

    def choose(self, situation: Situation) -> Decision:
        if situation.match_length == 0:
            return self._no_match
        for arm, pulls in self._pulls.items():
            if pulls == 0:
                return self._arms[arm]
        return self._arms[max(self._arms, key=self._bound)]

    def _rate(self, arm: str) -> float:
        return self._tokens[arm] / max(self._time[arm], 1e-9)

    def _bound(self, arm: str) -> float:
        best = max(self._rate(a) for a in self._arms)
        total = sum(self._pulls.values())
        return self._rate(arm) / best + self.exploration * math.sqrt(2 * math.log(total) / self._pulls[arm])

    def observe(self, record: StepRecord) -> None:
        if record.reason != "bandit":
            return
        arm = COPY if record.copies else "neural"
        self._pulls[arm] += 1
        self._tokens[arm] += 1 + len(record.accepted)
        self._time[arm] += record.draft_ms + record.verify_ms + record.overhead_ms


@dataclass
class _Mean:
    """A running mean that starts as `weight` observations of `value` and forgets slowly."""

    value: float
    weight: float
    memory: float = 64.0

    def add(self, x: float) -> None:
        self.weight = min(self.weight + 1, self.memory)
        self.value += (x - self.value) / self.weight


@dataclass(frozen=True)
class CostGateConfig:
    """Prior beliefs of the cost gate, all of accepted lengths in tokens."""

    follow: float = 8.0
    """Accepted length of a copy where intent is 1."""
    stray: float = 0.7
    """Accepted length of a copy where intent is 0."""
    neural: float = 1.2
    """Accepted length of a neural draft."""
    confidence: float = 4.0
    """How many observations the prior counts as."""
    memory: float = 64.0
    """How many past observations a mean remembers."""
    widths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15, 19, 23, 31)
    """Copy nodes to choose from: with the pending token, widths that the cost table knows well."""


@dataclass
class CostGate:
    """Takes the choice with the most expected tokens per millisecond, where there is no length head.

    The accepted length of a copy is estimated in cells of (intent, match length): a prior between `stray` and
    `follow`, weighted by the intent, then the mean of what was seen. A chain's length follows from it as if each
    token were accepted with one probability, so that the budget is chosen with the same sum.
    """

    costs: CostTable
    copy: Choice
    neural: Choice | None = None
    config: CostGateConfig = field(default_factory=CostGateConfig)

    def __post_init__(self) -> None:
        c = self.config
        self._cells: dict[tuple[int, int], _Mean] = {}
        self._neural: dict[str, _Mean] = defaultdict(lambda: _Mean(c.neural, c.confidence, c.memory))

    @staticmethod
    def _bin(intent: float | None, match_length: int) -> tuple[int, int]:
        return (-1 if intent is None else min(int(intent * BINS), BINS - 1), min(match_length.bit_length(), 6))

    def _cell(self, intent: float | None, match_length: int) -> _Mean:
        key = self._bin(intent, match_length)
        if key not in self._cells:
            c = self.config
            p = 0.5 if intent is None else (key[0] + 0.5) / BINS
            self._cells[key] = _Mean(c.stray + p * (c.follow - c.stray), c.confidence, c.memory)
        return self._cells[key]

    def choose(self, situation: Situation) -> Decision:
        length, costs = situation.length, self.costs
        best = Decision((), "no draft is worth its time")
        rate = 1 / costs.verify(1, length)
        if self.neural is not None:
            budget = self.neural.budget
            time = costs.draft(self.neural.name, budget.depth) + costs.verify(1 + budget.nodes, length)
            expected = (1 + self._neural[self.neural.name].value) / time
            if expected > rate:
                best, rate = self.neural.decide(f"{expected * 1e3:.0f} tokens/s expected"), expected
        if situation.match_length:
            mean = self._cell(situation.intent, situation.match_length).value
            follow = mean / (1 + mean)  # a geometric law with this mean
            for nodes in self.config.widths:
                if nodes > self.copy.budget.nodes or nodes > max(situation.room, 1):
                    break
                expected = (1 - follow ** (nodes + 1)) / (1 - follow) / costs.verify(1 + nodes, length)
                if expected > rate:
                    fixed = FixedBudget(nodes, min(nodes, self.copy.budget.depth))
                    best = Decision(((self.copy.name, fixed),), f"{expected * 1e3:.0f} tokens/s expected")
                    rate = expected
        return best

    def observe(self, record: StepRecord) -> None:
        names = set(record.source)
        if not names or len(names) > 1:
            return
        name = names.pop()
        accepted = len(record.accepted)
        if name != COPY:
            self._neural[name].add(accepted)
            return
        cell = self._cell(record.intent, record.match_length)
        depth = record.depth
        # a draft followed to its end tells only that the copy is at least that long: count what a longer one would
        # have brought under the present estimate
        cell.add(accepted + cell.value if accepted == depth else accepted)
