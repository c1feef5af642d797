"""The switch on the device for an engine that does not keep its requests' contexts there itself.

Its steps were played on a CPU; on a GPU it was not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from activations.matching.device import ALIGNED
from decoding.serving.vllm.device import Copies, DeviceSwitch, Texts
from decoding.serving.vllm.tally import Tally

if TYPE_CHECKING:
    from decoding.serving.vllm.counters import Counters
    from decoding.serving.vllm.host import Step


class Listed(Protocol):
    """What the engine's host knows of a request; it is one object as long as the request runs."""

    prompt_token_ids: list[int] | None
    output_token_ids: list[int]


class DeviceHistory:
    """A slot for each request of the batch. What a step verified is written to it on the device, without waiting; only
    what the engine knew when a request came (its prompt, part of which may be cached and never pass) is sent there."""

    def __init__(self, requests: int, capacity: int, device: torch.device | str) -> None:
        """At most `requests` in a batch, each of at most `capacity` tokens."""
        columns = -(-(capacity + 1) // ALIGNED) * ALIGNED  # the token behind a full context is written, and never read
        self._buffer = torch.zeros(requests, columns, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._slots: dict[int, tuple[Listed, int]] = {}  # by identity, which the object itself keeps from being reused
        self._free = list(range(requests))
        self._batch: list[int] = []
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)

    def texts(self, requests: Sequence[Listed]) -> Texts:
        """The contexts of a batch, in its order. A request that was not in the batch before is read from its lists. One
        that is not in it any more is forgotten: it may come back with another text."""
        batch = [id(request) for request in requests]
        if batch != self._batch:
            for key in self._slots.keys() - set(batch):
                self._free.append(self._slots.pop(key)[1])
            for key, request in zip(batch, requests, strict=True):
                if key not in self._slots:
                    self._slots[key] = request, self._free.pop()
                    self._admit(*self._slots[key])
            self._rows = self._sent([self._slots[key][1] for key in batch], torch.int64)
            self._batch = batch
        return Texts(self._buffer, self._lengths, self._rows)

    def _admit(self, request: Listed, slot: int) -> None:
        tokens = [*(request.prompt_token_ids or ()), *request.output_token_ids][: self._buffer.shape[1]]
        self._buffer[slot, : len(tokens)] = self._sent(tokens, torch.int32)
        self._lengths[slot] = 0  # nothing of it was read here

    def extend(
        self,
        texts: Texts,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        anchors: torch.Tensor,
        pending: torch.Tensor,
    ) -> None:
        """What a step read and gave: `tokens` and `positions` [T], request r's from starts[r] to starts[r + 1]
        (`starts` [R + 1], the last one T); `anchors` [R] is where in T each request's last verified token is, and
        `pending` [R] the token after it. Drafted tokens that were not kept are written too, behind the end."""
        places = torch.arange(len(tokens), dtype=starts.dtype, device=tokens.device)
        owners = torch.searchsorted(starts[1:], places, right=True)
        last = self._buffer.shape[1] - 1  # an index outside would stop the engine
        self._buffer[texts.rows[owners], positions.clamp(max=last)] = tokens.to(torch.int32)
        ends = (positions[anchors] + 1).clamp(max=last)
        self._buffer[texts.rows, ends] = pending.to(torch.int32)
        self._lengths[texts.rows] = ends.long() + 1

    def _sent(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        pinned = self._buffer.is_cuda
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(self._buffer.device, non_blocking=True)


class HistorySwitch:
    """As `HostSwitch`, without a step that waits for the device."""

    def __init__(
        self,
        switch: DeviceSwitch,
        requests: int,
        capacity: int,
        device: torch.device,
        counters: Counters | None = None,
        skips: int = 0,
    ) -> None:
        """At most `requests` in a batch, of at most `capacity` tokens; `skips` as for `Tally`."""
        self._switch = switch
        self._history = DeviceHistory(requests, capacity, device)
        self._tally = Tally(counters, requests, device, skips) if counters else None

    def decide(self, step: Step, requests: Mapping[str, Listed]) -> Copies:
        """What to copy; `step` is on the device, `unused` too."""
        texts = self._history.texts([requests[name] for name in step.names])
        starts, after = step.starts[:-1], step.starts[1:]
        # a step that began at the pending token has verified what was drafted behind it
        verified = step.positions[starts] == texts.lengths[texts.rows] - 1
        self._history.extend(texts, step.tokens, step.positions, step.starts, step.ends, step.pending)
        copies = self._switch.decide(step.states, texts, ~torch.as_tensor(step.unused))
        if self._tally is not None:
            sampled = torch.where(verified, step.ends - starts + 1, 1)
            self._tally.add(texts.rows, sampled, torch.where(verified, after - 1 - step.ends, 0), copies)
        return copies
