from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from probes.baselines import FITS, LEAK, LOGITS, SURFACE, baseline_scores, logits_features, surface_features


def test_features_are_finite_and_zero_without_a_match(fake_store: Any) -> None:
    rows = fake_store().rows()
    surface, logits = surface_features(rows), logits_features(rows)
    assert surface.shape == (2400, len(SURFACE)) and logits.shape == (2400, len(LOGITS))
    assert np.isfinite(surface).all() and np.isfinite(logits).all()
    without = rows["match_length"] == 0
    assert (surface[without] == 0).all() and (surface[~without, 0] == 1).all()
    row = int(np.flatnonzero(rows["source"] == "prompt")[0])
    expected = [1, *(np.log1p(rows[k][row]) for k in SURFACE[1:4]), rows["agreement"][row], 1]
    np.testing.assert_allclose(surface[row], expected, rtol=1e-6)


def test_scores_use_only_fit_rows_labels(fake_store: Any) -> None:
    """Labels outside the fit part change no score."""
    rows = fake_store().rows()
    fit = rows["document"] < 30
    y = np.maximum(rows["span_1"], 0)
    scores = baseline_scores(rows, y, fit)
    other = baseline_scores(rows, np.where(fit, y, 1 - y).astype(np.int8), fit)
    assert scores.keys() == other.keys()
    for name, score in scores.items():
        assert np.isfinite(score).all()
        np.testing.assert_array_equal(score, other[name])


def test_order_of_the_baselines_is_that_of_what_they_know(fake_store: Any) -> None:
    rows = fake_store().rows()
    fit, test = rows["document"] < 30, rows["document"] >= 30
    y = np.maximum(rows["span_1"], 0)
    told: list[str] = []
    scores = baseline_scores(rows, y, fit, progress=told.append)
    auc = {name: roc_auc_score(y[test], score[test]) for name, score in scores.items()}
    assert auc[LEAK] > auc["surface, boosted trees"] > 0.7
    assert abs(auc["last-step logits, logistic"] - 0.5) < 0.05  # the fake logits are noise
    assert len(told) == FITS
