"""What would make a good number worthless, tried one by one.

Each control is a probe of the same recipe on the same rows with one thing taken away, measured where the probe is: on
the test rows that a gate asks about.

Source: control tasks and selectivity, Hewitt and Liang 2019, arXiv 1909.03368.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes.baselines import LEAK, surface_features
from probes.evaluation import Evaluation, Interval, auc_difference
from probes.reading import states_at
from probes.rows import Store
from probes.sweep import Recipe
from probes.task import LOGITS, Floats, Fold, Task

KEYS = {"candidate": "candidate's first token", "pending": "pending token", "token": "anchor's own token"}
"""Columns of token ids that a control task may be keyed on, and what they hold."""
DIRECTIONS = 20
"""Random directions."""
PERFECT = 0.9999
"""An AUC from which a separation is called perfect."""


@dataclass(frozen=True)
class Control:
    """One control, or why it could not be made."""

    name: str
    """What was taken away."""
    expected: str
    """What an honest probe shows here."""
    roc_auc: Interval | None = None
    """Of the control; None where it was skipped. The bounds of the random direction are the 2.5 and 97.5 % quantiles
    over directions."""
    difference: Interval | None = None
    """ROC AUC of the probe minus that of the control (the control task's is the selectivity); None where the rows
    differ."""
    skipped: str | None = None
    """Why there is no number, and what would give one."""

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}


def controls(
    task: Task,
    store: Store,
    states: Floats,
    recipe: Recipe,
    probe: Evaluation,
    leak: Evaluation | None,
    random_init: tuple[Store, Task] | None,
    say: Callable[[str], None],
) -> list[Control]:
    """All controls.

    states [rows, width]: at the recipe's site. probe: the probe on `task.test`. leak: the leak check there.
    random_init: a store captured from a randomly initialised target, and the same question put to it.
    """
    say("controls")
    found = [_again(task, states, recipe, probe), _shuffled(task, states, recipe, probe)]
    found += _control_tasks(task, states, recipe, probe)
    found += [_directions(task, states), _row_split(task, states, recipe, probe)]
    found += [_embedding(task, store, recipe, probe), _random_init(recipe, random_init)]
    expected = "far above the probe where the label follows from the next position's logits: no probe may see them"
    if leak is None:
        found.append(Control(LEAK, expected, skipped="the store has no values in a column next_logprob"))
    else:
        found.append(Control(LEAK, expected, leak.roc_auc, auc_difference(probe, leak)))
    return found


def _again(task: Task, states: Floats, recipe: Recipe, probe: Evaluation) -> Control:
    score = recipe.cross_fit(task, states)
    return _told(task, "fitted here", "the probe's own AUC; more where it was fitted on other text", score, probe)


def _shuffled(task: Task, states: Floats, recipe: Recipe, probe: Evaluation) -> Control:
    """What the document alone gives away: within each, all known labels change places."""
    y = task.y.copy()
    rng = np.random.default_rng(task.seed)
    for part in np.unique(task.split.part[task.scope]):
        for document in np.unique(task.rows["document"][task.scope & (task.split.part == part)]):
            where = np.flatnonzero(task.scope & (task.rows["document"] == document))
            y[where] = y[rng.permutation(where)]
    score = recipe.cross_fit(task, states, y)
    mine = _evaluate(task, y, score)
    expected = "near 0.5, or what the document alone gives away"
    return Control("labels shuffled within documents", expected, mine.roc_auc, auc_difference(probe, mine))


def _control_tasks(task: Task, states: Floats, recipe: Recipe, probe: Evaluation) -> list[Control]:
    """A random label for each token id, positive as often as the real one, told on new documents."""
    found = []
    share = float(np.mean(task.y[task.scope]))
    for key in (key for key in KEYS if key in task.rows):
        ids, inverse = np.unique(task.rows[key], return_inverse=True)
        drawn = np.random.default_rng(task.seed).random(len(ids)) < share
        y = np.where(task.y >= 0, drawn[inverse], task.y).astype(np.int8)
        name = f"control task: a random label for each {KEYS[key]}"
        if any(len(np.unique(y[fold.fit])) < 2 for fold in task.folds):
            found.append(Control(name, "", skipped="too few different tokens"))
            continue
        mine = _evaluate(task, y, recipe.cross_fit(task, states, y))
        gap = _unpaired(probe, mine)
        found.append(Control(name, "well below the probe: the difference is its selectivity", mine.roc_auc, gap))
    return found


def _directions(task: Task, states: Floats) -> Control:
    """Projections of the states on random directions, each turned the right way on the rows that fit."""
    rng = np.random.default_rng(task.seed)
    areas = []
    for direction in rng.normal(size=(DIRECTIONS, states.shape[1])).astype(states.dtype):
        projected = states @ direction
        score = np.full(len(task.y), np.nan)
        for fold in task.folds:
            y, there = task.y[fold.fit], projected[fold.fit]
            score[fold.score] = projected[fold.score] * np.sign(there[y == 1].mean() - there[y == 0].mean() or 1.0)
        areas.append(task.on(task.test, score, resamples=1).roc_auc.estimate)
    lower, upper = np.quantile(areas, [0.025, 0.975])
    area = Interval(float(np.mean(areas)), float(lower), float(upper))
    return Control("random direction", "little above 0.5, and far below the probe", area)


def _row_split(task: Task, states: Floats, recipe: Recipe, probe: Evaluation) -> Control:
    """As many fit rows, but drawn from all rows, so that both sides hold rows of one document."""
    rng = np.random.default_rng(task.seed)
    fold = task.folds[0]
    pool = np.flatnonzero((fold.fit | (fold.score & task.test)) & task.scope)
    chosen = rng.permutation(pool)[: int(fold.fit.sum())]
    fit, score = np.zeros((2, len(task.y)), dtype=bool)
    fit[chosen] = True
    score[pool] = ~fit[pool]
    score &= task.rows["match_length"] >= task.asked.match if task.headline == "match" else True
    name = "rows split at random instead of documents"
    if not score.any() or len(np.unique(task.y[fit])) < 2:
        return Control(name, "", skipped="too few rows")
    values = recipe.cross_fit(task, states, folds=[Fold(fit, score)])
    mine = task.on(score, values)
    expected = "at most a little above the probe: the difference is what near-duplicates give away"
    return Control(name, expected, mine.roc_auc, _unpaired(probe, mine))


def _embedding(task: Task, store: Store, recipe: Recipe, probe: Evaluation) -> Control:
    name, expected = "embedding-only probe", "what the anchor's own token gives away"
    if "embed" not in store.sites:
        return Control(name, expected, skipped="the site embed was not captured: add it to --sites of `capture`")
    states = states_at(store, "embed", len(task.y)).float().numpy()
    return _told(task, name, expected, recipe.cross_fit(task, states), probe)


def _random_init(recipe: Recipe, given: tuple[Store, Task] | None) -> Control:
    name, expected = "randomly initialised target", "what the architecture and the tokens alone give"
    if given is None:
        return Control(name, expected, skipped="no store of a randomly initialised target was given (--random-init)")
    store, task = given
    states = states_at(store, recipe.site, len(task.y)).float().numpy()
    score = recipe.cross_fit(task, states)
    return Control(name, expected, task.on(task.test, score).roc_auc)


def leaks(task: Task, evaluations: dict[str, Evaluation]) -> list[str]:
    """Warnings about labels that something known at the anchor tells perfectly: evaluations by the score's name."""
    told = [
        f"{name} separates the test rows perfectly (AUC {e.roc_auc.estimate:.4f}): the label probably leaks into it; "
        "check where the label comes from before believing any number here"
        for name, e in evaluations.items()
        if name != LEAK and e.roc_auc.estimate >= PERFECT
    ]
    where = task.test
    features: dict[str, NDArray[Any]] = {n: task.rows[n] for n in LOGITS} | {
        n: surface_features(task.rows)[:, i]
        for i, n in enumerate(("matched", "match_length", "occurrences", "distance", "agreement", "from_prompt"))
    }
    for name, column in features.items():
        area = task.on(where, np.nan_to_num(column.astype(np.float64)), resamples=1).roc_auc.estimate
        if max(area, 1 - area) >= PERFECT:
            told.append(f"the column {name} alone separates the test rows perfectly: the label is made of it")
    return told


def _told(task: Task, name: str, expected: str, score: NDArray[np.float64], probe: Evaluation) -> Control:
    mine = task.on(task.test, score)
    return Control(name, expected, mine.roc_auc, auc_difference(probe, mine))


def _evaluate(task: Task, y: NDArray[np.int8], score: NDArray[np.float64]) -> Evaluation:
    """On the test rows, with other labels."""
    other = Task(task.asked, task.rows, y, task.split, task.folds, task.resamples, task.seed)
    return other.on(task.test, score)


def _unpaired(first: Evaluation, second: Evaluation) -> Interval:
    """Difference of two AUCs whose labels or rows differ: the same documents are drawn where they are the same."""
    if (first.rows, first.documents) == (second.rows, second.documents):
        return auc_difference(first, second)
    estimate = first.roc_auc.estimate - second.roc_auc.estimate
    return Interval(estimate, float("nan"), float("nan"))
