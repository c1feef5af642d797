"""Draft trees as the input of one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from activations.cache import KVCache
from activations.target import Target
from decoding.tree import DraftTree


def tree_forward(target: Target, cache: KVCache, pending: Sequence[int], trees: Sequence[DraftTree]) -> torch.Tensor:
    """Logits [rows, Q, V] of [pending token, nodes, padding] in every row of the cache; rows without a pending token
    are idle."""
    arrays = pack(pending, trees, cache.rows)
    tokens, ancestors, depths = (None if x is None else torch.from_numpy(x).to(target.device) for x in arrays)
    assert tokens is not None
    return target.forward(tokens, cache, ancestors, depths)


def pack(
    pending: Sequence[int], trees: Sequence[DraftTree], rows: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Input of the verifying forward: tokens [rows, Q], ancestors [rows, Q, Q], depths [rows, Q], Q = 1 + nodes of
    the largest tree. Without any draft the last two are None. Padding sees the context and itself."""
    q = 1 + max((len(t) for t in trees), default=0)
    tokens = np.zeros((rows, q), dtype=np.int64)
    for row, token in enumerate(pending):
        tokens[row, 0] = token
    if q == 1:
        return tokens, None, None
    ancestors = np.zeros((rows, q, q), dtype=bool)
    ancestors[:, range(q), range(q)] = True
    depths = np.zeros((rows, q), dtype=np.int64)
    for row, tree in enumerate(trees):
        n = len(tree)
        if n == 0:
            continue
        tokens[row, 1 : n + 1] = tree.tokens
        depths[row, 1 : n + 1] = tree.depths
        mask = ancestors[row]
        for i, parent in enumerate(tree.parents):
            if parent >= -1:
                mask[i + 1] |= mask[parent + 1]
    return tokens, ancestors, depths
