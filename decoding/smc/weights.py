"""Log weights of particles, and what they say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def normalized(log_weights: Weights) -> Weights:
    """Weights [N] that sum to 1. Raises ValueError where no particle has a finite weight."""
    highest = log_weights.max()
    if not np.isfinite(highest):
        raise ValueError(f"no particle has a finite weight: {log_weights.tolist()}")
    weights: Weights = np.exp(log_weights - highest)
    return weights / weights.sum()


def effective_size(log_weights: Weights) -> float:
    """Effective sample size in particles, 1 to N, of log weights [N]: 1 / sum of squares of the normalized weights."""
    return float(1.0 / np.square(normalized(log_weights)).sum())


def log_mean(log_weights: Weights) -> float:
    """Log of the mean weight, of log weights [N]."""
    highest = log_weights.max()
    return float(highest + np.log(np.exp(log_weights - highest).mean()))
