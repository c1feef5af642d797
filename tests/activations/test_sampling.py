"""Keyed sampling: the law, and that it depends on nothing but its keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from activations.sampling import Sampling, gumbel, uniform


def reference_law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities [V], by the book: temperature, the k largest, then the smallest set that reaches p."""
    values = (logits.double() / temperature).tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if top_k:
        order = order[:top_k]
    weights = torch.tensor([values[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    kept, mass = [], 0.0
    for i, w in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.append(i)
        mass += w
    law = torch.zeros(len(values), dtype=torch.float64)
    law[kept] = torch.tensor([values[i] for i in kept], dtype=torch.float64).softmax(0)
    return law


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.2, 3),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
)
def test_processed_logits_are_the_law_by_the_book(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 3
    law = Sampling(temperature, top_k, top_p).process(logits[None])[0].double().softmax(0)
    assert torch.allclose(law, reference_law(logits, temperature, top_k, top_p), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}])
def test_draws_follow_the_law(options: dict[str, float]) -> None:
    n = 40_000
    logits = torch.randn(8, generator=torch.Generator().manual_seed(5)) * 1.5
    sampling = Sampling(temperature=0.9, seed=11, **options)  # type: ignore[arg-type]
    positions = torch.arange(n)
    drawn = sampling.next_tokens(logits.expand(n, -1), torch.zeros(n, dtype=torch.long), positions)
    law = reference_law(logits, 0.9, int(options.get("top_k", 0)), options.get("top_p", 1.0))
    seen = torch.bincount(drawn, minlength=8).double() / n
    assert bool((seen[law == 0] == 0).all())
    assert float((seen - law).abs().max()) < 5 * (0.25 / n) ** 0.5


def test_a_draw_depends_on_its_keys_and_not_on_its_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    requests, positions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([4, 5, 4, 5, 4, 5])
    sampling = Sampling(temperature=1.0, seed=3)
    together = sampling.next_tokens(logits, requests, positions)
    alone = [int(sampling.next_tokens(logits[i : i + 1], requests[i : i + 1], positions[i : i + 1])) for i in range(6)]
    assert together.tolist() == alone


def test_each_key_changes_the_noise() -> None:
    one, other, tokens = torch.tensor([1]), torch.tensor([2]), torch.arange(64)
    base = gumbel(0, one, one, tokens)
    for changed in (gumbel(1, one, one, tokens), gumbel(0, other, one, tokens), gumbel(0, one, other, tokens)):
        assert int((changed == base).sum()) == 0


def test_noise_of_chosen_tokens_is_that_of_the_full_row() -> None:
    key = torch.tensor([3, 4])
    every = gumbel(9, key, key, torch.arange(100))
    some = torch.tensor([[5, 99], [0, 42]])
    assert torch.equal(gumbel(9, key, key, some), every.gather(1, some))


def test_successive_draws_are_independent() -> None:
    """Pairs of neighbouring positions over 8 equal tokens: chi-square of the 64 cells."""
    from scipy.stats import chisquare

    n = 64_000
    flat, zeros = torch.zeros(n, 8), torch.zeros(n, dtype=torch.long)
    drawn = Sampling(temperature=1.0, seed=2).next_tokens(flat, zeros, torch.arange(n))
    cells = torch.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64)
    assert chisquare(cells.numpy()).pvalue > 1e-3


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    zero = torch.tensor([0])
    assert Sampling().next_tokens(logits, zero, zero).tolist() == [1]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"temperature": -1.0}, "temperature"), ({"top_k": -2}, "top_k"), ({"top_p": 0.0}, "top_p")],
)
def test_bad_settings_are_named(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**options)  # type: ignore[arg-type]


# -- streams ----------------------------------------------------------------------------------------


def test_a_stream_has_a_noise_of_its_own() -> None:
    key, tokens = torch.arange(4000), torch.arange(2)
    own, draft = gumbel(1, key, key, tokens), gumbel(1, key, key, tokens, "draft")
    assert torch.equal(draft, gumbel(1, key, key, tokens, "draft"))
    for other in (own, gumbel(1, key, key, tokens, "accept"), gumbel(2, key, key, tokens, "draft")):
        assert abs(float(torch.corrcoef(torch.stack([draft.flatten(), other.flatten()]))[0, 1])) < 0.05


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    n = 20_000
    zeros, positions = torch.zeros(n, dtype=torch.long), torch.arange(n)
    drawn = uniform(3, zeros, positions, "accept")
    assert drawn.shape == (n,) and bool(((drawn > 0) & (drawn < 1)).all())
    assert kstest(drawn.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(uniform(3, zeros[:5], positions[7:12], "accept"), drawn[7:12])


def test_a_law_draws_what_next_tokens_draws() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    requests, positions = torch.arange(6), torch.arange(6) + 9
    for sampling in (Sampling(0.8, seed=2), Sampling(1.0, top_k=5), Sampling(1.3, top_p=0.6), Sampling(1.0, 6, 0.7)):
        law = sampling.law(logits)
        places = law.draw(sampling.seed, requests, positions, "x")
        ids = law.ids(places)
        assert torch.equal(ids, sampling.next_tokens(logits, requests, positions, "x"))
        assert torch.equal(law.full().gather(1, ids[:, None]), law.logits.gather(1, places[:, None]))
