"""Draws from a large vocabulary on a CPU: those of noise for every token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activations import draws
from activations.sampling import Sampling, gumbel

SIZE = 5000


def by_the_book(logits: torch.Tensor, seed: int, requests: torch.Tensor, positions: torch.Tensor) -> list[int]:
    every = torch.arange(logits.shape[1])
    return (logits.float() + gumbel(seed, requests, positions, every)).argmax(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 2.0, 5.0, 30.0]),
    st.sampled_from([0.0, -40.0, 3e4]),
    st.sampled_from([0.1, 1.0, 2.5]),
    st.booleans(),
)
def test_draws_are_those_of_noise_for_every_token(
    seed: int, spread: float, offset: float, temperature: float, holes: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(24, SIZE, generator=generator) * spread + offset
    if holes:
        logits = logits.masked_fill(torch.rand(24, SIZE, generator=generator) < 0.7, -torch.inf)
    requests, positions = torch.arange(24), torch.arange(24) + seed % 1000
    drawn = Sampling(temperature, seed=seed).next_tokens(logits, requests, positions)
    assert drawn.tolist() == by_the_book(logits / temperature, seed, requests, positions)


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """One token has half of the mass, and all others share the rest: most draws must find theirs on the second look."""
    n = 6000
    logits = torch.zeros(1, SIZE)
    logits[0, 7] = torch.log(torch.tensor(SIZE - 1.0))
    drawn = Sampling(1.0, seed=5).next_tokens(logits.expand(n, -1), torch.zeros(n, dtype=torch.long), torch.arange(n))
    assert float((drawn == 7).float().mean()) == pytest.approx(0.5, abs=0.03)
    rest = drawn[drawn != 7].float()
    assert float(rest.mean()) == pytest.approx(SIZE / 2, rel=0.05) and len(rest.unique()) > 0.6 * len(rest)


def test_hardly_a_token_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 49152, generator=torch.Generator().manual_seed(0)) * 4
    seen = []
    worth = draws._worth

    def counted(*given: object) -> torch.Tensor | None:
        found = worth(*given)  # type: ignore[arg-type]
        seen.append(None if found is None else len(found))
        return found

    monkeypatch.setattr(draws, "_worth", counted)
    Sampling(1.0).next_tokens(logits, torch.arange(50), torch.arange(50))
    assert len(seen) == 50 and all(n is not None and n < 500 for n in seen)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_no_numbers_are_met_as_before(value: float) -> None:
    logits = torch.full((2, SIZE), value)
    zero = torch.zeros(2, dtype=torch.long)
    assert Sampling(1.0).next_tokens(logits, zero, zero).tolist() == by_the_book(logits, 0, zero, zero)
