"""The linear probe: a logistic classifier over states, with scikit-learn's estimator contract.

    minimise over w, b   mean_i loss(y_i, w . x_i / r + b)  +  l2 / 2 * |w|^2        r = RMS of all entries of x

One scalar r makes `l2` mean the same at every site and in every target; the states are not centred. After the fit
r is folded into `coef_`, so that reading a score costs one dot product with the raw state.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch.nn.functional import logsigmoid

ROUND = 20
"""L-BFGS steps between two looks at the Hessian."""
HESSIAN_ROWS = 8
"""Rows that the Hessian is estimated from, as a multiple of the width: it only needs to be about right."""


class LinearProbe(ClassifierMixin, BaseEstimator):
    """Binary logistic regression over states [rows, width], fitted with L-BFGS in the states' own precision.

    States are float64 or float32; anything else becomes float64. The fit is convex and uses no random numbers, so it
    gives the same weights every time.
    """

    def __init__(self, *, l2: float = 1e-4, fit_intercept: bool = True, max_iter: int = 200, tol: float | None = None):
        """
        l2: weight of the penalty, for states scaled to RMS 1 and the mean loss; above 0.
        fit_intercept: whether there is a bias; it is not penalised.
        max_iter: most L-BFGS iterations.
        tol: about how far a logit may be from the optimum's; None is 1e-9 for float64 and 1e-4 for float32 states.
        """
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> LinearProbe:
        """Fit to states X [rows, width] and two-class labels y [rows], with an optional weight a row."""
        if not self.l2 > 0:
            raise ValueError(f"l2 must be above 0, got {self.l2!r}: without a penalty the weights may have no limit")
        states, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(labels)
        if type_of_target(labels) == "multiclass":
            raise ValueError("Only binary classification is supported. The type of the target is multiclass.")
        weights = _check_sample_weight(sample_weight, states, dtype=states.dtype, ensure_non_negative=True)
        if sample_weight is not None:
            kept = weights > 0
            states, labels, weights = states[kept], labels[kept], weights[kept]
        self.classes_ = np.unique(labels)
        if len(self.classes_) != 2:
            found = self.classes_.tolist()
            raise ValueError(f"a probe needs rows of two classes; these rows have {len(found)} class: {found}")
        signs = np.where(labels == self.classes_[1], 1.0, -1.0).astype(states.dtype)
        self._solve(*(torch.from_numpy(np.require(a, requirements=["C", "W"])) for a in (states, signs, weights)))
        return self

    def _solve(self, states: torch.Tensor, signs: torch.Tensor, weights: torch.Tensor) -> None:
        """Set `rms_`, `coef_` [1, width], `intercept_` [1] and `n_iter_`.

        L-BFGS runs in coordinates that the Hessian at the start of each round makes about equally steep: residual
        streams have a few entries hundreds of times larger than the rest, and plain L-BFGS needs hundreds of passes
        for them. The optimum is the same.
        """
        kind = states.dtype
        tol = self.tol or (1e-9 if kind == torch.float64 else 1e-4)
        shares = weights / weights.sum()
        self.rms_ = float(shares @ states.norm(dim=1).square() / states.shape[1]) ** 0.5 or 1.0
        start = torch.zeros(states.shape[1] + 1, dtype=kind)  # scaled weights, then the bias
        self.n_iter_ = 0
        while self.n_iter_ < self.max_iter:
            whiten = self._whitening(states, shares, start)
            v = torch.zeros_like(start, requires_grad=True)
            steps = min(ROUND, self.max_iter - self.n_iter_)
            solver = torch.optim.LBFGS(
                [v],
                max_iter=steps,
                tolerance_grad=tol,
                tolerance_change=tol**2,  # in these coordinates a step gains about the gradient squared
                history_size=ROUND,
                line_search_fn="strong_wolfe",
            )
            solver.step(partial(self._loss, v, start, whiten, states, signs, shares))
            taken = int(solver.state[v]["n_iter"])
            self.n_iter_ += max(taken, 1)
            start = start + whiten @ v.detach()
            if taken < steps:
                if kind == torch.float64:  # a loss in double precision shows 1e-16, and so the gradient only 1e-8
                    start = self._newton(states, signs, shares, start)
                break
        self.coef_: NDArray[np.floating] = (start[None, :-1] / self.rms_).numpy()
        self.intercept_: NDArray[np.floating] = start[-1:].numpy() * self.fit_intercept

    def _newton(
        self, states: torch.Tensor, signs: torch.Tensor, shares: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """One Newton step from `at`, which must be near the optimum."""
        whiten, v = self._whitening(states, shares, at), torch.zeros_like(at)
        self._loss(v, at, whiten, states, signs, shares)
        assert v.grad is not None
        return at - whiten @ v.grad

    @torch.no_grad()
    def _loss(self, v: torch.Tensor, start: torch.Tensor, whiten: torch.Tensor, states: torch.Tensor,
              signs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:  # fmt: skip
        """The objective at `start + whiten @ v`; leaves its gradient in `v.grad`."""
        full = start + whiten @ v
        w, b = full[:-1], full[-1] * self.fit_intercept
        z = states @ (w / self.rms_) + b
        residual = -shares * signs * torch.sigmoid(-signs * z)
        down = residual @ states / self.rms_ + self.l2 * w
        v.grad = whiten.T @ torch.cat([down, residual.sum()[None] * self.fit_intercept])
        return 0.5 * self.l2 * w @ w - shares @ logsigmoid(signs * z)

    def _whitening(self, states: torch.Tensor, shares: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """W [width + 1, width + 1] with W W^T the inverse Hessian at `at`, estimated from evenly spaced rows."""
        step = max(1, len(states) // (HESSIAN_ROWS * states.shape[1]))
        some, share = states[::step].double() / self.rms_, shares[::step].double()
        p = torch.sigmoid(some @ at[:-1].double() + at[-1].double() * self.fit_intercept)
        curvature = (p * (1 - p)).clamp_min(1e-6) * share / share.sum()
        rows = torch.cat([some, torch.ones(len(some), 1, dtype=torch.float64)], dim=1)
        hessian = (rows * curvature[:, None]).T @ rows
        # The bias too, and a little more for rounding, so that it is never singular: this only steers the search.
        hessian.diagonal().add_(self.l2 + 1e-12 * float(hessian.diagonal().max()))
        factor = torch.linalg.cholesky(hessian)
        identity = torch.eye(len(hessian), dtype=torch.float64)
        return torch.linalg.solve_triangular(factor, identity, upper=False).T.to(states.dtype).contiguous()

    def decision_function(self, X: ArrayLike) -> NDArray[np.floating]:
        """Logits [rows] of the second class."""
        check_is_fitted(self)
        states = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores: NDArray[np.floating] = states @ self.coef_[0].astype(states.dtype) + self.intercept_[0]
        return scores

    def predict_proba(self, X: ArrayLike) -> NDArray[np.floating]:
        """Probabilities [rows, 2] of both classes."""
        z = torch.from_numpy(self.decision_function(X))
        return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], dim=1).numpy()

    def predict(self, X: ArrayLike) -> NDArray[np.generic]:
        """The likelier class of each row."""
        second = self.decision_function(X) > 0
        labels: NDArray[np.generic] = self.classes_[second.astype(int)]
        return labels

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
