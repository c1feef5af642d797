"""Suffix matches of a batch, as tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from activations.matching.match import MatchConfig, Matches

NONE = -1
"""Start and token of what is not there."""


@dataclass(frozen=True)
class TensorMatches:
    """Suffix matches of B requests, on their device. The most recent candidate comes first."""

    starts: torch.Tensor
    """int32 [B, W]: where each candidate starts; -1 = none."""
    lengths: torch.Tensor
    """int32 [B, W]: match lengths; 0 where there is no candidate."""
    count: torch.Tensor
    """int32 [B]: occurrences in the whole context."""
    tokens: torch.Tensor
    """int32 [B, W, D]: the candidates' tokens; -1 behind a candidate's end."""
    ends: torch.Tensor
    """int32 [B]: tokens in each context, pending token included."""

    @property
    def agreeing(self) -> torch.Tensor:
        """int32 [B]: candidates whose first token is the most recent one's, itself included."""
        same = (self.starts != NONE) & (self.tokens[:, :, 0] == self.tokens[:, :1, 0])
        return same.sum(1, dtype=torch.int32)

    def host(self) -> list[Matches]:
        """The same as host values, in one copy, which waits for the device."""
        w = self.starts.shape[1]
        summary = torch.stack([self.ends, self.count, self.agreeing], dim=1)
        out = []
        for end, count, agreeing, *rest in torch.cat([summary, self.starts, self.lengths], dim=1).tolist():
            found = min(count, w)
            starts, lengths = tuple(rest[:found]), tuple(rest[w : w + found])
            out.append(Matches(end, count, starts, lengths, agreeing / max(found, 1)))
        return out

    def candidates(self) -> list[list[list[int]]]:
        """The candidates' tokens of each request, as host values; waits for the device."""
        rows = self.tokens.tolist()
        return [[[t for t in one if t != NONE] for one in row if one[0] != NONE] for row in rows]

    @classmethod
    def pack(
        cls, matches: Sequence[Matches], candidates: Sequence[Sequence[Sequence[int]]], config: MatchConfig
    ) -> TensorMatches:
        """Host values as CPU tensors."""
        b, w, d = len(matches), config.candidates, config.depth
        starts, lengths = [NONE] * (b * w), [0] * (b * w)
        tokens = [NONE] * (b * w * d)
        for row, (found, copied) in enumerate(zip(matches, candidates, strict=True)):
            starts[row * w : row * w + len(found.starts)] = found.starts
            lengths[row * w : row * w + len(found.starts)] = found.lengths
            for i, one in enumerate(copied):
                at = (row * w + i) * d
                tokens[at : at + len(one)] = one

        def tensor(values: list[int], *shape: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).reshape(b, *shape)

        return cls(
            tensor(starts, w),
            tensor(lengths, w),
            tensor([m.count for m in matches]),
            tensor(tokens, w, d),
            tensor([m.end for m in matches]),
        )
