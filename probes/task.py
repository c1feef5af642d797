"""One question put to a store: its rows, their labels, what may be fitted on and what is measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from probes.artifact import ChoiceError, ProbeError
from probes.evaluation import Evaluation, evaluate
from probes.rows import Label, Mask, Rows, Split, Store, check_classes, group_keys, labels_of, split_rows

Floats = NDArray[np.floating]
Scopes = dict[str, Evaluation]
LOGITS = ("max_prob", "entropy", "margin")
"""What the target's logits at the anchor tell."""
NEEDED = (
    "split", "match_length", "accepted", "censored", "occurrences", "distance", "agreement", "source", *LOGITS,
)  # fmt: skip
"""Columns that splits, labels, thresholds and baselines read, beside group, document and a span label."""
SCOPES = {"all": "all rows", "match": "rows with a suffix match"}


NONE_LEFT = "every row that would be measured is of a group that fitted the probe: measure on other prompts"


@dataclass(frozen=True)
class Fold:
    """Rows to fit on, and rows that may then be scored: no group is in both."""

    fit: Mask
    """[rows]."""
    score: Mask
    """[rows]."""


@dataclass(frozen=True)
class LabelOf:
    """Which label, and on which rows it is asked."""

    label: Label
    """span_0, span_1, span_2 or follow."""
    follow_m: int = 1
    """Accepted length from which `follow` is 1."""
    match: int = 5
    """Shortest match that counts as a suffix match."""
    only_matches: bool = False
    """Ask on rows with a suffix match only; `follow` always is."""

    @property
    def name(self) -> str:
        return f"follow_{self.follow_m}" if self.label == "follow" else self.label

    @classmethod
    def parse(cls, text: str, match: int) -> LabelOf:
        """`span_0`, `span_1`, `span_2`, `follow` or `follow_4`. Raises ValueError."""
        word, _, m = text.partition("_")
        if text in ("span_0", "span_1", "span_2"):
            return cls(text, match=match)  # type: ignore[arg-type]
        if word == "follow" and ((m.isdecimal() and int(m) > 0) or text == "follow"):
            return cls("follow", int(m or 1), match)
        raise ValueError(f"unknown label {text!r}: choose span_0, span_1, span_2, follow, or follow_ and a length")


@dataclass(frozen=True)
class Task:
    """A label of a store, ready to be fitted and measured. All arrays are [rows]."""

    asked: LabelOf
    """The label."""
    rows: Rows
    """The store's columns."""
    y: NDArray[np.int8]
    """0, 1, or -1 where unknown."""
    split: Split
    """The part of each row: fit, selection or test. In a store that is only measured, all rows are `test`."""
    folds: Sequence[Fold]
    """How whatever is fitted here is fitted: once on the fit part, or cross-fitted where all rows are test."""
    resamples: int
    """Bootstrap resamples behind each interval."""
    seed: int
    """Of the bootstrap and of everything fitted."""
    scope: Mask = field(init=False)
    """Rows that are asked about: known label, and a match where only those are asked."""
    tests: dict[str, Mask] = field(init=False)
    """Test rows: `all` (not where only matches are asked) and those with a suffix `match`."""

    def __post_init__(self) -> None:
        known = self.y >= 0
        match = known & (self.rows["match_length"] >= self.asked.match)
        test = self.split.part == "test"
        only = self.asked.only_matches or self.asked.label == "follow"
        tests = {} if self.asked.label == "follow" else {"all": known & test}
        if (match & test).any():
            tests["match"] = match & test
        object.__setattr__(self, "scope", match if only else known)
        object.__setattr__(self, "tests", tests)

    @property
    def fit(self) -> Mask:
        return self.scope & (self.split.part == "fit")

    @property
    def selection(self) -> Mask:
        return self.scope & (self.split.part == "selection")

    @property
    def headline(self) -> str:
        """The scope whose number is told first: rows with a match, if both classes occur there, else all."""
        both = [name for name, where in self.tests.items() if len(np.unique(self.y[where])) == 2]
        return (both or list(self.tests))[-1]

    @property
    def test(self) -> Mask:
        """Test rows of the headline."""
        return self.tests[self.headline]

    @property
    def gate(self) -> Mask:
        """Selection rows that a gate asks about: those with a suffix match, if both classes occur there."""
        match = self.selection & (self.rows["match_length"] >= self.asked.match)
        return match if len(np.unique(self.y[match])) == 2 else self.selection

    def on(self, where: Mask, score: ArrayLike, threshold: float | None = None, probability: bool = False,
           resamples: int | None = None) -> Evaluation:  # fmt: skip
        """Metrics of scores [rows] on the rows where `where` holds."""
        return evaluate(
            self.y[where],
            np.asarray(score)[where],
            self.rows["document"][where],
            threshold=threshold,
            probability=probability,
            resamples=self.resamples if resamples is None else min(resamples, self.resamples),
            seed=self.seed,
        )

    def measure(self, score: ArrayLike, threshold: float | None = None, probability: bool = False) -> Scopes:
        """Metrics on each scope of the test rows."""
        return {name: self.on(where, score, threshold, probability) for name, where in self.tests.items()}


def check_match(store: Store, match: int, which: str) -> None:
    """ChoiceError if the store does not know all suffix matches of `match` tokens and more."""
    captured = store.manifest.get("config", {}).get("labels", {}).get("kappa", 1)
    if captured > match:
        raise ChoiceError(
            f"{which} knows suffix matches of {captured} tokens and more only, and the probe is asked from {match} on: "
            f"capture with --kappa {match} or less, or train with --match {captured}"
        )


def check_rows(rows: Rows, label: Label) -> None:
    """Raises ProbeError if columns are missing, broken or empty without which nothing can be split or measured."""
    for name, why in (
        ("group", "which rows are near-duplicates, and a split could put copies of one text on both sides"),
        ("document", "which rows belong together, and no interval could be had"),
    ):
        if name not in rows or np.isin(rows[name].astype(str), ("", "None", "nan")).any():
            raise ProbeError(f"not every row of the store has a {name}: without it nobody knows {why}; capture again")
    needed = (*NEEDED, *(() if label == "follow" else (label,)))
    if missing := [name for name in needed if name not in rows]:
        raise ProbeError(f"the store has no column {', '.join(missing)}, which a probe needs: capture again")
    for name in LOGITS:
        if broken := int((~np.isfinite(np.asarray(rows[name], dtype=np.float64))).sum()):
            raise ProbeError(
                f"{broken} rows of the store have a {name} that is NaN or infinite: capture again in bfloat16 or "
                "float32"
            )
    if len(rows["document"]) == 0:
        raise ProbeError("the store has no rows: capture more prompts")
    documents = np.unique(rows["document"])
    if len(documents) < 2:
        raise ProbeError(
            "the store has rows of one document only: fitting and testing apart, and every interval, need several; "
            "capture more prompts"
        )


def task_of(store: Store, asked: LabelOf, selection_share: float, resamples: int, seed: int) -> Task:
    """To fit and measure: the fit part fits, the selection part selects, the test part is measured."""
    rows = store.rows()
    check_rows(rows, asked.label)
    y = labels_of(rows, asked.label, asked.follow_m)
    split = split_rows(rows, selection_share, seed)
    task = Task(asked, rows, y, split, [], resamples, seed)
    check_classes(y, split.part, task.scope, asked.name)
    return with_folds(task, [Fold(task.fit, split.part != "fit")])


def measured_task(
    store: Store, asked: LabelOf, folds: int, resamples: int, seed: int, seen: Collection[str] = ()
) -> Task:
    """To measure what was fitted elsewhere: all rows are test, and what is fitted here beside is cross-fitted.

    Rows of groups whose keys (see `group_keys`) were `seen` take no part. Raises ProbeError if too little remains: no
    row, one class, or a class in too few groups.
    """
    rows = store.rows()
    check_rows(rows, asked.label)
    y = labels_of(rows, asked.label, asked.follow_m)
    away = was_seen(rows, seen)
    if away.all():
        raise ProbeError(NONE_LEFT)
    split = Split(np.where(away, "other", "test").astype("<U9"), "none: the probe was fitted on another store")
    task = Task(asked, rows, y, split, [], resamples, seed)
    there = y[task.scope & ~away]
    if len(np.unique(there)) < 2:
        raise ProbeError(
            f"the store has {len(there)} rows with a known {asked.name} label, {int(there.sum())} of them positive: "
            "rows of both classes are needed; capture more prompts or choose another label"
        )
    known = group_folds(y, rows["group"], (y >= 0) & ~away, folds, seed)
    made = [Fold(fold.fit & task.scope, fold.score) for fold in known]
    if any(len(np.unique(y[fold.fit])) < 2 for fold in made):
        raise ProbeError(
            f"the rows of one class lie in too few groups for {folds} folds: capture more prompts, or ask for fewer"
        )
    return with_folds(task, made)


def unfitted_task(store: Store, asked: LabelOf, seen: Collection[str], resamples: int, seed: int) -> Task:
    """To measure alone: all rows are test but those of a train part and of groups whose keys were `seen`.

    Raises ProbeError if none remains.
    """
    rows = store.rows()
    check_rows(rows, asked.label)
    y = labels_of(rows, asked.label, asked.follow_m)
    given = np.array([s if isinstance(s, str) else "" for s in rows["split"].tolist()])
    away = was_seen(rows, seen)
    if "validation" in given:
        away |= given == "train"
    part = np.where(away, "other", "test").astype("<U9")
    task = Task(asked, rows, y, Split(part, "what fitted nothing"), [], resamples, seed)
    if not task.tests or not task.test.any():
        raise ProbeError("the other store has no rows of documents that fitted nothing: capture other prompts")
    return task


def was_seen(rows: Rows, seen: Collection[str]) -> Mask:
    """Rows [rows] of groups whose keys are among those `seen`."""
    found: Mask = np.isin(group_keys(rows["group"]), sorted(seen))
    return found


def with_folds(task: Task, folds: Sequence[Fold]) -> Task:
    """The same task with other folds."""
    return Task(task.asked, task.rows, task.y, task.split, folds, task.resamples, task.seed)


def group_folds(y: NDArray[np.int8], groups: NDArray[Any], kept: Mask, count: int, seed: int) -> list[Fold]:
    """Folds of the kept rows in which no group is in two, with about the same share of positive rows.

    y, groups and kept are [rows]. Raises ProbeError if there are too few groups, of one class or of all.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    where, groups = np.flatnonzero(kept), groups.astype(str)
    found = len(np.unique(groups[where]))
    if found < count:
        raise ProbeError(
            f"{len(where)} rows in {found} groups of documents are too few for {count} folds: capture more prompts, "
            "or ask for fewer folds"
        )
    folds = []
    splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    for fit, score in splitter.split(where, y[where], groups[where]):
        masks = np.zeros((2, len(y)), dtype=bool)
        masks[0, where[fit]] = masks[1, where[score]] = True
        if len(np.unique(y[masks[0]])) < 2:
            raise ProbeError(
                f"the rows of one class lie in too few groups for {count} folds: capture more prompts, or ask for "
                "fewer folds"
            )
        folds.append(Fold(masks[0], masks[1]))
    return folds


def logit(estimator: Any, X: Floats) -> NDArray[np.float64]:
    """Log-odds [rows] of label 1."""
    if hasattr(estimator, "decision_function"):
        return np.asarray(estimator.decision_function(X), dtype=np.float64)
    p = np.clip(np.asarray(estimator.predict_proba(X)[:, 1], dtype=np.float64), 1e-7, 1 - 1e-7)
    found: NDArray[np.float64] = np.log(p / (1 - p))
    return found


def fit_on(estimator: Any, X: Floats, y: NDArray[Any], groups: NDArray[Any] | None) -> Any:
    """Fit to X [rows, width] and y [rows]; an estimator that holds rows out by itself is told their groups [rows]."""
    if groups is not None and "groups" in inspect.signature(estimator.fit).parameters:
        return estimator.fit(X, y, groups=groups)
    return estimator.fit(X, y)


def cross_fit(
    make: Callable[[], Any],
    X: Floats,
    y: NDArray[Any],
    folds: Sequence[Fold],
    *,
    probability: bool = False,
    groups: NDArray[Any] | None = None,
) -> NDArray[np.float64]:
    """Scores [rows] by `make()`, fitted in each fold on features X [rows, width]; NaN where no fold scores.

    Log-odds, or probabilities with `probability`.
    """
    out = np.full(len(y), np.nan)
    for fold in folds:
        fitted = fit_on(make(), X[fold.fit], y[fold.fit], None if groups is None else groups[fold.fit])
        there = X[fold.score]
        out[fold.score] = fitted.predict_proba(there)[:, 1] if probability else logit(fitted, there)
    return out
