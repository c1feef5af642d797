"""Drafters: what proposes the tokens that the target then verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from decoding.budgets import Budget
from decoding.request import Request
from decoding.tree import DraftTree


class Drafter(Protocol):
    """Keeps its own state for each request, keyed by the request; catches up lazily.

    Calls for one request: `start`, then any number of `propose` and `observe`, then `close`. A drafter is not asked
    to propose at every step, but observes every one.
    """

    @property
    def name(self) -> str:
        """The `source` of its nodes."""
        ...

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites of the target whose states it needs, in the order in which they are concatenated; may be empty."""
        ...

    def describe(self) -> dict[str, Any]:
        """What its drafts depend on, for JSON: settings, and a hash of the weights where it has any."""
        ...

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        """The prompt is prefilled: `request.tokens` = prompt + pending token; `features` [prompt, sites * width],
        None without sites."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        """One tree a request, growing from its pending token `request.tokens[-1]`; None if there is nothing to say.
        Nodes deeper than `request.room` are of no use."""
        ...

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        """A step is committed: `request.tokens` is longer by n, its last token is the new pending one; `features`
        [n, sites * width] are those of the n newly verified positions (the old pending token and the accepted
        ones), so that all features ever given number `len(request.tokens) - 1`. The tensor is the drafter's to keep."""
        ...

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        """The requests' rows are resampled: requests[i] goes on from the state of requests[rows[i]], whose tokens are
        still in place; positions before `from_position` are known to be equal."""
        ...

    def close(self, request: Request) -> None:
        """Forget a request. Safe to repeat."""
        ...


class CopyDrafter:
    """Proposes what followed earlier occurrences of the last tokens: the most recent candidates, merged into a
    trie, the longest match first. Keeps a suffix index of each request on the host."""

    name = "copy"
    sites: tuple[str, ...] = ()

    def __init__(self, config: MatchConfig | None = None) -> None:
        self.config = config or MatchConfig()
        self._indices: dict[Request, SuffixIndex] = {}
        self._matches: dict[Request, Matches] = {}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self.config)}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        self._indices[request] = SuffixIndex(self.config, request.tokens)

    def match(self, request: Request) -> Matches:
        """The suffix matches of the request as it stands."""
        found = self._matches.get(request)
        if found is None:
            found = self._matches[request] = self._indices[request].find()
        return found

    def candidates(self, request: Request) -> list[list[int]]:
        """The tokens of the candidates, up to the matcher's depth: the longest match first (the most recent of
        equals), as the first candidate gets most of a budget."""
        matches = self.match(request)
        found = self._indices[request].candidates(matches)
        return [found[i] for i in sorted(range(len(found)), key=lambda i: -matches.lengths[i])]

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            depth = min(budget.depth, request.room)
            candidates = [found[:depth] for found in self.candidates(request)]
            trees.append(DraftTree.trie(candidates, self.name, budget.nodes) if candidates and depth > 0 else None)
        return trees

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        index = self._indices[request]
        index.extend(request.tokens[len(index) :])
        self._matches.pop(request, None)

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        fresh = {r: SuffixIndex(self.config, requests[row].tokens) for r, row in zip(requests, rows, strict=True)}
        self._indices.update(fresh)
        for request in requests:
            self._matches.pop(request, None)

    def close(self, request: Request) -> None:
        self._indices.pop(request, None)
        self._matches.pop(request, None)
