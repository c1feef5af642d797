"""Walks over logged texts: what fixed trees, rules and policies reach, and what could be had in hindsight.

A walk begins a text at its first generated token and goes on by what each step wrote. Its rate is tokens over time, of
all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.budgets import KEPT, Budget, Growth
from decoding.ltd.budget import GO_ON, LearnedBudget
from decoding.ltd.outcomes import Clock, Outcomes, nodes_at

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """What a way of choosing trees does, by text."""

    tokens: Values
    """[texts]"""
    milliseconds: Values
    """[texts]"""
    steps: NDArray[np.int64]
    """[texts]"""

    @property
    def per_second(self) -> float:
        return 1e3 * float(self.tokens.sum() / self.milliseconds.sum())

    @property
    def per_step(self) -> float:
        return float(self.tokens.sum() / self.steps.sum())

    def of(self, texts: Sequence[int] | NDArray[np.int64]) -> Rate:
        """Of some of the texts, by their numbers [chosen]."""
        chosen = np.asarray(texts, np.int64)
        return Rate(self.tokens[chosen], self.milliseconds[chosen], self.steps[chosen])

    def over(self, other: Rate, resamples: int = 1000) -> tuple[float, float, float]:
        """The ratio of two rates over the same texts, and its 95 % interval from a bootstrap over texts."""
        rng = np.random.default_rng(0)
        drawn = rng.integers(len(self.tokens), size=(resamples, len(self.tokens)))

        def rate(of: Rate) -> Values:
            found: Values = of.tokens[drawn].sum(1) / of.milliseconds[drawn].sum(1)
            return found

        low, high = np.quantile(rate(self) / rate(other), [0.025, 0.975])
        return self.per_second / other.per_second, float(low), float(high)


def walk(outcomes: Outcomes, tokens: NDArray[np.generic], milliseconds: NDArray[np.generic]) -> list[Rate]:
    """One walk for each option; tokens and milliseconds [positions, options] are what it gives at each position."""
    ends = outcomes.starts[1:, None]
    options = tokens.shape[1]
    at = np.broadcast_to(outcomes.starts[:-1, None], (len(ends), options)).copy()
    each = np.arange(options)[None]
    sums = np.zeros((2, len(ends), options))
    steps = np.zeros((len(ends), options), np.int64)
    while (going := at < ends).any():
        here = np.where(going, at, 0)
        gained = np.where(going, tokens[here, each], 0).astype(np.int64)
        sums[0] += gained
        sums[1] += np.where(going, milliseconds[here, each], 0.0)
        steps += going
        at += gained
    return [Rate(sums[0, :, i], sums[1, :, i], steps[:, i]) for i in range(options)]


def replay(outcomes: Outcomes, clock: Clock, budget: Budget, texts: Sequence[int] | None = None) -> Rate:
    """The walk of the trees that a budget grows, over all texts or some (by number), side by side."""
    chosen = np.arange(len(outcomes.keys)) if texts is None else np.asarray(texts, np.int64)
    at, ends = outcomes.starts[chosen], outcomes.starts[chosen + 1]
    pace = np.zeros((2, len(chosen)))
    sums, steps = np.zeros((2, len(chosen))), np.zeros(len(chosen), np.int64)
    while (going := np.flatnonzero(at < ends)).size:
        here = at[going]
        known = pace[0, going] / np.maximum(pace[1, going], 1.0)  # no step counts less than 1
        depths, sizes = decide(outcomes, budget, here, known)
        accepted = (outcomes.ranks[here, depths - 1] < sizes[:, None]).sum(-1)
        tokens = np.minimum(accepted + 1, outcomes.ahead[here])
        nodes = np.minimum(sizes, outcomes.top_k + (depths - 1) * outcomes.top_k**2)
        sums[0, going] += tokens
        sums[1, going] += clock.table[clock.rows(outcomes.context[here]), depths - 1, nodes]
        steps[going] += 1
        at[going] += tokens
        pace[:, going] = KEPT * pace[:, going] + np.stack([tokens, np.ones(len(going))])
    return Rate(sums[0], sums[1], steps)


def decide(
    outcomes: Outcomes, budget: Budget, rows: NDArray[np.int64], paces: Values
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Depths and sizes [rows] that a budget gives the trees at these positions; of a learned one, all at once."""
    if isinstance(budget, LearnedBudget):
        return _learned(outcomes, budget, rows, paces)
    k, nodes = outcomes.top_k, [nodes_at(d, outcomes.top_k) for d in range(outcomes.depth + 1)]
    depths, sizes = np.ones((2, len(rows)), np.int64)
    deepest = min(budget.depth, outcomes.depth)
    for i, (at, pace) in enumerate(zip(rows.tolist(), paces.tolist(), strict=True)):
        scores, length, depth = torch.from_numpy(outcomes.scores[at]), int(outcomes.context[at]), 1
        while depth < deepest and budget.go_on(Growth(scores[nodes[depth - 1] : nodes[depth]], depth, k, length, pace)):
            depth += 1
        depths[i], sizes[i] = depth, budget.size(Growth(scores[: nodes[depth]], depth, k, length, pace))
    return depths, sizes


def _learned(
    outcomes: Outcomes, budget: LearnedBudget, rows: NDArray[np.int64], paces: Values
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    observer, nodes = budget.observer, [nodes_at(d, outcomes.top_k) for d in range(outcomes.depth + 1)]
    deepest = min(budget.depth, outcomes.depth)
    depths = np.full(len(rows), deepest)
    going = np.arange(len(rows))
    for depth in range(1, deepest):
        if budget.depth_policy is None:
            stops = np.full(len(going), depth >= budget.fallback.depth)
        elif depth % budget.every or not going.size:
            continue
        else:
            at = rows[going]
            newest = outcomes.scores[at, nodes[depth - 1] : nodes[depth]]
            seen = observer.depth_rows(newest, depth, outcomes.context[at], paces[going])
            logits = budget.depth_policy(torch.from_numpy(seen))
            stops = ~(logits[:, GO_ON] > logits[:, 1 - GO_ON]).numpy()
        depths[going[stops]] = depth
        going = going[~stops]
    sizes = np.minimum(budget.fallback.nodes, np.array(nodes)[depths])
    if budget.size_policy is not None:
        for depth in np.unique(depths).tolist():
            mine = np.flatnonzero(depths == depth)
            at = rows[mine]
            seen = observer.size_rows(outcomes.scores[at, : nodes[depth]], depth, outcomes.context[at], paces[mine])
            sizes[mine] = np.array(budget.sizes)[budget.size_policy(torch.from_numpy(seen)).argmax(-1).numpy()]
    return depths, np.minimum(sizes, budget.nodes)


@dataclass(frozen=True)
class Fixed:
    """A fixed tree and what it does."""

    depth: int
    nodes: int
    rate: Rate
    """Of all texts."""


def grid(outcomes: Outcomes, clock: Clock, sizes: Sequence[int]) -> list[Fixed]:
    """All fixed trees of these sizes, by depth and size."""
    count = len(outcomes)
    tokens, milliseconds = outcomes.tokens(sizes), outcomes.milliseconds(clock, sizes)
    rates = walk(outcomes, tokens.reshape(count, -1), milliseconds.reshape(count, -1))
    return [
        Fixed(1 + i // len(sizes), sizes[i % len(sizes)], rate)
        for i, rate in enumerate(rates)
    ]  # fmt: skip


def oracle(outcomes: Outcomes, clock: Clock, sizes: Sequence[int], depth: int | None = None) -> Rate:
    """At each step the best tree in hindsight, of those of one depth where it is given: tokens less the time at the
    rate that this very choice reaches."""
    among = slice(None) if depth is None else slice(depth - 1, depth)
    tokens = outcomes.tokens(sizes)[:, among].reshape(len(outcomes), -1)
    milliseconds = outcomes.milliseconds(clock, sizes)[:, among].reshape(len(outcomes), -1)
    usual, every = float(tokens.mean() / milliseconds.mean()), np.arange(len(outcomes))
    for _ in range(4):
        best = (tokens - usual * milliseconds).argmax(1)
        [rate] = walk(outcomes, tokens[every, best][:, None], milliseconds[every, best][:, None])
        usual = rate.per_second / 1e3
    return rate
