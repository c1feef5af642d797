"""What can be had without a probe, and what a probe adds to it, on the same rows and folds.

A probe is worth its cost by what it adds to the features of the suffix match and of the last step's logits. All of
those are known at the anchor, before the draft; the leak check is not, and shows what a score from one position later
would reach.

Sources: lookback ratios, arXiv 2407.07071; cosine of two states, PLD+, arXiv 2412.01447.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from probes.artifact import JOIN
from probes.linear import LinearProbe
from probes.reading import logits_at, states_at
from probes.rows import Rows, Store
from probes.task import LOGITS, Floats, Task, cross_fit

SURFACE = ("matched", "match_length", "occurrences", "distance", "agreement", "from_prompt")
BASE_RATE = "base rate"
LENGTH = "match length"
LEAK = "leak check"
"""The log-probability that the target gives the candidate's first token with the pending token fed."""
LOOKBACK = "lookback ratio"
"""A logistic on the lookback ratios of all heads, where the store has them."""
COSINE = "hidden-state cosine (PLD+)"
"""Of the states at the anchor and at the place where its match was found, where the store has both; the name of the
baseline ends with the site."""
SOURCE = "@source"
PLAIN = ("surface + logits, logistic", "surface + logits, boosted trees")
WITH_PROBE = (
    "surface + logits + probe score, logistic",
    "surface + logits + probe score, boosted trees",
    "surface + logits + state, logistic",
)
LOOKBACK_L2 = 1e-3
FITS = 8
"""Scores that are fitted, the optional ones aside."""
Progress = Callable[[str], None]
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Baseline:
    """A score of every row that is measured or selected on."""

    score: Scores
    """[rows]; NaN on rows that nobody asks about."""
    probability: bool
    """Whether it is the probability of label 1."""


def surface_features(rows: Rows) -> Scores:
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


def logits_features(rows: Rows) -> Scores:
    """[rows, LOGITS]: how sure the target was of the pending token."""
    return np.stack([np.asarray(rows[name], dtype=np.float64) for name in LOGITS], axis=1)


def baselines(task: Task, store: Store, progress: Progress = lambda name: None) -> dict[str, Baseline]:
    """Every score that needs no probe. `progress(name)` is called before each fit; the task is of this store.

    In the leak check, rows that have no candidate or no next position come last.
    """
    rows = task.rows
    surface, logits = surface_features(rows), logits_features(rows)
    both = np.hstack([surface, logits])
    wanted: list[tuple[str, Callable[[], Any], Floats]] = [
        ("last-step logits, logistic", logistic, logits),
        ("surface, logistic", logistic, surface),
        ("surface, boosted trees", lambda: trees(task.seed), surface),
        (PLAIN[0], logistic, both),
        (PLAIN[1], lambda: trees(task.seed), both),
    ]
    if "lookback" in store.sites:
        heads = states_at(store, "lookback", len(task.y)).float().numpy()
        wanted.append((LOOKBACK, lambda: _scaled(LinearProbe(l2=LOOKBACK_L2)), heads))
    share = float(np.mean([task.y[fold.fit].mean() for fold in task.folds]))
    found = {
        BASE_RATE: Baseline(np.full(len(task.y), share), True),
        LENGTH: Baseline(rows["match_length"].astype(np.float64), False),
    }
    for name, make, features in wanted:
        progress(name)
        found[name] = Baseline(cross_fit(make, features, task.y, task.folds, probability=True), True)
    found |= _cosine(task, store, progress)
    if _known(rows, "next_logprob"):
        later = rows["next_logprob"].astype(np.float64)
        known = np.isfinite(later)
        score = np.where(known, later, later.min(where=known, initial=0.0) - 1)
        found[LEAK] = Baseline(score, False)
    return found


def with_probe(
    task: Task, score: Floats, states: Floats | None, l2: float, progress: Progress = lambda name: None
) -> dict[str, Baseline]:
    """Surface and logits together with the probe's log-odds [rows] or the state [rows, width].

    On the rows that fit them the log-odds must be of probes that did not see those rows (see `cross_fit`): a probe
    scores its own rows too well, and what is stacked on it would trust it too much.
    """
    both = np.hstack([surface_features(task.rows), logits_features(task.rows)])
    scored = np.hstack([both, np.asarray(score, dtype=np.float64)[:, None]])
    found = {}
    for name, make in ((WITH_PROBE[0], logistic), (WITH_PROBE[1], lambda: trees(task.seed))):
        progress(name)
        found[name] = Baseline(cross_fit(make, scored, task.y, task.folds, probability=True), True)
    if states is not None:
        progress(WITH_PROBE[2])
        everything = np.hstack([both.astype(np.float32), np.asarray(states, dtype=np.float32)])

        def make() -> Any:
            return _scaled(LinearProbe(l2=l2))

        found[WITH_PROBE[2]] = Baseline(cross_fit(make, everything, task.y, task.folds, probability=True), True)
    return found


def sources(store: Store) -> list[str]:
    """Sites whose states the store has both at the anchor and where its match was found."""
    return [site for site in store.sites if site + SOURCE in store.sites]


def cosines(store: Store, site: str, rows: int) -> Scores:
    """[rows]: cosine of the anchor's state with that at its match; NaN where there is none."""

    def both(states: torch.Tensor) -> torch.Tensor:
        here, there = states.chunk(2, dim=1)
        norms = here.norm(dim=1) * there.norm(dim=1)
        return torch.where(norms > 0, (here * there).sum(dim=1) / norms, torch.nan)

    return logits_at(store, f"{site}{JOIN}{site}{SOURCE}", rows, both)


def _cosine(task: Task, store: Store, progress: Progress) -> dict[str, Baseline]:
    """At the site that is best on the selection part, or without one on the test rows, which favours the baseline."""
    where = task.gate if task.gate.any() else task.test
    best, found = -1.0, {}
    for site in sources(store):
        progress(f"{COSINE} at {site}")
        features = _with_gaps(cosines(store, site, len(task.y)))
        score = cross_fit(logistic, features, task.y, task.folds, probability=True)
        area = float(np.nan_to_num(task.on(where, score, resamples=1).roc_auc.estimate))
        if area > best:
            best, found = area, {f"{COSINE} at {site}": Baseline(score, True)}
    return found


def skipped(rows: Rows, store: Store) -> list[str]:
    """Baselines that the store has nothing for."""
    found = []
    if "lookback" not in store.sites:
        found.append(f"{LOOKBACK}: the store has no lookback ratios (capture with --lookback)")
    if not sources(store):
        found.append(f"{COSINE}: the store has no states where matches were found (capture with --source-sites)")
    if not _known(rows, "next_logprob"):
        found.append(f"{LEAK}: the store has no values in a column next_logprob")
    return found


def logistic() -> Any:
    """An unfitted logistic regression behind a scaler, with the contract of scikit-learn."""
    from sklearn.linear_model import LogisticRegression

    return _scaled(LogisticRegression(max_iter=1000))


def trees(seed: int) -> Any:
    """Unfitted boosted trees, with the contract of scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    # Its early stopping would hold out rows, not documents.
    return HistGradientBoostingClassifier(early_stopping=False, random_state=seed)


def _scaled(classifier: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), classifier)


def _known(rows: Rows, column: str) -> bool:
    return column in rows and bool(np.isfinite(rows[column]).any())


def _with_gaps(column: NDArray[np.floating]) -> Scores:
    """[rows, 2]: the value, 0 where it is unknown, and whether it is known."""
    known = np.isfinite(column)
    return np.stack([np.where(known, column, 0.0), known], axis=1).astype(np.float64)
