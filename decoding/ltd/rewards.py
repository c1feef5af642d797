"""What a step of decoding is worth to a policy in training.

Sources: Learning to Draft, arXiv 2603.01639; a rate as its time at the best rate, Dinkelbach 1967 (Manage. Sci. 13).
"""

from __future__ import annotations

from typing import NamedTuple

REWARDS = ("dinkelbach", "ratio", "tokens", "time")
PATIENCE = 512
"""Steps that the typical step counts as, where means run."""


class Step(NamedTuple):
    """What a step of decoding gave."""

    tokens: float
    """A whole number, but of a typical step."""
    milliseconds: float


class Reward:
    """Makes a reward of a step. What it means by usual are running means, which begin at a typical step's.

    dinkelbach: tokens, less the time at the usual rate, over the usual tokens. Its mean is 0 at the usual rate and
        above it for whatever raises tokens over time of the whole text.
    ratio: tokens over time, Learning to Draft's own, over its usual value.
    tokens, time: tokens alone, the time alone (negative), over their usual values.
    """

    def __init__(self, kind: str, typical: Step) -> None:
        if kind not in REWARDS:
            raise ValueError(f"unknown reward {kind!r}: use {', '.join(REWARDS[:-1])} or {REWARDS[-1]}")
        if not (typical.tokens > 0 and typical.milliseconds > 0):
            raise ValueError(
                f"a typical step of {typical.tokens} tokens in {typical.milliseconds} ms: both are above 0"
            )
        self.kind, self.typical = kind, typical
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        tokens, milliseconds = self.typical
        self._tokens, self._milliseconds = PATIENCE * float(tokens), PATIENCE * milliseconds
        self._ratio, self._seen = PATIENCE * tokens / milliseconds, float(PATIENCE)

    def observe(self, step: Step) -> None:
        """Another step, for the running means."""
        self._tokens += step.tokens
        self._milliseconds += step.milliseconds
        self._ratio += step.tokens / step.milliseconds
        self._seen += 1

    def __call__(self, step: Step) -> float:
        tokens, milliseconds = step
        if self.kind == "ratio":
            return tokens / milliseconds * self._seen / self._ratio
        if self.kind == "tokens":
            return tokens * self._seen / self._tokens
        if self.kind == "time":
            return -milliseconds * self._seen / self._milliseconds
        usual = self._tokens / self._milliseconds
        return (tokens - usual * milliseconds) * self._seen / self._tokens
