"""Points of the ROC and precision-recall curves, few enough to be drawn and stored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from probes.evaluation import Ranked

POINTS = 200
"""Most points of a curve."""


def curves(y: ArrayLike, score: ArrayLike) -> dict[str, dict[str, list[float]]]:
    """`roc` (fpr, tpr) and `pr` (recall, precision) of labels y [rows] and scores [rows], from the highest threshold to
    the lowest.

    Thinned to points that are evenly far apart along the curve; the first and last stay. Empty where only one class
    occurs.
    """
    ranked = Ranked(y, score, np.zeros(len(np.asarray(y))))
    [[*positives], [*negatives]] = (counts.tolist() for counts in ranked.counts(np.ones((1, len(ranked.y)))))
    hits, alarms = np.array(positives[0]), np.array(negatives[0])
    if not (hits[-1] and alarms[-1]):
        return {"roc": {"fpr": [], "tpr": []}, "pr": {"recall": [], "precision": []}}
    tpr, fpr = hits / hits[-1], alarms / alarms[-1]
    roc = _thin(np.stack([np.append(0, fpr), np.append(0, tpr)]))
    pr = _thin(np.stack([tpr, hits / (hits + alarms)]))
    return {
        "roc": dict(zip(("fpr", "tpr"), roc, strict=True)),
        "pr": dict(zip(("recall", "precision"), pr, strict=True)),
    }


def _thin(points: NDArray[np.float64]) -> Any:
    """At most POINTS of the points [2, n]."""
    walked = np.concatenate([[0], np.cumsum(np.abs(np.diff(points, axis=1)).sum(axis=0))])
    wanted = np.linspace(0, walked[-1], POINTS)
    kept = np.unique(np.concatenate([np.searchsorted(walked, wanted[:-1]), [points.shape[1] - 1]]))
    return np.round(points[:, kept], 5).tolist()
