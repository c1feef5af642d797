"""The lookback ratio: how much of each head's attention goes to the prompt, and how much to the text written since.

For a head at a position, with P prompt tokens and N new ones in view, and the attention weights w over them,

    ratio = p / (p + n)        p = mean of w over the prompt's tokens        n = mean of w over the new ones

(Chuang et al. 2024, arXiv 2407.07071). A feature that probes are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from activations import attention
from activations.target import Target, TargetError

NAME = "lookback"
"""Its name among a store's sites."""


@dataclass
class Lookback:
    """The ratios of one forward pass over a whole text, one row, without a cache."""

    prompt: int
    """Tokens of the prompt."""
    first: int
    """First position to keep."""
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)
    """By block: float32 [positions, heads]."""

    def ratios(self) -> torch.Tensor:
        """float32 [positions, blocks x heads], blocks in order; 1 where nothing new is in view."""
        return torch.cat([self.blocks[k] for k in sorted(self.blocks)], dim=1)

    def see(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """query [1, H, T, D], key [1, Hkv, T, D], mask bool [1, 1, T, T] or None for causal."""
        found, seen = attention.weights(query, key, mask, scaling, slice(self.first, query.shape[2]))
        weights, view = found[0], seen[0, 0]
        p, n = (weights[..., part].sum(-1) / view[:, part].sum(-1).clamp_min(1)
                for part in (slice(self.prompt), slice(self.prompt, None)))  # fmt: skip
        self.blocks[int(module.layer_idx)] = (p / (p + n).clamp_min(1e-30)).T


def check_attention(target: Target) -> None:
    """Raise TargetError if the target's attention cannot be seen."""
    if target.config._attn_implementation != attention.NAME:
        raise TargetError(
            f"the attention of {target.name} is {target.config._attn_implementation!r}, whose weights cannot be seen: "
            "capture without lookback"
        )


@contextmanager
def watch(target: Target, prompt: int, first: int) -> Iterator[Lookback]:
    """Collect the ratios of the forward pass within. Raises TargetError if the target's attention cannot be seen."""
    check_attention(target)
    found = Lookback(prompt, first)
    with attention.attached(attention.OBSERVERS, found.see):
        yield found
