"""What the target makes of a text, beside its logits one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from activations.cache import KVCache
from activations.sampling import Sampling
from activations.target import Target
from decoding.decoder import Decoder
from decoding.fidelity import log_probabilities, mean_interval


@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(temperature=0.5, seed=3)])
def test_every_token_has_its_log_probability(small_target: Callable[..., Target], sampling: Sampling | None) -> None:
    target = small_target("llama")
    prompt, tokens = [1, 2, 3], [4, 9, 4]
    found = log_probabilities(target, prompt, tokens, sampling)
    scale = sampling.temperature if sampling is not None and not sampling.greedy else 1.0
    for i, token in enumerate(tokens):
        ids = torch.tensor([[*prompt, *tokens[:i]]])
        logits = target.forward(ids, KVCache(1, capacity=8), logits_to_keep=1)[0, -1].double()
        assert found[i] == pytest.approx(float((logits / scale).log_softmax(-1)[token]), abs=1e-5)


def test_greedy_texts_are_the_likeliest_at_each_token(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    written = Decoder(target).generate([5, 6, 5, 6], mode="copy", max_new_tokens=12)
    mine = log_probabilities(target, [5, 6, 5, 6], written.tokens)
    other = [(t + 1) % target.vocab_size for t in written.tokens[:1]]
    assert log_probabilities(target, [5, 6, 5, 6], other)[0] < mine[0]
    assert mine.shape == (len(written.tokens),) and (mine <= 0).all()


def test_tokens_that_the_sampling_excludes_are_impossible(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    likely = Decoder(target).generate([5, 6], mode="ar", max_new_tokens=1).tokens[0]
    only = Sampling(temperature=1.0, top_k=1)
    assert log_probabilities(target, [5, 6], [likely], only)[0] == pytest.approx(0.0)
    assert log_probabilities(target, [5, 6], [(likely + 1) % 64], only)[0] == -np.inf


@pytest.mark.parametrize(("prompt", "tokens"), [([], [1]), ([1], [])])
def test_both_are_needed(small_target: Callable[..., Target], prompt: list[int], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="both need at least 1"):
        log_probabilities(small_target("llama"), prompt, tokens)


def test_a_mean_has_an_interval_over_texts() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 6.0])
    assert found.estimate == 3.0 and 1.0 <= found.lower < 3.0 < found.upper <= 6.0
    assert found == mean_interval([1.0, 2.0, 3.0, 6.0])
    assert np.isnan(mean_interval([2.0]).lower) and mean_interval([2.0]).estimate == 2.0
    assert np.isnan(mean_interval([]).estimate)
