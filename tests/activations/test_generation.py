"""Completions in batches: the text that the target writes alone, and states that a second forward gives again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from activations.cache import KVCache
from activations.generation import FollowUp, Request, complete
from activations.sampling import Sampling
from activations.target import Target

STOP = 63


def greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    out = model.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(62) for _ in range(draw.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_greedy_text_is_the_targets(
    family: str, rows: int, small_target: Callable[..., Target], reference_model: Callable[..., Any]
) -> None:
    target, given = small_target(family), prompts(24)
    requests = [Request(i, p, max_new_tokens=5 + i) for i, p in enumerate(given)]
    found = {c.request.number: c for c in complete(target, requests, rows)}
    assert sorted(found) == list(range(24))
    for number, completion in found.items():
        assert completion.tokens == greedy(reference_model(family), given[number], 5 + number)
        assert completion.stopped == (completion.tokens[-1] == STOP)


def test_sampled_text_does_not_depend_on_the_batch(small_target: Callable[..., Target]) -> None:
    sampling = Sampling(0.9, top_k=20, seed=5)
    requests = [Request(i, p, 16, sampling if i % 3 else Sampling()) for i, p in enumerate(prompts(10))]
    alone, together = (
        {c.request.number: c.tokens for c in complete(small_target(), requests, rows)} for rows in (1, 7)
    )
    assert alone == together


def test_states_are_those_of_a_forward_over_the_text(small_target: Callable[..., Target]) -> None:
    target, sites = small_target(), ["resid_pre.1", "resid_mid.2", "resid_post.3"]
    follow_up = FollowUp((7, 8, 9), 6, Sampling())
    requests = [Request(i, p, 12, Sampling(0.7, seed=1), follow_up) for i, p in enumerate(prompts(9))]
    said = 0
    for completion in complete(target, requests, rows=4, sites=sites):
        ids = completion.request.prompt + completion.tokens
        with target.read(sites) as reader:
            target.hidden(torch.tensor([ids[:-1]]), KVCache(1))
            for site, state in reader.states.items():
                assert torch.allclose(completion.states[str(site)], state[0], atol=1e-4), site
        said += completion.followed_up
    assert said < 9  # some end at their limit


def test_a_follow_up_is_said_once_and_the_text_goes_on(small_target: Callable[..., Target]) -> None:
    """As if the answer had been asked for with the first part as its prompt."""
    target = small_target()
    first = Sampling(1.0, seed=3)
    requests = [Request(i, p, 40, first, FollowUp((1, 2), 10, Sampling())) for i, p in enumerate(prompts(40))]
    seen = 0
    for completion in complete(target, requests, rows=6):
        if not completion.followed_up:
            assert STOP not in completion.tokens and len(completion.tokens) == 40
            continue
        seen += 1
        cut = completion.tokens.index(STOP) + 1
        assert completion.tokens[cut : cut + 2] == [1, 2]
        asked = Request(0, completion.request.prompt + completion.tokens[: cut + 2], 10)
        [again] = complete(target, [asked], rows=1)
        assert completion.tokens[cut + 2 :] == again.tokens
        assert completion.stopped == again.stopped
    assert seen >= 5
