"""Whether a probe holds on other text than it was fitted on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes.evaluation import Interval
from probes.rows import Mask
from probes.sweep import Recipe
from probes.task import Floats, Fold, Task

OTHERS = "all others"
LEAST = 50
"""Fewest rows, and fewest of a class times ten, that are fitted on or measured."""
RESAMPLES = 300


@dataclass(frozen=True)
class Transfer:
    """One cell of a transfer matrix: fitted on rows of one kind, measured on those of another."""

    by: str
    """family (the domain), context (short or long), or store."""
    train: str
    """Kind of the rows that fitted: documents of the fit part; `all others` is every kind but the tested one."""
    test: str
    """Kind of the rows measured: documents that fitted nothing."""
    rows: int
    """Test rows."""
    base_rate: Interval
    """Share of positive test rows."""
    roc_auc: Interval
    """ROC AUC on the test rows."""
    average_precision: Interval
    """Average precision on the test rows."""

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}


def transfer(task: Task, states: Floats, recipe: Recipe, say: Callable[[str], None]) -> list[Transfer]:
    """Domain by domain, all domains but one, and short against long contexts, by probes of the same recipe.

    states [rows, width]: at the recipe's site. Kinds with too few rows of a class are left out.
    """
    families = task.rows["family"].astype(str)
    middle = int(np.median(task.rows["position"][task.scope]))
    long = f"more than {middle + 1} tokens"
    contexts = np.where(task.rows["position"] > middle, long, f"up to {middle + 1} tokens")
    return [
        *_matrix(task, states, recipe, "family", families, say, others=True),
        *_matrix(task, states, recipe, "context", contexts, say, others=False),
    ]


def _matrix(
    task: Task,
    states: Floats,
    recipe: Recipe,
    by: str,
    values: NDArray[np.str_],
    say: Callable[[str], None],
    others: bool,
) -> list[Transfer]:
    kinds = [k for k in sorted(set(values[task.scope].tolist())) if _enough(task, task.test & (values == k))]
    found: list[Transfer] = []
    trains: Mapping[str, Mask] = {k: values == k for k in kinds if _enough_to_fit(task, values == k)}
    for name, mask in trains.items():
        say(f"transfer from {name}")
        score = _fit(task, states, recipe, mask)
        found += [_cell(task, by, name, k, task.test & (values == k), score) for k in kinds]
    if others and len(kinds) > 1:
        for kind in kinds:
            if _enough_to_fit(task, values != kind):
                say(f"transfer to {kind}")
                score = _fit(task, states, recipe, values != kind)
                found.append(_cell(task, by, OTHERS, kind, task.test & (values == kind), score))
    return found


def _fit(task: Task, states: Floats, recipe: Recipe, mask: Mask) -> NDArray[np.float64]:
    folds = [Fold(fold.fit & mask, fold.score) for fold in task.folds]
    return recipe.cross_fit(task, states, folds=folds)


def _cell(task: Task, by: str, train: str, test: str, where: Mask, score: NDArray[np.floating]) -> Transfer:
    e = task.on(where, score, resamples=RESAMPLES)
    return Transfer(by, train, test, e.rows, e.base_rate, e.roc_auc, e.average_precision)


def to_store(name: str, task: Task, score: NDArray[np.floating]) -> Transfer:
    """The finished probe, whose scores [rows] are given, on the test rows of another store."""
    return _cell(task, "store", "this store", name, task.test, score)


def _enough(task: Task, where: Mask) -> bool:
    y = task.y[where]
    return len(y) >= LEAST and 10 * min(int(y.sum()), int(len(y) - y.sum())) >= LEAST


def _enough_to_fit(task: Task, mask: Mask) -> bool:
    return all(_enough(task, fold.fit & mask) for fold in task.folds)
