"""Weights as bytes to be hashed, by which a drafter is known again."""

from __future__ import annotations

import torch


def in_bytes(weights: torch.Tensor) -> bytes:
    """Weights [...] rounded to bfloat16, in which drafters are stored: the same bytes whatever they were loaded as."""
    plain = weights.detach().cpu()
    if plain.is_floating_point():
        plain = plain.to(torch.bfloat16)
    return plain.contiguous().view(torch.uint8).numpy().tobytes()
