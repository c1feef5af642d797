"""The suffix matcher of a batch of requests: the kernel on a GPU, an index for each request on the CPU."""

from __future__ import annotations

import torch

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig
from activations.matching.tensors import TensorMatches


class DeviceMatcher:
    """The contexts of `rows` requests, each of at most `capacity` tokens, and their suffix matches.

    On a GPU nothing waits for the device, except when a context might be full.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        config: MatchConfig | None = None,
        device: torch.device | str = "cpu",
        kernel: bool | None = None,
    ) -> None:
        """`kernel` None takes the kernel on every device but the CPU."""
        if rows < 1 or capacity < 1:
            raise ValueError(f"rows is {rows} and capacity {capacity}; both must be 1 or more")
        self.config = config or MatchConfig()
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows]: tokens in each context."""
        self._bound = 0  # no context is longer; known without asking the device
        self._indexes: list[SuffixIndex] = []
        if self.lengths.device.type != "cpu" if kernel is None else kernel:
            # the last column takes what is masked out
            self._buffer = torch.zeros(rows, capacity + 1, dtype=torch.int32, device=device)
        else:
            self._indexes = [SuffixIndex(self.config) for _ in range(rows)]

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Append tokens[b, :counts[b]] to each context: integers [rows, K] and [rows], on the matcher's device."""
        width = tokens.shape[1]
        self._bound += width
        if self._bound > self.capacity:
            self._bound = int((self.lengths + counts).max())
            if self._bound > self.capacity:
                raise ValueError(
                    f"a context would have {self._bound} tokens and the matcher holds {self.capacity}: "
                    "make it with a larger capacity"
                )
        if self._indexes:
            for index, row, count in zip(self._indexes, tokens.tolist(), counts.tolist(), strict=True):
                index.extend(row[:count])
        else:
            offset = torch.arange(width, device=tokens.device)
            slots = self.lengths[:, None] + offset
            slots = torch.where(offset < counts[:, None], slots, self.capacity)
            self._buffer.scatter_(1, slots, tokens.to(torch.int32))
        self.lengths += counts

    def reset(self, row: int) -> None:
        """Empty a context, for the next request in its row."""
        self.lengths[row] = 0
        if self._indexes:
            self._indexes[row] = SuffixIndex(self.config)

    def find(self) -> TensorMatches:
        """The matches of every context as it stands, its last token being the pending one."""
        if not self._indexes:
            from activations.matching.kernel import find_matches  # needs Triton

            return find_matches(self._buffer, self.lengths, self.config)
        matches = [index.find() for index in self._indexes]
        candidates = [index.candidates(found) for index, found in zip(self._indexes, matches, strict=True)]
        return TensorMatches.pack(matches, candidates, self.config)
