"""The difference of means: the direction from one class's mean state to the other's, found in one pass.

Source: mass-mean probes, Marks and Tegmark 2023, arXiv 2310.06824.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from probes.base import BinaryProbe, Layer
from probes.rows import Mask, StateSource

SPREAD_ROWS = 4096
"""Evenly spaced rows from which the spread along the direction is estimated."""


class DifferenceOfMeans(BinaryProbe):
    """Scores a state by where it lies between the two class means.

    The logit is that of two normal laws along the direction, with one spread and the classes' own shares. Means are
    exact; the spread comes from at most 4096 to 8191 evenly spaced rows, which are kept during the pass.
    """

    def _learn(self, states: StateSource, second: Mask, weights: NDArray[np.floating]) -> None:
        """Set `means_` [2, width], `coef_` [1, width] and `intercept_` [1]."""
        weight, second_ = torch.from_numpy(weights).double(), torch.from_numpy(second)
        of_class = torch.stack([weight * ~second_, weight * second_])
        step = max(1, len(states) // SPREAD_ROWS)
        sums, spaced = torch.zeros(2, states.width, dtype=torch.float64), []
        for rows, block in states.blocks():
            sums += of_class[:, rows] @ block.double()
            spaced.append(block[-rows.start % step :: step].double())
        mass = of_class.sum(dim=1)
        means = sums / mass[:, None]
        direction = means[1] - means[0]
        gap = float(direction @ direction)  # between the means along the direction, whose length is sqrt(gap)
        along = (torch.cat(spaced) - means[second_[::step].long()]) @ direction
        some = weight[::step]
        variance = float(some @ along.square() / some.sum())
        scale = gap / max(variance, 1e-6 * gap**2) if gap else 0.0
        middle = float(direction @ means.mean(dim=0))
        self.means_: NDArray[np.floating] = means.to(states.dtype).numpy()
        self.coef_: NDArray[np.floating] = (scale * direction)[None].to(states.dtype).numpy()
        bias = float((mass[1] / mass[0]).log()) - scale * middle
        self.intercept_: NDArray[np.floating] = np.array([bias], dtype=self.coef_.dtype)

    def layers(self) -> list[Layer]:
        return [(self.coef_, self.intercept_)]
