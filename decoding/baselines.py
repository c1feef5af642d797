"""Hugging Face `generate` on the same weights in memory: what every number of the benchmark stands beside."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from activations.target import Target
from decoding.modes import DecodingError

BASELINES = ("hf", "hf-lookup", "hf-assisted")
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Assistant:
    """The draft model of assisted generation. It may have a tokenizer of its own: `generate` translates."""

    name: str
    model: Any
    tokenizer: Any
    """None where it is the target's."""

    @classmethod
    def load(cls, folder: str, target: Target) -> Assistant:
        """From a folder; in the target's dtype, on its device. Raises DecodingError if it cannot be loaded."""
        if not (Path(folder) / "config.json").is_file():
            raise DecodingError(f"--assistant {folder}: no model is there: name a folder with a config.json")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise DecodingError(f"--assistant {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        same = tokenizer.get_vocab() == target.tokenizer.get_vocab()
        return cls(folder, model.to(target.device).eval(), None if same else tokenizer)


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


def hugging_face(
    target: Target, prompt: list[int], max_new_tokens: int, mode: str, assistant: Assistant | None = None
) -> Written:
    """Greedy `generate`: plain ("hf"), with prompt lookup ("hf-lookup"), or with a draft model ("hf-assisted").

    Raises ValueError for another mode, and for "hf-assisted" without an assistant.
    """
    if mode not in BASELINES:
        raise ValueError(f"unknown baseline {mode!r}: choose from {', '.join(BASELINES)}")
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if mode == "hf-lookup" else {}
    if mode == "hf-assisted":
        if assistant is None:
            raise ValueError("hf-assisted needs an assistant")
        options = {"assistant_model": assistant.model}
        if assistant.tokenizer is not None:
            options |= {"tokenizer": target.tokenizer, "assistant_tokenizer": assistant.tokenizer}
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
