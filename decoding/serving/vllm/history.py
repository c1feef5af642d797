"""The contexts of requests on the device, for an engine that does not keep them there itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from activations.matching.device import ALIGNED
from decoding.serving.vllm.device import Texts


class DeviceHistory:
    """A slot for each request of the batch. What a step verified is written to it on the device, without waiting; only
    what the engine knew when a request came (its prompt, part of which may be cached and never pass) is sent there."""

    def __init__(self, requests: int, capacity: int, device: torch.device | str) -> None:
        """At most `requests` in a batch, each of at most `capacity` tokens."""
        columns = -(-(capacity + 1) // ALIGNED) * ALIGNED  # the token behind a full context is written, and never read
        self._buffer = torch.zeros(requests, columns, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self._slots: dict[str, int] = {}
        self._free = list(range(requests))
        self._ids: list[str] = []
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)

    def texts(self, ids: Sequence[str], known: Callable[[str], Sequence[int]]) -> Texts:
        """The contexts of a batch, in its order. `known` is asked for the tokens so far of a request that was not in
        the batch before. One that is not in it any more is forgotten: it may come back with another text."""
        ids = list(ids)
        if ids != self._ids:
            for name in self._slots.keys() - set(ids):
                self._free.append(self._slots.pop(name))
            for name in ids:
                if name not in self._slots:
                    self._slots[name] = self._free.pop()
                    tokens = known(name)
                    self._buffer[self._slots[name], : len(tokens)] = self._sent(tokens, torch.int32)
            self._rows = self._sent([self._slots[name] for name in ids], torch.int64)
            self._ids = ids
        return Texts(self._buffer, self._lengths, self._rows)

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
        places = torch.arange(len(tokens), device=tokens.device)
        owners = torch.searchsorted(starts[1:], places, right=True, out_int32=True)
        last = self._buffer.shape[1] - 1  # an index outside would stop the engine
        self._buffer[texts.rows[owners], positions.clamp(max=last)] = tokens.to(torch.int32)
        ends = (positions[anchors] + 1).clamp(max=last)
        self._buffer[texts.rows, ends] = pending.to(torch.int32)
        self._lengths[texts.rows] = ends + 1

    def _sent(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        pinned = self._buffer.is_cuda
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(self._buffer.device, non_blocking=True)
