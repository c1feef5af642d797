from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from probes.curves import POINTS, curves


@pytest.mark.parametrize("count", [30, 5000])
def test_points_lie_on_scikit_learns_curves(count: int) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count)
    score = np.round(y + rng.normal(size=count), 3)
    found = curves(y, score)
    fpr, tpr, _ = roc_curve(y, score, drop_intermediate=False)
    roc = {(round(a, 5), round(b, 5)) for a, b in zip(fpr, tpr, strict=True)}
    assert set(zip(found["roc"]["fpr"], found["roc"]["tpr"], strict=True)) <= roc
    precision, recall, _ = precision_recall_curve(y, score)
    pr = {(round(a, 5), round(b, 5)) for a, b in zip(recall, precision, strict=True)}
    assert set(zip(found["pr"]["recall"], found["pr"]["precision"], strict=True)) <= pr
    assert len(found["roc"]["fpr"]) <= POINTS and len(found["pr"]["recall"]) <= POINTS
    assert (found["roc"]["fpr"][0], found["roc"]["tpr"][-1], found["pr"]["recall"][-1]) == (0, 1, 1)
    assert auc(found["roc"]["fpr"], found["roc"]["tpr"]) == pytest.approx(roc_auc_score(y, score), abs=0.01)
    area = np.sum(np.diff(found["pr"]["recall"], prepend=0) * found["pr"]["precision"])
    assert area == pytest.approx(average_precision_score(y, score), abs=0.02)


def test_one_class_has_no_curve() -> None:
    assert curves([1, 1], [0.1, 0.2]) == {"roc": {"fpr": [], "tpr": []}, "pr": {"recall": [], "precision": []}}
