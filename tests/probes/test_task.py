from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.artifact import ProbeError
from probes.linear import LinearProbe
from probes.mlp import MLPProbe
from probes.rows import group_keys
from probes.task import LabelOf, cross_fit, fit_on, group_folds, logit, measured_task, task_of, unfitted_task

SPAN = LabelOf("span_1")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_no_group_is_in_two_folds_and_every_row_is_scored_once(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 12, 200)
    y, kept = rng.integers(0, 2, 200).astype(np.int8), rng.random(200) < 0.8
    scored = np.zeros(200, dtype=int)
    for fold in group_folds(y, groups, kept, count, seed):
        assert not set(groups[fold.fit]) & set(groups[fold.score])
        assert (kept[fold.fit]).all() and kept[fold.score].all()
        scored += fold.score
    np.testing.assert_array_equal(scored, kept.astype(int))


def test_parts_of_a_task(fake_store: Any) -> None:
    task = task_of(fake_store(), SPAN, 0.2, 20, 0)
    [fold] = task.folds
    assert not (fold.fit & fold.score).any() and (fold.fit == task.fit).all()
    assert (task.tests["all"] <= fold.score).all() and (task.tests["match"] <= task.tests["all"]).all()
    assert set(task.rows["group"][task.fit]).isdisjoint(task.rows["group"][task.selection])
    assert (task.rows["match_length"][task.gate] >= 5).all()
    follow = task_of(fake_store(), LabelOf("follow", 3), 0.2, 20, 0)
    assert list(follow.tests) == ["match"] and follow.asked.name == "follow_3"
    assert (follow.rows["match_length"][follow.scope] >= 5).all()
    conditional = task_of(fake_store(), LabelOf("span_1", only_matches=True), 0.2, 20, 0)
    assert list(conditional.tests) == ["all", "match"]
    assert (conditional.rows["match_length"][conditional.fit] >= 5).all()


def test_a_scope_of_one_class_is_no_headline(fake_store: Any) -> None:
    """Where a match is at least as long as a span, its tokens are copied by definition."""
    store = fake_store()
    assert task_of(store, SPAN, 0.2, 20, 0).headline == "match"
    store._rows["span_1"] = np.where(store._rows["match_length"] >= 5, 1, store._rows["span_1"]).astype(np.int8)
    task = task_of(store, SPAN, 0.2, 20, 0)
    assert task.headline == "all" and (task.test == task.tests["all"]).all() and (task.gate == task.selection).all()


def test_a_store_that_fitted_nothing_is_cross_fitted(fake_store: Any) -> None:
    task = measured_task(fake_store(split=False), LabelOf("span_1", only_matches=True), 5, 20, 0)
    assert len(task.folds) == 5 and not task.fit.any() and not task.selection.any()
    scored = np.sum([fold.score for fold in task.folds], axis=0)
    assert (scored[task.tests["all"]] == 1).all()  # those without a match are scored, too
    assert all((task.rows["match_length"][fold.fit] >= 5).all() for fold in task.folds)


def test_what_was_seen_is_not_measured(fake_store: Any) -> None:
    store = fake_store()
    seen = np.unique(store.rows()["group"])[:5].astype(str)
    task = unfitted_task(store, SPAN, set(group_keys(seen)), 20, 0)
    assert not set(task.rows["group"][task.tests["all"]]) & set(seen)
    assert set(task.rows["split"][task.tests["all"]]) == {"validation"}
    with pytest.raises(ProbeError, match="no rows of documents that fitted nothing"):
        unfitted_task(store, SPAN, set(group_keys(store.rows()["group"])), 20, 0)


def test_labels_are_read_from_their_names() -> None:
    assert LabelOf.parse("span_2", 5) == LabelOf("span_2")
    assert LabelOf.parse("follow_4", 3) == LabelOf("follow", 4, 3)
    assert LabelOf.parse("follow", 5).name == "follow_1"
    for wrong in ("span_3", "follow_0", "follow_x", "span", "follow_-1", ""):
        with pytest.raises(ValueError, match="unknown label"):
            LabelOf.parse(wrong, 5)


def test_scores_of_each_fold_are_those_of_its_own_fit(fake_store: Any) -> None:
    store = fake_store(split=False)
    task = measured_task(store, SPAN, 3, 20, 0)
    X = store.states("resid_mid.1").float().numpy()
    found = cross_fit(LinearProbe, X, task.y, task.folds)
    for fold in task.folds:
        alone = LinearProbe().fit(X[fold.fit], task.y[fold.fit])
        np.testing.assert_allclose(found[fold.score], alone.decision_function(X[fold.score]), rtol=1e-5)
    p = cross_fit(LinearProbe, X, task.y, task.folds, probability=True)
    kept = task.y >= 0
    np.testing.assert_allclose(p[kept], 1 / (1 + np.exp(-found[kept])), rtol=1e-5)
    assert np.isnan(found[~kept]).all()


def test_an_estimator_that_holds_rows_out_is_told_the_groups(fake_store: Any) -> None:
    store = fake_store(documents=20)
    X, y = store.states("resid_mid.1").float().numpy(), np.maximum(store.rows()["span_1"], 0)
    groups = store.rows()["group"]
    told = fit_on(MLPProbe(hidden=(4,), max_epochs=3), X, y, groups)
    same = MLPProbe(hidden=(4,), max_epochs=3).fit(X, y, groups=groups)
    np.testing.assert_array_equal(logit(told, X), logit(same, X))


def test_log_odds_of_an_estimator_with_probabilities_only() -> None:
    class Sure:
        def predict_proba(self, X: np.ndarray) -> np.ndarray:
            return np.array([[0.25, 0.75], [0.0, 1.0]])

    found = logit(Sure(), np.zeros((2, 1)))
    assert found[0] == pytest.approx(np.log(3)) and np.isfinite(found[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": np.full(2400, None)}, "not every row of the store has a group"),
        ({"group": np.array(["a"] * 2399 + [""])}, "not every row of the store has a group"),
        ({"document": np.zeros(2400, dtype=int)}, "rows of one document only"),
        (
            {"span_1": np.ones(2400, dtype=np.int8)},
            r"\d+ rows with a known span_1 label, (\d+) of them positive: rows of",
        ),
    ],
)
def test_stores_that_cannot_be_measured(fake_store: Any, change: dict[str, np.ndarray], says: str) -> None:
    store = fake_store()
    store._rows |= change
    with pytest.raises(ProbeError, match=says):
        task_of(store, SPAN, 0.2, 20, 0)
    with pytest.raises(ProbeError, match=says):
        measured_task(store, SPAN, 5, 20, 0)


def test_missing_columns_and_rows(fake_store: Any) -> None:
    store = fake_store()
    del store._rows["group"]
    with pytest.raises(ProbeError, match="has a group: without it nobody knows which rows are near-duplicates"):
        task_of(store, SPAN, 0.2, 20, 0)
    empty = fake_store()
    empty._rows = {name: column[:0] for name, column in empty._rows.items()}
    with pytest.raises(ProbeError, match="has no rows"):
        task_of(empty, SPAN, 0.2, 20, 0)


def test_fewer_groups_than_folds(fake_store: Any) -> None:
    with pytest.raises(ProbeError, match=r"in 4 groups of documents are too few for 5 folds: .* ask for fewer folds"):
        measured_task(fake_store(documents=5), SPAN, 5, 20, 0)
    store = fake_store(documents=12)
    store._rows["span_1"] = np.where(store._rows["document"] == 3, store._rows["span_1"], 0).astype(np.int8)
    with pytest.raises(ProbeError, match="rows of one class lie in too few groups for 3 folds"):
        measured_task(store, SPAN, 3, 20, 0)


def test_a_key_is_of_the_groups_name_alone() -> None:
    names = np.array(["b", "a", "b"])
    assert group_keys(names).tolist() == [hashlib.sha256(n.encode()).hexdigest()[:12] for n in names]
    assert group_keys(np.array([], dtype=str)).tolist() == []


@pytest.mark.parametrize("name", ["split", "match_length", "accepted", "censored", "margin", "span_1"])
def test_a_missing_column_is_named(fake_store: Any, name: str) -> None:
    store = fake_store()
    del store._rows[name]
    with pytest.raises(ProbeError, match=f"has no column {name}, which a probe needs"):
        task_of(store, SPAN, 0.2, 20, 0)
    if name == "span_1":
        assert task_of(store, LabelOf("follow"), 0.2, 20, 0).y.any()  # which does not need it


@pytest.mark.parametrize("name", ["max_prob", "entropy", "margin"])
def test_logits_that_are_no_numbers_are_counted(fake_store: Any, name: str) -> None:
    store = fake_store()
    store._rows[name][[3, 700]] = np.nan, np.inf
    with pytest.raises(ProbeError, match=f"2 rows of the store have a {name} that is NaN or infinite"):
        measured_task(store, SPAN, 3, 20, 0)
