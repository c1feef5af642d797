"""What the probes of two classes share: scikit-learn's estimator contract, and fitting from a capture store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from probes.rows import HeldStates, Mask, ShardedStore, StateSource, StoredStates, list_rows

Layer = tuple[NDArray[np.floating], NDArray[np.floating]]
"""Weight [out, in] and bias [out]."""
KINDS = [np.float64, np.float32]
"""Dtypes of states that are kept; anything else becomes the first."""


class BinaryProbe(ClassifierMixin, BaseEstimator):
    """A classifier of two classes over states [rows, width]; a subclass says how it learns.

    States are float64 or float32; anything else becomes float64 (in a store, float32).
    """

    classes_: NDArray[Any]
    n_features_in_: int

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to states X [rows, width] and two-class labels y [rows], with an optional weight a row.

        Raises ValueError for states that are not finite, and for labels of one class or of more than two.
        """
        self._learn(*self._held(X, y, sample_weight)[:3])
        return self

    def fit_store(
        self,
        store: ShardedStore,
        sites: str | Sequence[str],
        y: ArrayLike,
        rows: Mask | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to a store's states at one site or several side by side, without holding them all in memory.

        y, rows, sample_weight: labels, mask of the rows to fit (all by default) and weights, each [rows of the store].
        Raises ProbeError, which says which rows, where a shard's states cannot be fitted; ValueError for columns of
        another length, labels of one class or of more than two, and weights below 0.
        """
        self._learn(*self._stored(store, sites, y, rows, sample_weight)[:3])
        return self

    @abstractmethod
    def _learn(self, states: StateSource, second: Mask, weights: NDArray[np.floating]) -> None:
        """Fit to states, whether each row is of the second class, and weights above 0."""

    @abstractmethod
    def layers(self) -> list[Layer]:
        """The fitted function from raw states to the logit: linear layers with a ReLU between them."""

    # -- what is fitted -----------------------------------------------------------------------------

    def _held(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> tuple[StateSource, Mask, NDArray[np.floating], Mask]:
        """States, second class and weights of the rows that weigh something, and which these are."""
        states, labels = validate_data(self, X, y, dtype=KINDS, ensure_all_finite=False)
        require_finite(states)
        weights = _check_sample_weight(sample_weight, states, dtype=states.dtype, ensure_non_negative=True)
        kept: Mask = weights > 0
        second = self._second(labels[kept])
        if not kept.all():
            states, weights = states[kept], weights[kept]
        return HeldStates(torch.from_numpy(np.require(states, requirements=["C", "W"]))), second, weights, kept

    def _stored(
        self,
        store: ShardedStore,
        sites: str | Sequence[str],
        y: ArrayLike,
        rows: Mask | None,
        sample_weight: ArrayLike | None,
    ) -> tuple[StateSource, Mask, NDArray[np.floating], Mask]:
        """As `_held`, for a store; the mask is over the store's rows."""
        states = StoredStates(store, sites, rows)
        labels = column(y, "y", len(states.rows))
        kept = states.rows
        weights = np.ones(len(kept)) if sample_weight is None else column(sample_weight, "sample_weight", len(kept))
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("sample_weight must be finite and 0 or more")
        if not (weights[kept] > 0).all():
            kept = kept & (weights > 0)
            states = StoredStates(store, sites, kept)
        second = self._second(labels[kept])
        if hasattr(self, "feature_names_in_"):  # of an earlier fit
            del self.feature_names_in_
        self.n_features_in_ = states.width
        return states, second, weights[kept], kept

    def _second(self, labels: NDArray[Any]) -> Mask:
        """Which rows are of the second class; sets `classes_`."""
        check_classification_targets(labels)
        if type_of_target(labels) == "multiclass":
            raise ValueError("Only binary classification is supported. The type of the target is multiclass.")
        self.classes_ = np.unique(labels)
        if len(self.classes_) != 2:
            found = self.classes_.tolist()
            raise ValueError(f"a probe needs rows of two classes; these rows have {len(found)} class: {found}")
        second: Mask = labels == self.classes_[1]
        return second

    # -- what comes out -----------------------------------------------------------------------------

    def decision_function(self, X: ArrayLike) -> NDArray[np.floating]:
        """Logits [rows] of the second class."""
        check_is_fitted(self)
        return self._logits(validate_data(self, X, dtype=KINDS, reset=False))

    def decision_store(
        self, store: ShardedStore, sites: str | Sequence[str], rows: Mask | None = None
    ) -> NDArray[np.floating]:
        """Logits [chosen rows] of a store's rows (all by default), a block at a time."""
        check_is_fitted(self)
        states = StoredStates(store, sites, rows)
        require_width(states.width, self.n_features_in_)
        return np.concatenate([self._logits(block.numpy()) for _, block in states.blocks()])

    def _logits(self, states: NDArray[np.floating]) -> NDArray[np.floating]:
        for weight, bias in self.layers()[:-1]:
            states = np.maximum(states @ weight.T.astype(states.dtype) + bias.astype(states.dtype), 0)
        weight, bias = self.layers()[-1]
        logits: NDArray[np.floating] = states @ weight[0].astype(states.dtype) + bias[0].astype(states.dtype)
        return logits

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


def require_finite(states: NDArray[np.floating]) -> None:
    """Raises ValueError, which lists the rows, if states [rows, width] have NaN or infinite entries."""
    if np.isfinite(states.sum()):  # finite only if all are
        return
    broken = np.flatnonzero(~np.isfinite(states).all(axis=1))
    if len(broken):
        raise ValueError(
            f"{len(broken)} rows of X have NaN or infinite (inf) entries ({list_rows(broken)}): leave these rows out"
        )


def require_width(found: int, fitted: int) -> None:
    """Raises ValueError unless the two numbers of entries of a state are the same."""
    if found != fitted:
        raise ValueError(f"the states have width {found}, and the probe was fitted to {fitted}: give the same sites")


def column(values: ArrayLike, name: str, rows: int) -> NDArray[Any]:
    """The values as an array [rows]. Raises ValueError, which names the column, for another shape."""
    found = np.asarray(values)
    if found.shape != (rows,):
        raise ValueError(f"{name} has shape {list(found.shape)}; it must be [{rows}]: a value for each row")
    return found


def fit_device(device: str | None, dtype: torch.dtype) -> torch.device:
    """Where to fit: the device named, or a GPU for float32 states if there is one, or the CPU.

    Raises ValueError for a GPU that is not there.
    """
    there = torch.cuda.is_available()
    if device is None:
        return torch.device("cuda" if there and dtype == torch.float32 else "cpu")
    found = torch.device(device)
    if found.type == "cuda" and not there:
        raise ValueError(f"device is {device!r}, and torch sees no GPU here: use 'cpu', or leave it out")
    return found
