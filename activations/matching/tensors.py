"""Suffix matches of a batch, as tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from activations.matching.match import MatchConfig, Matches
from activations.matching.trie import merge

NONE = -1
"""Start and token of what is not there."""
SUMMARY = ("end", "count", "longest", "distance", "agreeing", "in_prompt")
"""Columns of `TensorMatches.summary`."""


@dataclass(frozen=True)
class TensorMatches:
    """Suffix matches of B requests, on their device; `Matches` says what they are."""

    starts: torch.Tensor
    """int32 [B, W]: where each candidate starts; -1 = none."""
    lengths: torch.Tensor
    """int32 [B, W]: match lengths; 0 where there is no candidate."""
    tokens: torch.Tensor
    """int32 [B, W, D]: the candidates' tokens; -1 where there is no candidate."""
    tree_tokens: torch.Tensor
    """int32 [B, W * D]: the candidates merged by equal prefix (see `trie.merge`); -1 = unused node."""
    tree_parents: torch.Tensor
    """int32 [B, W * D]: parent of each node; -1 = child of the pending token, -2 = unused node. The first n nodes
    are the tree of budget n."""
    summary: torch.Tensor
    """int32 [B, 6]: tokens in the context, occurrences of its last kappa tokens, match length of the first candidate
    and tokens from its start to the context's end, candidates whose first token is the first one's (itself
    included), and 1 if it starts in the prompt; all but the first 0 without a match."""

    @classmethod
    def empty(cls, rows: int, config: MatchConfig, device: torch.device | str) -> TensorMatches:
        """Room for the matches of `rows` requests."""
        w, d = config.candidates, config.depth
        shapes = ((rows, w), (rows, w), (rows, w, d), (rows, w * d), (rows, w * d), (rows, len(SUMMARY)))
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))

    def first(self, rows: int) -> TensorMatches:
        """Those of the first `rows` requests, in the same memory."""
        if rows == len(self.starts):
            return self
        return TensorMatches(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def host(self) -> list[Matches]:
        """The same as host values, in one copy, which waits for the device."""
        w = self.starts.shape[1]
        out = []
        for row in torch.cat([self.summary, self.starts, self.lengths], dim=1).tolist():
            end, count, _, _, agreeing, in_prompt = row[: len(SUMMARY)]
            found = min(count, w)
            starts, lengths = (tuple(row[at : at + found]) for at in (len(SUMMARY), len(SUMMARY) + w))
            out.append(Matches(end, count, starts, lengths, agreeing / max(found, 1), bool(in_prompt)))
        return out

    def candidates(self) -> list[list[list[int]]]:
        """The candidates' tokens of each request, as host values; waits for the device."""
        return [[one for one in row if one[0] != NONE] for row in self.tokens.tolist()]

    @classmethod
    def pack(
        cls, matches: Sequence[Matches], candidates: Sequence[Sequence[Sequence[int]]], config: MatchConfig
    ) -> TensorMatches:
        """Host values as CPU tensors."""
        b, w, d = len(matches), config.candidates, config.depth
        starts, lengths = torch.full((b, w), NONE, dtype=torch.int32), torch.zeros(b, w, dtype=torch.int32)
        tokens = torch.full((b, w, d), NONE, dtype=torch.int32)
        for row, (found, copied) in enumerate(zip(matches, candidates, strict=True)):
            n = len(found.starts)
            if n:
                starts[row, :n] = torch.tensor(found.starts)
                lengths[row, :n] = torch.tensor(found.lengths)
                tokens[row, :n] = torch.tensor(copied)
        summary = [
            (m.end, m.count, m.longest, m.distance, round(m.agreement * len(m.starts)), m.in_prompt) for m in matches
        ]
        return cls(starts, lengths, tokens, *merge(tokens), torch.tensor(summary, dtype=torch.int32))
