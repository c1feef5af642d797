"""What probes need of a capture store: its rows, their labels, and which part of the fit each row belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from activations.labels import UNKNOWN, follow_labels
from probes.artifact import ChoiceError, ProbeError

Label = Literal["span_0", "span_1", "span_2", "follow"]
Rows = Mapping[str, NDArray[Any]]
Mask = NDArray[np.bool_]
PARTS = ("fit", "selection", "test")
OWN_SHARES = {"selection": 0.2, "test": 0.2}
"""Shares of the groups where the prompts came without a split."""


class Store(Protocol):
    """The reading side of a capture store; `rows()` and `states(site)` are aligned."""

    manifest: dict[str, Any]

    @property
    def sites(self) -> list[str]: ...

    def rows(self) -> dict[str, NDArray[Any]]: ...

    def states(self, site: str) -> torch.Tensor:
        """[rows, width] in the stored dtype."""
        ...


def manifest_hash(store: Store) -> str:
    """sha256 of the manifest's content, however its file is laid out."""
    return hashlib.sha256(json.dumps(store.manifest, sort_keys=True).encode()).hexdigest()


def choose_sites(store: Store, patterns: Iterable[str]) -> list[str]:
    """The store's sites that a pattern names (`resid_mid.*`, `resid_post.12`), in its order; all without a pattern."""
    patterns = list(patterns) or ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(site, pattern) for site in store.sites):
            raise ChoiceError(f"no captured site is {pattern!r}; the store has {', '.join(store.sites)}")
    return [site for site in store.sites if any(fnmatchcase(site, p) for p in patterns)]


def labels_of(rows: Rows, label: Label, follow_m: int) -> NDArray[np.int8]:
    """Labels [rows]: 0, 1, or -1 where the text does not decide; those rows are left out of fits and evaluation.

    `follow` is also unknown wherever the text was cut while a candidate still agreed: keeping only the decided ones
    of these rows would keep the positive ones. The span labels do not depend on that column.
    """
    if label == "follow":
        found = follow_labels(rows["match_length"], rows["accepted"], rows["censored"], follow_m)
        found[rows["censored"]] = UNKNOWN
        return found
    labels: NDArray[np.int8] = rows[label]
    return labels


@dataclass(frozen=True)
class Split:
    """Which part each row belongs to. Near-duplicates (one group) are never in two parts."""

    part: NDArray[np.str_]
    """`fit`, `selection` or `test` for each row."""
    rule: str
    """How the parts were made."""

    def counts(self, rows: Rows, kept: Mask) -> dict[str, Any]:
        """Numbers of groups, documents and kept rows in each part, and the rule."""
        found: dict[str, Any] = {"rule": self.rule}
        for part in PARTS:
            where = kept & (self.part == part)
            groups, documents = (len(np.unique(rows[name][where])) for name in ("group", "document"))
            found[part] = {"groups": groups, "documents": documents, "rows": int(where.sum())}
        return found


def split_rows(rows: Rows, selection_share: float, seed: int) -> Split:
    """Split by group.

    Prompts with a train and a validation part: weights are fitted on the train part without `selection_share` of its
    groups; these choose site, penalty, calibration and threshold; the validation part is the test. Other prompts are
    split 60 / 20 / 20.
    """
    groups = rows["group"].astype(str)
    given = np.array([s if isinstance(s, str) else "" for s in rows["split"].tolist()])
    rng = np.random.default_rng(seed)
    part = np.full(len(groups), "fit", dtype="<U9")
    if set(given.tolist()) == {"train", "validation"}:
        shared = np.intersect1d(groups[given == "train"], groups[given == "validation"])
        if len(shared):
            raise ProbeError(
                f"group {str(shared[0])!r} is in the train and in the validation part ({len(shared)} such groups): "
                "near-duplicates must share a part; correct the prompts and capture again"
            )
        part[given == "validation"] = "test"
        chosen = _shuffled(groups[given == "train"], rng)
        _enough(len(chosen), 2, "the train part")
        count = min(max(1, round(selection_share * len(chosen))), len(chosen) - 1)
        part[np.isin(groups, chosen[:count])] = "selection"
        return Split(part, f"by group: {count} of {len(chosen)} train groups for selection, validation part for test")
    chosen = _shuffled(groups, rng)
    _enough(len(chosen), 3, "the store")
    start = 0
    for name, share in OWN_SHARES.items():
        stop = start + max(1, round(share * len(chosen)))
        part[np.isin(groups, chosen[start:stop])] = name
        start = stop
    return Split(part, "by group at random, 60 / 20 / 20: the prompts have no train and validation part")


def _shuffled(groups: NDArray[np.str_], rng: np.random.Generator) -> NDArray[np.str_]:
    found: NDArray[np.str_] = rng.permutation(np.unique(groups))
    return found


def _enough(found: int, needed: int, where: str) -> None:
    if found < needed:
        raise ProbeError(
            f"{where} has {found} group of prompts; fitting, selecting and testing apart needs at least {needed}: "
            "capture more prompts"
        )


def check_classes(y: NDArray[np.int8], part: NDArray[np.str_], kept: Mask, label: str) -> None:
    """Every part needs both classes."""
    for name in PARTS:
        there = y[kept & (part == name)]
        positives = int(there.sum())
        if positives in (0, len(there)):
            raise ProbeError(
                f"the {name} part has {len(there)} rows with a known {label} label, {positives} of them positive: "
                "rows of both classes are needed; capture more prompts or choose another label"
            )
