"""Budgets: how far a drafter may grow its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from decoding.costs import CostTable


KEPT = 0.85
"""What a step counts in a pace, where the one after it counts 1."""


class Pace(NamedTuple):
    """A running mean of a text's tokens a step."""

    tokens: float = 0.0
    steps: float = 0.0

    def after(self, tokens: int) -> Pace:
        """The pace after another step, of that many tokens."""
        return Pace(KEPT * self.tokens + tokens, KEPT * self.steps + 1)

    @property
    def value(self) -> float:
        """0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0


class Growth(NamedTuple):
    """What a budget sees of a tree that grows."""

    scores: torch.Tensor
    """Cumulative log-probabilities of nodes [n]: for `go_on` those of the newest level, for `size` of all levels, one
    after the other."""
    depth: int
    """Levels drafted so far, 1 = the first."""
    beams: int
    """How many nodes of the newest level, its best ones, the next one would grow from."""
    length: int
    """Tokens of the text, the pending one included."""
    pace: float = 0.0
    """Tokens a step, of late; 0 where that is not known."""


class Budget(Protocol):
    """A growth rule for a tree. `nodes` and `depth` are hard limits; the methods may ask for less."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def go_on(self, growth: Growth) -> bool:
        """Whether to grow another level."""
        ...

    def size(self, growth: Growth) -> int:
        """How many of the grown nodes to keep, the best ones."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same limits."""

    nodes: int = 16
    """Most nodes of a tree, the pending token not counted."""
    depth: int = 20
    """Most tokens on one path."""

    def go_on(self, growth: Growth) -> bool:
        return growth.depth < self.depth

    def size(self, growth: Growth) -> int:
        return min(self.nodes, growth.scores.numel())


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

    def go_on(self, growth: Growth) -> bool:
        if growth.depth >= self.depth:
            return False
        best = growth.scores.topk(min(growth.beams, growth.scores.numel())).values
        return float(best.exp().sum()) * NEXT > self.level

    def size(self, growth: Growth) -> int:
        return min(self.nodes, max(1, int((growth.scores.exp() >= self.node).sum())))
