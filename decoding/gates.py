"""Gates: which drafter drafts at a step, how much, or that none does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from activations.matching.match import Matches
from decoding.budgets import Budget
from decoding.readings import Summary
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.trace import StepRecord

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
    """What decides at each step which drafter drafts, how much, or that none does."""

    def choose(self, situation: Situation) -> Decision:
        """The decision for one request, from what is known before anything is drafted."""
        ...

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
    """SwitchSD's rule (arXiv 2609.20186): copy iff a suffix match exists and the probe's output at the anchor reaches
    tau; else the neural side. Raises ValueError for a tau outside 0 to 1, and where the probe's output is not given."""

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
    """Learns which drafter pays without looking at the text: an upper confidence bound over the drafters (UCB1, Auer et
    al. 2002; for drafters BanditSpec, arXiv 2505.15141).

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
        self._time[arm] += record.milliseconds
