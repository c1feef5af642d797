"""How far to draft for an effective sample size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.gates import Situation
from decoding.smc.lookahead import HIGHEST, Lookahead, LookaheadGate


@given(st.integers(1, 16), st.integers(0, 16), st.floats(0.05, 0.95))
def test_it_starts_where_it_is_told(start: int, more: int, share: float) -> None:
    assert Lookahead(start, start + more, share).depth(0) == start


@pytest.mark.parametrize("spread", [0.1, 0.4, 0.7, 1.2])
def test_it_finds_the_largest_depth_that_keeps_the_share(spread: float) -> None:
    """Ratios with known laws: log p / q normal with variance s under q has chi2 = exp(s) - 1."""
    rng = np.random.default_rng(0)
    lookahead = Lookahead(4, 64)
    lookahead.observe(0, rng.normal(-spread / 2, math.sqrt(spread), 40_000))
    assert lookahead.chi2(0) == pytest.approx(math.exp(spread) - 1, rel=0.15)
    exact = max(k for k in range(1, 65) if math.exp(spread) ** -k >= 0.3)
    assert abs(lookahead.depth(0) - exact) <= max(1, round(0.15 * exact))
    k, chi2 = lookahead.depth(0), lookahead.chi2(0)
    assert (1 + chi2) ** -k >= 0.3 - 1e-9 and (1 + chi2) ** -(k + 1) < 0.3


def test_a_power_of_the_target_counts_by_its_spread_alone() -> None:
    plain, scaled = Lookahead(4, 64), Lookahead(4, 64)
    ratios = np.random.default_rng(0).normal(-0.2, 0.6, 20_000)
    plain.observe(0, ratios)
    scaled.observe(0, ratios - 1.5)
    assert scaled.chi2(0) == pytest.approx(plain.chi2(0), rel=0.1)


def test_equal_laws_draft_as_far_as_they_may_and_hopeless_ones_one_token() -> None:
    lookahead = Lookahead(4, 12)
    lookahead.observe(1, [0.0] * 5000)
    lookahead.observe(2, [-math.inf] * 4000 + [math.log(HIGHEST)] * 200)
    assert lookahead.depth(1) == 12
    assert lookahead.depth(2) == 1
    lookahead.observe(3, [math.inf, 1e9] * 10)  # believed no further than the highest ratio
    assert math.isfinite(lookahead.chi2(3))


def test_requests_do_not_depend_on_each_other() -> None:
    lookahead = Lookahead(4, 12)
    lookahead.observe(1, [2.0, -1.0] * 500)
    assert lookahead.depth(0) == 4 != lookahead.depth(1)
    lookahead.close(1)
    lookahead.close(1)
    assert lookahead.depth(1) == 4


def test_the_gate_asks_for_the_requests_own_depth() -> None:
    lookahead = Lookahead(3, 8)
    gate = LookaheadGate("draft", lookahead)
    lookahead.observe(7, [0.0] * 5000)
    for number, depth in ((0, 3), (7, 8)):
        [(name, budget)] = gate.choose(Situation(20, 20, request=number)).drafts
        assert (name, budget.depth, budget.nodes) == ("draft", depth, depth)


@pytest.mark.parametrize(("values", "told"), [((0, 4), "starts at 0"), ((5, 4), "starts at 5"), ((2, 4, 1.0), "share")])
def test_bad_settings_are_told(values: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Lookahead(*values)
