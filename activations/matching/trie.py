"""Candidates of a batch merged into draft trees on their device, in plain torch."""

from __future__ import annotations

import torch

UNUSED = -2
"""Parent of a node that is not there."""


def merge(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates int32 [B, W, D], best first, -1 = none, merged by equal prefix: tokens and parents int32 [B, W * D].

    The first candidate's chain comes first; then the others side by side, one token of each a round, as far as
    they are new. Parents precede children, -1 is the pending token and unused nodes come last (token -1, parent
    -2), so that the first n nodes are what a budget of n would have kept. Nothing waits for the device.
    """
    b, w, d = tokens.shape
    equal = (tokens[:, :, None] == tokens[:, None]).to(torch.int32).cumprod(dim=3)  # [B, W, W, D] up to here
    owner = equal.argmax(dim=2)  # [B, W, D] the first candidate with this prefix
    candidate = torch.arange(w, device=tokens.device)
    new = (owner == candidate[:, None]) & (tokens >= 0)
    # a node's number is how many new ones come before it: the first chain, then level by level
    rest = new[:, 1:].transpose(1, 2).reshape(b, -1)
    count = torch.cat([new[:, 0], rest], dim=1).cumsum(1) - 1
    number = torch.cat([count[:, None, :d], count[:, d:].reshape(b, d, w - 1).transpose(1, 2)], dim=1)
    number = number.gather(1, owner)
    parent = torch.cat([torch.full_like(number[:, :, :1], -1), number[:, :, :-1]], dim=2)
    slot = torch.where(new, number, w * d).reshape(b, -1)  # one more takes what is not new
    nodes = torch.full((b, w * d + 1), -1, dtype=torch.int32, device=tokens.device)
    nodes.scatter_(1, slot, tokens.reshape(b, -1))
    parents = torch.full_like(nodes, UNUSED).scatter_(1, slot, parent.reshape(b, -1).to(torch.int32))
    return nodes[:, :-1].contiguous(), parents[:, :-1].contiguous()
