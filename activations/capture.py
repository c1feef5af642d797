"""Capturing: the target answers prompts, and its states are kept at the positions where a decoder has to decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from activations.cache import KVCache
from activations.corpus import Prompt, prompts_hash
from activations.generation import Completion, Request, complete
from activations.labels import LabelConfig, follow_rows
from activations.provenance import provenance
from activations.sampling import Sampling
from activations.store import CaptureStore, StoreWriter
from activations.target import Target, TargetError


@dataclass(frozen=True)
class CaptureConfig:
    """What is captured."""

    sites: tuple[str, ...] = ("attn_out.*", "resid_mid.*", "resid_post.*")
    """Sites to keep; `*` stands for every block."""
    selection: Literal["anchors", "matches"] = "anchors"
    """Positions to keep: every anchor of the generated text, or those with a suffix match."""
    max_new_tokens: int = 192
    """Longest completion, in tokens."""
    temperature: float = 0.0
    """Temperature of the completions; 0 is greedy."""
    batch: int = 32
    """Completions written at once, and documents in a shard. An interrupted run loses at most one shard."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """How copied tokens are labelled."""
    seed: int = 0
    """Keys the sampling of the completions."""

    def __post_init__(self) -> None:
        if not self.sites:
            raise ValueError("no sites to keep: name at least one")
        for name in ("max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        Sampling(temperature=self.temperature)  # checks itself


def estimate_bytes(target: Target, prompts: int, config: CaptureConfig) -> int:
    """Upper bound of the store's size: every completion at its longest and every anchor kept."""
    item = torch.empty(0, dtype=target.dtype).element_size()
    return prompts * config.max_new_tokens * (len(target.sites(config.sites)) * target.width * item + 64)


def capture(
    target: Target,
    prompts: Sequence[Prompt],
    folder: Path,
    config: CaptureConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CaptureStore:
    """Answer `prompts` and keep states, labels and surface features in a store.

    `progress(done, total)` is called with documents. An interrupted call leaves whole shards behind; the same
    call again goes on after them. Raises StoreError if `folder` holds another capture.
    """
    config = config or CaptureConfig()
    sites = [str(s) for s in target.sites(config.sites)]
    for prompt in prompts:  # one that is too long must not end the capture half way
        try:
            target.encode_messages(prompt.messages)
        except TargetError as error:
            raise TargetError(f"prompt {prompt.id}: {error}") from error
    template = target.tokenizer.chat_template
    store = StoreWriter(
        folder,
        {
            "target": target.fingerprint.to_dict(),
            "target_name": target.name,
            "selection": config.selection,
            "config": asdict(config),
            "documents": len(prompts),
            "prompts": prompts_hash(prompts),
            "dtype": str(target.dtype).removeprefix("torch."),
            "attention": target.config._attn_implementation,
            "chat_template": template if isinstance(template, str) else None,
            "provenance": provenance(seed=config.seed),
        },
        sites,
    )
    shards = math.ceil(len(prompts) / config.batch)
    for first in (n * config.batch for n in (*store.gaps, *range(store.complete_shards, shards))):
        chosen = prompts[first : first + config.batch]
        parts = []
        for completion in _completions(target, chosen, first, config):
            prompt = prompts[completion.request.number]
            parts.append((completion.request.number, read_document(target, prompt, completion, sites, config)))
            if progress:
                progress(first + len(parts), len(prompts))
        parts.sort(key=lambda part: part[0])
        rows = {k: np.concatenate([part[1][0][k] for part in parts]) for k in parts[0][1][0]}
        states = {s: torch.cat([part[1][1][s] for part in parts]) for s in sites}
        store.write(rows, states)
    return CaptureStore.open(folder)


def _completions(target: Target, prompts: Sequence[Prompt], first: int, config: CaptureConfig) -> Iterator[Completion]:
    sampling = Sampling(temperature=config.temperature, seed=config.seed)
    requests = (
        Request(number, target.encode_messages(prompt.messages), config.max_new_tokens, sampling)
        for number, prompt in enumerate(prompts, start=first)
    )
    return complete(target, requests, rows=min(config.batch, len(prompts)))


def read_document(
    target: Target, prompt: Prompt, completion: Completion, sites: Sequence[str], config: CaptureConfig
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Rows and states of one document, from one teacher-forced forward without padding.

    `max_prob`, `entropy` (nats) and `margin` (top-2 gap of the logits) are those of the anchor's own logits, the
    ones that chose the pending token. `next_logprob` is what the target, one position later, gives the candidate's
    first token: it is not known when the decision is taken, and is kept for the leak check only.
    """
    ids = completion.request.prompt + completion.tokens
    start = len(completion.request.prompt) - 1  # the first anchor
    rows = follow_rows(ids, start + 1, config.labels, completion.stopped, _template_ids(target))
    count = len(rows["position"])
    cache = KVCache(1, capacity=len(ids))
    with target.read(sites) as reader:
        hidden = target.hidden(torch.tensor([ids[:-1]], device=target.device), cache)
        states = {str(s): v[0, start:].cpu() for s, v in reader.states.items()}
    logits = target.logits(hidden[0, start:]).float()
    logp = logits.log_softmax(-1)
    top = logits.topk(2, dim=-1).values
    rows["max_prob"] = logp.max(-1).values.exp().cpu().numpy()
    rows["entropy"] = -(logp.exp() * logp).sum(-1).cpu().numpy()
    rows["margin"] = (top[:, 0] - top[:, 1]).cpu().numpy()
    # The most recent candidate's first token; rows without a match point anywhere and are blanked below.
    candidate = np.asarray(ids)[np.where(rows["match_length"] > 0, rows["position"] + 2 - rows["distance"], 0)]
    following = logp[1:].gather(1, torch.from_numpy(candidate[:-1, None]).to(logp.device))[:, 0].cpu().numpy()
    rows["next_logprob"] = np.append(following, np.nan).astype(np.float32)
    rows["next_logprob"][rows["match_length"] == 0] = np.nan
    rows["document"] = np.full(count, completion.request.number, dtype=np.int64)
    for name in ("group", "split", "family"):
        rows[name] = np.full(count, getattr(prompt, name))
    if config.selection == "matches":
        keep = rows["match_length"] > 0
        rows = {k: v[keep] for k, v in rows.items()}
        states = {k: v[torch.from_numpy(keep)] for k, v in states.items()}
    return rows, states


def _template_ids(target: Target) -> frozenset[int]:
    """Special tokens and the newline: what a chat template is made of beside role names."""
    return frozenset(target.tokenizer.all_special_ids) | frozenset(
        target.tokenizer("\n", add_special_tokens=False)["input_ids"]
    )
