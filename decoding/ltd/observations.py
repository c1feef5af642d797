"""What the policies see of a growing tree. Training and decoding make it here, in one way.

`paper` is Learning to Draft's own, for any number of beams and any depth: the depth policy sees the cumulative
log-probabilities of the newest level, the size policy those of all levels, each with copies of the text's length and of
the tree's depth, which give the two some weight among so many. `ranked` has the same knowledge in a form from which
less must be learnt: scores from the best to the worst, as probabilities too, and the depth one-hot. `history` adds the
pace of the text: how many tokens its last steps gave.

Source: arXiv 2603.01639.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.budgets import Growth

Observation = NDArray[np.float32]
Lengths = NDArray[np.integer]
Paces = NDArray[np.float64]

OBSERVATIONS = ("paper", "ranked", "history")
FLOOR = -12.0
"""Log-probabilities below it say no more; it also stands where there is no node."""
LENGTH, STEP = 1000.0, 10.0
"""Text length and depth are divided by these."""
DEPTH_COPIES, SIZE_COPIES = 0.14, 0.024
"""Copies of length and depth, each: as a share of the scores beside them. The paper's 14 of 100 and 29 of 1210."""
RANKED = 24
"""Nodes of a whole tree that `ranked` shows by their rank."""


@dataclass(frozen=True)
class Observer:
    """Makes observations [rows, features], float32, of scores [rows, nodes], text lengths and paces [rows]."""

    kind: str
    """One of OBSERVATIONS."""
    top_k: int
    """Beams a level, and children of each."""
    depth: int
    """Most levels of a tree."""

    def __post_init__(self) -> None:
        if self.kind not in OBSERVATIONS:
            raise ValueError(
                f"unknown observation {self.kind!r}: use {', '.join(OBSERVATIONS[:-1])} or {OBSERVATIONS[-1]}"
            )
        for name in ("top_k", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def depth_features(self) -> int:
        """Features of the depth policy's observation."""
        square = self.top_k**2
        if self.kind == "paper":
            return square + 2 * _copies(square, DEPTH_COPIES)
        return 2 * square + self._scalars

    @property
    def size_features(self) -> int:
        """Features of the size policy's observation."""
        if self.kind == "paper":
            return self._nodes + 2 * _copies(self._nodes, SIZE_COPIES)
        return 2 * RANKED + self.depth * self.top_k + self._scalars

    @property
    def _scalars(self) -> int:
        """Length, depth one-hot, and the pace."""
        return 1 + self.depth + (self.kind == "history")

    @property
    def _nodes(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    def to_depth(self, growth: Growth) -> torch.Tensor:
        """[1, features] of what `go_on` is told."""
        return torch.from_numpy(self.depth_rows(*_row(growth)))

    def to_size(self, growth: Growth) -> torch.Tensor:
        """[1, features] of what `size` is told."""
        return torch.from_numpy(self.size_rows(*_row(growth)))

    def depth_rows(self, newest: Observation, depth: int, length: Lengths, pace: Paces) -> Observation:
        """Of the newest level's scores."""
        square = self.top_k**2
        out = np.full((len(newest), self.depth_features), FLOOR, np.float32)
        if self.kind == "paper":
            _clip(newest, out, 0)
            _copy_scalars(out, square, length, depth)
            return out
        _ranked(newest, out, 0, square)
        self._tail(out, 2 * square, depth, length, pace)
        return out

    def size_rows(self, scores: Observation, depth: int, length: Lengths, pace: Paces) -> Observation:
        """Of all levels' scores, one after the other."""
        out = np.full((len(scores), self.size_features), FLOOR, np.float32)
        if self.kind == "paper":
            _clip(scores, out, 0)
            _copy_scalars(out, self._nodes, length, depth)
            return out
        _ranked(scores, out, 0, RANKED)
        at, k, start = 2 * RANKED, self.top_k, 0
        out[:, at : at + self.depth * k] = 0.0
        for level in range(depth):
            end = k + level * k * k
            best = -np.sort(-scores[:, start:end], axis=1)[:, :k]
            out[:, at + level * k : at + level * k + best.shape[1]] = np.exp(best)
            start = end
        self._tail(out, at + self.depth * k, depth, length, pace)
        return out

    def _tail(self, out: Observation, at: int, depth: int, length: Lengths, pace: Paces) -> None:
        out[:, at] = length / LENGTH
        out[:, at + 1 :] = 0.0
        out[:, at + depth] = 1.0
        if self.kind == "history":
            out[:, -1] = pace


def _row(growth: Growth) -> tuple[Observation, int, Lengths, Paces]:
    scores: Observation = growth.scores.detach().cpu().numpy()[None]
    return scores, growth.depth, np.array([growth.length]), np.array([growth.pace])


def _copies(scores: int, share: float) -> int:
    return max(1, round(scores * share))


def _clip(scores: Observation, out: Observation, at: int) -> None:
    np.maximum(scores, FLOOR, out=out[:, at : at + scores.shape[1]])


def _copy_scalars(out: Observation, at: int, length: Lengths, depth: int) -> None:
    half = at + (out.shape[1] - at) // 2
    out[:, at:half] = (length / LENGTH)[:, None]
    out[:, half:] = depth / STEP


def _ranked(scores: Observation, out: Observation, at: int, most: int) -> None:
    """Log-probabilities of the best `most` nodes, and behind them their probabilities."""
    best = -np.sort(-scores, axis=1)[:, :most]
    n = best.shape[1]
    np.maximum(best, FLOOR, out=out[:, at : at + n])
    np.exp(out[:, at : at + most], out=out[:, at + most : at + 2 * most])
