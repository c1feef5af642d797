"""What can be had without a hidden state: features of the suffix match and of the last step's logits.

A probe is worth its cost by what it adds to these. All are known at the anchor, before the draft; the leak check is
not, and shows what a score from one position later would reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes.rows import Mask, Rows

SURFACE = ("matched", "match_length", "occurrences", "distance", "agreement", "from_prompt")
LOGITS = ("max_prob", "entropy", "margin")
LEAK = "leak check"
"""The log-probability that the target gives the candidate's first token with the pending token fed."""
FITS = 5
"""Baselines that are fitted."""
Features = NDArray[np.float64]
Progress = Callable[[str], None]


def surface_features(rows: Rows) -> Features:
    """[rows, SURFACE]: the suffix match alone; counts and distances as log(1 + x); zeros without a match."""
    matched = rows["match_length"] > 0
    columns = [
        matched,
        np.log1p(rows["match_length"]),
        np.log1p(rows["occurrences"]),
        np.log1p(np.maximum(rows["distance"], 0)),
        rows["agreement"],
        rows["source"] == "prompt",
    ]
    stacked = np.stack([np.asarray(c, dtype=np.float64) for c in columns], axis=1)
    return np.where(matched[:, None], stacked, 0.0)


def logits_features(rows: Rows) -> Features:
    """[rows, LOGITS]: how sure the target was of the pending token."""
    return np.stack([np.asarray(rows[name], dtype=np.float64) for name in LOGITS], axis=1)


def baseline_scores(
    rows: Rows, y: NDArray[np.int8], fit: Mask, seed: int = 0, progress: Progress = lambda name: None
) -> dict[str, NDArray[np.float64]]:
    """Scores [rows] of every baseline, fitted on the rows where `fit` holds and given for all rows.

    `progress(name)` is called before each fit. In the leak check, rows that have no candidate or no next position
    come last.
    """
    surface, logits = surface_features(rows), logits_features(rows)
    both = np.hstack([surface, logits])
    scores: dict[str, NDArray[np.float64]] = {"match length": rows["match_length"].astype(np.float64)}
    for name, model, features in (
        ("last-step logits, logistic", _logistic(), logits),
        ("surface, logistic", _logistic(), surface),
        ("surface, boosted trees", _trees(seed), surface),
        ("surface + logits, logistic", _logistic(), both),
        ("surface + logits, boosted trees", _trees(seed), both),
    ):
        progress(name)
        scores[name] = model.fit(features[fit], y[fit]).predict_proba(features)[:, 1]
    later = rows["next_logprob"].astype(np.float64)
    known = np.isfinite(later)
    scores[LEAK] = np.where(known, later, later.min(where=known, initial=0.0) - 1)
    return scores


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))


def _trees(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    # Its early stopping would hold out rows, not documents.
    return HistGradientBoostingClassifier(early_stopping=False, random_state=seed)
