"""Numbers of the benchmark, against slow and plain computations of the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.summary import (
    HEAVY,
    OVERALL,
    Drafts,
    Row,
    counterpart,
    divergence,
    gate_quality,
    ratio,
    speed,
    summarize,
)
from decoding.tables import speed_table, steps_table, without_loops


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
    assert before.to_dict()["looped"] == 0
    assert row("1", "copy", 4, 1.0, tokens=[1, 2] * 3).to_dict()["looped"] == 6


def test_false_copies_cost_what_they_took_beyond_the_target_alone_on_their_prompts() -> None:
    rows = [
        row("1", "ar", 10, 1.0, step_seconds=0.9),  # 90 ms a step
        row("1", "copy", 10, 0.8, steps=5, drafts={"copy": Drafts(4, 5, 2, 0.3)}, step_seconds=0.7),
        row("2", "ar", 10, 0.5, step_seconds=0.4),  # 40 ms
        row("2", "copy", 10, 0.4, steps=5, drafts={"copy": Drafts(4, 5, 1, 0.05)}, step_seconds=0.4),
        row("2", "eagle", 10, 0.4, steps=5, drafts={"eagle": Drafts(5, 5, 1, 0.05)}, step_seconds=0.4),
        row("1", "eagle", 10, 0.4, steps=5, drafts={"eagle": Drafts(5, 5, 1, 0.05)}, step_seconds=0.4),
    ]
    records = {(r["group"], r["mode"]): r for r in summarize(rows, ["ar", "copy", "eagle"])}
    copy = records[OVERALL, "copy"]
    assert copy["false_copies"] == pytest.approx(3 / 8)
    assert copy["lost_ms"] == pytest.approx(300 - 2 * 90 + 50 - 40)
    assert copy["lost_share"] == pytest.approx((0.3 - 0.18 + 0.05 - 0.04) / 1.2)
    for mode in ("ar", "eagle"):  # nothing was copied
        assert records[OVERALL, mode]["false_copies"] is None
        assert records[OVERALL, mode]["lost_ms"] is None
    alone = summarize([r for r in rows if r.mode != "ar"], ["copy", "eagle"])
    assert {r["lost_ms"] for r in alone} == {None}


def test_ratios_are_also_told_over_the_prompts_that_do_not_loop() -> None:
    loop = [7, 8, 9] * 4
    rows = [row(k, m, 11, s) for k, m, s in [("1", "ar", 1.0), ("1", "copy", 0.5), ("2", "ar", 1.0), ("3", "ar", 2.0)]]
    rows += [row("2", "copy", 11, 0.1, tokens=loop), row("3", "copy", 11, 1.0)]
    records = {r["mode"]: r for r in summarize(rows, ["ar", "copy"]) if r["group"] == OVERALL}
    copy = records["copy"]
    assert copy["over_ar"]["estimate"] == pytest.approx(4.0 / 1.6)
    assert copy["no_loops"]["prompts"] == 2
    assert copy["no_loops"]["over_ar"]["estimate"] == pytest.approx(2.0)
    assert copy["no_loops"]["tokens_per_second"] == pytest.approx(22 / 1.5)
    assert records["ar"]["no_loops"]["tokens_per_second"] == pytest.approx(22 / 3), "the same prompts in every column"
    assert copy["looped"] == pytest.approx(12 / 36)
    heads, cells = speed_table(without_loops(list(records.values())))
    assert heads == ["mode", "tokens/s", "× ar [95 %]"]
    assert cells[1] == ["copy", "14.7", "2.00 [2.00, 2.00]"]
    every = summarize([r for r in rows if r.key == "2"], ["ar", "copy"])
    assert without_loops(every) == [], "no prompt is left"
    assert every[0]["no_loops"]["tokens_per_second"] is None


@settings(deadline=None, max_examples=40)
@given(rows_of_one_mode, st.floats(0.1, 10))
def test_intervals_hold_the_estimate_and_scale_with_speed(pairs: list, factor: float) -> None:
    a = [row(str(i), "a", n, s) for i, (n, s) in enumerate(pairs)]
    b = [row(str(i), "b", n, s * (1 + i)) for i, (n, s) in enumerate(pairs)]
    faster = [row(r.key, "a", r.decoded, r.decode_seconds / factor) for r in a]
    plain, scaled = ratio(a, b, resamples=200), ratio(faster, b, resamples=200)
    for name in ("estimate", "lower", "upper"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name), rel=1e-6)
    assert plain.lower <= plain.upper
    least, most = 1.0, float(len(a))  # the prompts' own ratios
    assert least - 1e-9 <= plain.lower and plain.upper <= most + 1e-9
    same = ratio(a, a, resamples=50)
    assert (same.estimate, same.lower, same.upper) == pytest.approx((1.0, 1.0, 1.0))


def test_every_base_in_the_run_gets_a_column() -> None:
    modes = ["hf", "ar", "eagle", "switchsd", "switchsd/gate=match"]
    rows = [row(k, m, 10, 1.0 / (i + 1)) for k in ("1", "2") for i, m in enumerate(modes)]
    over = ("ar", "hf-lookup", "eagle", "switchsd/gate=match")
    records = {r["mode"]: r for r in summarize(rows, modes, over) if r["group"] == OVERALL}
    switch = records["switchsd"]
    assert [k for k in switch if k.startswith("over_")] == ["over_ar", "over_eagle", "over_switchsd/gate=match"]
    assert switch["over_switchsd/gate=match"]["estimate"] == pytest.approx(4 / 5)
    assert "over_eagle" not in records["eagle"]


@pytest.mark.parametrize(
    ("column", "base", "expected"),
    [
        ("copy", "ar", "ar"),
        ("ar", "ar", None),
        ("eagle/temperature=1", "ar", "ar/temperature=1"),
        ("copy/kappa=3/temperature=1", "ar", "ar/temperature=1"),
        ("eagle/temperature=2", "ar", "ar"),
        ("switchsd", "hf", None),
        ("eagle/neural_nodes=9", "eagle", "eagle"),
        ("switchsd/kappa=3", "switchsd/gate=match", "switchsd/gate=match"),
        ("switchsd/gate=match", "switchsd/gate=match", None),
    ],
)
def test_counterparts(column: str, base: str, expected: str | None) -> None:
    columns = ["ar", "ar/temperature=1", "eagle", "eagle/temperature=1", "switchsd/gate=match", "copy"]
    assert counterpart(column, base, [*columns, column]) == expected


def test_the_share_of_the_oracle_is_shown_where_a_replay_found_it() -> None:
    rows = [row(k, m, 10, 1.0) for k in ("1", "2") for m in ("ar", "switchsd")]
    records = summarize(rows, ["ar", "switchsd"], oracle={"switchsd": {OVERALL: 0.31}})
    shown = {r["mode"]: r["oracle_share"] for r in records if r["group"] == OVERALL}
    assert shown == {"ar": None, "switchsd": 0.31}
    heads, cells = steps_table([r for r in records if r["group"] == OVERALL])
    assert heads[-1] == "of the oracle's gain"
    assert [line[-1] for line in cells] == ["–", "31%"]
    assert "of the oracle's gain" not in steps_table(summarize(rows, ["ar", "switchsd"]))[0]
