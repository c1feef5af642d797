"""From which score on to copy: rules that choose a threshold on a selection part.

What a rule reaches there is too good; measure the threshold on other rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from probes.evaluation import Ranked

Rule = Literal["f1", "precision", "rate"]
RULES: tuple[Rule, ...] = ("f1", "precision", "rate")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepCosts:
    """What a step costs with and without a copied draft, as measured on the machine that will decode."""

    copy_ms: float = 1.2
    """Milliseconds of a step that copies: draft, verification and overhead. Only its ratio to other_ms matters."""
    other_ms: float = 1.0
    """Milliseconds of a step that does not copy."""
    other_tokens: float = 1.0
    """Tokens that a step without a copied draft gives: 1, or more where another drafter takes over."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class ThresholdConfig:
    """How the threshold is chosen."""

    threshold_rule: Rule = "f1"
    """f1: best F1. precision: the lowest threshold whose precision is at least precision_floor. rate: most expected
    tokens per millisecond under copy_ms, other_ms and other_tokens."""
    precision_floor: float = 0.9
    """Least precision of the rule `precision`."""
    costs: StepCosts = StepCosts()
    """What a step costs, for the rule `rate`."""

    def __post_init__(self) -> None:
        if self.threshold_rule not in RULES:
            raise ValueError(f"unknown threshold_rule {self.threshold_rule!r}: choose f1, precision or rate")
        if not 0 < self.precision_floor <= 1:
            raise ValueError(f"precision_floor is {self.precision_floor}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class Chosen:
    """A threshold and why it is that one."""

    threshold: float
    """Copy where the score is at least this; infinite where never copying is best."""
    rule: str
    """The rule in words."""
    value: float
    """What the rule reaches on the rows that chose it: F1, precision, or tokens per millisecond."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "threshold": self.threshold if math.isfinite(self.threshold) else None}


def rate_at(accepted: ArrayLike, score: ArrayLike, threshold: float, costs: StepCosts) -> float:
    """Expected tokens per millisecond of a threshold, for accepted lengths [rows] and scores [rows]; see
    `rate_threshold`."""
    called = np.asarray(score) >= threshold
    tokens = np.where(called, np.asarray(accepted) + 1, costs.other_tokens).sum()
    return float(tokens / np.where(called, costs.copy_ms, costs.other_ms).sum())


def choose(config: ThresholdConfig, y: ArrayLike, score: ArrayLike, accepted: ArrayLike) -> Chosen:
    """The threshold of the configured rule for scores [rows], labels [rows] and accepted lengths [rows]."""
    if config.threshold_rule == "precision":
        return precision_threshold(y, score, config.precision_floor)
    if config.threshold_rule == "rate":
        return rate_threshold(accepted, score, config.costs)
    return f1_threshold(y, score)


def best_f1_threshold(y: ArrayLike, score: ArrayLike) -> float:
    """The score from which calling rows positive gives the greatest F1; of equals the highest. See `f1_threshold`, also
    for labels y [rows] and scores [rows]."""
    return f1_threshold(y, score).threshold


def f1_threshold(y: ArrayLike, score: ArrayLike) -> Chosen:
    """The rule `f1`, for labels y [rows] and scores [rows]; of equals the highest threshold.

    The rule of SwitchSD (arXiv 2609.20186). Raises ValueError if no row is positive.
    """
    cuts, positives, negatives = by_threshold(y, score)
    f1 = 2 * positives / (positives + negatives + positives[-1])
    best = int(f1.argmax())
    return Chosen(float(cuts[best]), "best F1", float(f1[best]))


def precision_threshold(y: ArrayLike, score: ArrayLike, floor: float) -> Chosen:
    """The lowest threshold whose precision is at least `floor`, and so the greatest recall at that precision.

    For labels y [rows] and scores [rows]. Raises ValueError, with the best precision there is, where none reaches it.
    """
    cuts, positives, negatives = by_threshold(y, score)
    precision = positives / (positives + negatives)
    [enough] = np.nonzero(precision >= floor)
    if not len(enough):
        raise ValueError(
            f"no threshold has a precision of {floor}; the best is {precision.max():.4f}: lower the precision floor"
        )
    return Chosen(float(cuts[enough[-1]]), f"precision of at least {floor:g}", float(precision[enough[-1]]))


def rate_threshold(accepted: ArrayLike, score: ArrayLike, costs: StepCosts) -> Chosen:
    """The threshold with the most tokens per millisecond, where a row that is called gives accepted + 1 tokens.

    For accepted lengths [rows] and scores [rows].
    Every row counts as one step. A decoder skips the rows inside an accepted draft, so this is an expectation over
    anchors and not over the steps of one run. Of equals the highest threshold; infinite (never copy) if none gains.
    """
    tokens = np.asarray(accepted, dtype=np.float64) + 1
    ranked = Ranked(np.zeros(len(tokens)), score, np.zeros(len(tokens)))
    order = np.argsort(-np.asarray(score, dtype=np.float64), kind="stable")
    called = np.concatenate([[0], ranked.ends + 1])  # rows that are called: none, then group by group
    gained = np.concatenate([[0.0], np.cumsum(tokens[order])])[called]
    rest = len(tokens) - called
    rate = (gained + rest * costs.other_tokens) / (called * costs.copy_ms + rest * costs.other_ms)
    best = int(rate.argmax())
    threshold = math.inf if best == 0 else float(ranked.score[ranked.ends[best - 1]])
    return Chosen(threshold, "most expected tokens per millisecond", float(rate[best]))


def by_threshold(y: ArrayLike, score: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Each distinct score, the highest first, and the positives and negatives that score at least as much.

    For labels y [rows] and scores [rows]. Raises ValueError where no row is positive.
    """
    ranked = Ranked(y, score, np.zeros(len(np.asarray(y))))
    positives, negatives = ranked.counts(np.ones((1, len(ranked.y))))
    if not positives[0, -1]:
        raise ValueError("no row is positive: a threshold cannot be chosen")
    return ranked.score[ranked.ends], positives[0], negatives[0]
