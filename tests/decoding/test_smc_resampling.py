"""Resampling and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.smc.resampling import RESAMPLING, ancestors, systematic
from decoding.smc.weights import effective_size, log_mean, normalized

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=1, max_size=12).filter(any)
DRAWS = 8000


def drawn(name: str, weights: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([RESAMPLING[name](weights, rng) for _ in range(DRAWS)])


@pytest.mark.parametrize("name", list(RESAMPLING))
def test_particles_are_continued_in_proportion_to_their_weights(name: str) -> None:
    weights = np.array([0.05, 0.3, 0.0, 0.15, 0.5])
    counts = drawn(name, weights)
    assert (counts.sum(1) == 5).all() and (counts[:, 2] == 0).all()
    spread = np.sqrt(5 * weights * (1 - weights) / DRAWS)
    assert np.abs(counts.mean(0) - 5 * weights) == pytest.approx(np.zeros(5), abs=4 * spread.max())


def test_systematic_resampling_varies_less() -> None:
    weights = np.array([0.05, 0.3, 0.0, 0.15, 0.5])
    even, free = (drawn(name, weights).var(0) for name in ("systematic", "multinomial"))
    assert (even <= free).all() and even.sum() < free.sum() / 3
    assert free == pytest.approx(5 * weights * (1 - weights), abs=0.06)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, st.integers(0, 1000), st.sampled_from(list(RESAMPLING)))
def test_counts_and_ancestors_fit(raw: list[float], seed: int, name: str) -> None:
    weights = np.array(raw) / sum(raw)
    n = len(weights)
    counts = RESAMPLING[name](weights, np.random.default_rng(seed))
    assert counts.sum() == n and (counts[weights == 0] == 0).all()
    if name == "systematic":
        assert (np.abs(counts - n * weights) < 1 + 1e-9).all()
    chosen = ancestors(counts)
    assert np.bincount(chosen, minlength=n).tolist() == counts.tolist()
    assert all(chosen[i] == i for i in range(n) if counts[i])  # who goes on stays in its row


def test_a_point_rounded_up_to_one_finds_the_last_particle_with_weight() -> None:
    class Highest:
        def random(self) -> float:
            return 1 - 2.0**-53

    counts = systematic(np.array([0.5, 0.25, 0.25, 0.0]), Highest())  # type: ignore[arg-type]
    assert counts.tolist()[-1] == 0 and counts.sum() == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-2000, 2000), min_size=1, max_size=10), st.floats(-1e4, 1e4))
def test_weights_do_not_depend_on_a_common_factor(logs: list[float], shift: float) -> None:
    values = np.array([*logs, -np.inf])
    weights = normalized(values + shift)
    assert weights.sum() == pytest.approx(1) and weights[-1] == 0
    assert weights == pytest.approx(normalized(values), abs=1e-9)
    assert effective_size(values + shift) == pytest.approx(effective_size(values), rel=1e-6)
    assert 1 - 1e-9 <= effective_size(values) <= len(values)
    assert log_mean(values + shift) == pytest.approx(log_mean(values) + shift, abs=1e-6)


def test_known_sizes() -> None:
    assert effective_size(np.zeros(7)) == pytest.approx(7)
    assert effective_size(np.log([3.0, 1.0])) == pytest.approx(16 / 10)
    assert log_mean(np.log([3.0, 1.0])) == pytest.approx(np.log(2))


def test_no_weight_at_all_is_told() -> None:
    with pytest.raises(ValueError, match="no particle has a finite weight"):
        normalized(np.array([-np.inf, -np.inf]))
