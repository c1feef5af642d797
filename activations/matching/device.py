"""The suffix matcher of a batch of requests, by whichever back end suits their device."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from activations.matching import reference
from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig
from activations.matching.tensors import TensorMatches

Backend = Literal["triton", "index", "torch"]
ALIGNED = 16
"""A row's tokens start at a multiple of this, so that a GPU reads them in the largest pieces."""


def backend_for(device: torch.device) -> Backend:
    """The back end that is fastest on a device."""
    if device.type == "cpu":
        return "index"
    return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "torch"


class DeviceMatcher:
    """The contexts of `rows` requests, each of at most `capacity` tokens, and their suffix matches.

    `triton` and `torch` keep the contexts in one tensor on the device, and nothing waits for it, except when a
    context might be full; `index` keeps a `SuffixIndex` for each on the host. All find the same.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        config: MatchConfig | None = None,
        device: torch.device | str = "cpu",
        backend: Backend | None = None,
    ) -> None:
        """`backend` None takes the one that suits the device."""
        if rows < 1 or capacity < 1:
            raise ValueError(f"rows is {rows} and capacity {capacity}; both must be 1 or more")
        if backend not in (None, "triton", "index", "torch"):
            raise ValueError(f"backend is {backend!r}; it must be 'triton', 'index', 'torch' or None")
        self.config = config or MatchConfig()
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows]: tokens in each context."""
        self.prompts = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows]: tokens in each prompt."""
        self.backend: Backend = backend or backend_for(self.lengths.device)
        self._bound = 0  # no context is longer; known without asking the device
        self._indexes = [SuffixIndex(self.config) for _ in range(rows if self.backend == "index" else 0)]
        columns = 0 if self._indexes else -(-(capacity + 1) // ALIGNED) * ALIGNED
        # at least one column more than the capacity: `torch` puts there what is masked out
        self._buffer = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        if self.backend == "triton":
            from activations.matching.kernel import Workspace  # needs Triton

            self._workspace = Workspace.of(self._buffer, self.config)

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Append tokens[b, :counts[b]] to each context: integers [rows, K] and [rows], on the matcher's device.

        Raises ValueError if a context outgrows the capacity.
        """
        width = tokens.shape[1]
        self._bound += width
        if self._bound > self.capacity:
            self._bound = int((self.lengths + counts).max())
            if self._bound > self.capacity:
                raise ValueError(
                    f"a context would have {self._bound} tokens and the matcher holds {self.capacity}: "
                    "make it with a larger capacity"
                )
        if self.backend == "triton":
            from activations.matching.kernel import append_tokens

            append_tokens(self._buffer, self.lengths, self.capacity, tokens.contiguous(), counts.contiguous())
            return
        if self._indexes:
            for index, row, count in zip(self._indexes, tokens.tolist(), counts.tolist(), strict=True):
                index.extend(row[:count])
        else:
            offset = torch.arange(width, device=tokens.device)
            slots = self.lengths[:, None] + offset
            slots = torch.where(offset < counts[:, None], slots, self.capacity)
            self._buffer.scatter_(1, slots, tokens.to(torch.int32))
        self.lengths += counts

    def end_prompt(self, row: int) -> None:
        """What a context holds so far is its prompt."""
        self.prompts[row] = self.lengths[row]
        if self._indexes:
            self._indexes[row].prompt = len(self._indexes[row])

    def reset(self, row: int) -> None:
        """Empty a context, for the next request in its row."""
        self.lengths[row] = 0
        self.prompts[row] = 0
        if self._indexes:
            self._indexes[row] = SuffixIndex(self.config)

    def find(self) -> TensorMatches:
        """The matches of every context as it stands, its last token being the pending one. With the kernel the
        result is overwritten by the next call, and a CUDA graph may hold the call. (It may not hold `append`, which
        looks out for a full context; `kernel.append_tokens` drops what does not fit.)"""
        if self.backend == "triton":
            from activations.matching.kernel import find_matches

            return find_matches(self._buffer, self.lengths, self.prompts, self.config, self._workspace)
        if self.backend == "torch":
            return reference.find_matches(self._buffer, self.lengths, self.prompts, self.config)
        matches = [index.find() for index in self._indexes]
        candidates = [index.candidates(found) for index, found in zip(self._indexes, matches, strict=True)]
        return TensorMatches.pack(matches, candidates, self.config)
