"""The linear probe: a logistic classifier over states, with scikit-learn's estimator contract.

    minimise over w, b   mean_i loss(y_i, w . x_i / r + b)  +  l2 / 2 * |w|^2        r = RMS of all entries of x

One scalar r makes `l2` mean the same at every site and in every target; the states are not centred. After the fit
r is folded into `coef_`, so that reading a score costs one dot product with the raw state.

SwitchSD's probe (arXiv 2609.20186) is this one without b.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from probes.base import BinaryProbe, Layer, fit_device
from probes.logistic import solve
from probes.rows import Mask, StateSource


class LinearProbe(BinaryProbe):
    """Binary logistic regression over states [rows, width], fitted with L-BFGS in the states' own precision.

    The fit is convex and uses no random numbers, so it gives the same weights every time, and `fit_store` finds the
    same optimum as `fit`.
    """

    def __init__(
        self,
        *,
        l2: float = 1e-4,
        fit_intercept: bool = True,
        max_iter: int = 200,
        tol: float | None = None,
        device: str | None = None,
    ):
        """
        l2: weight of the penalty, for states scaled to RMS 1 and the mean loss; above 0.
        fit_intercept: whether there is a bias; it is not penalised.
        max_iter: most L-BFGS iterations over all rows.
        tol: about how far a logit may be from the optimum's; None is 1e-9 for float64 and 1e-4 for float32 states.
        device: where the fit runs; None is a GPU for float32 states if there is one, else the CPU.
        """
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.device = device

    def _learn(self, states: StateSource, second: Mask, weights: NDArray[np.floating]) -> None:
        """Set `rms_`, `coef_` [1, width], `intercept_` [1] and `n_iter_`."""
        found = solve(
            states,
            torch.from_numpy(np.where(second, weights, 0)),
            torch.from_numpy(np.where(second, 0, weights)),
            l2=self.l2,
            fit_intercept=self.fit_intercept,
            max_iter=self.max_iter,
            tol=self.tol,
            device=fit_device(self.device, states.dtype),
        )
        self.rms_ = found.rms
        self.coef_: NDArray[np.floating] = found.weight.to(states.dtype)[None].numpy()
        self.intercept_: NDArray[np.floating] = np.array([found.bias], dtype=self.coef_.dtype)
        self.n_iter_ = found.iterations

    def layers(self) -> list[Layer]:
        return [(self.coef_, self.intercept_)]
