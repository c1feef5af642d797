"""What every (depth, size) would have given at every position of logged texts, and what it would have cost.

The log holds the head's whole tree at each position. A tree that stops at an earlier level is its first part, and the
`size` best nodes of that part are what the drafter keeps. So a drafted tree's accepted length is the number of nodes on
the text's path that are among the best: under greedy decoding a table look-up instead of two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoding.costs import CostTable
from decoding.replay_log import LogError, LoggedText

NEVER = np.iinfo(np.int16).max
"""Rank of a path node that the tree does not hold."""


@dataclass(frozen=True)
class Outcomes:
    """Positions of all texts one after the other, in the texts' order."""

    ranks: NDArray[np.int16]
    """[positions, depths, depths]: of the path's node at the j-th level among the nodes of a tree of the d-th depth,
    from 0, best first; NEVER where there is no such node."""
    scores: NDArray[np.float32]
    """[positions, nodes], cumulative log-probabilities of the whole tree."""
    summary: NDArray[np.float32]
    """[positions, 3], of the anchor's logits: largest probability, entropy, gap of the top two."""
    context: NDArray[np.int32]
    """[positions]: tokens of the request, the pending one included."""
    prompt: NDArray[np.int32]
    """[positions]: tokens of the text's prompt."""
    ahead: NDArray[np.int32]
    """[positions]: tokens of the text that are known behind the pending one. No step gives more."""
    starts: NDArray[np.int64]
    """[texts + 1]: where each text begins; its last position is the last at which a step may begin."""
    top_k: int
    sources: tuple[str, ...]
    """[texts]"""
    keys: tuple[str, ...]
    """[texts]"""

    @classmethod
    def of(cls, texts: Sequence[LoggedText], depth: int | None = None) -> Outcomes:
        """Of whole trees of the same shape, cut to `depth` levels. Raises LogError where the shapes differ."""
        if not texts:
            raise LogError("no texts: a log of at least one is needed")
        k = texts[0].top_k
        logged = levels_of(texts[0])
        depth = logged if depth is None else depth
        if not 1 <= depth <= logged:
            raise LogError(f"the log's trees are {logged} levels deep: {depth} cannot be had from them")
        for text in texts:
            if text.top_k != k or levels_of(text) != logged:
                raise LogError(
                    f"{text.key} holds trees of top_k {text.top_k} and {levels_of(text)} levels, {texts[0].key} of "
                    f"top_k {k} and {logged}: a log is of one drafter and one depth"
                )
        nodes = nodes_at(depth, k)
        parts = [_ranks(text, depth, nodes) for text in texts]
        steps = np.array([text.steps for text in texts])
        return cls(
            ranks=np.concatenate(parts),
            scores=np.concatenate([text.scores[:, :nodes].numpy() for text in texts]),
            summary=np.concatenate([text.summary.numpy() for text in texts]),
            context=np.concatenate([text.prompt + 1 + np.arange(text.steps, dtype=np.int32) for text in texts]),
            prompt=np.repeat(np.array([t.prompt for t in texts], np.int32), steps),
            ahead=np.concatenate(
                [len(t.ids) - t.prompt - 1 - np.arange(t.steps, dtype=np.int32) for t in texts]
            ),
            starts=np.concatenate([[0], np.cumsum(steps)]),
            top_k=k,
            sources=tuple(t.source for t in texts),
            keys=tuple(t.key for t in texts),
        )  # fmt: skip

    @property
    def depth(self) -> int:
        """Levels of the whole trees."""
        return self.ranks.shape[1]

    def __len__(self) -> int:
        return len(self.context)

    def text_of(self, position: int) -> int:
        """Which text a position belongs to."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def accepted(self, sizes: Sequence[int]) -> NDArray[np.int8]:
        """[positions, depths, sizes]: drafted tokens that are kept."""
        by_size = [(self.ranks < size).sum(-1, dtype=np.int8) for size in sizes]
        return np.stack(by_size, axis=-1)

    def tokens(self, sizes: Sequence[int]) -> NDArray[np.int8]:
        """[positions, depths, sizes]: tokens that the step writes, the target's own included; none behind a text."""
        limit = np.minimum(self.ahead, 100)[:, None, None].astype(np.int8)
        return np.minimum(self.accepted(sizes) + np.int8(1), limit)

    def milliseconds(self, clock: Clock, sizes: Sequence[int]) -> NDArray[np.float32]:
        """[positions, depths, sizes]: what a step costs."""
        row = clock.rows(self.context)
        out = np.empty((len(self), self.depth, len(sizes)), np.float32)
        for d in range(1, self.depth + 1):
            for v, size in enumerate(sizes):
                out[:, d - 1, v] = clock.table[row, d - 1, min(size, nodes_at(d, self.top_k))]
        return out


@dataclass(frozen=True)
class Clock:
    """Milliseconds of a step, by the text's length, the tree's depth and its number of nodes."""

    table: NDArray[np.float64]
    """[lengths, depths, nodes + 1]"""
    lengths: NDArray[np.integer]
    """[lengths]: those that the table knows, in tokens, increasing."""

    @classmethod
    def of(cls, costs: CostTable, drafter: str, outcomes: Outcomes, overhead: float) -> Clock:
        """From a cost table, for all lengths in the log; `overhead` is the rest of a step."""
        lengths = np.unique(outcomes.context)
        nodes = nodes_at(outcomes.depth, outcomes.top_k)
        verifying = np.array([[costs.verify(1 + n, int(c)) for n in range(nodes + 1)] for c in lengths])
        drafting = np.array([costs.draft(drafter, d) for d in range(1, outcomes.depth + 1)])
        return cls(verifying[:, None] + drafting[None, :, None] + overhead, lengths)

    def rows(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows [n] of the table, for lengths [n] that it knows."""
        found: NDArray[np.int64] = np.searchsorted(self.lengths, lengths)
        return found


def nodes_at(depth: int, top_k: int) -> int:
    """Nodes of a whole tree of that depth."""
    return top_k + (depth - 1) * top_k * top_k if depth > 0 else 0


def levels_of(text: LoggedText) -> int:
    """Depth of a text's whole trees. Raises LogError where they are none."""
    nodes, k = text.scores.shape[1], text.top_k
    levels = 1 + (nodes - k) // (k * k)
    if nodes < k or nodes_at(levels, k) != nodes:
        raise LogError(f"{text.key} holds trees of {nodes} nodes: with top_k {k} they are not whole ones")
    return levels


def _ranks(text: LoggedText, depth: int, nodes: int) -> NDArray[np.int16]:
    """[steps, depth, depth], see Outcomes.ranks."""
    k, steps = text.top_k, text.steps
    tokens, parents, scores = (x[:, :nodes].numpy() for x in (text.tokens, text.parents, text.scores))
    rows = np.arange(steps)
    ids = np.array([*text.ids, *[-1] * depth])  # behind the end nothing is right
    node = np.full(steps, -1)
    above = np.ones(steps, bool)
    out = np.full((steps, depth, depth), NEVER, np.int16)
    for j in range(depth):
        start, end = nodes_at(j, k), nodes_at(j + 1, k)
        right = (tokens[:, start:end] == ids[text.prompt + 1 + j + rows][:, None]) & (
            parents[:, start:end] == node[:, None]
        )
        above &= right.any(1)
        node = np.where(above, start + right.argmax(1), NEVER)
        own = scores[rows, np.where(above, node, 0)][:, None]
        # Stable and descending: of equals the earlier one comes first.
        better = (scores > own) | ((scores == own) & (np.arange(nodes) < node[:, None]))
        by_level = [better[:, nodes_at(d, k) : nodes_at(d + 1, k)].sum(1) for d in range(depth)]
        ranks = np.cumsum(np.stack(by_level, 1), axis=1)
        ranks[:, :j] = NEVER
        out[:, :, j] = np.where(above[:, None], ranks, NEVER)
    return out
