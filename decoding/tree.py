"""The draft tree: what any drafter proposes and the verifier judges in one forward.

Verifying a tree in one forward: SpecInfer, arXiv 2305.09781.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ROOT = -1
"""Parent of the children of the pending token."""
UNUSED = -2
"""Parent of a node of padding."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """N drafted tokens. Parents precede children; all sequences have length N."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """Index of the parent; -1 = child of the pending token, -2 = unused node of padding."""
    source: Sequence[str]
    """Name of the drafter of each node."""
    logq: Sequence[float]
    """Log-probability that the drafter gave the token after its parent; 0 for a certain one."""
    q_logits: Any = None
    """Float32 tensor [N, V], where the drafter draws on its own: the processed logits that each node was drawn from."""
    candidates: Any = None
    """(tokens, scores, parents) of all nodes before pruning, where a policy learns from them."""

    # -- making ------------------------------------------------------------------------------------

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str, logq: Sequence[float] | None = None) -> DraftTree:
        """One path."""
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), [source] * n, list(logq) if logq is not None else [0.0] * n)

    @classmethod
    def trie(cls, candidates: Sequence[Sequence[int]], source: str, max_nodes: int) -> DraftTree:
        """Candidates, best first, merged by equal prefix into at most `max_nodes` nodes.

        The first candidate's chain comes first and keeps its budget; the others then grow side by side, one
        token a round, so that each gets its likeliest tokens (the early ones) before any gets its late ones.
        """
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}

        def step(at: int, token: int) -> int:
            """The child of node `at` with this token, made if there is room; UNUSED if not."""
            key = (at, token)
            found = children.get(key)
            if found is None:
                if len(tokens) >= max_nodes:
                    return UNUSED
                found = children[key] = len(tokens)
                tokens.append(token)
                parents.append(at)
            return found

        if candidates:
            at = ROOT
            for token in candidates[0]:
                at = step(at, token)
                if at == UNUSED:
                    break
            ends = [(ROOT, candidate) for candidate in candidates[1:]]
            depth = 0
            while ends:
                grown = []
                for at, candidate in ends:
                    if depth < len(candidate) and (at := step(at, candidate[depth])) != UNUSED:
                        grown.append((at, candidate))
                ends = grown
                depth += 1
        n = len(tokens)
        return cls(tokens, parents, [source] * n, [0.0] * n)

    @classmethod
    def merge(cls, trees: Sequence[DraftTree]) -> DraftTree:
        """One trie of several trees: equal tokens under equal parents become one node, of the first source.

        `q_logits` and `candidates` belong to one drafter's growth: they stay only where a single tree is given.
        """
        if len(trees) == 1:
            return trees[0]
        tokens: list[int] = []
        parents: list[int] = []
        source: list[str] = []
        logq: list[float] = []
        children: dict[tuple[int, int], int] = {}
        for tree in trees:
            place: list[int] = []  # where each node of this tree went
            for token, parent, name, weight in zip(tree.tokens, tree.parents, tree.source, tree.logq, strict=True):
                if parent == UNUSED:
                    place.append(UNUSED)
                    continue
                above = ROOT if parent == ROOT else place[parent]
                key = (above, token)
                found = children.get(key)
                if found is None:
                    found = children[key] = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    source.append(name)
                    logq.append(weight)
                place.append(found)
        return cls(tokens, parents, source, logq)

    def check(self, vocabulary: int) -> None:
        """Raise ValueError unless all tokens are in the vocabulary and parents precede their children."""
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocabulary:
                raise ValueError(f"it drafted token {token}, the vocabulary has {vocabulary}")
            if not UNUSED <= parent < i:
                raise ValueError(f"it drafted node {i} below node {parent}, which does not precede it")

    def cut(self, depth: int, nodes: int | None = None) -> DraftTree:
        """Without what lies deeper than `depth`, and at most the first `nodes` of the rest."""
        depths = self.depths
        if (nodes is None or len(self) <= nodes) and (not depths or max(depths) <= depth):
            return self
        return self.part([i for i, d in enumerate(depths) if 0 < d <= depth][:nodes])

    def part(self, keep: Sequence[int]) -> DraftTree:
        """The nodes of these indices, in rising order; with a node its parent must be kept."""
        place = {old: new for new, old in enumerate(keep)}
        return DraftTree(
            [self.tokens[i] for i in keep],
            [place.get(self.parents[i], ROOT) for i in keep],
            [self.source[i] for i in keep],
            [self.logq[i] for i in keep],
            None if self.q_logits is None else self.q_logits[keep],
            self.candidates,
        )

    # -- what follows from it ----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Every node follows the one before it."""
        return list(self.parents) == list(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each node from the pending token, from 1 on; 0 for an unused node."""
        out: list[int] = []
        for parent in self.parents:
            out.append(1 if parent == ROOT else 0 if parent == UNUSED else out[parent] + 1)
        return out

    @cached_property
    def ancestors(self) -> list[list[int]]:
        """For each node the node indices on its path from the root, itself included and last."""
        out: list[list[int]] = []
        for i, parent in enumerate(self.parents):
            out.append([*(out[parent] if parent >= 0 else ()), i])
        return out

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node, the first one where siblings are equal."""
        out: dict[tuple[int, int], int] = {}
        for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent != UNUSED:
                out.setdefault((parent, token), i)
        return out

    @cached_property
    def paths(self) -> list[list[int]]:
        """The path to every leaf, in the order of the leaves."""
        inner = set(self.parents)
        return [self.ancestors[i] for i, p in enumerate(self.parents) if p != UNUSED and i not in inner]
