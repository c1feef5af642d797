"""Completions written by the target itself, many at a time.

Rows of one KV cache are refilled as soon as their sequence ends (continuous batching), so that the matrix
products stay wide. A completion depends on its prompt, its number and the sampling alone, up to the rounding
differences between batch shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from activations.cache import KVCache
from activations.sampling import Sampling, choose
from activations.sites import SiteReader
from activations.target import Target


@dataclass(frozen=True)
class FollowUp:
    """What is said once the first part of a text has ended at a stop token, and how the text then goes on."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Request:
    """A prompt to complete. `number` keys the sampling noise."""

    number: int
    prompt: list[int]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    follow_up: FollowUp | None = None
    """The row goes on with these tokens instead of ending: no second prefill."""


@dataclass(frozen=True)
class Completion:
    """What the target wrote for a request."""

    request: Request
    tokens: list[int]
    """Generated ids, the stop token and those of a follow-up included."""
    stopped: bool
    """True if a stop token ended it, False if the token limit did."""
    followed_up: bool = False
    """True if the first part ended and the follow-up was said."""
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    """By site, [prompt + generated - 1, width]: the last token was never fed, so it has no state."""


def complete(
    target: Target, requests: Iterable[Request], rows: int = 64, sites: Iterable[str] = ()
) -> Iterator[Completion]:
    """Yield completions as they end, in no fixed order; with `sites`, their states come along."""
    with target.read(sites) as reader:
        yield from _complete(target, iter(requests), rows, reader)


def _complete(target: Target, source: Iterator[Request], rows: int, reader: SiteReader) -> Iterator[Completion]:
    cache = KVCache(rows, capacity=256)
    slots: list[_Row | None] = [None] * rows
    prefill = _Prefill(target, reader)

    def admit(row: int) -> Iterator[Completion]:
        """Fill a free row with the next request; those that end at their first token are yielded at once."""
        slots[row], cache.lengths[row] = None, 0
        for request in source:
            single, logits, states = prefill(request.prompt)
            cache.load_row(row, single)
            live = _Row(request, request.sampling, request.max_new_tokens, [states])
            live.take(_choose([live], logits, [len(request.prompt)])[0], target.stop_ids)
            if not live.ended:
                slots[row] = live
                return
            yield live.completion()

    for row in range(rows):
        yield from admit(row)
    causal = torch.ones(1, 1, dtype=torch.bool, device=target.device)
    while any(slots):
        busy = [row for row in range(rows) if slots[row] is not None]
        if len(busy) <= rows // 2:  # nothing left to admit: drop the idle rows
            cache.select(busy)
            slots = [slots[r] for r in busy]
            rows = len(busy)
            busy = list(range(rows))
        live = [s for s in slots if s is not None]
        tokens = torch.tensor([[s.tokens[-1] if s else 0] for s in slots], device=target.device)
        logits = target.forward(tokens, cache, causal)[:, 0]
        states = {str(site): state.clone() for site, state in reader.states.items()}
        cache.commit([range(1) if s is not None else () for s in slots])
        chosen = _choose(live, logits[busy], [cache.lengths[r] for r in busy])
        for row, one, token in zip(busy, live, chosen, strict=True):
            one.states.append({site: state[row] for site, state in states.items()})
            one.take(token, target.stop_ids)
            if one.ended or cache.lengths[row] + 1 >= target.max_length:
                yield one.completion()
                yield from admit(row)


class _Row:
    """One text being written."""

    def __init__(self, request: Request, sampling: Sampling, limit: int, states: list[dict[str, torch.Tensor]]) -> None:
        self.request, self.sampling, self.limit, self.states = request, sampling, limit, states
        self.tokens: list[int] = []
        self.said: list[int] = []  # follow-up tokens that are still to be fed
        self.followed_up = self.stopped = self.ended = False

    def take(self, token: int, stop_ids: frozenset[int]) -> None:
        """Append the chosen token, or the next token of a follow-up in its place."""
        if self.said:
            self.tokens.append(self.said.pop(0))
            return
        self.tokens.append(token)
        self.stopped = token in stop_ids
        more = self.request.follow_up
        if self.stopped and more is not None and not self.followed_up:
            self.said, self.sampling = list(more.tokens), more.sampling
            self.limit = len(self.tokens) + len(more.tokens) + more.max_new_tokens
            self.followed_up, self.stopped = True, False
        self.ended = self.stopped or len(self.tokens) >= self.limit

    def completion(self) -> Completion:
        states = {site: torch.cat([part[site] for part in self.states]) for site in self.states[0]}
        return Completion(self.request, self.tokens, self.stopped, self.followed_up, states)


class _Prefill:
    """Prefills prompts one by one; a prompt equal to the previous one costs nothing."""

    def __init__(self, target: Target, reader: SiteReader) -> None:
        self._target, self._reader = target, reader
        self._prompt: list[int] = []
        self._result: tuple[KVCache, torch.Tensor, dict[str, torch.Tensor]] | None = None

    def __call__(self, prompt: list[int]) -> tuple[KVCache, torch.Tensor, dict[str, torch.Tensor]]:
        """Cache, logits [1, V] of the last position, states [prompt, width] by site."""
        if self._result is None or prompt != self._prompt:
            cache = KVCache(1, capacity=len(prompt))
            tokens = torch.tensor([prompt], device=self._target.device)
            logits = self._target.forward(tokens, cache, logits_to_keep=1)[:, 0]
            cache.commit([range(len(prompt))])
            states = {str(site): state[0] for site, state in self._reader.states.items()}
            self._prompt, self._result = prompt, (cache, logits, states)
        return self._result


def _choose(rows: list[_Row], logits: torch.Tensor, positions: list[int]) -> list[int]:
    chosen = choose([r.sampling for r in rows], logits, [r.request.number for r in rows], positions)
    return [int(token) for token in chosen.tolist()]
