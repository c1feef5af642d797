"""Sites: their names, and that they are bit for bit the states that the blocks compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from activations.cache import KVCache
from activations.sites import KINDS, parse_sites
from activations.target import Target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_states_are_those_that_the_branches_add_up_to(family: str, small_target: Callable[..., Target]) -> None:
    target = small_target(family)
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    names = [f"{kind}.*" for kind in KINDS]
    with target.read(["embed", *names]) as reader:
        final = target.hidden(tokens, KVCache(1, capacity=32))
    at = {str(site): state for site, state in reader.states.items()}
    assert torch.equal(at["embed"], at["resid_pre.0"])
    for k in range(target.blocks):
        assert torch.equal(at[f"resid_mid.{k}"], at[f"resid_pre.{k}"] + at[f"attn_out.{k}"])
        assert torch.equal(at[f"resid_post.{k}"], at[f"resid_mid.{k}"] + at[f"mlp_out.{k}"])
        if k:
            assert torch.equal(at[f"resid_pre.{k}"], at[f"resid_post.{k - 1}"])
    last = at[f"resid_post.{target.blocks - 1}"]
    assert torch.equal(target.final_norm(last), final) and not torch.equal(last, final)


@pytest.mark.parametrize(
    ("names", "says"),
    [(["resid_mid"], "unknown site"), (["layer.3"], "unknown site"), (["resid_mid.9"], "blocks 0 to 3")],
)
def test_unknown_sites_are_named(names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_sites(names, 4)
    assert [str(s) for s in parse_sites(["resid_mid.*", "resid_mid.1"], 3)] == [f"resid_mid.{k}" for k in range(3)]


def test_eagle_reads_three_different_states() -> None:
    from activations.sites import eagle_sites

    assert eagle_sites(30) == ["resid_pre.2", "resid_pre.15", "resid_pre.27"]
    for blocks in range(4, 40):
        assert len(set(eagle_sites(blocks))) == 3
    with pytest.raises(ValueError, match="has 3 blocks"):
        eagle_sites(3)
