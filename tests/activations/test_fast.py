"""The fast forward against the general one, over families, trees, ragged rows and windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from activations import attention
from activations.cache import KVCache
from activations.sites import KINDS
from activations.target import Target

FAST = ("llama", "qwen2", "qwen3", "mistral")
"""Families of the common block."""


def target_of(family: str) -> Target:
    model = FAMILIES[family].make().eval()
    model.set_attn_implementation(FAMILIES[family].implementation)
    return Target(model, None, family, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_only_the_common_block_is_taken(family: str) -> None:
    target = target_of(family)
    target.speed_up()
    assert (target._fast is not None) or family not in FAST


def both(
    target: Target, tokens: torch.Tensor, lengths: list[int], ancestors: torch.Tensor | None
) -> list[torch.Tensor]:
    """Final states and every site, of rows of the given lengths and then one forward of `tokens`, in either way."""
    b, q = tokens.shape
    depths = None if ancestors is None else ancestors.sum(-1) - 1
    fast, found = target._fast, []
    sites = [f"{kind}.*" for kind in KINDS] + ["embed"]
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCABULARY, (b, max(lengths)), generator=generator)
    with target.read(sites) as reader:
        for one in (None, fast):
            target._fast = one
            cache = KVCache(b)
            target.hidden(prompt, cache)
            cache.commit([range(n) for n in lengths])
            states = [target.hidden(tokens, cache, ancestors, depths)]
            states += [reader.states[site] for site in target.sites(sites)]
            found.append(torch.cat([s.reshape(b, q, -1) for s in states], dim=-1))
    target._fast = fast
    return found


@pytest.fixture(scope="module", params=FAST)
def target(request: pytest.FixtureRequest) -> Target:
    made = target_of(request.param)
    made.speed_up()
    assert made._fast is not None
    return made


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_same_states_for_any_tree_in_any_row(target: Target, data: st.DataObject) -> None:
    b = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=b, max_size=b))  # windows are 8
    q = data.draw(st.integers(1, 9))
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=b * q, max_size=b * q))).view(
        b, q
    )
    ancestors = None
    if q > 1 and data.draw(st.booleans()):
        ancestors = torch.eye(q, dtype=torch.bool).repeat(b, 1, 1)
        for row in range(b):
            for i in range(1, q):
                ancestors[row, i] |= ancestors[row, data.draw(st.integers(0, i - 1))]
    general, fast = both(target, tokens, lengths, ancestors)
    assert torch.allclose(general, fast, atol=2e-5, rtol=1e-4)


def test_a_hook_or_an_observer_means_the_general_forward(target: Target) -> None:
    seen: list[int] = []
    tokens = torch.arange(5)[None]
    with target.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1)):
        target.hidden(tokens, KVCache())
    assert seen == [1]
    with attention.attached(attention.OBSERVERS, lambda *_: seen.append(2)):
        target.hidden(tokens, KVCache())
    assert seen == [1] + [2] * target.blocks
    target.hidden(tokens, KVCache())
    assert len(seen) == 1 + target.blocks


def _scaled(block: Any) -> None:
    forward = block.forward
    block.forward = lambda *args, **options: 1.01 * forward(*args, **options)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda block: setattr(block.input_layernorm, "variance_epsilon", 0.5), True),  # read from the module
        (lambda block: setattr(block.self_attn, "scaling", 1.0), True),
        (lambda block: block.mlp.register_parameter("extra", nn.Parameter(torch.ones(1))), False),
        (lambda block: setattr(block.mlp, "act_fn", nn.GELU()), False),
        (_scaled, False),  # looks the same, and is found out by what it gives
    ],
)
def test_blocks_that_do_something_else_are_noticed(change: Callable[[Any], None], taken: bool) -> None:
    target = target_of("llama")
    change(target.layers[1])
    target.speed_up()
    assert (target._fast is not None) == taken
    if taken:
        general, fast = both(target, torch.arange(4)[None], [6], None)
        assert torch.allclose(general, fast, atol=2e-5, rtol=1e-4)
