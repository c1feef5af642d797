"""Resampling: which particle each one goes on from, so that particle i is continued N W_i times on average.

Source: Douc and Cappe 2005, arXiv cs/0507025.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from decoding.smc.weights import Weights

Counts = NDArray[np.int64]


def systematic(weights: Weights, rng: np.random.Generator) -> Counts:
    """How often each particle is continued: one random offset for N evenly spaced points, so that no count is further
    than 1 from N W_i. `weights` [N] sum to 1."""
    n = len(weights)
    return _counts(weights, (rng.random() + np.arange(n)) / n)


def multinomial(weights: Weights, rng: np.random.Generator) -> Counts:
    """How often each particle is continued: N independent draws. `weights` [N] sum to 1."""
    return _counts(weights, rng.random(len(weights)))


RESAMPLING: dict[str, Callable[[Weights, np.random.Generator], Counts]] = {
    "systematic": systematic,
    "multinomial": multinomial,
}


def _counts(weights: Weights, points: NDArray[np.float64]) -> Counts:
    """How many points fall into each particle's share of [0, 1)."""
    ends = np.cumsum(weights)
    found = np.searchsorted(ends / ends[-1], points, side="right")
    found = np.minimum(found, np.flatnonzero(weights)[-1])  # a point that was rounded up to 1
    return np.bincount(found, minlength=len(weights))


def ancestors(counts: Counts) -> list[int]:
    """The particle that each one goes on from, for counts [N]. A particle that goes on at all stays where it is: fewest
    copies."""
    left = counts.copy()
    out = list(range(len(counts)))
    left[counts > 0] -= 1
    free = iter(np.repeat(np.arange(len(counts)), left).tolist())
    for i in np.flatnonzero(counts == 0).tolist():
        out[i] = next(free)
    return out
