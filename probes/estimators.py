"""Estimators by name: the probes, and what scikit-learn has to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from probes.artifact import ChoiceError


def _linear(**options: Any) -> Any:
    from probes.linear import LinearProbe

    return LinearProbe(**options)


def _mlp(**options: Any) -> Any:
    from probes.mlp import MLPProbe

    return MLPProbe(**options)


def _mlp2(**options: Any) -> Any:
    return _mlp(**{"hidden": (64, 32), **options})


def _means(**options: Any) -> Any:
    from probes.means import DifferenceOfMeans

    return DifferenceOfMeans(**options)


def _lda(**options: Any) -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    # Shrinkage: a state has as many entries as many a store has rows.
    return LinearDiscriminantAnalysis(**{"solver": "lsqr", "shrinkage": "auto", **options})


def _logistic(**options: Any) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(**{"max_iter": 1000, **options}))


def _trees(**options: Any) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    # Its early stopping would hold out rows, not documents.
    return HistGradientBoostingClassifier(**{"early_stopping": False, "random_state": 0, **options})


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "mlp": _mlp,
    "mlp2": _mlp2,
    "means": _means,
    "lda": _lda,
    "logistic": _logistic,
    "trees": _trees,
}
"""A new estimator of each name; keywords go to its constructor. The first four also fit from a store."""


def make_estimator(name: str, **options: Any) -> Any:
    """A new, unfitted estimator; ChoiceError for an unknown name."""
    if name not in ESTIMATORS:
        raise ChoiceError(f"no estimator {name!r}: choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name](**options)
