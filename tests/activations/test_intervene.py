"""Writing at sites: exact where nothing is changed, and what is changed goes on as if the target had computed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, family_target
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from activations.cache import KVCache
from activations.intervene import SiteWriter
from activations.lens import readable_sites
from activations.sites import KINDS
from activations.target import Target

Make = Callable[..., Target]
NAMES = ["embed", *(f"{kind}.{block}" for kind in KINDS for block in (0, 2, 3))]
TOKENS = torch.randint(0, 63, (2, 14), generator=torch.Generator().manual_seed(3))
PLACE = 9


def run(target: Target) -> torch.Tensor:
    return target.hidden(TOKENS, KVCache(2, capacity=14))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_value_changes_nothing_and_another_one_nothing_before_it(
    family: str, name: str, small_target: Make
) -> None:
    target = small_target(family)
    before = run(target)
    writer = SiteWriter(target, name)
    with writer.writing(torch.clone):
        assert torch.equal(run(target), before)

    def other(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[1, PLACE] += 1
        return state

    with writer.writing(other), target.read([name]) as reader:
        changed = run(target)
    with target.read([name]) as plain:
        assert torch.equal(run(target), before)
    (read,), (was,) = reader.states.values(), plain.states.values()
    assert torch.equal(read[1, PLACE], was[1, PLACE] + 1)
    assert torch.equal(changed[0], before[0]) and torch.equal(changed[1, :PLACE], before[1, :PLACE])
    assert not torch.equal(changed[1, PLACE], before[1, PLACE])
    attends = not name.endswith(".3") or name == "resid_pre.3"  # behind the last attention positions are apart
    assert torch.equal(changed[1, PLACE + 1 :], before[1, PLACE + 1 :]) != attends


@pytest.mark.parametrize("kind", ["resid_mid", "attn_out", "mlp_out", "resid_post", "resid_pre"])
def test_what_is_written_is_what_the_block_goes_on_from(kind: str, small_target: Make) -> None:
    target = small_target("llama")
    writer = SiteWriter(target, f"{kind}.1")
    names = [*(f"{k}.1" for k in KINDS), "resid_pre.2"]
    with writer.writing(lambda state: state.roll(1, -1)), target.read(names) as reader:
        run(target)
    at = {site.kind if site.block == 1 else "later": state for site, state in reader.states.items()}
    assert torch.equal(at["resid_mid"], at["resid_pre"] + at["attn_out"]) == (kind != "resid_mid")
    assert torch.equal(at["resid_post"], at["resid_mid"] + at["mlp_out"]) == (kind != "resid_post")
    assert torch.equal(at["resid_post"], at["later"])


def test_gpt2_is_written_too() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, eos_token_id=None)
    target = Target(GPT2LMHeadModel(config), None, "small-gpt2", None)  # type: ignore[arg-type]
    for name in ("embed", "resid_pre.1", "attn_out.1", "resid_mid.1", "mlp_out.1", "resid_post.1"):
        before = run(target)
        writer = SiteWriter(target, name)
        with writer.writing(torch.clone):
            assert torch.equal(run(target), before)
        with writer.writing(lambda state: state * 2):
            assert not torch.equal(run(target), before)


def test_a_scaled_branch_is_refused() -> None:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, residual_multiplier=0.5, initializer_range=0.12,
    )  # fmt: skip
    target = Target(GraniteForCausalLM(config), None, "small-granite", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attn_out\.1 of small-granite cannot be written \(its block multiplies it"):
        SiteWriter(target, "attn_out.1")
    SiteWriter(target, "resid_mid.1")


def test_a_block_that_adds_to_a_copy_is_refused(small_target: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target("llama")
    norm = target.layers[1].post_attention_layernorm
    original = target.layers[1].forward

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        layer = target.layers[1]
        out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        mid = hidden_states + out
        return mid + layer.mlp(norm(mid.clone()))

    before = run(target)
    monkeypatch.setattr(target.layers[1], "forward", forward)
    assert torch.equal(run(target), before) and original is not forward
    with pytest.raises(ValueError, match=r"resid_mid\.1 of small-llama cannot be written \(its block keeps a copy"):
        SiteWriter(target, "resid_mid.1")


def test_edits_of_another_shape_and_unknown_sites(small_target: Make) -> None:
    target = small_target("llama")
    writer = SiteWriter(target, "resid_post.1")
    with pytest.raises(ValueError, match="an edit keeps shape and dtype"), writer.writing(lambda state: state[:1]):
        run(target)
    with pytest.raises(ValueError, match="blocks 0 to 3"):
        SiteWriter(target, "resid_post.9")
    before = run(target)  # no hook was left behind
    assert torch.equal(run(target), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_written_bit_for_bit_or_refused(name: str) -> None:
    target = family_target(name)
    scaled = FAMILIES[name].scale != 1.0
    tokens = TOKENS % 97
    plain = target.hidden(tokens, KVCache(2, capacity=14))
    for site in readable_sites(target):
        if scaled and site.kind in ("attn_out", "mlp_out"):
            with pytest.raises(ValueError, match="its block multiplies it"):
                SiteWriter(target, site)
            continue
        writer = SiteWriter(target, site)
        with writer.writing(torch.clone):
            assert torch.equal(target.hidden(tokens, KVCache(2, capacity=14)), plain), site
        with writer.writing(lambda state: state.flip(0)):
            assert not torch.equal(target.hidden(tokens, KVCache(2, capacity=14)), plain), site
