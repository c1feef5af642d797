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
    Times,
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


def test_rare_arrivals_are_simulated() -> None:
    """Down to the rarest that are taken: every request alone."""
    work = Workload(requests=20, tokens=5, arrivals=1e-6)
    for system in (sequential, overlapped):
        run = system(flat(1, 4), work, 2, 8)
        assert run.rows == run.steps and run.efficiency is None and -1e-6 < run.target_idle < 1
    assert compare(flat(1, 4), work, 4, 2).outcome == "gains nothing"


def test_arrivals_bound_the_throughput() -> None:
    work = Workload(requests=40, tokens=50, arrivals=2.0)
    for system in (sequential, overlapped):
        run = system(flat(1, 4), work, 2, 8)
        assert run.waiting_ms > 0
        assert run.tokens_per_second < 1.5 * 2 * 50
        assert run.latency_ms < 1000


def test_it_says_when_overlapping_loses_and_why() -> None:
    work = Workload(requests=64, tokens=100)

    def verdict(times: Times, m: int = 4) -> str:
        return compare(times, work, m, k=2).verdict

    once = "verifying 2m costs hardly more than m, and is done once instead of twice"
    assert verdict(flat(1, 20)).endswith(once)
    assert verdict(flat(1, 20)).startswith("loses 47 %: one batch of 8 takes 21 ms, two half-steps 40 ms")
    waits = "drafting sets the pace and the target waits; drafting for 2m costs hardly more than m"
    assert waits in verdict(flat(20, 1)) and "verifying 2m" not in verdict(flat(20, 1))
    contended = verdict(straight(2, 10, rho=0.6))
    assert contended.startswith("loses") and contended.endswith("the halves slow each other down")
    turns = verdict(replace(straight(8, 10), shared=True))
    assert turns.startswith("gains nothing") and "nothing overlaps" in turns
    assert compare(replace(flat(8, 10), shared=True), work, 4, 2).why.startswith("nothing overlaps")
    assert compare(straight(10, 8), work, 4, 2).why == "drafting sets the pace"
    assert verdict(straight(10, 8)).startswith("gains 7")
    assert "hardly anything to hide" in verdict(straight(0.3, 100))
    dear = Measured({1: {1: 1.0}}, {4: {1: 10.0}, 8: {1: 16.0}})
    assert "is cheaper than twice m, by as much as the drafting that is hidden" in verdict(dear)


@pytest.mark.parametrize(
    ("work", "m", "told"),
    [
        (Workload(requests=3, tokens=100), 4, "--requests 3 do not fill the 2m places: raise it to several times 2m"),
        (Workload(requests=1, tokens=100), 1, "--requests 1: a single request has nothing to overlap"),
        (Workload(requests=60, tokens=50, arrivals=0.5), 4, "--arrivals 0.5 a second are too few"),
        (Workload(requests=12, tokens=3), 4, "--requests 12 are so few for 2m places that the first and last steps"),
    ],
)
def test_the_verdict_follows_the_simulation(work: Workload, m: int, told: str) -> None:
    """With full batches overlapping would gain 80 %; what is simulated is less, for the reason that is told."""
    found = compare(straight(10, 8), work, m, k=2)
    assert found.closed_form == pytest.approx(1.8) and found.gain < 1.62 and found.parts
    assert told in found.verdict and ("smaller --batch" in found.verdict) == (work.requests > 1)
    assert "(with full batches all the time: gain 1.800)" in found.verdict
    percent = 100 * abs(found.gain - 1)
    words = {"gains": f"gains {percent:.3g} %", "gains nothing": "gains nothing", "loses": f"loses {percent:.0f} %"}
    assert found.verdict.startswith(words[found.outcome])
    assert (found.outcome == "gains") == (found.gain >= 1.005)


def test_where_both_keep_up_with_arrivals() -> None:
    """Full batches would lose; with hardly ever two requests at a time, both take the same time."""
    found = compare(flat(1, 20), Workload(requests=40, tokens=50, arrivals=0.05), 4, 2)
    assert found.closed_form < 0.6 and found.outcome == "gains nothing"
    assert found.why.startswith("--arrivals 0.05 a second are too few") and "verifying" not in found.why


@pytest.mark.parametrize(
    "times",
    [
        flat(3, 7),
        straight(3, 7),
        Curves({1: 3}, {1: 7}),
        FromCosts(CostTable({}, [1], [1], [[7]], {"draft": [3.0]}, 0, 0), "draft"),
    ],
)
def test_on_one_device_the_halves_take_turns(times: Measured | Curves | FromCosts) -> None:
    apart = times.draft(2, 1) + times.verify(3, 1)
    assert replace(times, shared=True).together(2, 3, 1) == pytest.approx(apart)
    assert replace(times, shared=True, rho=0.5).together(2, 3, 1) == pytest.approx(1.5 * apart)
    assert times.together(2, 3, 1) == pytest.approx(max(times.draft(2, 1), times.verify(3, 1)))


@given(
    curve=st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=1, max_size=5),
    x=st.integers(1, 5000), k=st.integers(1, 9),
)  # fmt: skip
def test_times_are_above_zero_everywhere(curve: dict[int, float], x: int, k: int) -> None:
    """Falling or steep curves, however far beyond their points."""
    table = {m: {k: ms} for m, ms in curve.items()} | {1: curve}
    costs = CostTable({}, sorted(curve), [64, 256], [[ms * s for _, ms in sorted(curve.items())] for s in (2, 1)],
                      {"draft": [2.0, 0.5], "eagle": [3.0, 1.0]}, 0, 0)  # fmt: skip
    sources = [Curves(curve, curve), Measured(table, table)]
    sources += [FromCosts(costs, name, context=9000) for name in ("draft", "eagle")]
    for times in sources:
        for ms in (times.draft(x, k), times.verify(x, k), times.together(x, x, k)):
            assert 0 < ms < math.inf
    assert Curves({1: 5}, {8: 10, 16: 5}).verify(100, 0) == 5


def test_it_says_where_times_are_extrapolated() -> None:
    curves = Curves({1: 2, 8: 4}, {1: 10, 64: 14})
    assert curves.extrapolated([1, 8], [1, 7]) == []
    assert curves.extrapolated([4, 16], [7]) == [
        "drafting for 4 to 16 requests (measured: 1 to 8)", "verifying 32 to 128 tokens (measured: 1 to 64)"
    ]  # fmt: skip
    table = Measured({2: {1: 1, 4: 2}, 4: {1: 1, 3: 2}}, {2: {1: 1}})
    assert table.extrapolated([2], [1]) == []
    assert table.extrapolated([2, 4], [1, 4]) == [
        "drafting 1 to 4 tokens of a request (measured: 1 to 3)", "verifying for 2 to 4 requests (measured: 2)",
        "verifying 1 to 4 tokens of a request (measured: 1)",
    ]  # fmt: skip
    costs = FromCosts(CostTable({}, [1, 32], [64, 256], [[1, 2]] * 2, {"draft": [1, 2]}, 0, 0), "draft", 512)
    assert costs.extrapolated([8], [2, 3]) == [
        "drafting 2 to 3 tokens (measured: 1 to 2)", "512 tokens in the cache (measured: 64 to 256)"
    ]  # fmt: skip
    assert Roofline(HARDWARE["h100"], MODELS["8b"], MODELS["1b"]).extrapolated([9999], [99]) == []


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
    assert devices_for(HARDWARE["h100"], MODELS["8b"]) == 1 and devices_for(HARDWARE["h100"], MODELS["70b"]) == 4
    assert devices_for(HARDWARE["h200"], MODELS["70b"]) == 2
    assert devices_for(HARDWARE["h100"], MODELS["32b"], MODELS["32b"]) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"requests": 0},
        {"tokens": 0},
        {"acceptance": 1.5},
        {"arrivals": -1.0},
        {"arrivals": 1e-300},
        {"arrivals": math.nan},
    ],
)
def test_work_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Workload(**bad)  # type: ignore[arg-type]
