"""Numbers of the benchmark, against slow and plain computations of the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.summary import HEAVY, OVERALL, Drafts, Row, divergence, gate_quality, ratio, speed, summarize


def row(key: str, mode: str, decoded: int, seconds: float, **more: object) -> Row:
    fields: dict = {
        "group": "qa", "copy_heavy": False, "settings": "s", "prompt_tokens": 3, "tokens": list(range(decoded + 1)),
        "steps": decoded, "first_token_seconds": 0.5,
    }  # fmt: skip
    return Row(key=key, mode=mode, decoded=decoded, decode_seconds=seconds, **{**fields, **more})


rows_of_one_mode = st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 5)), min_size=2, max_size=8)


@settings(deadline=None)
@given(rows_of_one_mode, st.integers(0, 5))
def test_ratio_is_that_of_totals_and_its_interval_that_of_a_plain_bootstrap(pairs: list, seed: int) -> None:
    a = [row(str(i), "a", n, s) for i, (n, s) in enumerate(pairs)]
    b = [row(str(i), "b", n + i, s / (1 + i)) for i, (n, s) in enumerate(pairs)]
    found = ratio(a, b, seed=seed, resamples=50)
    assert found.estimate == pytest.approx(speed(a) / speed(b))
    draws = np.random.default_rng(seed).multinomial(len(a), np.full(len(a), 1 / len(a)), size=50)
    values = []
    for counts in draws:
        index = [i for i, c in enumerate(counts) for _ in range(c)]
        values.append(speed([a[i] for i in index]) / speed([b[i] for i in index]))
    low, high = np.percentile(values, [2.5, 97.5])
    assert (found.lower, found.upper) == (pytest.approx(low), pytest.approx(high))


def test_ratio_pairs_prompts() -> None:
    """Two modes with the same speed ratio at every prompt have a ratio without spread, however unequal the prompts."""
    a = [row(str(i), "a", 10 * (i + 1), 1.0) for i in range(6)]
    b = [row(str(i), "b", 5 * (i + 1), 1.0) for i in range(6)]
    found = ratio(a, b)
    assert (found.estimate, found.lower, found.upper) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="same prompts"):
        ratio(a, b[:3])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_divergence(a: list[int], b: list[int]) -> None:
    found = divergence(a, b)
    if found is None:
        assert a == b
    else:
        assert a[:found] == b[:found]
        assert a[found : found + 1] != b[found : found + 1]


def test_summary_counts_only_prompts_that_every_mode_finished() -> None:
    rows = [
        row("1", "ar", 10, 1.0),
        row("1", "copy", 10, 0.5, steps=5, drafts={"copy": Drafts(2, 5, 1)}),
        row("2", "ar", 10, 1.0, copy_heavy=True),
        row("2", "copy", 10, 0.25, copy_heavy=True, steps=2, drafts={"copy": Drafts(2, 8, 0)}),
        row("3", "ar", 10, 9.0),
    ]
    records = {(r["group"], r["mode"]): r for r in summarize(rows, ["ar", "copy"])}
    assert set(records) == {(g, m) for g in ("qa", HEAVY, OVERALL) for m in ("ar", "copy")}
    overall = records[OVERALL, "copy"]
    assert overall["prompts"] == 2
    assert overall["tokens_per_second"] == pytest.approx(20 / 0.75)
    assert overall["tokens_per_step"] == pytest.approx(20 / 7)
    assert overall["accepted_length"] == pytest.approx(13 / 4)
    assert overall["copy_steps"] == pytest.approx(4 / 7)
    assert overall["over_ar"]["estimate"] == pytest.approx(2 / 0.75)
    assert records[OVERALL, "ar"]["accepted_length"] is None
    assert records[HEAVY, "copy"]["over_ar"]["estimate"] == pytest.approx(4.0)


def test_gate_quality_compares_the_same_prompts() -> None:
    rows = [
        row("1", "copy", 10, 1.0, drafts={"copy": Drafts(10, 20, 5)}),
        row("1", "switchsd", 10, 1.0, drafts={"copy": Drafts(6, 18, 1), "eagle": Drafts(4, 3, 2)}),
        row("2", "copy", 10, 1.0, drafts={"copy": Drafts(90, 90, 90)}),
    ]
    found = gate_quality(rows, "switchsd", "copy")
    assert found is not None
    assert found["kept_tokens"] == pytest.approx(0.9)
    assert found["avoided_empty_steps"] == pytest.approx(0.8)
    assert (found["copy_steps"], found["always_copy_steps"]) == (6, 10)
    assert gate_quality([row("1", "copy", 1, 1.0), row("1", "switchsd", 1, 1.0)], "switchsd", "copy") is None


def test_rows_survive_json() -> None:
    before = row("1", "copy", 4, 1.0, drafts={"copy": Drafts(1, 2, 0)})
    assert Row.from_dict(before.to_dict()) == before
    assert math.isnan(speed([]))
