"""How many tokens to draft between two weighings, chosen so that enough particles still count.

Source: the share of particles that count after K tokens, SMC-SD, arXiv 2604.15672.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoding.budgets import FixedBudget
from decoding.gates import Decision, Situation

if TYPE_CHECKING:
    from decoding.trace import StepRecord

TARGET_SHARE = 0.3
"""Share of the particles that should still count after a round: ESS / N."""
HIGHEST = 16.0
"""Largest ratio p / q of a token that is believed: the mean of its square has a heavy tail."""
PRIOR = 32.0
"""Tokens that the depth to start with stands for."""


@dataclass
class _Moments:
    tokens: float
    first: float
    second: float


class Lookahead:
    """The largest K with (1 + chi2)^-K >= share, chi2 being that of the target's law against the draft model's for one
    token. It is estimated for each request from its own particles, so that requests do not depend on each other."""

    def __init__(self, start: int, most: int, share: float = TARGET_SHARE) -> None:
        """`start`: K as long as little is known; `most`: the largest one."""
        if not 1 <= start <= most:
            raise ValueError(f"the lookahead starts at {start} tokens; that must be 1 to {most}")
        if not 0 < share < 1:
            raise ValueError(f"the ESS share to keep is {share}; it must lie between 0 and 1")
        self.start = start
        self.most = most
        self.share = share
        self._seen: dict[int, _Moments] = {}

    def chi2(self, request: int) -> float:
        """Of one token, for the request of this number."""
        seen = self._seen.get(request) or self._prior()
        mean = seen.first / seen.tokens  # 1 in law, and a sum over the vocabulary where the target's law is a power
        return max(seen.second / seen.tokens / mean**2 - 1, 0.0)

    def depth(self, request: int) -> int:
        """K of the request of this number."""
        growth = math.log1p(self.chi2(request))
        if growth * self.most <= -math.log(self.share):
            return self.most
        return max(1, math.floor(-math.log(self.share) / growth + 1e-9))

    def observe(self, request: int, log_ratios: Iterable[float]) -> None:
        """Log p / q of drafted tokens, which were drawn from q."""
        seen = self._seen.setdefault(request, self._prior())
        for value in log_ratios:
            ratio = min(math.exp(min(value, 100.0)), HIGHEST)
            seen.tokens += 1
            seen.first += ratio
            seen.second += ratio**2

    def close(self, request: int) -> None:
        """Forget a request. Safe to repeat."""
        self._seen.pop(request, None)

    def _prior(self) -> _Moments:
        return _Moments(PRIOR, PRIOR, PRIOR * self.share ** (-1 / self.start))


class LookaheadGate:
    """One drafter at every step, each request's chain as long as the lookahead says."""

    def __init__(self, drafter: str, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self._decisions = [Decision(((drafter, FixedBudget(k, k)),), "lookahead") for k in range(1, lookahead.most + 1)]

    def choose(self, situation: Situation) -> Decision:
        return self._decisions[self.lookahead.depth(situation.request) - 1]

    def observe(self, record: StepRecord) -> None: ...
