"""The EAGLE-3 head: one decoder block that drafts from the target's features.

Row i pairs the feature of token i with the embedding of token i+1 and predicts token i+2; its RoPE position is i.
A feature is either the concatenation of three target states, which `fc` maps to the head's width, or the head's
own output at the row before (pre-norm). Architecture and checkpoint format: EAGLE-3 (arXiv 2503.01840) and the
published SafeAILab checkpoints.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

AGAIN = "train the head again with `switchsd train eagle`, or download it again"


class HeadError(Exception):
    """A head that cannot be loaded or does not fit its target. The message says what to do."""


class ChoiceError(HeadError):
    """A head that was named and is not there, or one of another target."""


@dataclass(frozen=True)
class HeadConfig:
    """The keys of a published EAGLE-3 `config.json` that the head needs."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    draft_vocab_size: int
    head_dim: int = 0
    """0: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    target_hidden_size: int = 0
    """Width of the target's states; 0: the head's own width."""

    @property
    def per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def feature_width(self) -> int:
        return 3 * (self.target_hidden_size or self.hidden_size)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> HeadConfig:
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in raw.items() if k in known and v is not None}
        rope = raw.get("rope_parameters") or {}
        if "rope_theta" not in values and "rope_theta" in rope:
            values["rope_theta"] = rope["rope_theta"]
        for name, value in values.items():
            if not isinstance(value, (int, float)):
                raise HeadError(f"config.json of an EAGLE-3 head has {name} {value!r}, which is no number: {AGAIN}")
        try:
            return cls(**values)
        except TypeError as error:
            raise HeadError(f"config.json lacks a key of an EAGLE-3 head: {error}") from error


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(positions: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., 1, dim] of positions [...], in the half-split layout of Llama."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None].float() * frequency
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to x [..., heads, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.per_head
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Block(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.hidden_norm, self.input_layernorm = nn.RMSNorm(*norm), nn.RMSNorm(*norm)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(*norm)
        self.mlp = _Mlp(config)


class EagleHead(nn.Module):
    """Parameters under the published names; `project` and `finish` are the parts that training composes."""

    d2t: torch.Tensor
    """[draft vocabulary]: target id = draft id + d2t[draft id]."""
    t2d: torch.Tensor
    """[vocabulary] bool: the target ids that the draft vocabulary has."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.midlayer = _Block(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def draft_tokens(self) -> torch.Tensor:
        """Target ids [draft vocabulary] of the draft ids."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_vocabulary(self, tokens: torch.Tensor) -> None:
        """Draft id k stands for target id tokens[k] (increasing)."""
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    def project(
        self, hidden: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [..., H, D] and keys [..., Hkv, D], and values, of rows [..., width]."""
        layer, dim = self.midlayer, self.config.per_head
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], dim=-1)
        attn = layer.self_attn
        q, k, v = (linear(x).unflatten(-1, (-1, dim)) for linear in (attn.q_proj, attn.k_proj, attn.v_proj))
        cos, sin = rotary(positions, dim, self.config.rope_theta)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The block's output [..., width] (the next row's feature) from its input and attention result."""
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(attended)
        mlp, x = layer.mlp, layer.post_attention_layernorm(hidden)
        return hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary."""
        logits: torch.Tensor = self.lm_head(self.norm(output))
        return logits

    # -- files --------------------------------------------------------------------------------------

    def save(self, folder: Path, **extra: object) -> None:
        """Write config.json and model.safetensors in the published layout, both or, on a full disk, neither."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            k: v.to(torch.bfloat16).contiguous() if v.is_floating_point() else v for k, v in self.state_dict().items()
        }
        save_file(state, folder / "model.safetensors.tmp")
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        values = asdict(self.config)
        values["head_dim"] = self.config.per_head
        values["target_hidden_size"] = self.config.feature_width // 3
        (folder / "config.json.tmp").write_text(json.dumps({**config, **values, **extra}, indent=2) + "\n")
        for name in ("model.safetensors", "config.json"):
            os.replace(folder / f"{name}.tmp", folder / name)


def load_head(folder: Path, target_vocab: int) -> EagleHead:
    """Load a SafeAILab-format EAGLE-3 checkpoint (safetensors, or `pytorch_model.bin` read as weights only)."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ChoiceError(f"{folder} holds no EAGLE-3 head: config.json is missing: give the folder of one")
    try:
        raw = json.loads(config_file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise HeadError(f"{config_file} is damaged ({error}): {AGAIN}") from error
    state = _tensors(folder)
    state = {k.removeprefix("model.").replace("layers.0.", "midlayer."): v for k, v in state.items()}
    state.pop("embed_tokens.weight", None)  # the target's own embedding is used
    missing = [k for k in ("fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight") if k not in state]
    if missing:
        raise HeadError(f"{folder} is not an EAGLE-3 head: {', '.join(missing)} missing (EAGLE-1/2 is not supported)")
    raw.setdefault("vocab_size", target_vocab)
    raw["draft_vocab_size"] = state["lm_head.weight"].shape[0]
    raw["target_hidden_size"] = state["fc.weight"].shape[1] // 3
    config = HeadConfig.from_dict(raw)
    if config.vocab_size != target_vocab:
        raise HeadError(
            f"the head in {folder} is for a vocabulary of {config.vocab_size}, the target has {target_vocab}: "
            "use the head that was trained for this target"
        )
    if "d2t" not in state:
        if config.draft_vocab_size != config.vocab_size:
            raise HeadError(f"{folder} has a draft vocabulary of {config.draft_vocab_size} but no d2t tensor")
        state["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    tokens = torch.arange(config.draft_vocab_size) + state["d2t"]
    if tokens.min() < 0 or tokens.max() >= target_vocab or len(tokens.unique()) != len(tokens):
        raise HeadError(f"the d2t tensor in {folder} does not map into the target's vocabulary of {target_vocab}")
    state.pop("t2d", None)
    try:
        head = EagleHead(config)
        result = head.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        told = " ".join(str(error).split())[:200]
        raise HeadError(f"the tensors in {folder} do not fit its config.json ({told}): {AGAIN}") from error
    if set(result.missing_keys) - {"t2d"} or result.unexpected_keys:
        raise HeadError(
            f"the tensors in {folder} do not make an EAGLE-3 head: missing {result.missing_keys}, "
            f"not understood {result.unexpected_keys}"
        )
    head.set_vocabulary(tokens)
    return head.eval().requires_grad_(False)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    try:
        if files:
            return {k: v for file in files for k, v in load_file(file).items()}
        binary = folder / "pytorch_model.bin"
        if binary.is_file():
            state: dict[str, torch.Tensor] = torch.load(binary, map_location="cpu", weights_only=True)
            return state
    except Exception as error:
        raise HeadError(f"cannot read the weights in {folder} ({error}): {AGAIN}") from error
    raise HeadError(f"{folder} has no model.safetensors or pytorch_model.bin: {AGAIN}")
