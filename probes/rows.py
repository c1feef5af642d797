"""What probes need of a capture store: its rows, their labels, and which part of the fit each row belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from activations.labels import UNKNOWN, follow_labels
from activations.sites import Site
from probes.artifact import JOIN, ChoiceError, ProbeError

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

    def rows(self) -> dict[str, NDArray[Any]]:
        """Columns by name, each [rows]."""
        ...

    def states(self, site: str) -> torch.Tensor:
        """[rows, width] in the stored dtype."""
        ...


def manifest_hash(store: Store) -> str:
    """sha256 of the manifest's content, however its file is laid out."""
    return hashlib.sha256(json.dumps(store.manifest, sort_keys=True).encode()).hexdigest()


def is_site(name: str) -> bool:
    """Whether states of this name are the anchor's own at a site, or at several side by side; a store also holds
    states of other places (`SITE@source`) and `lookback`, which no decoder hands to a probe."""
    try:
        for one in name.split(JOIN):
            Site.parse(one)
    except ValueError:
        return False
    return True


def choose_sites(store: Store, patterns: Iterable[str]) -> list[str]:
    """The store's sites that a pattern names (`resid_mid.*`, `resid_post.12`), in its order; all without a pattern.

    Other states than those of the anchor's own sites are only chosen by their name, or by a pattern with an `@`.
    Raises ChoiceError for a pattern that names nothing.
    """
    patterns = list(patterns) or ["*"]
    for pattern in patterns:
        if not any(_names(pattern, site) for site in store.sites):
            raise ChoiceError(f"no captured site is {pattern!r}; the store has {', '.join(store.sites)}")
    return [site for site in store.sites if any(_names(p, site) for p in patterns)]


def _names(pattern: str, site: str) -> bool:
    return site == pattern or ((is_site(site) or "@" in pattern) and fnmatchcase(site, pattern))


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


def group_keys(groups: NDArray[Any]) -> NDArray[np.str_]:
    """12 hex digits for each group's name [rows]: they tell a group again, and nothing else of it."""
    names, index = np.unique(groups.astype(str), return_inverse=True)
    keys = np.array([hashlib.sha256(str(name).encode()).hexdigest()[:12] for name in names], dtype="<U12")
    found: NDArray[np.str_] = keys[index]
    return found


@dataclass(frozen=True)
class Split:
    """Which part each row belongs to. Near-duplicates (one group) are never in two parts."""

    part: NDArray[np.str_]
    """[rows]: `fit`, `selection` or `test`."""
    rule: str
    """How the parts were made."""

    def counts(self, rows: Rows, kept: Mask) -> dict[str, Any]:
        """Numbers of groups, documents and kept rows (a mask [rows]) in each part, and the rule."""
        found: dict[str, Any] = {"rule": self.rule}
        for part in PARTS:
            where = kept & (self.part == part)
            groups, documents = (len(np.unique(rows[name][where])) for name in ("group", "document"))
            found[part] = {"groups": groups, "documents": documents, "rows": int(where.sum())}
        return found

    def told(self, rows: Rows, kept: Mask) -> dict[str, Any]:
        """The counts of kept rows (a mask [rows]), and as `groups_seen` the keys of the groups that fit or select."""
        seen = np.isin(self.part, ("fit", "selection"))
        return {**self.counts(rows, kept), "groups_seen": np.unique(group_keys(rows["group"][seen])).tolist()}


def split_rows(rows: Rows, selection_share: float, seed: int) -> Split:
    """Split by group.

    Prompts with a train and a validation part: weights are fitted on the train part without `selection_share` of its
    groups; these choose site, penalty, calibration and threshold; the validation part is the test. Other prompts are
    split 60 / 20 / 20. Raises ProbeError if a group is in both parts, or if there are too few groups.
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
    """Raises ProbeError unless every part has kept rows of both classes; y, part and kept are [rows]."""
    for name in PARTS:
        there = y[kept & (part == name)]
        positives = int(there.sum())
        if positives in (0, len(there)):
            raise ProbeError(
                f"the {name} part has {len(there)} rows with a known {label} label, {positives} of them positive: "
                "rows of both classes are needed; capture more prompts or choose another label"
            )


# -- states in blocks: one site or several side by side, in memory or not -------------------------------

BLOCK_BYTES = 1 << 21
"""About how much of the states is handled at once: what a processor core's cache holds."""


class ShardedStore(Store, Protocol):
    """A store whose states can be read in parts."""

    @property
    def shards(self) -> list[dict[str, Any]]:
        """One entry a shard; `rows` is its number of rows."""
        ...

    def shard_states(self, shard: int, site: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """[rows, width] of a shard's rows from `start` to before `stop`."""
        ...


class StateSource(Protocol):
    """Rows of states, given again and again in the same order, a block or a shard at a time."""

    width: int
    """Entries of a row, all sites together."""
    dtype: torch.dtype
    """float64 where the states are kept so, else float32."""
    shards: int

    def __len__(self) -> int: ...

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """All rows in order, as (which rows, their states [rows, width])."""
        ...

    def shard(self, number: int) -> tuple[slice, torch.Tensor]:
        """All rows of one shard, as (which rows, their states [rows, width])."""
        ...

    def select(self, rows: Mask) -> StateSource:
        """Only the rows [len(self)] where the mask holds."""
        ...


class HeldStates:
    """States [rows, width] in memory, as a source of one shard."""

    shards = 1

    def __init__(self, states: torch.Tensor) -> None:
        self._states = states
        self.width, self.dtype = states.shape[1], states.dtype

    def __len__(self) -> int:
        return len(self._states)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        step = block_rows(self.width, self.dtype)
        for start in range(0, len(self), step):
            rows = slice(start, min(start + step, len(self)))
            yield rows, self._states[rows]

    def shard(self, number: int) -> tuple[slice, torch.Tensor]:
        return slice(0, len(self)), self._states

    def select(self, rows: Mask) -> HeldStates:
        return HeldStates(self._states[torch.from_numpy(rows).to(self._states.device)])


class StoredStates:
    """States of a store's chosen rows at one site or several side by side, read when they are asked for.

    Memory holds one block, or one shard where `shard` is called. A shard is checked when it is first read:
    ProbeError names the site and the rows whose states are not finite or of another width.
    """

    def __init__(self, store: ShardedStore, sites: str | Sequence[str], rows: Mask | None = None) -> None:
        """`rows` [rows of the store] are the chosen ones; all by default."""
        self._store = store
        self.sites = site_names(store, sites)
        counts = [int(shard["rows"]) for shard in store.shards]
        self._first = np.concatenate([[0], np.cumsum(counts)])  # each shard's first row in the store
        total = int(self._first[-1])
        self.rows: Mask = check_mask(rows, total)
        if not self.rows.any():
            raise ProbeError(f"none of the store's {total} rows is chosen: a fit needs some")
        self._before = np.concatenate([[0], np.cumsum(self.rows)])  # chosen rows before each row
        self.shards = len(counts)
        self._checked: set[tuple[int, int]] = set()
        some = next(number for number in range(self.shards) if counts[number])
        heads = [store.shard_states(some, site, 0, 1) for site in self.sites]
        self._widths = [head.shape[-1] for head in heads]
        if len(set(self._widths)) > 1:
            told = ", ".join(f"{width} at {site}" for site, width in zip(self.sites, self._widths, strict=True))
            raise ProbeError(f"states of one target have one width, and these differ ({told}): capture them again")
        self.width = sum(self._widths)
        self.dtype = torch.float64 if all(head.dtype == torch.float64 for head in heads) else torch.float32

    def __len__(self) -> int:
        return int(self._before[-1])

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        step = block_rows(self.width, self.dtype)
        for number in range(self.shards):
            count = int(self._first[number + 1] - self._first[number])
            for start in range(0, count, step):
                rows, states = self._read(number, start, min(start + step, count))
                if len(states):
                    yield rows, states

    def shard(self, number: int) -> tuple[slice, torch.Tensor]:
        return self._read(number, 0, int(self._first[number + 1] - self._first[number]))

    def select(self, rows: Mask) -> StoredStates:
        chosen = self.rows.copy()
        chosen[chosen] = rows
        return StoredStates(self._store, self.sites, chosen)

    def _read(self, number: int, start: int, stop: int) -> tuple[slice, torch.Tensor]:
        first = int(self._first[number])
        chosen = self.rows[first + start : first + stop]
        rows = slice(int(self._before[first + start]), int(self._before[first + stop]))
        states = torch.empty(rows.stop - rows.start, self.width, dtype=self.dtype)
        if not len(states):
            return rows, states
        index = None if chosen.all() else torch.from_numpy(np.flatnonzero(chosen))
        column = 0
        for site, width in zip(self.sites, self._widths, strict=True):
            part = self._store.shard_states(number, site, start, stop)
            if part.shape != (stop - start, width):
                raise ProbeError(
                    f"shard {number} has states of shape {list(part.shape)} at {site} for its rows {start} to "
                    f"{stop - 1}, and others have width {width}: capture that shard again"
                )
            states[:, column : column + width] = part if index is None else part[index]
            column += width
        if (number, start) not in self._checked:  # once, not at every pass
            at = first + start + np.flatnonzero(chosen)
            check_finite(states, at, f"at {' + '.join(self.sites)} in shard {number}")
            self._checked.add((number, start))
        return rows, states


def block_rows(width: int, dtype: torch.dtype) -> int:
    """Rows in a block of `BLOCK_BYTES`."""
    return max(BLOCK_BYTES // (width * dtype.itemsize), 1)


def site_names(store: Store, sites: str | Sequence[str]) -> tuple[str, ...]:
    """One site or several as a tuple; ChoiceError for one that was not captured or is named twice."""
    names = (sites,) if isinstance(sites, str) else tuple(sites)
    for name in names:
        if name not in store.sites:
            raise ChoiceError(f"site {name!r} was not captured; the store has {', '.join(store.sites)}")
    if not names or len(set(names)) < len(names):
        raise ChoiceError(f"the sites are {list(names)}: name at least one, and each once")
    return names


def check_mask(rows: Mask | None, total: int) -> Mask:
    """A mask [total] of rows; all of them by default. Raises ProbeError for anything else."""
    if rows is None:
        return np.ones(total, dtype=bool)
    mask = np.asarray(rows)
    if mask.dtype != bool or mask.shape != (total,):
        raise ProbeError(f"rows must be {total} booleans, one for each row of the store; got {mask.dtype} {mask.shape}")
    return mask


def check_finite(states: torch.Tensor, numbers: NDArray[np.integer], where: str) -> None:
    """Raises ProbeError, which lists the rows by their `numbers` [rows], if states [rows, width] are not finite."""
    if torch.isfinite(states.sum()):  # a sum is much cheaper, and finite only if all are
        return
    broken = numbers[(~torch.isfinite(states)).any(dim=1).numpy()]
    if len(broken):
        raise ProbeError(
            f"{len(broken)} rows have states {where} that are NaN or infinite ({list_rows(broken)}): leave these rows "
            "or the site out, or capture again in bfloat16 or float32"
        )


def list_rows(numbers: NDArray[np.integer], most: int = 5) -> str:
    """Row numbers [rows] in words: `row 3`, `rows 3, 8` or `rows 3, 8, 9, 11, 20 and 7 more`."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:most].tolist()))}{more}"
