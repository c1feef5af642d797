"""The replay log: what both drafters could have known and done at every position of a fixed greedy text.

At every position at which a step may begin the head's whole tree is grown, and the anchor's states and logits are
kept. Copies follow from the text alone and are not stored. A text is one safetensors file:

    ids        int32 [prompt + answer], the answer as far as it is known
    tokens     int32 [steps, nodes] of the head's whole tree, parents first; `steps` positions begin a step
    parents    int16 [steps, nodes], -1 = child of the pending token
    scores     float32 [steps, nodes], cumulative log-probabilities
    summary    float32 [steps, 3], the anchor's logits: largest probability, entropy in nats, gap of the top two
    state.*    [steps, width] in the target's dtype, one a site: the anchor's states

Position i is the i-th generated token: it is pending, and its anchor is the token before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from activations.cache import KVCache
from activations.generation import Request as Answer
from activations.generation import complete
from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.eagle.drafter import EagleDrafter
from decoding.readings import summary
from decoding.request import Request

VERSION = 1
EVERYTHING = 10**6
"""More nodes than a whole tree has."""


class LogError(Exception):
    """A replay log that cannot be read. The message says what to do."""


@dataclass(frozen=True)
class LoggedText:
    """One text and everything a step at any of its positions could have known and drafted."""

    key: str
    """Unique in a log: source and number of the prompt."""
    source: str
    """Where the prompt comes from: train, validation, or the name of a benchmark."""
    prompt: int
    """Tokens of the prompt."""
    stopped: bool
    """`ids` ends at a stop token, not at a limit."""
    ids: list[int]
    """Prompt and answer."""
    tokens: torch.Tensor
    """int32 [steps, nodes]: the head's whole tree at each position, parents first."""
    parents: torch.Tensor
    """int16 [steps, nodes], -1 = child of the pending token."""
    scores: torch.Tensor
    """float32 [steps, nodes]: cumulative log-probabilities."""
    summary: torch.Tensor
    """float32 [steps, 3] of the anchor's logits: largest probability, entropy in nats, gap of the top two."""
    top_k: int = 4
    """Children that the head considered at a node, and beams a level."""
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    """By site, [steps, width]: the anchor's states."""

    @property
    def steps(self) -> int:
        """Positions at which a step may begin."""
        return len(self.scores)

    def context(self, position: int) -> int:
        """Tokens in the context at a position, the pending one included."""
        return self.prompt + 1 + position

    def save(self, file: Path) -> None:
        """Write it whole or not at all."""
        names = ("tokens", "parents", "scores", "summary")
        tensors = {"ids": torch.tensor(self.ids, dtype=torch.int32), **{n: getattr(self, n) for n in names}}
        tensors |= {f"state.{site}": state for site, state in self.states.items()}
        meta = {
            "version": VERSION, "key": self.key, "source": self.source, "prompt": self.prompt,
            "stopped": self.stopped, "top_k": self.top_k,
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, scratch, {"replay": json.dumps(meta)})
            scratch.replace(file)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: Path, states: bool = True) -> LoggedText:
        """Read it, with its states or without. Raises LogError for another file, or one of another version."""
        try:
            with safe_open(file, "pt") as opened:
                meta = json.loads((opened.metadata() or {})["replay"])
                if meta.pop("version") != VERSION:
                    raise ValueError("another version")
                held = {k: opened.get_tensor(k) for k in opened.keys() if states or not k.startswith("state.")}  # noqa: SIM118
            ids = held.pop("ids").tolist()
            kept = {k.removeprefix("state."): held.pop(k) for k in list(held) if k.startswith("state.")}
            return cls(ids=ids, states=kept, **meta, **held)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise LogError(f"{file} is no replay log of this version ({error}): delete it and log again") from error


def read_log(folder: str | os.PathLike[str], states: bool = True) -> list[LoggedText]:
    """All texts of a log, in the order of their names. Raises LogError if there are none, or one cannot be read."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise LogError(f"{os.fspath(folder)} holds no logged texts: make them first")
    return [LoggedText.load(file, states) for file in files]


def log_answers(
    target: Target,
    drafter: EagleDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int = 128,
    ahead: int = 24,
    depth: int = 5,
    sites: Sequence[str] = (),
) -> list[LoggedText]:
    """Let the target answer prompts (token ids) greedily, side by side, and log every answer of 3 tokens or more.

    An answer has at most `limit` tokens at which a step may begin, and `ahead` more, so that it is known how far drafts
    are followed. `depth` and `sites`: see `log_text`.
    """
    requests = [Answer(i, list(ids), limit + ahead) for i, ids in enumerate(prompts)]
    done = sorted(complete(target, requests, rows=min(len(requests), 32)), key=lambda c: c.request.number)
    return [
        log_text(
            target, drafter, [*c.request.prompt, *c.tokens], len(c.request.prompt), key=f"{c.request.number:04}",
            source="prompts", stopped=c.stopped, limit=limit, depth=depth, sites=sites,
        )
        for c in done
        if len(c.tokens) >= 3
    ]  # fmt: skip


def log_text(
    target: Target,
    drafter: EagleDrafter,
    ids: Sequence[int],
    prompt: int,
    *,
    key: str,
    source: str,
    stopped: bool,
    limit: int = 128,
    depth: int = 5,
    sites: Sequence[str] = (),
) -> LoggedText:
    """Log a prompt of `prompt` tokens and the target's greedy answer behind it.

    Steps may begin at the first `limit` generated tokens; what is behind them only says how far drafts are followed.
    The head's trees are `depth` levels deep. Raises LogError for an answer too short for a step.
    """
    ids = list(ids)
    steps = min(limit, len(ids) - prompt) - 1
    if prompt < 1 or steps < 1:
        raise LogError(f"{key}: an answer of {len(ids) - prompt} tokens has no step to log")
    fed = prompt + steps  # positions that have a state
    wanted = [*target.sites(drafter.sites), *target.sites(sites)]
    with target.read(wanted) as reader:
        cache = KVCache(1, capacity=fed)
        logits = target.forward(torch.tensor([ids[:fed]], device=target.device), cache, logits_to_keep=steps + 1)[
            0, :-1
        ]
        features = torch.cat([reader.states[s][0] for s in target.sites(drafter.sites)], dim=-1)
        anchors = slice(prompt - 1, fed - 1)
        states = {str(s): reader.states[s][0, anchors].cpu().clone() for s in target.sites(sites)}
    request = Request(0, ids[:prompt], max_new_tokens=steps + depth + 2, tokens=ids[: prompt + 1])
    drafter.start(request, features[:prompt])
    grown: list[tuple[torch.Tensor, ...]] = []
    try:
        for end in range(prompt + 1, prompt + 1 + steps):
            [tree] = drafter.propose([request], [FixedBudget(EVERYTHING, depth)])
            assert tree is not None and tree.candidates is not None
            grown.append(tuple(x.cpu() for x in tree.candidates))
            request.tokens.append(ids[end])
            drafter.observe(request, features[end - 1 : end])
    finally:
        drafter.close(request)
    tokens, scores, parents = (torch.stack(x) for x in zip(*grown, strict=True))
    return LoggedText(
        key, source, prompt, stopped, ids, tokens.int(), parents.short(), scores.float(), summary(logits).cpu(),
        drafter.top_k, states,
    )  # fmt: skip
