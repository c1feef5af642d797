"""Whether a head fits its target: its choices on the target's own greedy text.

A head with one wrong setting (a layer id off by one, a norm in the wrong place) drafts without an error, and next
to nothing of it is accepted. So where few of its first choices are the target's, the neighbouring settings are tried,
and the ones that do better are named.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from activations import packaged
from activations.corpus import load_corpus, spread
from activations.generation import Request as Asked
from activations.generation import complete
from activations.sites import last_site
from activations.target import Target, TargetError
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.head import EagleHead, HeadWarning
from decoding.eagle.rope import frequencies
from decoding.request import Request

LOW = 0.2
"""Agreement of the first draft step below which a setting is taken to be wrong."""
EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Positions in the text between which agreement is told."""


@dataclass(frozen=True)
class Text:
    """A text of the target's own."""

    prompt: int
    """Tokens of the prompt."""
    tokens: list[int]
    states: dict[str, torch.Tensor]
    """By site, [tokens - 1, width]."""


@dataclass(frozen=True)
class Span:
    """Agreement of the first draft step between two positions in the text."""

    start: int
    end: int
    rows: int
    agreement: float


@dataclass(frozen=True)
class HeadCheck:
    """How a head does on its target's own greedy text."""

    rows: int
    """Positions at which it was asked."""
    agreement: tuple[float, ...]
    """By draft step: share of its choices that are the target's, after true tokens (teacher-forced)."""
    accepted: tuple[float, ...]
    """By draft step: share of the positions at which this choice and all before it are the target's."""
    positions: tuple[Span, ...]
    better: tuple[tuple[str, float], ...] = ()
    """Other settings under which the first step agrees more, the best one first. Tried only where it agrees little."""

    @property
    def tokens_per_step(self) -> float:
        """Of a draft of one token a level: accepted length + 1."""
        return 1 + sum(self.accepted)

    @property
    def fits(self) -> bool:
        return not self.agreement or self.agreement[0] >= LOW

    def told(self) -> str:
        """What is wrong, for people."""
        text = (
            f"the head's first choice is the target's at {self.agreement[0]:.1%} of {self.rows} positions of its text"
        )
        if not self.better:
            return f"{text}; no neighbouring setting does better: it is probably the head of another target"
        tried = "; ".join(f"{setting}: {share:.1%}" for setting, share in self.better)
        return f"{text}, so a setting in its config.json is probably wrong. What does better: {tried}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step, "fits": self.fits}


def check_head(
    target: Target, head: EagleHead, prompts: Sequence[list[int]] | None = None, tokens: int = 16, steps: int = 1
) -> HeadCheck:
    """The head on the target's greedy text, `tokens` of it after each prompt (by default a few embedded ones).

    Raises HeadError for a head that cannot be used with the target, TargetError if the target writes nothing.
    """
    if prompts is None:
        prompts = [target.encode_messages(p.messages) for p in spread(load_corpus("validation"), 4)]
    own = head.config.sites(target.blocks)
    texts = write(target, prompts, tokens + steps, own)
    hits, at = choices(EagleDrafter(target, head), texts, steps)
    if not len(hits):
        raise TargetError(f"{target.name} ends its texts at once: no head can be checked with these prompts")
    check = HeadCheck(
        rows=len(hits),
        agreement=tuple(hits.double().mean(0).tolist()),
        accepted=tuple(hits.cumprod(1).double().mean(0).tolist()),
        positions=tuple(
            Span(a, b, int(inside.sum()), float(hits[inside, 0].double().mean()))
            for a, b in itertools.pairwise(EDGES)
            if (inside := (at >= a) & (at < b)).any()
        ),
    )
    if check.fits:
        return check
    tried = neighbours(target, head)
    texts = write(target, prompts, tokens + steps, dict.fromkeys(s for _, sites in tried.values() for s in sites))
    found = []
    for setting, (other, sites) in tried.items():
        share = float(choices(EagleDrafter(target, other, sites=sites), texts, 1)[0].double().mean())
        if share > check.agreement[0] + 0.05:
            found.append((setting, share))
    return replace(check, better=tuple(sorted(found, key=lambda f: -f[1])))


def write(target: Target, prompts: Sequence[list[int]], tokens: int, sites: Any) -> list[Text]:
    """The target's greedy text after each prompt, with its states at the sites."""
    asked = [Asked(i, list(ids), tokens) for i, ids in enumerate(prompts)]
    done = sorted(complete(target, asked, rows=min(16, len(asked)), sites=sites), key=lambda c: c.request.number)
    return [Text(len(c.request.prompt), [*c.request.prompt, *c.tokens], c.states) for c in done]


def choices(drafter: EagleDrafter, texts: Sequence[Text], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the choices of `steps` draft steps, each after true tokens, are the target's: [rows, steps] of 0 and 1,
    and the position [rows] of the first of them in its text. Rows whose steps reach behind the text are left out."""
    hits, at = [], []
    for text in texts:
        ids = text.tokens
        states = torch.cat([text.states[site] for site in drafter.sites], dim=-1)
        request = Request(0, ids[: text.prompt], max_new_tokens=len(ids), tokens=ids[: text.prompt + 1])
        drafter.start(request, states[: text.prompt])
        for first in range(text.prompt + 1, len(ids) - steps + 1):
            chosen = drafter.forced(request, ids[first : first + steps - 1])
            hits.append([a == b for a, b in zip(chosen, ids[first : first + steps], strict=True)])
            at.append(first)
            request.tokens = ids[: first + 1]
            drafter.observe(request, states[first - 1 : first])
        drafter.close(request)
    return torch.tensor(hits, dtype=torch.int64).view(-1, steps), torch.tensor(at)


def neighbours(target: Target, head: EagleHead) -> dict[str, tuple[EagleHead, tuple[str, ...]]]:
    """Heads with the same weights and one other setting, and the sites that they read, by what was changed."""
    config, blocks = head.config, target.blocks
    sites = config.sites(blocks)
    out: dict[str, tuple[EagleHead, tuple[str, ...]]] = {}
    if config.features:
        numbers = [blocks if s == last_site(blocks) else int(s.removeprefix("resid_pre.")) for s in sites]
        for shift in (-1, 1):
            ids = tuple(k + shift for k in numbers)
            if min(ids) >= 0 and max(ids) <= blocks:
                moved = replace(config, layer_ids=ids)
                listed = ", ".join(map(str, ids))
                out[f"eagle_aux_hidden_state_layer_ids [{listed}]"] = (head, moved.sites(blocks))
    flags = ["norm_before_residual"] if config.eagle == 3 else []
    for name in [*flags, *(["norm_output"] if config.last_norm else [])]:
        value = not getattr(config, name)
        out[f"{name} {str(value).lower()}"] = (_with(head, **{name: value}), sites)
    rope = getattr(target.config, "rope_parameters", None) or {}
    theta = next((v for r in (rope, *rope.values()) if isinstance(r, dict) and (v := r.get("rope_theta"))), None)
    if theta and theta != config.rope_theta:
        out[f"rope_theta {theta:g}"] = (_with(head, rope_theta=float(theta)), sites)
    if config.rope_scaling:
        out["no rope_scaling"] = (_with(head, rope_scaling=None), sites)
    return out


def _with(head: EagleHead, **changes: Any) -> EagleHead:
    """The same weights under other settings."""
    other = copy.copy(head)
    c = other.config = replace(head.config, **changes)
    other.angles, other.rope_factor = frequencies(c.per_head, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
    return other


def ensure_head(target: Target, head: EagleHead, folder: Path) -> None:
    """Warn of a head that does not fit. It is checked once for each target; the outcome is kept in the user's cache."""
    key = json.dumps([_digest(head), head.config.to_dict(), target.fingerprint.to_dict(), str(target.dtype)])
    marker = packaged.cache_dir() / "checks" / f"head-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    told = None
    with suppress(OSError, ValueError, KeyError):
        told = json.loads(marker.read_text(encoding="utf-8"))["told"]
    if told is None:
        try:
            check = check_head(target, head)
        except TargetError as error:
            warnings.warn(f"the EAGLE head in {folder} could not be checked: {error}", HeadWarning, stacklevel=2)
            return
        told = "" if check.fits else check.told()
        if target.fingerprint.revision != "unknown":
            with suppress(OSError):  # a full or read-only disk costs the next run the same check, nothing else
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.write_text(json.dumps({"told": told, **check.to_dict()}))
    if told:
        warnings.warn(f"{folder}: {told}. `switchsd head check {folder}` says more", HeadWarning, stacklevel=2)


def _digest(head: EagleHead) -> str:
    """A hash over samples of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in head.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // 4096)].double().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()
