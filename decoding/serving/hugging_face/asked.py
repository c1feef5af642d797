"""What was asked of `generate`: the prompts, and what cannot be done."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from decoding.modes import DecodingError

CACHES = ("cache", "past_key_values")
"""The names of the cache among the keywords, after transformers 5.22 and up to it."""
KNOWN = {*CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
FORGOTTEN = ("streamer", "assistant_model", "synced_gpus", "tokenizer")


def forgotten(others: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the `generate` that is running which are none of the model's; taken from `others` if they are there.

    transformers 5.16 to 5.24 do not hand them to a callable `custom_generate`: a streamer would be given the prompt and
    then wait for ever. So they are read in the caller's frame; there are none where nobody calls from `generate`.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    found = {} if frame is None else {name: frame.f_locals.get(name) for name in FORGOTTEN}
    return found | {name: others.pop(name) for name in FORGOTTEN if name in others}


def refuse(config: GenerationConfig, others: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise DecodingError for what this loop cannot honour. `others`: what the model's forward would be given; `asked`:
    see `forgotten`."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or asked.get("assistant_model") is not None:
        named = "an assistant" if asked.get("assistant_model") is not None else str(getattr(mode, "value", mode))
        raise DecodingError(
            f"custom_generate with SwitchSD decodes greedily or samples, and drafts by itself; {named} was asked for: "
            "leave num_beams, assistant_model, prompt_lookup_num_tokens and the like out"
        )
    if asked.get("synced_gpus"):
        raise DecodingError(
            "synced_gpus=True: ranks accept drafts of different lengths; use a model that is not sharded"
        )
    cache = next((others[name] for name in CACHES if others.get(name) is not None), None)
    if config.cache_implementation not in (None, "dynamic", "hybrid"):
        raise DecodingError(
            f"cache_implementation={config.cache_implementation!r}: drafting keeps a cache of its own: leave it out"
        )
    if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
        raise DecodingError(
            f"a {type(cache).__name__} was given: drafting keeps a cache of its own: leave cache and past_key_values "
            "out, and give the whole text as input_ids"
        )
    if config.use_cache is False:
        raise DecodingError("use_cache=False: drafts are verified with a cache: leave it out")
    if config.prefill_chunk_size is not None:
        raise DecodingError(f"prefill_chunk_size={config.prefill_chunk_size}: prompts are read whole: leave it out")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise DecodingError(
                    f"{name}=True: states are not kept while drafts are verified: leave it out, or run "
                    "the finished text through the model once"
                )
    for name, value in others.items():
        if value is not None and name not in KNOWN:
            raise DecodingError(f"{name} was given: only input_ids and attention_mask are read; leave it out")


def prompts(input_ids: torch.Tensor, others: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each row [rows, width] without its padding. Raises DecodingError where that is not on the
    left."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise DecodingError(
            f"input_ids have shape {tuple(input_ids.shape)}; they must be [rows, tokens], and hold some text"
        )
    mask, positions = others.get("attention_mask"), others.get("position_ids")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or not bool((mask.bool()[:, -1]).all() and (mask.diff(dim=1) >= 0).all()):
        raise DecodingError(
            "attention_mask must be 0 for padding on the left and 1 from there on: give the tokenizer "
            "padding_side='left'"
        )
    expected = (mask.long().cumsum(1) - 1).clamp(min=0)
    if positions is not None and (
        positions.shape != expected.shape or bool(((positions.to(expected.device) != expected) & mask.bool()).any())
    ):
        raise DecodingError("position_ids other than 0, 1, 2, ... cannot be followed: leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)]
