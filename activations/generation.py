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
from activations.sampling import Sampling
from activations.sites import SiteReader
from activations.target import Target


@dataclass(frozen=True)
class Request:
    """A prompt to complete. `number` keys the sampling noise."""

    number: int
    prompt: list[int]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Completion:
    request: Request
    tokens: list[int]
    """Generated ids, the stop token included."""
    stopped: bool
    """True if a stop token ended it, False if the token limit did."""
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
    slots: list[Request | None] = [None] * rows
    written: list[list[int]] = [[] for _ in range(rows)]
    read: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(rows)]

    def admit(row: int) -> Completion | None:
        """Prefill the next request into a free row; a request that ends at its first token is returned."""
        request = next(source, None)
        slots[row] = request
        if request is None:
            cache.lengths[row] = 0
            return None
        single = KVCache(1, capacity=len(request.prompt))
        tokens = torch.tensor([request.prompt], device=target.device)
        logits = target.forward(tokens, single, logits_to_keep=1)[:, 0]
        single.commit([range(len(request.prompt))])
        cache.load_row(row, single)
        read[row] = [{str(site): state[0] for site, state in reader.states.items()}]
        written[row] = choose([request], logits, [len(request.prompt)])
        return ended(row)

    def choose(batch: list[Request], logits: torch.Tensor, positions: list[int]) -> list[int]:
        """Next tokens; rows that share a sampling are processed together."""
        out = [0] * len(batch)
        for sampling in {r.sampling for r in batch}:
            index = [i for i, r in enumerate(batch) if r.sampling == sampling]
            numbers = torch.tensor([batch[i].number for i in index], device=logits.device)
            where = torch.tensor([positions[i] for i in index], device=logits.device)
            for i, token in zip(index, sampling.next_tokens(logits[index], numbers, where).tolist(), strict=True):
                out[i] = token
        return out

    def ended(row: int) -> Completion | None:
        request = slots[row]
        assert request is not None
        stopped = written[row][-1] in target.stop_ids
        full = len(written[row]) >= request.max_new_tokens or cache.lengths[row] + 1 >= target.max_length
        if not (stopped or full):
            return None
        states = {site: torch.cat([part[site] for part in read[row]]) for site in read[row][0]}
        return Completion(request, written[row], stopped, states)

    def fill(row: int) -> Iterator[Completion]:
        while (done := admit(row)) is not None:
            yield done

    for row in range(rows):
        yield from fill(row)
    causal = torch.ones(1, 1, dtype=torch.bool, device=target.device)
    while any(slots):
        live = [row for row in range(rows) if slots[row] is not None]
        if len(live) <= rows // 2:  # nothing left to admit: drop the idle rows
            cache.select(live)
            slots, written, read = ([x[r] for r in live] for x in (slots, written, read))  # type: ignore[assignment]
            rows = len(live)
            live = list(range(rows))
        tokens = torch.tensor([[w[-1] if s else 0] for s, w in zip(slots, written, strict=True)], device=target.device)
        logits = target.forward(tokens, cache, causal)[:, 0]
        states = {str(site): state.clone() for site, state in reader.states.items()}
        cache.commit([range(1) if slots[row] is not None else () for row in range(rows)])
        batch = [s for s in slots if s is not None]
        for row, token in zip(live, choose(batch, logits[live], [cache.lengths[r] for r in live]), strict=True):
            written[row].append(token)
            read[row].append({site: state[row] for site, state in states.items()})
            if (done := ended(row)) is not None:
                yield done
                yield from fill(row)
