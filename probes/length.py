"""The accepted-length head: how many tokens of a copied draft the target will keep.

A row's accepted length n means that tokens 1..n of the candidate were accepted and token n + 1 was not. The head
models the hazard of each step,

    h_k(x) = P(token k is accepted | tokens before it were) = sigmoid(w_k . x + b_k),     k = 1, 2, ...

so that a row takes part in step k only if it got there, and a censored row (its text was cut while the candidate
still agreed) simply takes part in no step after its last known one. Steps after `steps` share one hazard. Then

    P(length >= k) = h_1 ... h_k,    E[length] = sum over k of P(length >= k).

Source: hazards in discrete time, Singer and Willett 1993 (J. Educ. Stat. 18, 155-195).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from probes.base import KINDS, column, fit_device, require_finite, require_width
from probes.logistic import solve
from probes.rows import HeldStates, Mask, ShardedStore, StateSource, StoredStates

Floats = NDArray[np.floating]


class LengthProbe(RegressorMixin, BaseEstimator):
    """Accepted length 0..m_max of states [rows, width], by one logistic regression a step."""

    def __init__(
        self,
        *,
        m_max: int = 20,
        steps: int = 6,
        l2: float = 1e-2,
        max_iter: int = 200,
        tol: float | None = None,
        device: str | None = None,
    ):
        """
        m_max: longest draft, in tokens; longer accepted lengths count as this one.
        steps: steps with a hazard of their own; the later ones share one, as fewer and fewer rows get there.
        l2: weight of the penalty, for states scaled to RMS 1 and the mean loss; above 0. It is larger than a
            LinearProbe's: the chances of many steps are multiplied, and so is what they are overconfident by.
        max_iter, tol, device: as in LinearProbe, for each step's fit.
        """
        self.m_max = m_max
        self.steps = steps
        self.l2 = l2
        self.max_iter = max_iter
        self.tol = tol
        self.device = device

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        censored: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to states X [rows, width] and accepted lengths y [rows], of which the `censored` are lower bounds.

        A length between two whole ones counts as part of each. Raises ValueError for lengths below 0, for censored ones
        that are not whole, and for settings that do not fit each other.
        """
        states, lengths = validate_data(self, X, y, dtype=KINDS, ensure_all_finite=False, y_numeric=True)
        require_finite(states)
        weights = _check_sample_weight(sample_weight, states, dtype=np.float64, ensure_non_negative=True)
        cut = np.zeros(len(states), bool) if censored is None else column(censored, "censored", len(states))
        held = HeldStates(torch.from_numpy(np.require(states, requirements=["C", "W"])))
        self._learn(held, lengths, cut, weights)
        return self

    def fit_store(
        self,
        store: ShardedStore,
        sites: str | Sequence[str],
        accepted: ArrayLike,
        censored: ArrayLike,
        rows: Mask | None = None,
    ) -> Self:
        """Fit to a store's states at one site or several side by side, a block at a time.

        accepted, censored, rows: the store's columns of these names, and a mask of the rows to fit, each [rows].
        Raises ValueError as `fit` does.
        """
        states = StoredStates(store, sites, rows)
        kept = states.rows
        if hasattr(self, "feature_names_in_"):  # of an earlier fit
            del self.feature_names_in_
        self.n_features_in_ = states.width
        lengths, cut = (column(c, n, len(kept))[kept] for c, n in ((accepted, "accepted"), (censored, "censored")))
        self._learn(states, lengths, cut, np.ones(len(lengths)))
        return self

    def _learn(self, states: StateSource, lengths: NDArray[np.generic], cut: Mask, weights: Floats) -> None:
        """Set `coef_` [hazards, width], `intercept_` [hazards], `at_risk_` [hazards] and `n_iter_`."""
        if not 1 <= self.steps <= self.m_max:
            raise ValueError(f"steps is {self.steps} and m_max {self.m_max}; 1 <= steps <= m_max must hold")
        y = lengths.astype(np.float64)
        if not (np.isfinite(y).all() and (y >= 0).all()):
            raise ValueError(f"accepted lengths must be 0 or more, got {y[~(y >= 0)][:3].tolist()}")
        cut = cut.astype(bool)
        if (y[cut] % 1).any():
            raise ValueError("a censored length must be a whole number: that many tokens were accepted")
        known = np.minimum(y, self.m_max)[:, None]
        k = np.arange(1, self.m_max + 1)
        there = np.clip(known - (k - 2), 0, 1)  # the part of each row that reached step k
        there[cut] *= k <= known[cut]  # and whose outcome there is known
        up = np.clip(known - (k - 1), 0, 1) * weights[:, None]
        down = there * weights[:, None] - up
        hazards = [(up[:, i], down[:, i]) for i in range(self.steps)]
        if self.steps < self.m_max:
            hazards.append((up[:, self.steps :].sum(axis=1), down[:, self.steps :].sum(axis=1)))
        fitted = [self._hazard(states, *one) for one in hazards]
        self.coef_: Floats = np.stack([w for w, _, _ in fitted]).astype(_numpy(states.dtype))
        self.intercept_: Floats = np.array([b for _, b, _ in fitted], dtype=self.coef_.dtype)
        self.at_risk_ = np.array([int(((u + d) > 0).sum()) for u, d in hazards])
        self.n_iter_ = max(n for _, _, n in fitted)

    def _hazard(self, states: StateSource, up: Floats, down: Floats) -> tuple[Floats, float, int]:
        """Weight [width], bias and iterations of one step; a bias alone where only one outcome was seen."""
        if up.sum() <= 0 or down.sum() <= 0:
            return np.zeros(states.width), math.log((up.sum() + 0.5) / (down.sum() + 0.5)), 0
        risk: Mask = (up + down) > 0
        found = solve(
            states if risk.all() else states.select(risk),
            torch.from_numpy(up[risk]),
            torch.from_numpy(down[risk]),
            l2=self.l2,
            max_iter=self.max_iter,
            tol=self.tol,
            device=fit_device(self.device, states.dtype),
        )
        return found.weight.numpy(), found.bias, found.iterations

    # -- what comes out -----------------------------------------------------------------------------

    def survival(self, X: ArrayLike) -> Floats:
        """P(accepted length >= k) [rows, m_max] for k = 1..m_max."""
        check_is_fitted(self)
        return self._survival(validate_data(self, X, dtype=KINDS, reset=False))

    def distribution(self, X: ArrayLike) -> Floats:
        """P(accepted length = k) [rows, m_max + 1] for k = 0..m_max."""
        survival = self.survival(X)
        sides = np.ones((len(survival), 1)), np.zeros((len(survival), 1))
        law: Floats = -np.diff(np.hstack([sides[0], survival, sides[1]]), axis=1)
        return law

    def expected(self, X: ArrayLike, nodes: int | None = None) -> Floats:
        """Expected accepted length [rows] of a draft of `nodes` tokens in a row; m_max by default.

        X is [rows, width]. Raises ValueError for more than m_max nodes.
        """
        if nodes is not None and not 0 <= nodes <= self.m_max:
            raise ValueError(f"nodes is {nodes}; this head knows drafts of 0 to {self.m_max} tokens")
        total: Floats = self.survival(X)[:, :nodes].sum(axis=1)
        return total

    def expected_store(self, store: ShardedStore, sites: str | Sequence[str], rows: Mask | None = None) -> Floats:
        """`expected` of a store's chosen rows (all by default), a block at a time."""
        check_is_fitted(self)
        states = StoredStates(store, sites, rows)
        require_width(states.width, self.n_features_in_)
        return np.concatenate([self._survival(block.numpy()).sum(axis=1) for _, block in states.blocks()])

    def predict(self, X: ArrayLike) -> Floats:
        """`expected` of the longest draft."""
        return self.expected(X)

    def _survival(self, states: Floats) -> Floats:
        z = states @ self.coef_.T.astype(states.dtype) + self.intercept_.astype(states.dtype)
        hazards = torch.sigmoid(torch.from_numpy(z)).numpy()
        rest = self.m_max - self.steps
        whole = np.hstack([hazards[:, : self.steps], np.repeat(hazards[:, self.steps :], rest, axis=1)])
        survival: Floats = np.cumprod(whole, axis=1)
        return survival

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True  # it predicts lengths of drafts, not any number
        return tags


def _numpy(dtype: torch.dtype) -> type[np.floating]:
    return np.float64 if dtype == torch.float64 else np.float32
