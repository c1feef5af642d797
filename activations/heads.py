"""Attention heads: which of them look for what came before, and what the target does without some of them.

Both look into the attention that `activations.attention` computes, and refuse a target with another one.

Source: induction heads and their score on repeated random tokens, Olsson et al. 2022, arXiv 2209.11895.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from activations import attention
from activations.cache import KVCache
from activations.target import Target, TargetError


@dataclass(frozen=True, order=True)
class Head:
    """A query head, written `block.head`, both counted from 0."""

    block: int
    head: int

    def __str__(self) -> str:
        return f"{self.block}.{self.head}"


def check_heads(target: Target) -> None:
    """Raise TargetError unless the target's heads can be seen and changed."""
    if target.config._attn_implementation != attention.NAME:
        raise TargetError(
            f"the attention of {target.name} is {target.config._attn_implementation!r}, whose heads can be neither "
            f"seen nor ablated: choose a target that takes {attention.NAME!r} attention"
        )


@dataclass
class _Induction:
    length: int
    scores: dict[int, torch.Tensor] = field(default_factory=dict)

    def see(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """query [B, H, T, D], key [B, Hkv, T, D], mask bool [B or 1, 1, T, T] or None for causal."""
        size = query.shape[2]
        weights, _ = attention.weights(query, key, mask, scaling, slice(self.length, size - 1))
        second = torch.arange(self.length, size - 1, device=query.device)
        index = (second - self.length + 1).expand(*weights.shape[:2], -1)[..., None]
        self.scores[int(module.layer_idx)] = weights.gather(3, index).mean((0, 2, 3)).cpu()


def repeated_tokens(target: Target, length: int = 50, rows: int = 4, seed: int = 0) -> torch.Tensor:
    """int64 [rows, 2 * length]: different random tokens, none of them special, and the same ones again."""
    special = target.stop_ids | set(getattr(target.tokenizer, "all_special_ids", ()))
    usable = torch.tensor([i for i in range(target.vocab_size) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    length = min(length, len(usable), target.max_length // 2)
    once = torch.stack([usable[torch.randperm(len(usable), generator=generator)[:length]] for _ in range(rows)])
    return torch.cat([once, once], dim=1)


def induction_scores(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, heads]: mean attention that the second copy's tokens pay to what followed them in the first.

    `tokens` [rows, 2 * length] as `repeated_tokens` gives them. Raises TargetError as `check_heads`.
    """
    check_heads(target)
    found = _Induction(tokens.shape[1] // 2)
    with attention.attached(attention.OBSERVERS, found.see):
        target.hidden(tokens.to(target.device), KVCache(len(tokens), capacity=tokens.shape[1]))
    return torch.stack([found.scores[k] for k in range(target.blocks)])


def previous_token_scores(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, heads]: mean attention that each token but the first of `tokens` [rows, T] pays to the one
    before it. Raises TargetError as `check_heads`.
    """
    check_heads(target)
    found: dict[int, torch.Tensor] = {}

    def see(
        module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        pattern, _ = attention.weights(query, key, mask, scaling, slice(1, query.shape[2]))
        found[int(module.layer_idx)] = pattern.diagonal(dim1=2, dim2=3).mean((0, 2)).cpu()

    with attention.attached(attention.OBSERVERS, see):
        target.hidden(tokens.to(target.device), KVCache(len(tokens), capacity=tokens.shape[1]))
    return torch.stack([found[k] for k in range(target.blocks)])


def attention_from(target: Target, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """float32 [positions, blocks, heads, T]: the attention that each head pays from some positions of a text of T
    tokens, 0 to what it does not see. Raises TargetError as `check_heads`, and ValueError for a position outside.
    """
    check_heads(target)
    if outside := [p for p in positions if not 0 <= p < len(ids)]:
        raise ValueError(f"position {outside[0]} is outside the text, which has {len(ids)} tokens")
    found: dict[int, torch.Tensor] = {}

    def see(
        module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        pattern, _ = attention.weights(query, key, mask, scaling, slice(None))
        found[int(module.layer_idx)] = pattern[0][:, list(positions)].cpu()

    with attention.attached(attention.OBSERVERS, see):
        target.hidden(torch.tensor([list(ids)], device=target.device), KVCache(1, capacity=len(ids)))
    return torch.stack([found[k] for k in range(target.blocks)]).permute(2, 0, 1, 3)


def top_heads(scores: torch.Tensor, count: int) -> list[Head]:
    """The `count` heads with the highest scores [blocks, heads], the highest first."""
    order = scores.flatten().sort(descending=True, stable=True).indices[:count].tolist()
    return [Head(*divmod(int(i), scores.shape[1])) for i in order]


class HeadMeans:
    """What each head gives on average over the positions that passed while it watched."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with attention.attached(attention.EDITORS, self._add):
            yield

    def _add(self, module: Any, given: torch.Tensor) -> torch.Tensor:
        block = int(module.layer_idx)
        total = given.double().sum((0, 1))
        self._sums[block] = self._sums.get(block, torch.zeros_like(total)) + total
        self._counts[block] = self._counts.get(block, 0) + given.shape[0] * given.shape[1]
        return given

    def __getitem__(self, head: Head) -> torch.Tensor:
        """float64 [Dv]"""
        return self._sums[head.block][head.head] / self._counts[head.block]


@contextmanager
def ablated(target: Target, heads: Iterable[Head], means: HeadMeans | None = None) -> Iterator[None]:
    """Within, these heads give their mean at every position, or zeros without `means`, before the output projection.

    Raises TargetError as `check_heads`, and ValueError for a head that the target does not have.
    """
    check_heads(target)
    count = int(target.config.num_attention_heads)
    by_block: dict[int, list[int]] = {}
    for one in heads:
        if not (0 <= one.block < target.blocks and 0 <= one.head < count):
            raise ValueError(f"{target.name} has no head {one}: it has {target.blocks} blocks of {count} heads")
        by_block.setdefault(one.block, []).append(one.head)

    def edit(module: Any, given: torch.Tensor) -> torch.Tensor:
        block = int(module.layer_idx)
        chosen = by_block.get(block)
        if not chosen:
            return given
        given = given.clone()
        given[:, :, chosen] = 0 if means is None else _stacked(means, block, chosen).to(given)
        return given

    with attention.attached(attention.EDITORS, edit):
        yield


def _stacked(means: HeadMeans, block: int, heads: Sequence[int]) -> torch.Tensor:
    return torch.stack([means[Head(block, head)] for head in heads])
