"""Loops: stretches in which a text repeats itself, where any copying drafter looks good."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERIOD = 40
"""Longest period, in tokens, that counts as a loop."""
REPEATS = 3
"""Fewest times in a row that the period must stand there."""


def in_loops(tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens [n] lie in a loop: a stretch of period p <= 40 that is at least 3 p long, its first period
    included."""
    text = np.asarray(tokens, dtype=np.int64)
    marked = np.zeros(len(text), dtype=bool)
    for period in range(1, min(PERIOD, len(text) // REPEATS) + 1):
        same = np.concatenate([[0], text[period:] == text[:-period], [0]])
        edges = np.flatnonzero(np.diff(same))
        for start, end in zip(edges[::2], edges[1::2], strict=True):  # runs of tokens that equal the one a period ago
            if end - start >= (REPEATS - 1) * period:
                marked[start : end + period] = True
    return marked
