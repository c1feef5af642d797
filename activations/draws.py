"""The largest of logits with keyed noise over a large vocabulary, on a CPU: noise only where it can matter.

A row's largest sum is found in two looks. The likeliest tokens get their noise first; their largest sum is a bound that
another token must reach, and hardly one can: for a token that is d below the bound the chance is at most exp(-d). Half
of the noise's bits say which, and only those tokens get their whole noise. The outcome is bit for bit that of noise for
every token.

The bits come from a hash of the keys with the constants of C. Wellons' lowbias32 (hash-prospector).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

M1, M2, PER_TOKEN = 0x7FEB352D, 0x846CA68B, 0x27D4EB2F
"""Multipliers of the noise's hash."""
LARGE = 2048
"""Tokens from which two looks are cheaper."""
NEAR = 3.0
"""Nats below the likeliest token that the first look goes."""
SLACK = 1e-3
"""Nats that a bound is lowered by, for rounding in float32; more where sums are so large that it is coarser."""

Noise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Noise [1, n] of a key [1] for token ids [n]."""


def noisy_argmax(logits: torch.Tensor, keys: torch.Tensor, noise: Noise) -> torch.Tensor:
    """argmax [N] of float32 logits [N, V] + noise(keys [N], all ids): of equals the first."""
    every = torch.arange(logits.shape[1])
    out = torch.empty(len(logits), dtype=torch.long)
    for i, row in enumerate(logits):
        key = keys[i : i + 1]
        tokens = _worth(row.detach().numpy(), int(key), lambda some, key=key: noise(key, some)[0])  # type: ignore[misc]
        if tokens is None:
            out[i] = (row + noise(key, every)[0]).argmax()
        else:
            out[i] = tokens[(row[tokens] + noise(key, tokens)[0]).argmax()]
    return out


def _worth(logits: NDArray[np.float32], key: int, noise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """Ids, increasing, among which the largest sum is; None where they are not few."""
    first = np.flatnonzero(logits > logits.max() - NEAR)
    if not 0 < len(first) <= len(logits) // 8:
        return None
    bound = float((logits[first] + noise(torch.from_numpy(first)).numpy()).max())
    bound -= SLACK + abs(bound) * 1e-6
    # noise >= d needs 1 - u <= 1 - exp(-exp(-d)) <= exp(-d), and 1 - u is no less than its upper 32 bits say
    chance = np.exp(logits - np.float32(bound))
    chance *= np.float32(2.0**32)
    worth = np.flatnonzero(_complement(key, len(logits)) <= chance)
    return torch.from_numpy(np.union1d(first, worth)) if len(worth) <= len(logits) // 8 else None


def _complement(key: int, size: int) -> NDArray[np.uint32]:
    """2^32 - 1 - the upper half of each token's 48 random bits."""
    bits = _per_token(size) + np.uint32(key)
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(M1)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(M2)
    bits ^= bits >> np.uint32(16)
    return np.invert(bits, out=bits)


@lru_cache(maxsize=4)
def _per_token(size: int) -> NDArray[np.uint32]:
    return np.arange(size, dtype=np.uint32) * np.uint32(PER_TOKEN)
