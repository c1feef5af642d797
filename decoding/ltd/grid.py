"""Walks over logged texts: what fixed trees, rules and policies reach, and what could be had in hindsight.

A walk begins a text at its first generated token and goes on by what each step wrote. Its rate is tokens over time, of
all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoding.ltd.outcomes import Outcomes

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """What a way of choosing trees does, by text."""

    tokens: Values
    """[texts]"""
    milliseconds: Values
    """[texts]"""
    steps: NDArray[np.int64]
    """[texts]"""

    @property
    def per_second(self) -> float:
        return 1e3 * float(self.tokens.sum() / self.milliseconds.sum())

    @property
    def per_step(self) -> float:
        return float(self.tokens.sum() / self.steps.sum())

    def of(self, texts: Sequence[int] | NDArray[np.int64]) -> Rate:
        """Of some of the texts."""
        chosen = np.asarray(texts, np.int64)
        return Rate(self.tokens[chosen], self.milliseconds[chosen], self.steps[chosen])

    def over(self, other: Rate, resamples: int = 1000) -> tuple[float, float, float]:
        """The ratio of two rates over the same texts, and its 95 % interval from a bootstrap over texts."""
        rng = np.random.default_rng(0)
        drawn = rng.integers(len(self.tokens), size=(resamples, len(self.tokens)))

        def rate(of: Rate) -> Values:
            found: Values = of.tokens[drawn].sum(1) / of.milliseconds[drawn].sum(1)
            return found

        low, high = np.quantile(rate(self) / rate(other), [0.025, 0.975])
        return self.per_second / other.per_second, float(low), float(high)


def walk(outcomes: Outcomes, tokens: NDArray[np.generic], milliseconds: NDArray[np.generic]) -> list[Rate]:
    """One walk for each option; tokens and milliseconds [positions, options] are what it gives at each position."""
    ends = outcomes.starts[1:, None]
    options = tokens.shape[1]
    at = np.broadcast_to(outcomes.starts[:-1, None], (len(ends), options)).copy()
    each = np.arange(options)[None]
    sums = np.zeros((2, len(ends), options))
    steps = np.zeros((len(ends), options), np.int64)
    while (going := at < ends).any():
        here = np.where(going, at, 0)
        gained = np.where(going, tokens[here, each], 0).astype(np.int64)
        sums[0] += gained
        sums[1] += np.where(going, milliseconds[here, each], 0.0)
        steps += going
        at += gained
    return [Rate(sums[0, :, i], sums[1, :, i], steps[:, i]) for i in range(options)]
