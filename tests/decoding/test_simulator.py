"""The simulator: against closed forms, against limits, and what it says when overlapping loses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.costs import CostTable
from decoding.minedraft.roofline import BLOCK_US, HARDWARE, MODELS, REACHED, Roofline, devices_for
from decoding.minedraft.simulator import (
    Curves,
    FromCosts,
    Measured,
    Workload,
    compare,
    frontier,
    overlapped,
    sequential,
)

LONG = Workload(requests=120, tokens=200, acceptance=0.7)


def flat(t: float, v: float, rho: float = 0.0) -> Measured:
    """Times that do not depend on the batch."""
    return Measured({1: {1: t}}, {1: {1: v}}, rho)


def straight(t: float, v: float, rho: float = 0.0) -> Measured:
    """Times in proportion to the batch."""
    return Measured({1: {1: t}, 2: {1: 2 * t}}, {1: {1: v}, 2: {1: 2 * v}}, rho)


@pytest.mark.parametrize(
    ("alpha_v", "ratio"),
    [
        (0.1, 1.44),
        (0.19, 1.59),
        (0.5, 1.85),
        (1.256, 2.00),
        (1.68, 1.98),
        (3, 1.82),
        (5.1, 1.60),
        (10, 1.36),
        (50, 1.10),
    ],
)
def test_the_theorem_holds_only_in_between(alpha_v: float, ratio: float) -> None:
    """The paper has a gain above 1.59 for every alpha V from 1.68 on."""
    assert frontier(alpha_v).ratio == pytest.approx(ratio, abs=0.006)


def test_the_frontier_is_the_minimum() -> None:
    """Against a fine grid of drafting times."""
    for alpha in (0.05, 0.7, 4.0, 30.0):
        found = frontier(alpha)
        times = [1.002**i / 1e3 for i in range(9000)]
        assert found.sd == pytest.approx(min((t + 1) / -math.expm1(-alpha * t) for t in times), rel=1e-5)
        assert found.psd == pytest.approx(min(max(t, 1) / -math.expm1(-alpha * t) for t in times), rel=3e-3)
        assert 1 < found.ratio <= 2 + 1e-9
    with pytest.raises(ValueError, match="must be above 0"):
        frontier(0)


@pytest.mark.parametrize("rho", [0.0, 0.25])
@pytest.mark.parametrize(("t", "v"), [(10, 10), (2, 10), (10, 4), (0.5, 20)])
@pytest.mark.parametrize("shape", [flat, straight])
def test_the_steady_state_is_the_closed_form(shape, t: float, v: float, rho: float) -> None:  # type: ignore[no-untyped-def]
    found = compare(shape(t, v, rho), LONG, m=4, k=1)
    wanted = (t + v) / max(t, v) / (1 + rho) / (2 if shape is flat else 1)
    assert found.closed_form == pytest.approx(wanted)
    assert found.gain == pytest.approx(wanted, rel=0.05)
    assert found.psd.efficiency == pytest.approx((t + v) / max(t, v) / (1 + rho), rel=0.03)


@settings(deadline=None, max_examples=40)
@given(
    t=st.floats(0.1, 20), v=st.floats(0.1, 20), m=st.integers(1, 6), k=st.integers(0, 5),
    rate=st.sampled_from([0, 5.0]), acceptance=st.floats(0, 1), requests=st.integers(1, 20), seed=st.integers(0, 99),
)  # fmt: skip
def test_both_write_everything(t, v, m, k, rate, acceptance, requests, seed) -> None:  # type: ignore[no-untyped-def]
    """Whatever the times and arrivals: the same tokens, nobody lost, no time in which both rest, no gain above 2."""
    work = Workload(requests, 20, acceptance, rate, seed)
    times = Curves({1: t}, {1: v, 8: 2 * v})
    wanted = sum(r.left for r in work.make())
    runs = [system(times, work, k, 2 * m) for system in (sequential, overlapped)]
    for run in runs:
        assert run.tokens == wanted and len(run.latencies) == requests
        assert run.ms - run.waiting_ms <= run.target_ms + run.drafter_ms + 1e-6
        assert max(run.target_ms, run.drafter_ms) <= run.ms - run.waiting_ms + 1e-6
        assert -1e-9 <= run.target_idle <= 1 and -1e-9 <= run.drafter_idle <= 1
    assert runs[0].ms - runs[0].waiting_ms == pytest.approx(runs[0].target_ms + runs[0].drafter_ms)


def test_requests_accept_the_same_in_both() -> None:
    """A single request takes the same steps, and the same time: there is nothing to overlap."""
    work = replace(LONG, requests=1)
    times = flat(3, 7)
    one, two = sequential(times, work, 4, 2), overlapped(times, work, 4, 2)
    assert (one.steps, one.ms) == (two.steps, pytest.approx(two.ms)) and two.efficiency is None


def test_tokens_per_step_are_the_geometric_law() -> None:
    for acceptance, k in ((0.0, 3), (0.6, 4), (1.0, 4)):
        work = Workload(requests=30, tokens=600, acceptance=acceptance)
        run = sequential(flat(1, 1), work, k, 1)
        assert run.tokens / run.steps == pytest.approx(work.per_step(k), rel=0.02)


def test_arrivals_bound_the_throughput() -> None:
    work = Workload(requests=40, tokens=50, arrivals=2.0)
    for system in (sequential, overlapped):
        run = system(flat(1, 4), work, 2, 8)
        assert run.waiting_ms > 0
        assert run.tokens_per_second < 1.5 * 2 * 50
        assert run.latency_ms < 1000


def test_it_says_when_overlapping_loses_and_why() -> None:
    work = Workload(requests=32, tokens=100)
    found = compare(flat(1, 20), work, m=4, k=2)
    assert found.gain < 0.6
    assert found.verdict.startswith("loses: one batch of 8 takes 21 ms, two half-steps 40 ms")
    assert "done once instead of twice" in found.verdict
    contended = compare(straight(2, 10, rho=0.6), work, m=4, k=2)
    assert contended.verdict.startswith("loses") and "slow each other down" in contended.verdict
    gains = compare(straight(10, 8), work, m=4, k=2)
    assert gains.verdict == "gains 80 %; drafting sets the pace" and gains.gain > 1.6
    assert compare(straight(1, 100, rho=0.01), work, m=4, k=2).verdict.startswith("gains nothing")


def test_times_from_tables_and_costs() -> None:
    table = Measured({2: {1: 1, 3: 3}, 4: {1: 2, 3: 6}}, {2: {1: 10, 3: 14}, 4: {1: 12, 3: 20}})
    assert table.draft(2, 2) == 2 and table.draft(3, 3) == 4.5 and table.draft(6, 1) == 3
    assert table.verify(3, 2) == 14
    curves = Curves({1: 2, 3: 4}, {1: 10, 5: 14})
    assert curves.draft(2, 3) == 9 and curves.verify(1, 2) == 12 and curves.verify(2, 4) == 19
    costs = CostTable({}, [1, 9], [256], [[40, 48]], {"eagle": [2, 3], "draft": [1, 2]}, 0, 0)
    assert FromCosts(costs, "eagle").draft(4, 2) == 12
    assert FromCosts(costs, "draft").draft(9, 2) == pytest.approx(2 * 48 / 40)
    assert FromCosts(costs, "draft").verify(3, 2) == 48


def test_the_roofline() -> None:
    """By hand: 8 billion parameters of 2 bytes over 3.35 TB/s at 80 %; compute takes over in wide batches."""
    times = Roofline(HARDWARE["h100"], MODELS["8b"], MODELS["1b"], context=0)
    assert times.verify(1, 0) == pytest.approx(16.06 / 3350 / REACHED * 1e3)
    assert times.verify(512, 7) == pytest.approx(2 * 8.03e9 * 4096 / 989e12 / REACHED * 1e3)
    assert times.draft(1, 4) == pytest.approx(4 * 2.472 / 3350 / REACHED * 1e3)
    small = replace(times, draft_model=MODELS["0.5b"], hardware=HARDWARE["h200"])
    assert small.draft(1, 2) == pytest.approx(2 * max(24 * BLOCK_US / 1e3, 0.988 / 4800 / REACHED * 1e3))
    assert replace(times, context=1000).verify(2, 0) - times.verify(2, 0) == pytest.approx(
        2 * 1000 * 131072 / 3350e9 / REACHED * 1e3
    )
    assert times.together(4, 4, 4) == max(times.draft(4, 4), times.verify(4, 4))
    shared = replace(times, shared=True)
    assert shared.together(4, 4, 4) == pytest.approx(times.draft(4, 4) + times.verify(4, 4))  # all of it is bandwidth
    assert compare(shared, Workload(16, 50), 4, 4).verdict.startswith("loses")
    assert devices_for(MODELS["8b"], HARDWARE["h100"]) == 1 and devices_for(MODELS["70b"], HARDWARE["h100"]) == 4
    assert devices_for(MODELS["70b"], HARDWARE["h200"]) == 2


@pytest.mark.parametrize("bad", [{"requests": 0}, {"tokens": 0}, {"acceptance": 1.5}, {"arrivals": -1.0}])
def test_work_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Workload(**bad)  # type: ignore[arg-type]
