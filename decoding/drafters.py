"""Drafters: what proposes the tokens that the target then verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from activations.matching.shared import SharedMatches, SharedStore
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

    def resume(self, request: Request, features: torch.Tensor | None, before: Request, kept: int) -> None:
        """Like `start`, for a request whose first `kept` + 1 tokens are those of `before`, which has ended and will be
        closed; `features` [prompt - kept, sites * width] are those of the prompt's positions from `kept` on."""
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
    """Proposes what followed earlier occurrences of the last tokens: the matcher's candidates, merged into a trie.
    Keeps a suffix index of each request on the host. The numbers of candidates and tokens are SwitchSD's (arXiv
    2609.20186).

    With a shared store, what finished requests wrote is a source too: where its match is longer than any in the
    context, its candidates come first. What a request has written enters the store when it is closed.
    """

    name = "copy"
    sites: tuple[str, ...] = ()

    def __init__(self, config: MatchConfig | None = None, shared: SharedStore | None = None) -> None:
        self.config = config or MatchConfig()
        self.shared = shared
        self._indices: dict[Request, SuffixIndex] = {}
        self._matches: dict[Request, Matches] = {}
        self._foreign: dict[Request, SharedMatches] = {}

    def describe(self) -> dict[str, Any]:
        shared = {} if self.shared is None else {"shared": asdict(self.shared.config)}
        return {"name": self.name, **asdict(self.config), **shared}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        self._indices[request] = SuffixIndex(self.config, request.tokens, prompt=len(request.prompt))

    def resume(self, request: Request, features: torch.Tensor | None, before: Request, kept: int) -> None:
        self.start(request, features)  # a few microseconds a token

    def match(self, request: Request) -> Matches:
        """The suffix matches of the request as it stands."""
        found = self._matches.get(request)
        if found is None:
            found = self._indices[request].find()
            if self.shared is not None and found.longest < self.config.max_length:
                foreign = self.shared.find(request.tokens[-self.shared.config.max_length :])
                if foreign.length > found.longest:
                    self._foreign[request] = foreign
                    found = replace(found, shared=foreign.length)
            self._matches[request] = found
        return found

    def candidates(self, request: Request) -> list[Sequence[int]]:
        """The tokens of the candidates, up to the matcher's depth, the best first: the first one gets most of a
        budget. Those of other requests' texts come first where they match more."""
        matches = self.match(request)
        own: list[Sequence[int]] = [*self._indices[request].candidates(matches)]
        return [*self._foreign[request].candidates, *own] if matches.shared else own

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            depth = min(budget.depth, request.room)
            candidates = [one[:depth] for one in self.candidates(request)]
            trees.append(DraftTree.trie(candidates, self.name, budget.nodes) if candidates and depth > 0 else None)
        return trees

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        index = self._indices[request]
        index.extend(request.tokens[len(index) :])
        self._forget(request)

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        fresh = {
            r: SuffixIndex(self.config, requests[row].tokens, prompt=len(requests[row].prompt))
            for r, row in zip(requests, rows, strict=True)
        }
        self._indices.update(fresh)
        for request in requests:
            self._forget(request)

    def close(self, request: Request) -> None:
        self._forget(request)
        if self._indices.pop(request, None) is not None and self.shared is not None:
            self.shared.add(request.generated)

    def _forget(self, request: Request) -> None:
        """What was found for the request holds no longer."""
        self._matches.pop(request, None)
        self._foreign.pop(request, None)
