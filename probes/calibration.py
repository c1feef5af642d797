"""Turning logits into probabilities, and how far off those are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from probes.evaluation import BINS

Method = Literal["sigmoid", "isotonic", "temperature"]
METHODS: tuple[Method, ...] = ("sigmoid", "isotonic", "temperature")
Floats = NDArray[np.float64]
Calibrator = Callable[[ArrayLike], Floats]


@dataclass(frozen=True)
class Reliability:
    """How often rows of about one probability are positive, in bins of equally many rows."""

    predicted: list[float]
    """Mean probability in each bin."""
    observed: list[float]
    """Share of positive rows in each bin."""
    rows: list[int]
    """Rows in each bin."""
    error: float
    """Expected calibration error: the mean over rows of |predicted - observed| of their bin (Guo et al. 2017, arXiv
    1706.04599, with bins of equally many rows)."""


def reliability(y: ArrayLike, probability: ArrayLike, bins: int = BINS) -> Reliability:
    """Compare probabilities [rows] with labels y [rows] of 0 and 1."""
    labels, scores = np.asarray(y, dtype=np.float64), np.asarray(probability, dtype=np.float64)
    order = np.argsort(-scores, kind="stable")[::-1]  # the order that `evaluate` has, so that the errors are the same
    parts = [p for p in np.array_split(order, bins) if len(p)]
    predicted = [float(scores[p].mean()) for p in parts]
    observed = [float(labels[p].mean()) for p in parts]
    rows = [len(p) for p in parts]
    gaps = np.abs(np.subtract(predicted, observed))
    return Reliability(predicted, observed, rows, float(np.average(gaps, weights=rows)))


def calibrate(method: Method, logits: ArrayLike, y: ArrayLike) -> Calibrator:
    """Fit the map from logits [rows] to probabilities [rows] of label 1 on rows that did not fit the logits.

    sigmoid       p = sigmoid(a logit + b)
    temperature   p = sigmoid(logit / T)
    isotonic      any rising steps; it needs well over 1,000 rows

    Raises ValueError if the rows are of one class. Sources: Platt 1999 (sigmoid), Guo et al. 2017, arXiv 1706.04599
    (temperature), Zadrozny and Elkan 2002 (isotonic).
    """
    fitted = _fit(method, logits, y)

    def probability(values: ArrayLike) -> Floats:
        found: Floats = fitted.predict_proba(_column(values))[:, 1].astype(np.float64)
        return found

    return probability


def sigmoid_parts(method: Literal["sigmoid", "temperature"], logits: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """The fitted a and b of p = sigmoid(a logit + b), for an artifact that holds these two numbers.

    Of logits [rows] and labels y [rows]. Raises ValueError if the rows are of one class.
    """
    [inner] = _fit(method, logits, y).calibrated_classifiers_
    [fitted] = inner.calibrators
    if method == "sigmoid":
        return -float(fitted.a_), -float(fitted.b_)
    return 2 * float(fitted.beta_), 0.0  # scikit-learn makes the logits -x and x of two classes, 2 x apart


def _fit(method: Method, logits: ArrayLike, y: ArrayLike) -> Any:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """A fitted classifier whose only feature is its logit."""

        classes_ = np.array([0, 1])

        def fit(self, X: Floats, y: ArrayLike) -> Given:
            return self

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def decision_function(self, X: Floats) -> Floats:
            return X[:, 0]

        def predict(self, X: Floats) -> NDArray[np.int_]:
            return (X[:, 0] > 0).astype(int)

    labels = np.asarray(y).astype(int)
    if len(np.unique(labels)) < 2:
        raise ValueError("calibration needs rows of both classes")
    every = np.arange(len(labels))
    one = [(every, every)]  # nothing is fitted before, so that no fold is needed, and few rows of a class are enough
    return CalibratedClassifierCV(FrozenEstimator(Given()), method=method, cv=one).fit(_column(logits), labels)


def _column(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)[:, None]
