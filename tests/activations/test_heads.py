"""Induction scores and head ablation, beside TransformerLens and against attention written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from activations.cache import KVCache
from activations.heads import (
    Head,
    HeadMeans,
    ablated,
    attention_from,
    induction_scores,
    previous_token_scores,
    repeated_tokens,
    top_heads,
)
from activations.lens import Lens
from activations.target import Target, TargetError

Make = Callable[..., Target]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_are_those_of_transformer_lens(family: str, small_target: Make) -> None:
    target = small_target(family)
    tokens = repeated_tokens(target, length=10, rows=3)
    assert tokens.shape == (3, 20) and torch.equal(tokens[:, :10], tokens[:, 10:])
    assert not (tokens == 63).any() and all(len(set(row.tolist())) == 10 for row in tokens)
    names = [f"blocks.{k}.attn.hook_pattern" for k in range(target.blocks)]
    with torch.no_grad():
        _, cache = Lens(target).bridge.run_with_cache(tokens, names_filter=names)
    scores = induction_scores(target, tokens)
    for block, name in enumerate(names):
        pattern = cache[name]  # [rows, heads, query, key]
        expected = torch.stack([pattern[:, :, 10 + i, i + 1] for i in range(9)]).mean((0, 1))
        torch.testing.assert_close(scores[block], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ablation_is_that_of_transformer_lens(family: str, small_target: Make) -> None:
    target = small_target(family)
    tokens = torch.randint(0, 63, (1, 12), generator=torch.Generator().manual_seed(5))
    heads = [Head(0, 3), Head(2, 1), Head(2, 2)]

    def zero(z: torch.Tensor, index: list[int]) -> torch.Tensor:
        """Where heads stand apart [1, 12, heads, 8] or side by side [1, 12, heads * 8]."""
        apart = z.clone().reshape(1, 12, 4, 8)
        apart[:, :, index] = 0
        return apart.reshape(z.shape)

    hooks = [
        ("blocks.0.attn.hook_z", lambda z, hook: zero(z, [3])),
        ("blocks.2.attn.hook_z", lambda z, hook: zero(z, [1, 2])),
    ]
    with torch.no_grad():
        expected = Lens(target).bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    with ablated(target, heads):
        found = target.forward(tokens, KVCache(1, capacity=12))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, target.forward(tokens, KVCache(1, capacity=12)), atol=1e-3)


def test_means_and_no_heads(small_target: Make) -> None:
    target = small_target("llama")
    tokens = torch.randint(0, 63, (2, 12), generator=torch.Generator().manual_seed(5))

    def hidden(where: torch.Tensor = tokens) -> torch.Tensor:
        return target.hidden(where, KVCache(len(where), capacity=12))

    before, means = hidden(), HeadMeans()
    with means.watching():
        assert torch.equal(hidden(), before)
        hidden(tokens[:1])
    with ablated(target, []):
        assert torch.equal(hidden(), before)
    projection = target.layers[1].self_attn.o_proj
    given: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    hidden()
    hidden(tokens[:1])
    with ablated(target, [Head(1, 2)], means):
        hidden()
    handle.remove()
    mean = torch.cat([g.reshape(-1, 4, 8) for g in given[:2]]).double().mean(0)
    changed, was = given[2].unflatten(-1, (4, 8)), given[0].unflatten(-1, (4, 8))
    torch.testing.assert_close(changed[:, :, 2].double(), mean[2].expand(2, 12, 8), rtol=1e-5, atol=1e-7)
    assert torch.equal(changed[:, :, [0, 1, 3]], was[:, :, [0, 1, 3]])
    assert torch.equal(hidden(), before)


def test_top_heads_and_refusals(small_target: Make) -> None:
    scores = torch.tensor([[0.1, 0.9], [0.5, 0.9]])
    assert [str(head) for head in top_heads(scores, 3)] == ["0.1", "1.1", "1.0"]
    target = small_target("llama")
    with pytest.raises(ValueError, match=r"no head 4\.0: it has 4 blocks of 4 heads"), ablated(target, [Head(4, 0)]):
        pass
    with pytest.raises(TargetError, match="neither seen nor ablated"):
        induction_scores(small_target("llama", "eager"), repeated_tokens(target))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_from_positions_is_that_of_transformer_lens(family: str, small_target: Make) -> None:
    target = small_target(family)
    tokens = torch.randint(0, 63, (1, 12), generator=torch.Generator().manual_seed(5))
    names = [f"blocks.{k}.attn.hook_pattern" for k in range(target.blocks)]
    with torch.no_grad():
        _, cache = Lens(target).bridge.run_with_cache(tokens, names_filter=names)
    found = attention_from(target, tokens[0].tolist(), [3, 11])
    expected = torch.stack([cache[name][0] for name in names])  # [blocks, heads, query, key]
    torch.testing.assert_close(found, expected[:, :, [3, 11]].permute(2, 0, 1, 3), rtol=1e-4, atol=1e-6)
    assert not found[0, :, :, 4:].any()  # nobody looks ahead
    before = torch.stack([expected[:, :, q, q - 1] for q in range(1, 12)]).mean(0)
    torch.testing.assert_close(previous_token_scores(target, tokens), before, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="position 12 is outside the text, which has 12 tokens"):
        attention_from(target, tokens[0].tolist(), [12])
