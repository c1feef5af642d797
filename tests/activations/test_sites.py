"""Sites: bit for bit the states that the blocks compute, and blocks whose states have no known place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from activations.cache import KVCache
from activations.sites import KINDS, SiteReader, parse_sites
from activations.target import Target, TargetError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


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
    assert torch.equal(target.backbone.norm(last), final) and not torch.equal(last, final)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=0.5)),
    ],
    ids=["norms behind the branches", "parallel branches", "scaled branches"],
)
def test_blocks_that_are_built_otherwise_are_refused_and_no_hook_stays(model: Callable[[], Any]) -> None:
    made = model()
    layers: nn.ModuleList = made.model.layers
    embed = made.get_input_embeddings()
    for kind in ("attn_out", "resid_mid", "mlp_out"):
        with pytest.raises(ValueError, match=f"{kind} of .*read resid_pre, resid_post or embed"):
            SiteReader(embed, layers, parse_sites(["embed", "resid_post.*", f"{kind}.1"], 2))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
    SiteReader(embed, layers, parse_sites(["embed", "resid_pre.*", "resid_post.*"], 2)).close()


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(TargetError, match=r"small-gpt2 .*another name than `layers`"):
        Target(model, None, "small-gpt2", None)  # type: ignore[arg-type]


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
