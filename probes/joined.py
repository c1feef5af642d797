"""Two stores as one: what fitted a probe, and other text to measure it on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from probes.artifact import ProbeError
from probes.rows import Split, Store, check_classes, labels_of, split_rows
from probes.task import NONE_LEFT, Fold, LabelOf, Task, check_rows, with_folds


class Joined:
    """The rows of `first`, then those of `second`: columns and sites that both have. A document
    is of one of them; a group that has one name in both is one group."""

    def __init__(self, first: Store, second: Store) -> None:
        self.stores = first, second
        self.manifest: dict[str, Any] = second.manifest
        one, two = first.rows(), second.rows()
        self.count = len(one["document"])
        shift = int(one["document"].max(initial=0)) + 1
        two = {**two, "document": two["document"] + shift}
        self._rows = {name: np.concatenate([one[name], two[name]]) for name in one if name in two}

    @property
    def sites(self) -> list[str]:
        return [site for site in self.stores[0].sites if site in self.stores[1].sites]

    def rows(self) -> dict[str, NDArray[Any]]:
        return dict(self._rows)

    def states(self, site: str) -> torch.Tensor:
        return torch.cat([store.states(site) for store in self.stores])


def joined_task(joined: Joined, asked: LabelOf, selection_share: float, resamples: int, seed: int) -> Task:
    """The fit and selection parts of the first store fit and select; the second store is the test.

    Rows of the second that share a group with those parts, or are in a train part of its own, are left out. Raises
    ProbeError if none remains.
    """
    rows = joined.rows()
    for store in joined.stores:
        check_rows(store.rows(), asked.label)
    first = {name: column[: joined.count] for name, column in rows.items()}
    own = split_rows(first, selection_share, seed).part
    others = np.full(len(rows["document"]) - joined.count, "test")
    part = np.concatenate([np.where(own == "test", "other", own), others])
    given = np.array([s if isinstance(s, str) else "" for s in rows["split"].tolist()])
    second = part == "test"
    seen = second & np.isin(rows["group"].astype(str), rows["group"][~second & (part != "other")].astype(str))
    away = seen | (second & (given == "train")) if "validation" in given[second] else seen
    part = np.where(away, "other", part).astype("<U9")
    y = labels_of(rows, asked.label, asked.follow_m)
    rule = "by store: fit and selection part of the store that fitted the probe; test is the other store"
    if seen.any():
        count = len(np.unique(rows["group"][seen].astype(str)))
        rule += f", without the {count} groups that have the name of one that fitted or selected"
    task = Task(asked, rows, y, Split(part, rule), [], resamples, seed)
    if not (part == "test").any():
        raise ProbeError(NONE_LEFT)
    check_classes(y, part, task.scope, asked.name)
    return with_folds(task, [Fold(task.fit, part != "fit")])
