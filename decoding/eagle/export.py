"""Heads as files that other software reads: SafeAILab's EAGLE, and speculators (vLLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from decoding.eagle.head import EagleHead, HeadConfig, HeadError, write

if TYPE_CHECKING:
    from pathlib import Path

    from activations.target import Target

Format = Literal["safeailab", "speculators"]
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def export_head(
    head: EagleHead, folder: Path, form: Format, target: Target, verifier: str = "", steps: int = 5, **extra: object
) -> None:
    """Write a head of the target's into a new folder.

    `verifier` is what the target is called where the files will be used (by default its name here), `steps` how many
    tokens speculators proposes, `extra` more keys of config.json. Raises HeadError for a head that the format cannot
    hold: what another reader would silently take for another head is not written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise HeadError(f"{folder} is not empty: choose a new folder")
    ids = _layer_ids(head.config, target.blocks)
    reasons = obstacles(head.config, form, ids, target.blocks)
    if reasons:
        other = (
            " (speculators can)" if form == "safeailab" and not obstacles(head.config, "speculators", ids, 0) else ""
        )
        raise HeadError(f"the {form} format cannot hold this head, which {' and '.join(reasons)}{other}")
    if form == "safeailab":
        write(folder, _state(head), {**_safeailab(head.config, target), **extra})
    else:
        state = {k.replace("midlayer.", "layers.0."): v for k, v in _state(head).items()}
        for block in range(head.config.num_hidden_layers):
            _fill_biases(state, head.config, f"layers.{block}.")
        write(folder, state, {**_speculators(head.config, target, ids, verifier or target.name, steps), **extra})


def obstacles(config: HeadConfig, form: Format, ids: list[int], blocks: int) -> list[str]:
    """What a format has no place for."""
    c = config
    scaled = (c.rope_scaling or {}).get("rope_type")
    if form == "speculators":
        found = {
            "is an EAGLE-1 or -2 head": c.eagle == 1,
            "reads the target's last state only": c.eagle == 3 and not c.features,
            "has no output matrix of its own": not c.own_head,
            "has a bias outside its blocks": bool(set(c.biases) - {*ATTENTION, *MLP}),
            "has biases in its MLP and normed queries": c.qk_norm and bool(set(c.biases) & set(MLP)),
        }
    else:
        usual = [2, blocks // 2, blocks - 3]
        found = {
            "adds its attention to the normed state (norm_before_residual)": c.norm_before_residual,
            "norms what fc reads (norm_before_fc or fc_norm)": c.norm_before_fc or c.fc_norm,
            "feeds its normed output on (norm_output)": c.norm_output,
            "norms its queries and keys": c.qk_norm,
            "sees a window of rows": c.window > 0,
            f"has {c.num_hidden_layers} blocks": c.num_hidden_layers > 1,
            f"reads the layers {ids} and not the usual {usual}": c.eagle == 3 and ids != usual,
            "has no output matrix of its own": c.eagle == 3 and not c.own_head,
            "has one": c.eagle == 1 and c.own_head,
            "norms its output or its block's input": c.eagle == 1 and (c.last_norm or c.first_norm),
            f"has rotary positions of type {scaled}": scaled not in (None, "default", "linear"),
            "has biases": bool(set(c.biases) - ({"fc"} if c.eagle == 1 else set())),
        }
    return [what for what, holds in found.items() if holds]


def _layer_ids(config: HeadConfig, blocks: int) -> list[int]:
    """k: what enters block k."""
    if config.layer_ids or not config.features:
        return list(config.layer_ids)
    return [int(site.removeprefix("resid_pre.")) for site in config.sites(blocks)]


def _state(head: EagleHead) -> dict[str, torch.Tensor]:
    maps = () if head.config.own_head else ("d2t", "t2d")
    return {k: v for k, v in head.state_dict().items() if k not in maps}


def _sizes(config: HeadConfig, target: Target) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.per_head,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings or target.max_length,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _safeailab(config: HeadConfig, target: Target) -> dict[str, Any]:
    out = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_sizes(config, target)}
    out["rope_theta"] = config.rope_theta
    if config.rope_scaling:
        out["rope_scaling"] = {"type": config.rope_scaling["rope_type"], "factor": config.rope_scaling["factor"]}
    if config.eagle == 1:
        return out | {"bias": "fc" in config.biases}
    return out | {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_width}


def _speculators(config: HeadConfig, target: Target, ids: list[int], verifier: str, steps: int) -> dict[str, Any]:
    rope = config.rope_scaling or {"rope_type": "default"}
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **_sizes(config, target),
        "attention_bias": bool(set(config.biases) & set(ATTENTION)),
        "mlp_bias": bool(set(config.biases) & set(MLP)),
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        **({"rope_scaling": config.rope_scaling} if config.rope_scaling else {}),
    }
    if config.window:
        layer |= {"sliding_window": config.window, "use_sliding_window": True}
        layer["layer_types"] = ["sliding_attention"] * config.num_hidden_layers
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width if config.target_width != config.hidden_size else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_aux_hidden_state_layer_ids_meaning": "k: the state that enters block k, hidden_states[k]",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [target.fingerprint.architecture]},
        },
    }


def _fill_biases(state: dict[str, torch.Tensor], config: HeadConfig, block: str) -> None:
    """The format has biases at all of a block's maps of a kind, or at none: the others are zero."""
    for part, names in (("self_attn", ATTENTION), ("mlp", MLP)):
        if set(config.biases) & set(names):
            for name in names:
                weight = state[f"{block}{part}.{name}.weight"]
                state.setdefault(f"{block}{part}.{name}.bias", weight.new_zeros(len(weight)))
