"""Rotary positions, as a head's `config.json` asks for them.

Sources: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071.
"""

from __future__ import annotations

from typing import Any

import torch

KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not change as the text grows: what was written stays right."""
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


def frequencies(dim: int, theta: float, scaling: dict[str, Any] | None, longest: int) -> tuple[torch.Tensor, float]:
    """Angles a position [dim / 2], and what cosines and sines are multiplied by.

    `scaling` is a `rope_scaling` (`rope_type` and its numbers); `longest` the head's `max_position_embeddings`.
    """
    if not scaling or scaling["rope_type"] == "default":
        return theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its advice is for who writes a model's config
    try:
        config = LlamaConfig(
            hidden_size=dim, num_attention_heads=1, head_dim=dim, max_position_embeddings=longest or 2048,
            rope_parameters={**scaling, "rope_theta": theta},
        )  # fmt: skip
        with torch.device("cpu"):
            angles, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    finally:
        logging.set_verbosity(level)
    return angles.float(), float(factor)


def table(positions: torch.Tensor, angles: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., 1, dim] of positions [...], in the half-split layout of Llama, float32."""
    angle = positions[..., None].float() * angles.to(positions.device)
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [..., heads, dim] by cos and sin [..., 1, dim]."""
    half = x.shape[-1] // 2
    return x * cos.to(x.dtype) + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin.to(x.dtype)
