"""The verifier under `generate`: the target's next token is the one that its processed logits give."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.request import Request
from decoding.serving.hugging_face.sequences import Sequences
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict, Verifier


class ProcessedVerifier(Verifier):
    """Exact under any logits processors: only nodes on the accepted path are judged, each once and in order. The number
    of a request is its row."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        # Rows that must be in step choose their first token together, and not at prefill, one row after the other.
        self.opens = sequences.in_step

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        return self._accept_lazily(trees, logits, requests, intent)

    def _next(self, logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
        return self._sequences.extend([request.number for request in requests], logits)

    def _ended(self, request: Request) -> bool:
        return self._sequences.over(request.number)
