"""Logged texts with whole trees, made up."""

from __future__ import annotations

import random

import torch

from decoding.costs import CostTable
from decoding.ltd.outcomes import nodes_at
from decoding.replay_log import LoggedText

COSTS = CostTable(
    {}, [1, 2, 4, 8, 32], [4, 64], [[20.0, 20.5, 20.2, 23.0, 40.0], [22.0, 22.0, 23.0, 27.0, 55.0]],
    {"eagle": [1.0, 2.0, 2.8, 3.5]}, 0.0, 0.0,
)  # fmt: skip


def made_text(
    seed: int, steps: int = 40, top_k: int = 2, depth: int = 3, *, ahead: int = 0, chance: float | None = None,
    source: str = "train", vocabulary: int = 4,
) -> LoggedText:  # fmt: skip
    """Over few tokens, so that trees are right now and then; with `chance`, each level of a tree is, best node first,
    with that probability, and its scores say so. `ahead`: tokens known beyond the last position's next."""
    draw = random.Random(seed)
    ids = [draw.randrange(vocabulary) for _ in range(3 + steps + 1 + ahead)]
    levels = [list(range(nodes_at(d, top_k), nodes_at(d + 1, top_k))) for d in range(depth)]
    nodes = nodes_at(depth, top_k)
    scores, tokens = torch.zeros(steps, nodes), torch.zeros(steps, nodes, dtype=torch.int32)
    above = torch.full((steps, nodes), -1)
    for step in range(steps):
        path, before = -1, [-1]
        for number, level in enumerate(levels):
            for place, parent in enumerate(before):
                start = float(scores[step, parent]) if parent >= 0 else 0.0
                right = ids[4 + number + step] if 4 + number + step < len(ids) else 0
                drawn = draw.sample(range(vocabulary), top_k)
                steps_down = sorted(draw.choice([0.0, 0.25, 0.5, 1.0, 2.0]) for _ in drawn)
                if chance is not None and parent == path:
                    first = right if draw.random() < chance else (right + 1) % vocabulary
                    drawn = [first, *(t for t in drawn if t not in (right, first)), *drawn][:top_k]
                    steps_down = [0.1 if chance > 0.5 else 2.0, *[4.0] * (top_k - 1)]
                for child in range(top_k):
                    node = level[place * top_k + child]
                    above[step, node] = parent
                    scores[step, node] = start - steps_down[child]
                    tokens[step, node] = drawn[child]
            path = next((i for i in level if int(above[step, i]) == path and int(tokens[step, i]) == right), -2)
            before = sorted(level, key=lambda i: -float(scores[step, i]))[:top_k]
    return LoggedText(
        f"{source}-{seed}", source, 3, ahead == 0, ids, tokens, above.short(), scores, torch.rand(steps, 3), top_k
    )
