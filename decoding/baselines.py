"""Hugging Face `generate` on the same weights in memory: what every number of the benchmark stands beside."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from activations.target import Target

BASELINES = ("hf", "hf-lookup")
LOOKUP_TOKENS = 10


@dataclass
class Written:
    """One baseline generation."""

    tokens: list[int] = field(default_factory=list)
    """Generated ids, the stop token included."""
    pieces: list[int] = field(default_factory=list)
    """Tokens that each forward brought."""
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    """From the first token to the last."""


class _Clock(BaseStreamer):
    """Notes when tokens come; `generate` shows it the prompt first."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.pieces: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.pieces.append(int(value.numel()))

    def end(self) -> None: ...


def hugging_face(target: Target, prompt: list[int], max_new_tokens: int, mode: str) -> Written:
    """Greedy `generate`, plain ("hf") or with prompt lookup ("hf-lookup")."""
    if mode not in BASELINES:
        raise ValueError(f"unknown baseline {mode!r}: choose from {', '.join(BASELINES)}")
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if mode == "hf-lookup" else {}
    ids = torch.tensor([prompt], device=target.device)
    stops = sorted(target.stop_ids)
    with target.stock():
        clock = _Clock()
        output: Any = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            streamer=clock,
            **options,
        )
    tokens = output[0, len(prompt) :].tolist()
    return Written(
        tokens=tokens,
        pieces=clock.pieces,
        first_token_seconds=clock.times[0] - clock.start,
        decode_seconds=clock.times[-1] - clock.times[0],
    )
