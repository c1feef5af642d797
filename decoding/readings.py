"""What a gate may know of the last step's logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Summary(NamedTuple):
    """How sure the target was of the pending token: its logits at the anchor."""

    max_prob: float
    entropy: float
    """In nats."""
    margin: float
    """Gap of the two largest logits."""


def summary(logits: torch.Tensor) -> torch.Tensor:
    """[..., 3] in float32 of logits [..., V]: largest probability, entropy in nats, gap of the two largest logits."""
    logp = logits.float().log_softmax(-1)
    top = logp.topk(2, dim=-1).values
    return torch.stack([top[..., 0].exp(), -(logp.exp() * logp).sum(-1), top[..., 0] - top[..., 1]], dim=-1)
