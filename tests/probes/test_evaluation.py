from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from probes import evaluation
from probes.evaluation import FALSE_ALARMS, METRICS, Interval, Ranked, auc_difference, differences, evaluate, interval

seeds = st.integers(0, 2**32 - 1)


def rows(seed: int, count: int = 60, documents: int = 7, levels: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, scores with many ties (all in [0, 1]), and documents; both classes occur."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, count)
    y[:2] = [0, 1]
    return y, rng.integers(0, levels, count) / levels + 0.1 * y, rng.integers(0, documents, count)


def found_at(y: np.ndarray, score: np.ndarray, rate: float) -> float:
    """The greatest true positive rate of a threshold whose false positive rate is at most `rate`, one by one."""
    called = [score >= t for t in np.unique(score)]
    return max([float(c[y == 1].mean()) for c in called if c[y == 0].mean() <= rate], default=0.0)


@given(seeds)
def test_point_estimates_are_scikit_learns(seed: int) -> None:
    y, score, documents = rows(seed)
    result = evaluate(y, score, documents, threshold=0.5, resamples=3)
    called = score >= 0.5
    assert result.roc_auc.estimate == pytest.approx(roc_auc_score(y, score))
    assert result.average_precision.estimate == pytest.approx(average_precision_score(y, score))
    assert result.base_rate.estimate == pytest.approx(y.mean())
    assert result.f1 is not None and result.precision is not None and result.recall is not None
    assert result.f1.estimate == pytest.approx(f1_score(y, called, zero_division=np.nan), nan_ok=True)
    assert result.precision.estimate == pytest.approx(precision_score(y, called, zero_division=np.nan), nan_ok=True)
    assert result.recall.estimate == pytest.approx(recall_score(y, called))
    assert (result.rows, result.documents) == (60, len(set(documents)))
    assert result.brier is None and result.ece is None
    assert result.tpr_at_5.estimate == pytest.approx(found_at(y, score, 0.05))


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_a_weighted_draw_equals_repeating_the_documents_rows(seed: int) -> None:
    """The reference of the bootstrap: take each drawn document's rows as often as it was drawn."""
    y, score, documents = rows(seed, count=40, documents=5)
    ranked = Ranked(y, score, documents)
    draws = ranked.draws(6, seed)
    names = np.unique(documents)
    ranking, base = ranked.ranking(draws), ranked.base_rate(draws)
    auc, ap = ranking["roc_auc"], ranking["average_precision"]
    at, calibrated = ranked.decisions(draws, 0.5), ranked.calibration(draws / 1.0, bins=4)
    bins = np.argsort(-score, kind="stable")[::-1]
    bin_of = np.empty(len(y), dtype=int)
    for number, part in enumerate(np.array_split(bins, 4)):
        bin_of[part] = number
    for line, counts in enumerate(draws.astype(int)):
        taken = np.concatenate([np.tile(np.flatnonzero(documents == d), n) for d, n in zip(names, counts, strict=True)])
        yy, ss = y[taken], score[taken]
        assert base[line] == pytest.approx(yy.mean())
        assert calibrated["brier"][line] == pytest.approx(brier_score_loss(yy, ss, pos_label=1))
        gaps = [abs((ss - yy)[bin_of[taken] == b].sum()) for b in range(4)]
        assert calibrated["ece"][line] == pytest.approx(sum(gaps) / len(taken))
        if len(set(yy)) < 2:
            assert np.isnan(auc[line])
            continue
        assert auc[line] == pytest.approx(roc_auc_score(yy, ss))
        assert ap[line] == pytest.approx(average_precision_score(yy, ss))
        for name, rate in FALSE_ALARMS.items():
            assert ranking[name][line] == pytest.approx(found_at(yy, ss, rate))
        assert at["f1"][line] == pytest.approx(f1_score(yy, ss >= 0.5, zero_division=np.nan), nan_ok=True)


def test_every_draw_has_as_many_documents_and_the_first_is_the_data() -> None:
    y, score, documents = rows(0)
    draws = Ranked(y, score, documents).draws(50, 0)
    assert draws.shape == (51, 7)
    assert (draws[0] == 1).all() and (draws.sum(axis=1) == 7).all()
    assert len({tuple(d) for d in draws}) > 40


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    y, score, documents = rows(1)
    whole = evaluate(y, score, documents, threshold=0.4, resamples=40)
    monkeypatch.setattr(evaluation, "CHUNK", 130)
    assert evaluate(y, score, documents, threshold=0.4, resamples=40) == whole


def test_intervals_hold_the_estimate_and_widen_with_alike_rows() -> None:
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(40), 25)
    y = rng.integers(0, 2, len(documents))
    score = y + 2 * rng.normal(size=40)[documents] + rng.normal(size=len(documents))
    alike = evaluate(y, score, documents).roc_auc
    as_if_independent = evaluate(y, score, np.arange(len(y))).roc_auc
    assert alike.lower < alike.estimate < alike.upper
    assert alike.estimate == as_if_independent.estimate
    assert evaluate(y, score, documents, seed=0).roc_auc == alike
    assert evaluate(y, score, documents, seed=1).roc_auc != alike


def test_bootstrap_covers_the_truth() -> None:
    """Of 60 intervals about 57 should hold the true AUC; rows of a document share their luck."""
    rng = np.random.default_rng(0)
    truth, hits = 0.7602, 0  # two normals one standard deviation apart: Phi(1 / sqrt 2)
    for trial in range(60):
        documents = np.repeat(np.arange(60), 6)
        y = np.repeat(rng.integers(0, 2, 60), 6)
        score = y + np.sqrt(0.8) * rng.normal(size=60)[documents] + np.sqrt(0.2) * rng.normal(size=360)
        found = evaluate(y, score, documents, resamples=200, seed=trial).roc_auc
        hits += found.lower <= truth <= found.upper
    assert 51 <= hits <= 60


def test_difference_is_paired() -> None:
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(30), 20)
    y = rng.integers(0, 2, 600)
    score = y + rng.normal(size=600)
    noisy = score + 0.3 * rng.normal(size=600)
    first, second = evaluate(y, score, documents), evaluate(y, noisy, documents)
    found = auc_difference(first, second)
    assert found.estimate == pytest.approx(roc_auc_score(y, score) - roc_auc_score(y, noisy))
    one, other = first.roc_auc, second.roc_auc
    assert found.upper - found.lower < 0.7 * ((one.upper - one.lower) + (other.upper - other.lower)) / 2
    assert auc_difference(first, first) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="same rows"):
        auc_difference(first, evaluate(y[1:], score[1:], documents[1:]))


def test_one_class_has_no_auc() -> None:
    result = evaluate([1, 1, 1], [0.1, 0.2, 0.3], [0, 1, 2], threshold=0.2)
    assert np.isnan(result.roc_auc.estimate) and str(result.roc_auc) == "undefined"
    assert result.to_dict()["roc_auc"] == {"estimate": None, "lower": None, "upper": None}
    assert result.precision is not None and result.precision.estimate == 1


def test_resamples_without_a_value_are_left_out() -> None:
    found = interval(np.array([0.5, np.nan, 0.4, 0.6, np.nan]))
    assert (found.estimate, found.lower, found.upper) == (0.5, pytest.approx(0.405), pytest.approx(0.595))


@pytest.mark.parametrize(
    ("y", "score", "documents", "says"),
    [
        ([0, 1], [0.1], [0, 1], "one value a row"),
        ([], [], [], "no rows"),
        ([0, 1], [0.1, np.nan], [0, 1], "1 of 2 scores are NaN"),
        ([0, -1], [0.1, 0.2], [0, 1], r"0 or 1, got \[-1\]"),
    ],
)
def test_bad_rows(y: list[int], score: list[float], documents: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        evaluate(y, score, documents)


def test_every_metric_has_a_paired_difference() -> None:
    y, score, documents = rows(3)
    first = evaluate(y, score, documents, threshold=0.5, probability=True, resamples=30)
    second = evaluate(y, score / 2, documents, threshold=0.5, probability=True, resamples=30)
    found = differences(first, second)
    assert set(found) == set(METRICS) - {"base_rate"}
    for name, gap in found.items():
        expected = getattr(first, name).estimate - getattr(second, name).estimate
        assert gap.estimate == pytest.approx(expected, nan_ok=True)
        np.testing.assert_allclose(first.draws[name][0], getattr(first, name).estimate)
    assert found["roc_auc"] == Interval(0.0, 0.0, 0.0)  # halving changes no order
    plain = evaluate(y, score, documents, resamples=30)
    assert set(differences(first, plain)) == {"roc_auc", "average_precision", *FALSE_ALARMS}


def test_one_document_has_no_interval() -> None:
    y, score, documents = rows(0)
    found = evaluate(y, score, documents * 0, threshold=0.5, probability=True, resamples=20)
    for name in METRICS:
        assert np.isfinite(getattr(found, name).estimate) and np.isnan(getattr(found, name).lower)
    assert "[" not in str(found.roc_auc)


def test_a_calibration_needs_probabilities() -> None:
    with pytest.raises(ValueError, match=r"probabilities lie in \[0, 1\]"):
        evaluate([0, 1], [0.5, 1.5], [0, 1], probability=True)
