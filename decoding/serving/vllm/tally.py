"""Counting what was decided on the device, without a step that waits for its counters."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from decoding.serving.vllm.device import Copies

if TYPE_CHECKING:
    from decoding.serving.vllm.counters import Counters

COLUMNS = 7
"""Numbers that a step says of a request."""
AHEAD = 8
"""Steps that may be on their way to the host. It seldom runs more than one ahead of the device."""


class Tally:
    """Each step's numbers go to the host by themselves, and are counted when a later step finds them there."""

    def __init__(self, counters: Counters, slots: int, device: torch.device | str, skips: int = 0) -> None:
        """`slots`: most requests at a time; each keeps its slot while it runs. Steps of up to `skips` requests leave
        the head's further passes out where all of them copy."""
        self._counters = counters
        self._skips = skips
        self._copied = torch.zeros(slots, dtype=torch.bool, device=device)
        on_gpu = self._copied.is_cuda
        self._blocks = [torch.zeros(COLUMNS * slots, pin_memory=on_gpu) for _ in range(AHEAD)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(AHEAD)]
        self._sent: deque[tuple[int, int]] = deque()
        self._next = 0

    def add(self, slots: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor, copies: Copies) -> None:
        """One step of R requests: their slots, how many tokens it gave each (the new pending one included) and how many
        drafted ones it rejected, integers [R]; and what is drafted next."""
        while self._sent:
            event = self._events[self._sent[0][0]]
            if event is not None and not event.query():
                if len(self._sent) < AHEAD:
                    break
                event.synchronize()
            self._count(*self._sent.popleft())
        drafted_here = self._copied[slots]
        columns = [copies.scores, copies.asked, copies.eligible, copies.chosen, drafted_here, sampled, rejected]
        numbers = torch.stack([column.float() for column in columns])
        self._copied[slots] = copies.chosen
        self._blocks[self._next][: numbers.numel()].copy_(numbers.view(-1), non_blocking=True)
        event = self._events[self._next]
        if event is not None:
            event.record()
        self._sent.append((self._next, len(slots)))
        self._next = (self._next + 1) % AHEAD

    def _count(self, block: int, requests: int) -> None:
        numbers = self._blocks[block][: COLUMNS * requests].view(COLUMNS, requests).numpy()
        scores, *flags, sampled, rejected = numbers
        asked, eligible, chosen, drafted_here = (flag > 0 for flag in flags)
        if eligible.any():
            skipped = requests <= self._skips and bool((chosen | ~eligible).all())
            self._counters.decided(scores[asked].tolist(), int(chosen.sum()), int(eligible.sum()), skipped)
        # a step that verified no draft judges none: the request was paused, or its slot has a new one
        drafted, kept = sampled + rejected - 1, sampled - 1
        for row in (drafted_here & (drafted > 0)).nonzero()[0]:
            self._counters.settled(int(drafted[row]), int(kept[row]))
