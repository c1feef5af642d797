"""The logit lens ends where the target does, and agrees with TransformerLens's states on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from activations.cache import KVCache
from activations.lens import Lens
from activations.logit_lens import logit_lens
from activations.target import Target

Make = Callable[..., Target]
IDS = torch.randint(0, 63, (1, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_the_last_block_says_what_the_target_says(family: str, small_target: Make) -> None:
    target = small_target(family)
    positions, tokens = [0, 5, 11], [7, 3, 7]
    found = logit_lens(target, IDS[0].tolist(), positions, tokens)
    assert found.shape == (target.blocks, 3)
    own = target.forward(IDS, KVCache(1, capacity=12))[0].float().log_softmax(-1)
    torch.testing.assert_close(found[-1], own[positions, tokens], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], found[-1], atol=1e-3)


def test_blocks_in_the_middle_are_those_of_transformer_lens(small_target: Make) -> None:
    target = small_target("llama")
    states = Lens(target).states(IDS, [f"resid_post.{k}" for k in range(target.blocks)])
    found = logit_lens(target, IDS[0].tolist(), [4], [9])
    for block, state in enumerate(states.values()):
        scale = state[0, 4].pow(2).mean().add(target.config.rms_norm_eps).rsqrt()
        logits = target.head.weight @ (state[0, 4] * scale * target.final_norm.weight)
        torch.testing.assert_close(found[block, 0], logits.log_softmax(-1)[9], rtol=1e-4, atol=1e-4)


def test_bad_calls_say_what_is_wrong(small_target: Make) -> None:
    target = small_target("llama")
    with pytest.raises(ValueError, match="position 12 is outside the text, which has 12 tokens"):
        logit_lens(target, IDS[0].tolist(), [12], [0])
    with pytest.raises(ValueError, match="2 positions and 1 tokens"):
        logit_lens(target, IDS[0].tolist(), [1, 2], [0])
