"""Counting on the device what was decided there, so that no step waits for its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decoding.serving.vllm.device import Copies

if TYPE_CHECKING:
    from decoding.serving.vllm.counters import Counters

STEPS = 16
"""Steps between two copies to the host. Counters lag behind by as many, and a little more."""


class Tally:
    """A log of the last steps on the device, which goes to the host a block at a time."""

    def __init__(self, counters: Counters, slots: int, device: torch.device | str) -> None:
        """`slots`: most requests at a time; each keeps its slot while it runs."""
        self._counters = counters
        self._copied = torch.zeros(slots, dtype=torch.bool, device=device)
        self._log = torch.zeros(STEPS, 7, slots, device=device)
        on_gpu = self._log.is_cuda
        self._host = torch.zeros(self._log.shape, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._steps: list[tuple[int, bool]] = []
        self._sent: list[tuple[int, bool]] = []

    def add(
        self, slots: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor, copies: Copies, skipped: bool
    ) -> None:
        """One step of R requests: their slots, how many tokens it gave each (the new pending one included) and how many
        drafted ones it rejected, integers [R]; what is drafted next, and whether neural steps were left out."""
        if self._sent and (self._arrived is None or self._arrived.query()):
            self._read()
        drafted_here = self._copied[slots]
        columns = [copies.scores, copies.asked, copies.eligible, copies.chosen, drafted_here, sampled, rejected]
        self._log[len(self._steps), :, : len(slots)] = torch.stack([column.float() for column in columns])
        self._copied[slots] = copies.chosen
        self._steps.append((len(slots), skipped))
        if len(self._steps) == STEPS:
            if self._sent:
                assert self._arrived is not None
                self._arrived.synchronize()  # that copy is as many steps old
                self._read()
            self._host.copy_(self._log, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._sent, self._steps = self._steps, []

    def _read(self) -> None:
        for block, (requests, skipped) in zip(self._host.numpy(), self._sent, strict=False):
            scores, *flags, sampled, rejected = block[:, :requests]
            asked, eligible, chosen, drafted_here = (flag > 0 for flag in flags)
            if eligible.any():
                self._counters.decided(scores[asked].tolist(), int(chosen.sum()), int(eligible.sum()), skipped)
            # a step that was given no draft judges none: the request was paused, or its slot has a new one
            drafted, kept = sampled + rejected - 1, sampled - 1
            for row in (drafted_here & (drafted > 0)).nonzero()[0]:
                self._counters.settled(int(drafted[row]), int(kept[row]))
        self._sent = []
