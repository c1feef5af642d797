from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from probes.thresholds import (
    StepCosts,
    ThresholdConfig,
    best_f1_threshold,
    choose,
    precision_threshold,
    rate_at,
    rate_threshold,
)

seeds = st.integers(0, 2**32 - 1)


def rows(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, scores with many ties, and accepted lengths."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, count)
    y[:2] = [0, 1]
    return y, rng.integers(0, 9, count) / 9 + 0.1 * y, rng.integers(0, 5, count) * y


@settings(max_examples=25)
@given(seeds)
def test_best_threshold_beats_every_other(seed: int) -> None:
    y, score, _ = rows(seed)
    best = best_f1_threshold(y, score)
    values = {t: f1_score(y, score >= t) for t in np.unique(score)}
    assert values[best] == pytest.approx(max(values.values()))
    assert best == max(t for t, f in values.items() if f == pytest.approx(values[best]))


@settings(max_examples=25)
@given(seeds, st.floats(0.05, 1.0))
def test_the_precision_floor_is_kept_by_the_lowest_threshold(seed: int, floor: float) -> None:
    y, score, _ = rows(seed)
    precision = {t: y[score >= t].mean() for t in np.unique(score)}
    kept = [t for t, p in precision.items() if p >= floor]
    if not kept:
        with pytest.raises(ValueError, match="the best is"):
            precision_threshold(y, score, floor)
        return
    found = precision_threshold(y, score, floor)
    assert found.threshold == min(kept)
    assert found.value == pytest.approx(precision[found.threshold])


@settings(max_examples=25)
@given(seeds, st.floats(0.5, 5), st.floats(0.5, 3))
def test_the_rate_is_that_of_steps_one_by_one(seed: int, copy_ms: float, other_tokens: float) -> None:
    _, score, accepted = rows(seed)
    costs = StepCosts(copy_ms, 1.0, other_tokens)

    def rate(threshold: float) -> float:
        called = score >= threshold
        tokens = np.where(called, accepted + 1, other_tokens).sum()
        return float(tokens / np.where(called, copy_ms, 1.0).sum())

    found = rate_threshold(accepted, score, costs)
    assert rate_at(accepted, score, found.threshold, costs) == pytest.approx(found.value)
    values = {t: rate(t) for t in [*np.unique(score), math.inf]}
    assert found.value == pytest.approx(max(values.values()))
    assert values[found.threshold] == pytest.approx(found.value)


def test_never_copying_is_best_where_nothing_is_accepted() -> None:
    found = rate_threshold([0, 0, 0], [0.1, 0.5, 0.9], StepCosts(copy_ms=2.0))
    assert found.threshold == math.inf and found.to_dict()["threshold"] is None
    cheap = rate_threshold([3, 3, 3], [0.1, 0.5, 0.9], StepCosts())
    assert cheap.threshold == 0.1


def test_the_configured_rule_is_used() -> None:
    y, score, accepted = rows(0)
    for rule, words in (("f1", "best F1"), ("precision", "precision of at least 0.5"), ("rate", "tokens per")):
        found = choose(ThresholdConfig(threshold_rule=rule, precision_floor=0.5), y, score, accepted)  # type: ignore[arg-type]
        assert words in found.rule


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threshold_rule": "best"}, "unknown threshold_rule 'best'"),
        ({"precision_floor": 0.0}, "precision_floor is 0"),
        ({"precision_floor": 1.5}, "precision_floor is 1.5"),
    ],
)
def test_bad_settings(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ThresholdConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copy_ms is -1"):
        StepCosts(copy_ms=-1)


def test_a_threshold_needs_a_positive_row() -> None:
    with pytest.raises(ValueError, match="no row is positive"):
        best_f1_threshold([0, 0], [0.1, 0.2])
