"""How good a score is: ranking and decision metrics with intervals from a bootstrap over documents.

Rows of one document are alike, so whole documents are drawn again, never rows. A drawn document counts as often as
it was drawn: every resample is a weight a row, the scores are sorted once, and all metrics of all resamples are
cumulative sums over that order.

Source: the cluster bootstrap, Field and Welsh 2007 (J. R. Stat. Soc. B 69, 369-390).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95
CHUNK = 100_000
"""Weights (resamples x rows) held at once."""
BINS = 10
"""Bins of equally many rows behind a calibration error."""
FALSE_ALARMS = {"tpr_at_1": 0.01, "tpr_at_5": 0.05}
"""False positive rates at which the true positive rate is told."""
METRICS = (
    "base_rate", "roc_auc", "average_precision", *FALSE_ALARMS, "f1", "precision", "recall", "brier", "ece"
)  # fmt: skip


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
    tpr_at_1: Interval
    """Greatest share of the positive rows found by a threshold that calls at most 1 % of the negative ones."""
    tpr_at_5: Interval
    """The same at 5 %."""
    threshold: float | None = None
    """Rows that score at least this are called copied; None without a threshold."""
    f1: Interval | None = None
    """Harmonic mean of precision and recall at the threshold."""
    precision: Interval | None = None
    """Share of the called rows that are positive."""
    recall: Interval | None = None
    """Share of the positive rows that are called."""
    brier: Interval | None = None
    """Mean squared distance of probability and label; None for a score that is no probability."""
    ece: Interval | None = None
    """Expected calibration error over bins of equally many rows: the mean over rows of |mean probability - share of
    positive rows| of their bin. The bins are those of the data in every resample."""
    draws: Mapping[str, Floats] = field(default_factory=dict, repr=False, compare=False)
    """Each metric of the data and of each resample, for paired differences."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict() if isinstance(value, Interval) else value
            for name, value in vars(self).items()
            if value is not None and name != "draws"
        }


def evaluate(
    y: ArrayLike,
    score: ArrayLike,
    documents: ArrayLike,
    *,
    threshold: float | None = None,
    probability: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Evaluation:
    """All metrics of scores [rows] against labels y [rows] of 0 and 1.

    `documents` [rows] names the document of each row. For conditional metrics (rows with a suffix match, say) give
    those rows only. `probability` says that a score is the probability of label 1, whose calibration can be told.
    The rows of one document alone have no interval.
    """
    ranked = Ranked(y, score, documents)
    draws = ranked.draws(resamples, seed)
    if ranked.count == 1:
        draws = draws[:1]
    found = {"base_rate": ranked.base_rate(draws), **ranked.ranking(draws)}
    if threshold is not None:
        found |= ranked.decisions(draws, threshold)
    if probability:
        found |= ranked.calibration(draws)
    intervals: dict[str, Any] = {name: interval(values) for name, values in found.items()}
    return Evaluation(rows=len(ranked.y), documents=ranked.count, threshold=threshold, draws=found, **intervals)


def differences(first: Evaluation, second: Evaluation) -> dict[str, Interval]:
    """Each metric of the first score minus that of the second, both on the same resamples of the same rows.

    Metrics that one of them lacks are left out, and so is the base rate, which belongs to the rows. Raises ValueError
    for evaluations of other rows or other resamples.
    """
    sizes = {len(values) for e in (first, second) for values in e.draws.values()}
    if len(sizes) != 1 or (first.rows, first.documents) != (second.rows, second.documents):
        raise ValueError("a paired difference needs two evaluations of the same rows with the same resamples and seed")
    shared = [name for name in METRICS[1:] if name in first.draws and name in second.draws]
    return {name: interval(first.draws[name] - second.draws[name]) for name in shared}


def auc_difference(first: Evaluation, second: Evaluation) -> Interval:
    """ROC AUC of the first score minus that of the second; see `differences`."""
    return differences(first, second)["roc_auc"]


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

    def counts(self, weights: Floats) -> tuple[Floats, Floats]:
        """Weighted positives and negatives [lines, groups] with at least the score of each group."""
        positives = np.cumsum(weights * self.y, axis=1)[:, self.ends]
        return positives, np.cumsum(weights, axis=1)[:, self.ends] - positives

    def base_rate(self, draws: Floats) -> Floats:
        total = np.bincount(self.document, minlength=self.count)
        positive = np.bincount(self.document, weights=self.y, minlength=self.count)
        return _divide(draws @ positive, draws @ total)

    def ranking(self, draws: Floats) -> dict[str, Floats]:
        """roc_auc, average_precision and the true positive rates at few false alarms."""
        out = {name: np.empty(len(draws)) for name in ("roc_auc", "average_precision", *FALSE_ALARMS)}
        step = max(1, CHUNK // len(self.y))
        for start in range(0, len(draws), step):
            lines = slice(start, start + step)
            weights = np.take(draws[lines], self.document, axis=1)
            positives, negatives = self.counts(weights)
            steps = np.diff(positives, axis=1, prepend=0)  # positives of each group
            below = np.diff(negatives, axis=1, prepend=0)  # negatives of each group
            pairs = np.einsum("ij,ij->i", below, positives - steps / 2)
            gained = np.einsum("ij,ij->i", steps, positives / np.maximum(positives + negatives, 1))
            hits, alarms = positives[:, -1], negatives[:, -1]
            out["roc_auc"][lines] = _divide(pairs, hits * alarms)
            out["average_precision"][lines] = _divide(gained, hits)
            for name, rate in FALSE_ALARMS.items():
                allowed = (negatives <= rate * alarms[:, None]).sum(axis=1)  # groups that may be called
                found = np.where(allowed, positives[np.arange(len(allowed)), allowed - 1], 0.0)
                out[name][lines] = np.where(alarms > 0, _divide(found, hits), np.nan)
        return out

    def calibration(self, draws: Floats, bins: int = BINS) -> dict[str, Floats]:
        """brier and ece of scores that are probabilities; raises ValueError where one is not in [0, 1]."""
        if self.score[-1] < 0 or self.score[0] > 1:
            raise ValueError(f"probabilities lie in [0, 1], got {self.score[-1]} to {self.score[0]}")
        rows = draws @ np.bincount(self.document, minlength=self.count)
        squares = draws @ np.bincount(self.document, weights=(self.score - self.y) ** 2, minlength=self.count)
        gaps = np.zeros(len(draws))
        for part in np.array_split(np.arange(len(self.y))[::-1], bins):
            off = np.bincount(self.document[part], weights=(self.score - self.y)[part], minlength=self.count)
            gaps += np.abs(draws @ off)
        return {"brier": _divide(squares, rows), "ece": _divide(gaps, rows)}

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


def _divide(top: Floats, bottom: Floats) -> Floats:
    """top / bottom, NaN where there is nothing to divide by."""
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)
