"""Small random models of many families, and where their sites are by their own source: the reference by names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from transformers import PreTrainedModel

from activations.target import Target, choose_attention

VOCABULARY, WIDTH, BLOCKS, WINDOW = 97, 32, 3, 8
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "initializer_range": 0.15,
}  # fmt: skip
MLP = {**PLAIN, "intermediate_size": 48}
GROUPED = {**MLP, "num_key_value_heads": 2}
SLIDING = {**GROUPED, "head_dim": 8, "sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEW_FALCON = {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model and, by module names, what a reader must give."""

    make: Callable[[], PreTrainedModel]
    attention: str = "self_attn"
    """The module whose output is added as the attention branch."""
    mlp: str = "mlp"
    mid: str | None = "post_attention_layernorm"
    """The module that resid_mid enters; None in a parallel block."""
    norm: str = "norm"
    scale: float = 1.0
    """What both branches are multiplied by."""
    implementation: str = "folded"
    """The attention that `choose_attention` must choose."""


FAMILIES = {
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED))),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8))),
    "qwen3-moe": Family(
        lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8, mlp_only_layers=[1]))
    ),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**SLIDING))),
    "mixtral": Family(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2))
    ),
    "gemma2": Family(
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SLIDING, query_pre_attn_scalar=8)),
        "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm", implementation="eager",
    ),
    "gemma3": Family(
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **SLIDING, final_logit_softcapping=5.0,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
        ),
        "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm",
    ),
    "phi3": Family(lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED))),
    "olmo2": Family(
        lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
        "post_attention_layernorm", "post_feedforward_layernorm", "mlp",
    ),
    "granite": Family(
        lambda: hf.GraniteForCausalLM(
            hf.GraniteConfig(
                **GROUPED, residual_multiplier=0.22, logits_scaling=7.0, embedding_multiplier=12.0,
                attention_multiplier=0.3,
            )
        ),
        scale=0.22,
    ),
    "smollm3": Family(lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED))),
    "gpt-neox": Family(
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**MLP)), "attention", mid=None, norm="final_layer_norm"
    ),
    "gpt-neox sequential": Family(
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**MLP, use_parallel_residual=False)),
        "attention", norm="final_layer_norm",
    ),
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=BLOCKS, n_head=4, n_positions=256, initializer_range=0.15,
                bos_token_id=None, eos_token_id=None,
            )
        ),
        "attn", mid="ln_2", norm="ln_f",
    ),
    "falcon new": Family(
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**NEW_FALCON)),
        "self_attention", mid=None, norm="ln_f", implementation="sdpa",
    ),
    "falcon new, one norm": Family(
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**NEW_FALCON, num_ln_in_parallel_attn=1)),
        "self_attention", mid=None, norm="ln_f", implementation="sdpa",
    ),
    "falcon old": Family(
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**PLAIN, multi_query=True)),
        "self_attention", mid=None, norm="ln_f", implementation="sdpa",
    ),
    "falcon old sequential": Family(
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**PLAIN, multi_query=False, parallel_attn=False)),
        "self_attention", norm="ln_f", implementation="sdpa",
    ),
    "stablelm": Family(
        lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED)), implementation="sdpa"
    ),
    "stablelm parallel": Family(
        lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED, use_parallel_residual=True)),
        mid=None, implementation="sdpa",
    ),
    "cohere": Family(lambda: hf.CohereForCausalLM(hf.CohereConfig(**GROUPED, logit_scale=0.3)), mid=None),
    "deepseek-v3": Family(
        lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**MLP, **LATENT, num_key_value_heads=4))
    ),
    "hyperclovax": Family(  # multiplies by the number of the same name by which Granite divides
        lambda: hf.HyperCLOVAXForCausalLM(
            hf.HyperCLOVAXConfig(**GROUPED, logits_scaling=7.0, residual_multiplier=0.3, use_post_norm=True)
        ),
        "post_norm1", "post_norm2", scale=0.3,
    ),
}  # fmt: skip


@functools.cache
def family_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with norms that are not all ones, under the attention that its family gets."""
    torch.manual_seed(0)
    model = FAMILIES[name].make().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model = model.to(dtype)
    choose_attention(model)
    return model


def family_target(name: str, dtype: torch.dtype = torch.float32) -> Target:
    return Target(family_model(name, dtype), None, f"small {name}", None)  # type: ignore[arg-type]
