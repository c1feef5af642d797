"""Budgets: how far a drafter may grow its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from decoding.costs import CostTable


class Budget(Protocol):
    """A growth rule for a tree. `nodes` and `depth` are hard limits; the methods may ask for less."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def go_on(self, scores: torch.Tensor, depth: int) -> bool:
        """Whether to grow another level, given the scores [beams] of the level at `depth` (1 = first drafted)."""
        ...

    def size(self, scores: torch.Tensor) -> int:
        """How many of the grown nodes to keep, given all their scores [n]."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same limits."""

    nodes: int = 16
    """Most nodes of a tree, the pending token not counted."""
    depth: int = 20
    """Most tokens on one path."""

    def go_on(self, scores: torch.Tensor, depth: int) -> bool:
        return depth < self.depth

    def size(self, scores: torch.Tensor) -> int:
        return min(self.nodes, scores.numel())


TYPICAL_CONTEXT = 512
"""Tokens of context at which a tree is priced."""
NEXT = 0.5
"""How likely the best child of an accepted node is accepted too, before it is drafted."""


@dataclass(frozen=True)
class PricedBudget:
    """Grows a tree only as far as its nodes are likely to earn the time that they cost.

    A node is kept while its probability under the drafter reaches the price of verifying it; another level is
    drafted while the tokens to be expected from it exceed its price. Prices are in tokens: time over the time in
    which the target writes a token by itself.
    """

    nodes: int
    depth: int
    node: float
    """Price of verifying one more node, in tokens."""
    level: float
    """Price of drafting one more level, in tokens."""

    @classmethod
    def of(cls, costs: CostTable, drafter: str, nodes: int, depth: int) -> PricedBudget:
        """Prices from a cost table."""
        token = costs.verify(1, TYPICAL_CONTEXT)
        node = (costs.verify(1 + nodes, TYPICAL_CONTEXT) - token) / nodes
        level = (costs.draft(drafter, depth) - costs.draft(drafter, 1)) / max(depth - 1, 1)
        return cls(nodes, depth, max(node, 0.0) / token, max(level, 0.0) / token)

    def go_on(self, scores: torch.Tensor, depth: int) -> bool:
        return depth < self.depth and float(scores.exp().sum()) * NEXT > self.level

    def size(self, scores: torch.Tensor) -> int:
        return min(self.nodes, max(1, int((scores.exp() >= self.node).sum())))
