"""How good a score is: ranking and decision metrics with intervals from a bootstrap over documents.

Rows of one document are alike, so whole documents are drawn again, never rows. A drawn document counts as often as
it was drawn: every resample is a weight a row, the scores are sorted once, and all metrics of all resamples are
cumulative sums over that order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95
CHUNK = 100_000
"""Weights (resamples x rows) held at once."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % bootstrap interval. All NaN where the metric is undefined."""

    estimate: float
    lower: float
    upper: float

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN."""
        return {k: v if np.isfinite(v) else None for k, v in asdict(self).items()}

    def __format__(self, spec: str) -> str:
        if not np.isfinite(self.estimate):
            return "undefined"
        if not np.isfinite(self.lower):  # one document or prompt has no spread
            return format(self.estimate, spec)
        return f"{self.estimate:{spec}} [{self.lower:{spec}}, {self.upper:{spec}}]"

    def __str__(self) -> str:
        return format(self, ".4f")


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one score on one set of rows."""

    rows: int
    """Number of rows."""
    documents: int
    """Number of documents, the unit of the bootstrap."""
    base_rate: Interval
    """Share of rows whose label is 1: the average precision of a score that knows nothing."""
    roc_auc: Interval
    """Probability that a positive row scores above a negative one; ties count half."""
    average_precision: Interval
    """Mean precision over the recall steps."""
    threshold: float | None = None
    """Rows that score at least this are called copied; None without a threshold."""
    f1: Interval | None = None
    """Harmonic mean of precision and recall at the threshold."""
    precision: Interval | None = None
    """Share of the called rows that are positive."""
    recall: Interval | None = None
    """Share of the positive rows that are called."""
    auc_draws: Floats = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    """ROC AUC of the data and of each resample, for paired differences."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict() if isinstance(value, Interval) else value
            for name, value in vars(self).items()
            if value is not None and name != "auc_draws"
        }


def evaluate(
    y: ArrayLike,
    score: ArrayLike,
    documents: ArrayLike,
    *,
    threshold: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Evaluation:
    """All metrics of scores [rows] against labels y [rows] of 0 and 1.

    `documents` [rows] names the document of each row. For conditional metrics (rows with a suffix match, say) give
    those rows only.
    """
    ranked = Ranked(y, score, documents)
    draws = ranked.draws(resamples, seed)
    roc_auc, average_precision = ranked._ranking(draws)
    at = None if threshold is None else ranked.decisions(draws, threshold)
    return Evaluation(
        rows=len(ranked.y),
        documents=ranked.count,
        base_rate=interval(ranked.base_rate(draws)),
        roc_auc=interval(roc_auc),
        average_precision=interval(average_precision),
        threshold=threshold,
        f1=None if at is None else interval(at["f1"]),
        precision=None if at is None else interval(at["precision"]),
        recall=None if at is None else interval(at["recall"]),
        auc_draws=roc_auc,
    )


def auc_difference(first: Evaluation, second: Evaluation) -> Interval:
    """ROC AUC of the first score minus that of the second, both measured on the same resamples of the same rows."""
    draws = (first.auc_draws, second.auc_draws)
    if len(draws[0]) != len(draws[1]) or (first.rows, first.documents) != (second.rows, second.documents):
        raise ValueError("a paired difference needs two evaluations of the same rows with the same resamples and seed")
    return interval(draws[0] - draws[1])


def interval(values: Floats) -> Interval:
    """`values[0]` is the estimate, the rest are resamples; those without a value (one class only) are left out."""
    rest = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or not len(rest):
        return Interval(float(values[0]), np.nan, np.nan)
    lower, upper = np.quantile(rest, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values[0]), float(lower), float(upper))


class Ranked:
    """Rows sorted by score, the highest first, ready for many weightings of their documents.

    Each method takes draws [resamples, documents] (how often a document counts; the first line is all ones, the data
    as they are) and gives one value a line, NaN where it is undefined.
    """

    def __init__(self, y: ArrayLike, score: ArrayLike, documents: ArrayLike) -> None:
        labels, scores, names = np.asarray(y), np.asarray(score, dtype=np.float64), np.asarray(documents)
        if not (labels.ndim == scores.ndim == names.ndim == 1 and len(labels) == len(scores) == len(names)):
            shapes = f"{labels.shape}, {scores.shape}, {names.shape}"
            raise ValueError(f"labels, scores and documents must be one value a row, got shapes {shapes}")
        if not len(labels):
            raise ValueError("there are no rows to evaluate")
        if np.isnan(scores).any():
            raise ValueError(f"{int(np.isnan(scores).sum())} of {len(scores)} scores are NaN: leave those rows out")
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(f"labels must be 0 or 1, got {sorted(set(np.unique(labels).tolist()) - {0, 1})}")
        order = np.argsort(-scores, kind="stable")
        self.y = labels[order].astype(np.float64)
        self.score = scores[order]
        unique, inverse = np.unique(names, return_inverse=True)
        self.document = inverse[order]
        self.count = len(unique)
        self.ends = np.append(np.flatnonzero(np.diff(self.score)), len(scores) - 1)
        """Last row of each group of equal scores."""

    def draws(self, resamples: int, seed: int) -> Floats:
        """The data as they are, and `resamples` draws of as many documents with replacement."""
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(self.count, np.full(self.count, 1 / self.count), size=resamples)
        return np.vstack([np.ones((1, self.count)), counts])

    def _counts(self, weights: Floats) -> tuple[Floats, Floats]:
        """Weighted positives and negatives [lines, groups] with at least the score of each group."""
        positives = np.cumsum(weights * self.y, axis=1)[:, self.ends]
        return positives, np.cumsum(weights, axis=1)[:, self.ends] - positives

    def base_rate(self, draws: Floats) -> Floats:
        total = np.bincount(self.document, minlength=self.count)
        positive = np.bincount(self.document, weights=self.y, minlength=self.count)
        return _divide(draws @ positive, draws @ total)

    def roc_auc(self, draws: Floats) -> Floats:
        return self._ranking(draws)[0]

    def average_precision(self, draws: Floats) -> Floats:
        return self._ranking(draws)[1]

    def _ranking(self, draws: Floats) -> Floats:
        """ROC AUC and average precision [2, lines]."""
        out = np.empty((2, len(draws)))
        step = max(1, CHUNK // len(self.y))
        for start in range(0, len(draws), step):
            weights = np.take(draws[start : start + step], self.document, axis=1)
            positives, negatives = self._counts(weights)
            steps = np.diff(positives, axis=1, prepend=0)  # positives of each group
            below = np.diff(negatives, axis=1, prepend=0)  # negatives of each group
            pairs = np.einsum("ij,ij->i", below, positives - steps / 2)
            gained = np.einsum("ij,ij->i", steps, positives / np.maximum(positives + negatives, 1))
            out[0, start : start + step] = _divide(pairs, positives[:, -1] * negatives[:, -1])
            out[1, start : start + step] = _divide(gained, positives[:, -1])
        return out

    def decisions(self, draws: Floats, threshold: float) -> dict[str, Floats]:
        """f1, precision and recall where rows that score at least `threshold` are called."""
        called = self.score >= threshold

        def total(rows: NDArray[np.bool_] | Floats) -> Floats:
            summed: Floats = draws @ np.bincount(self.document, weights=rows, minlength=self.count)
            return summed

        hits, calls, positives = total(called * self.y), total(called), total(self.y)
        return {
            "f1": _divide(2 * hits, calls + positives),
            "precision": _divide(hits, calls),
            "recall": _divide(hits, positives),
        }


def best_f1_threshold(y: ArrayLike, score: ArrayLike) -> float:
    """The score from which calling rows positive gives the greatest F1; of equals the highest.

    Choose it on a selection part; what it gives there is too good.
    """
    ranked = Ranked(y, score, np.zeros(len(np.asarray(y))))
    positives, negatives = ranked._counts(np.ones((1, len(ranked.y))))
    if not positives[0, -1]:
        raise ValueError("no row is positive: a threshold cannot be chosen")
    f1 = 2 * positives[0] / (positives[0] + negatives[0] + positives[0, -1])
    return float(ranked.score[ranked.ends[int(f1.argmax())]])


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
    """Expected calibration error: the mean over rows of |predicted - observed| of their bin."""


def reliability(y: ArrayLike, probability: ArrayLike, bins: int = 10) -> Reliability:
    """Compare probabilities [rows] with labels y [rows] of 0 and 1."""
    order = np.argsort(np.asarray(probability), kind="stable")
    parts = [p for p in np.array_split(order, bins) if len(p)]
    predicted = [float(np.asarray(probability, dtype=np.float64)[p].mean()) for p in parts]
    observed = [float(np.asarray(y, dtype=np.float64)[p].mean()) for p in parts]
    rows = [len(p) for p in parts]
    gaps = np.abs(np.subtract(predicted, observed))
    return Reliability(predicted, observed, rows, float(np.average(gaps, weights=rows)))


def _divide(top: Floats, bottom: Floats) -> Floats:
    """top / bottom, NaN where there is nothing to divide by."""
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)
