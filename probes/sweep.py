"""The sweep: every label at every site with every estimator and penalty, compared on the selection part.

The best of many numbers is too good, so nothing here is a result: what is chosen is measured once, on the test part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from probes.artifact import JOIN, ChoiceError
from probes.estimators import make_estimator
from probes.evaluation import Interval
from probes.linear import LinearProbe
from probes.reading import is_held, states_at
from probes.rows import Mask, Store
from probes.task import Floats, Fold, Task, cross_fit, fit_on, group_folds, logit
from probes.thresholds import best_f1_threshold

RESAMPLES = 200
Metric = Literal["roc_auc", "average_precision", "f1"]


@dataclass(frozen=True)
class Recipe:
    """How a probe is fitted: enough to fit it again on other rows or labels."""

    site: str
    """Where the state is read; several sites side by side are joined by +."""
    estimator: str = "linear"
    """Name of the estimator."""
    l2: float | None = None
    """The penalty, where the estimator has one to choose."""
    bias: bool = True
    """Whether it has a bias."""
    seed: int = 0
    """Of estimators that use random numbers."""

    def make(self) -> Any:
        """A new estimator. Raises ChoiceError for an unknown name."""
        options: dict[str, Any] = {}
        if self.estimator == "linear":
            options = {"l2": self.l2 or LinearProbe().l2, "fit_intercept": self.bias}
        elif self.estimator in ("mlp", "mlp2"):
            options = {"seed": self.seed}
        elif self.estimator == "trees":
            options = {"random_state": self.seed}
        return make_estimator(self.estimator, **options)

    def cross_fit(
        self, task: Task, states: Floats, y: NDArray[np.int8] | None = None, folds: Sequence[Fold] | None = None
    ) -> NDArray[np.float64]:
        """Log-odds [rows] of probes fitted in the task's folds, or others, on its labels, or others."""
        labels, made = task.y if y is None else y, task.folds if folds is None else folds
        return cross_fit(self.make, states, labels, made, groups=task.rows["group"])


@dataclass(frozen=True)
class SiteResult:
    """One cell of the sweep, on the selection part. For choosing only: the best of many such numbers is too good."""

    label: str
    """span_0, span_1, span_2, or follow_ and the accepted length."""
    site: str
    """Where the state was read; several sites side by side are joined by +."""
    estimator: str
    """Name of the estimator."""
    l2: float | None
    """The chosen penalty; None where the estimator has none to choose."""
    roc_auc: Interval
    """ROC AUC with its interval."""
    average_precision: float
    """Average precision."""
    f1: float
    """F1 at the threshold that is best for it."""
    iterations: int
    """Steps of the chosen fit."""

    def value(self, metric: Metric) -> float:
        """What it is chosen by."""
        found = getattr(self, metric)
        return float(getattr(found, "estimate", found))

    def to_dict(self) -> dict[str, Any]:
        """With the site's kind and block, where it is one site that has a block."""
        kind, _, block = self.site.partition(".")
        plain = JOIN not in self.site
        return {
            **vars(self),
            "kind": kind if plain else None,
            "block": int(block) if plain and block.isdecimal() else None,
            "roc_auc": self.roc_auc.to_dict(),
        }


@dataclass(frozen=True)
class Fitted:
    """The best fit of one cell."""

    recipe: Recipe
    probe: Any
    """The fitted estimator."""
    result: SiteResult


def fit_cell(
    store: Store, tasks: Sequence[Task], states: torch.Tensor | None, recipe: Recipe,
    penalties: Sequence[float | None], select_by: Metric,
) -> list[Fitted]:  # fmt: skip
    """The best penalty's fit for each task's label, at one site with one estimator; states [rows, width] that are not
    given are read from the store a block at a time. Raises ChoiceError for an estimator that cannot do with that."""
    found = []
    for task in tasks:
        parts = None if states is None else [_some(states, rows) for rows in (task.fit, task.selection)]
        tried = []
        for l2 in penalties:
            one = replace(recipe, l2=l2)
            probe, score = _held(one, task, *parts) if parts else _streamed(one, task, store)
            tried.append(Fitted(one, probe, _measure(task, one, probe, score)))
        found.append(max(tried, key=lambda each: each.result.value(select_by)))
    return found


def _some(states: torch.Tensor, rows: Mask) -> Floats:
    found: Floats = states[torch.from_numpy(rows)].float().numpy()
    return found


def _held(recipe: Recipe, task: Task, fit: Floats, selection: Floats) -> tuple[Any, NDArray[np.float64]]:
    probe = fit_on(recipe.make(), fit, task.y[task.fit], task.rows["group"][task.fit])
    return probe, logit(probe, selection)


def _streamed(recipe: Recipe, task: Task, store: Store) -> tuple[Any, NDArray[np.float64]]:
    probe, sites = recipe.make(), recipe.site.split(JOIN)
    if not hasattr(probe, "fit_store"):
        raise ChoiceError(
            f"the states at {recipe.site} do not fit into memory, which the estimator {recipe.estimator} needs: "
            "leave it out"
        )
    told = {"groups": task.rows["group"]} if "groups" in inspect.signature(probe.fit_store).parameters else {}
    probe.fit_store(store, sites, task.y, rows=task.fit, **told)
    return probe, np.asarray(probe.decision_store(store, sites, task.selection), dtype=np.float64)


def _measure(task: Task, recipe: Recipe, probe: Any, score: NDArray[np.float64]) -> SiteResult:
    """On the selection part, whose scores [selected rows] are given."""
    where, scores = task.selection, np.full(len(task.y), np.nan)
    scores[where] = score
    e = task.on(where, scores, best_f1_threshold(task.y[where], score), resamples=RESAMPLES)
    assert e.f1 is not None
    return SiteResult(
        task.asked.name, recipe.site, recipe.estimator, recipe.l2, e.roc_auc, e.average_precision.estimate,
        e.f1.estimate, int(np.max(getattr(probe, "n_iter_", 0))),
    )  # fmt: skip


def sweep(
    store: Store,
    tasks: Sequence[Task],
    recipes: Sequence[Recipe],
    penalties: Mapping[str, Sequence[float | None]],
    select_by: Metric,
    say: Callable[[str], None],
) -> list[Fitted]:
    """The best fit of each task's label for each recipe; a site's states are read once."""
    found: list[Fitted] = []
    for site in dict.fromkeys(recipe.site for recipe in recipes):
        count = len(tasks[0].y)
        states = states_at(store, site, count) if is_held(store, site, count) else None
        for recipe in (r for r in recipes if r.site == site):
            say(f"fitting {site}" + ("" if recipe.estimator == "linear" else f", {recipe.estimator}"))
            found += fit_cell(store, tasks, states, recipe, penalties[recipe.estimator], select_by)
    return found


def unseen_scores(task: Task, states: Floats, recipe: Recipe, folds: int) -> NDArray[np.float64]:
    """Log-odds [rows] of the fit rows, each by a probe of the same recipe that did not see its group; NaN elsewhere."""
    return recipe.cross_fit(task, states, folds=group_folds(task.y, task.rows["group"], task.fit, folds, task.seed))
