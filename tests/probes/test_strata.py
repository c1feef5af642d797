from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from probes.strata import DRAFTED, LOOP_DISTANCE, asked, kinds, loops, skipped, strata
from probes.task import LabelOf, task_of


def test_every_row_is_of_one_kind_each_way(fake_store: Any) -> None:
    rows = fake_store().rows()
    rows["match_length"][:9] = [0, 1, 2, 3, 5, 7, 8, 31, 32]
    found = kinds(rows, 5)
    assert found["match_length"][:9].tolist() == [
        "none", "1 to 2", "1 to 2", "3 to 4", "5", "6 to 7", "8 to 11", "16 to 31", "32 and more",
    ]  # fmt: skip
    assert set(found) == {"match_length", "family", "source", "loop", "context", "asked"}
    for values in found.values():
        assert len(values) == len(rows["document"])
    where = (rows["source"] == "output") & (rows["distance"] <= LOOP_DISTANCE)
    np.testing.assert_array_equal(loops(rows), where)
    assert set(found["loop"][where & (rows["match_length"] > 0)]) == {"loop"}
    rows["pending_class"] = np.where(rows["position"] % 2, "word", "number")
    assert set(kinds(rows, 5)["token_class"]) == {"word", "number"} and skipped(rows) == []


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), min_size=1, max_size=30), min_size=1, max_size=3
    ),
    st.integers(1, 5),
)
def test_a_decoder_asks_where_the_last_copy_has_ended(texts: list[list[tuple[int, int]]], match: int) -> None:
    rows = {
        "document": np.repeat(np.arange(len(texts)), [len(text) for text in texts]),
        "position": np.concatenate([7 + np.arange(len(text)) for text in texts]),
        "match_length": np.array([length for text in texts for length, _ in text]),
        "accepted": np.array([accepted for text in texts for _, accepted in text]),
    }
    wanted = []
    for text in texts:  # as the decoder goes: a step writes what it accepts and one token more
        asks, at = [False] * len(text), 0
        while at < len(text):
            asks[at] = True
            at += 1 + (min(text[at][1], DRAFTED) if text[at][0] >= match else 0)
        wanted += asks
    assert asked(rows, match).tolist() == wanted


def test_strata_are_the_subsets_and_cover_the_scope(fake_store: Any) -> None:
    store = fake_store()
    store._rows["family"] = np.where(store._rows["document"] % 2, "code", "chat")
    task = task_of(store, LabelOf("span_1"), 0.2, 30, 0)
    rng = np.random.default_rng(0)
    score, baseline = task.y + rng.normal(size=2400), task.y + 4 * rng.normal(size=2400)
    found = strata(task, score, baseline)
    for scope, where in task.tests.items():
        for by in {s.by for s in found[scope]}:
            assert sum(s.rows for s in found[scope] if s.by == by) == where.sum()
            assert sum(s.positives for s in found[scope] if s.by == by) == (task.y[where] == 1).sum()
    code = next(s for s in found["match"] if (s.by, s.value) == ("family", "code"))
    there = task.tests["match"] & (task.rows["family"] == "code")
    mine, other = (roc_auc_score(task.y[there], values[there]) for values in (score, baseline))
    assert code.roc_auc.estimate == pytest.approx(mine)
    assert code.over_baseline is not None and code.over_baseline.estimate == pytest.approx(mine - other)
    assert [s.value for s in found["all"] if s.by == "match_length"][:2] == ["none", "5"]


def test_a_pooled_number_that_comes_from_the_domain_alone_is_seen(fake_store: Any) -> None:
    store = fake_store()
    code = store._rows["document"] % 2 == 0
    store._rows["family"] = np.where(code, "code", "chat")
    rng = np.random.default_rng(0)
    store._rows["span_1"] = (rng.random(2400) < np.where(code, 0.9, 0.1)).astype(np.int8)
    task = task_of(store, LabelOf("span_1"), 0.2, 30, 0)
    score = code + 0.01 * rng.normal(size=2400)
    assert task.measure(score)["all"].roc_auc.estimate > 0.85
    within = [s.roc_auc.estimate for s in strata(task, score, None)["all"] if s.by == "family"]
    assert len(within) == 2 and all(abs(value - 0.5) < 0.1 for value in within)
