"""Reading a block by its arithmetic: what is refused, and that the model is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import BLOCKS, family_model
from torch import nn
from transformers import BertConfig, BertLMHeadModel, MiniMaxConfig, MiniMaxForCausalLM

from activations.cache import KVCache
from activations.sites import SiteReader
from activations.structure import find_blocks
from activations.target import Target, TargetError

ATTENDING = {"position_embeddings", "attention_mask", "position_ids"}


def llama(forward: Callable[..., torch.Tensor] | None = None) -> Any:
    """A small Llama of its own, whose blocks compute something else; the arguments are (block, state, attend)."""
    model = copy.deepcopy(family_model("llama"))
    for block in model.model.layers if forward else ():

        def own(block: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            def attend(state: torch.Tensor) -> torch.Tensor:
                return block.self_attn(state, **{k: v for k, v in kwargs.items() if k in ATTENDING})[0]

            assert forward is not None
            return forward(block, hidden_states, attend)

        block.forward = MethodType(own, block)
    return model


def target_of(model: Any) -> Target:
    return Target(model, None, "small", None)  # type: ignore[arg-type]


def mlp_first(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    mid = state + block.mlp(block.post_attention_layernorm(state))
    return mid + attend(block.input_layernorm(mid))


def hidden_mid(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    mid = state + attend(block.input_layernorm(state))
    return mid + block.mlp(F.rms_norm(mid, mid.shape[-1:]))


def two_mlps(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    attend(state)
    return state + block.mlp(block.post_attention_layernorm(state)) + block.input_layernorm(state)


def scaled_residual(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    mid = state * 0.5 + attend(block.input_layernorm(state))
    return mid + block.mlp(block.post_attention_layernorm(mid))


def three_branches(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    mid = state + attend(block.input_layernorm(state))
    return mid + block.mlp(block.post_attention_layernorm(mid)) + state.abs()


def called_twice(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The output of the latest call, which a reader would keep, is not the one that is added."""
    after = mid_and_mlp(block, state, attend)
    block.mlp(state)
    return after


def not_finite(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    return mid_and_mlp(block, state, attend) + float("inf")


def mid_and_mlp(block: Any, state: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    mid = state + attend(block.input_layernorm(state))
    return mid + block.mlp(block.post_attention_layernorm(mid))


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (mlp_first, "adds first, the output of mlp, is no attention"),
        (hidden_mid, "the state between its two branches enters none of its modules"),
        (two_mlps, "neither branch mixes positions"),
        (scaled_residual, "is not its input with the outputs of two of its modules added"),
        (three_branches, "is not its input with the outputs of two of its modules added"),
        (called_twice, "is not its input with the outputs of two of its modules added"),
        (not_finite, "its states are not finite"),
    ],
)
def test_a_block_that_cannot_be_read_is_refused_by_name(forward: Callable[..., torch.Tensor], says: str) -> None:
    target = target_of(llama(forward))
    before = attached(target.model)
    with pytest.raises(TargetError, match=rf"small \(LlamaForCausalLM\) cannot be read: LlamaDecoderLayer: .*{says}"):
        target.check_structure()
    for kind in ("attn_out", "resid_mid", "mlp_out"):
        with pytest.raises(ValueError, match=rf"small has no {kind}.1: {kind} of LlamaDecoderLayer .*read resid_pre"):
            target.read(["embed", "resid_post.*", f"{kind}.1"])
    assert attached(target.model) == before
    with target.read(["embed", "resid_pre.*", "resid_post.*"]) as reader:
        target.hidden(torch.arange(5)[None], KVCache(1))
    assert len(reader.states) == 2 * BLOCKS + 1


def test_a_replaced_forward_alone_changes_nothing() -> None:
    """The refusals above are about what the blocks compute."""
    target_of(llama(mid_and_mlp)).check_structure()


def test_a_family_with_scaled_residuals_is_refused() -> None:
    config = MiniMaxConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2,
        bos_token_id=None, eos_token_id=None, mlp_alpha_factor=2.0, full_attn_alpha_factor=2.0,
    )  # fmt: skip
    with pytest.raises(TargetError, match=r"MiniMaxForCausalLM.*MiniMaxDecoderLayer"):
        target_of(MiniMaxForCausalLM(config)).check_structure()


def test_a_parallel_block_has_no_middle() -> None:
    target = target_of(family_model("cohere"))
    target.check_structure()
    with pytest.raises(ValueError, match=r"small has no resid_mid.0: CohereDecoderLayer .*parallel"):
        target.sites(["resid_post.0", "resid_mid.*"])


def attached(model: nn.Module) -> list[Any]:
    """What hangs on each module: hooks, and a forward that is not its class's."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).get("forward")) for m in model.modules()]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon new", "deepseek-v3"])
def test_one_block_of_each_kind_runs_and_the_model_is_left_as_it_was(family: str) -> None:
    model = family_model(family)
    target, before = target_of(model), attached(model)
    ran: list[int] = []
    handles = [
        layer.get_submodule("mlp").register_forward_hook(lambda *_, k=k: ran.append(k))
        for k, layer in enumerate(target.layers)
    ]
    layouts = target.structure.layouts
    for handle in handles:
        handle.remove()
    assert ran == ([0, 1] if family == "deepseek-v3" else [0])  # its first block has no experts
    assert len(layouts) == BLOCKS and attached(model) == before


def test_a_parallel_block_of_another_kind_behind_the_first_is_read_too() -> None:
    """What enters it has passed attention: its rows are made equal where they are compared."""
    model = copy.deepcopy(family_model("cohere"))
    model.model.layers[1].kind = "other"
    target = target_of(model)
    first, second, third = target.structure.layouts
    assert first is third and first is not second
    assert first.places == second.places and second.parallel
    target.check_structure()


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    model = llama()
    before = attached(model)
    model.lm_head.weight = nn.Parameter(torch.zeros(97, 31), requires_grad=False)
    with pytest.raises(RuntimeError):
        _ = target_of(model).structure
    assert attached(model) == before


def test_logits_that_are_more_than_the_output_matrix_are_refused() -> None:
    model = llama()
    plain = model.forward
    model.forward = lambda **kwargs: SimpleNamespace(logits=plain(**kwargs).logits + 1)
    target = target_of(model)
    with pytest.raises(TargetError, match=r"small \(LlamaForCausalLM\).*logits"):
        target.check_structure()
    with pytest.raises(TargetError, match="logits of small"):
        target.forward(torch.arange(5)[None], KVCache(1))


def test_a_model_without_a_final_norm() -> None:
    model = llama()
    model.model.norm = nn.Identity()
    target = target_of(model)
    target.check_structure()
    assert isinstance(target.final_norm, nn.Identity)


def test_blocks_are_found_under_any_name_and_only_where_there_is_one_list() -> None:
    decoder = nn.Module()
    decoder.stack = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    decoder.gates = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert find_blocks(decoder, 3) is decoder.stack
    assert find_blocks(decoder, 4) is None
    decoder.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert find_blocks(decoder, 3) is None
    bert = BertLMHeadModel(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    with pytest.raises(TargetError, match=r"small is a BertLMHeadModel, whose blocks cannot be found: .* decoder-only"):
        target_of(bert)


def test_a_draft_behind_the_last_learned_position() -> None:
    """The nodes that could be kept are right; those behind the end of the text must not stop the pass."""
    target = target_of(family_model("gpt2"))
    ids = torch.arange(target.max_length)[None] % 97
    cache = KVCache(1)
    target.hidden(ids[:, :-2], cache)
    cache.commit([range(target.max_length - 2)])
    found = target.forward(torch.cat([ids[:, -2:], ids[:, :3]], 1), cache)
    with torch.no_grad():
        own = target.model(ids, use_cache=False).logits
    assert torch.allclose(found[:, :2], own[:, -2:], atol=1e-5)


def test_states_come_to_the_device_that_was_asked_for() -> None:
    target = target_of(family_model("llama"))
    sites = target.sites(["embed", "resid_mid.1"])
    layouts = target.structure.layouts
    with SiteReader(target.embed, target.layers, sites, layouts, torch.device("meta")) as reader:
        target.hidden(torch.arange(5)[None], KVCache(1))
    assert {state.device.type for state in reader.states.values()} == {"meta"}
