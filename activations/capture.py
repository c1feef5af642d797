"""Capturing: the target answers prompts, and its states are kept at the positions where a decoder has to decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from activations.cache import KVCache
from activations.causal import CausalConfig, causal_drops, document_matches
from activations.corpus import Prompt, PromptError, Skipped, prompts_hash
from activations.generation import Completion, Request, complete
from activations.labels import LabelConfig, follow_rows
from activations.lookback import NAME as LOOKBACK
from activations.lookback import check_attention, watch
from activations.provenance import provenance
from activations.sampling import Sampling
from activations.sites import eagle_sites, last_site
from activations.store import ROW_BYTES, CaptureStore, Rows, States, StoreWriter, check_space, text_rows
from activations.target import Target, TargetError

SELECTIONS = ("anchors", "matches", "every", "all")
EAGLE = "eagle"
"""Stands for the sites that an EAGLE-3 head is trained from."""
SOURCES = ("source", "candidate")
"""Other places than the anchor where a state may be kept."""
LESS = "fewer sites or prompts, shorter completions, or selection matches or every"


@dataclass(frozen=True)
class CaptureConfig:
    """What is captured."""

    sites: tuple[str, ...] = ("attn_out.*", "resid_mid.*", "resid_post.*")
    """Sites to keep; `*` stands for every block, `eagle` for the sites that an EAGLE-3 head is trained from."""
    source_sites: tuple[str, ...] = ()
    """Sites whose states are also kept where an anchor's match was found: `SITE@source`, of the token that stands
    there as the anchor does here, and `SITE@candidate`, of the first candidate's first token (of the anchor, if
    that is the pending token itself). Zeros without a match."""
    lookback: bool = False
    """Also keep each head's lookback ratio (its attention to the prompt against that to the text since)."""
    selection: Literal["anchors", "matches", "every", "all"] = "anchors"
    """Positions to keep: the anchors of the generated text, those with a suffix match, every k-th one of them
    (`every`), or all positions, the prompt's included, without copy labels (what a drafter is trained from)."""
    every: int = 8
    """With selection `every`: keep one anchor in so many of a document, from the first on."""
    max_new_tokens: int = 192
    """Longest completion, in tokens."""
    temperature: float = 0.0
    """Temperature of the completions; 0 is greedy."""
    batch: int = 32
    """Completions written at once, and documents in a shard. An interrupted run loses at most one shard."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """How copied tokens are labelled."""
    causal: bool = False
    """Also keep, for each anchor with a match, by how many nats the candidate's first token falls when its source is
    taken away. Slow: three forwards an anchor."""
    removal: CausalConfig = field(default_factory=CausalConfig)
    """How sources are taken away."""
    max_nonfinite: float = 0.01
    """Largest share of a shard's rows whose states may be infinite or not a number; more of them end the run."""
    seed: int = 0
    """Keys the sampling of the completions."""

    def __post_init__(self) -> None:
        if not self.sites:
            raise ValueError("no sites to keep: name at least one")
        if self.selection not in SELECTIONS:
            raise ValueError(f"unknown selection {self.selection!r}: choose one of {', '.join(SELECTIONS)}")
        for name in ("max_new_tokens", "batch", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.max_nonfinite <= 1:
            raise ValueError(f"max_nonfinite is {self.max_nonfinite}; a share lies in [0, 1]")
        if self.selection == "all" and (self.causal or self.source_sites or self.lookback):
            raise ValueError("causal, source_sites and lookback are about anchors: choose another selection than all")
        Sampling(temperature=self.temperature)  # checks itself

    def described(self) -> dict[str, Any]:
        """What decides a store's content, as it stands in its manifest."""
        unused = {"max_nonfinite"}
        if self.selection != "every":
            unused |= {"every"}
        if not self.causal:
            unused |= {"causal", "removal"}
        unused |= {name for name in ("source_sites", "lookback") if not getattr(self, name)}
        return {name: value for name, value in asdict(self).items() if name not in unused}


def sites_of(target: Target, config: CaptureConfig) -> list[str]:
    """The names of the states to keep.

    Raises ValueError for a site that the target does not have, and TargetError for lookback ratios that it hides.
    """
    if config.lookback:
        check_attention(target)
    names: list[str] = []
    for name in config.sites:
        names += [*eagle_sites(target.blocks), last_site(target.blocks)] if name == EAGLE else [name]
    found = [str(site) for site in target.sites(names)]
    found += [f"{site}@{place}" for site in target.sites(config.source_sites) for place in SOURCES]
    return [*found, LOOKBACK] if config.lookback else found


def _width(target: Target, name: str) -> int:
    """Entries of a kept state."""
    return target.blocks * int(target.config.num_attention_heads) if name == LOOKBACK else target.width


def estimate_bytes(target: Target, prompts: Sequence[Prompt], config: CaptureConfig) -> int:
    """Upper bound of the store's size: every completion at its longest, and with selection `matches` every anchor.

    Raises TargetError, naming the prompt, for one that the target cannot take, and ValueError for an unknown site.
    """
    widths = sum(_width(target, name) for name in sites_of(target, config))
    row = widths * target.dtype.itemsize + ROW_BYTES
    return row * sum(_most_rows(_length(target, prompt), target, config) for prompt in prompts)


def suitable(target: Target, prompts: Sequence[Prompt], skipped: Skipped) -> list[Prompt]:
    """The prompts that the target can take; the other ones, too long ones for instance, are added to `skipped`."""
    kept = []
    for prompt in prompts:
        try:
            _length(target, prompt)
        except TargetError as error:
            skipped.add(PromptError(str(error)))
        else:
            kept.append(prompt)
    return kept


def _length(target: Target, prompt: Prompt) -> int:
    """A prompt's tokens. Raises TargetError, naming the prompt, if the target cannot take it."""
    try:
        return len(target.encode_messages(prompt.messages))
    except TargetError as error:
        raise TargetError(f"prompt {prompt.id}: {error}") from error


def _most_rows(prompt_length: int, target: Target, config: CaptureConfig) -> int:
    """The most rows of a document whose prompt has so many tokens."""
    anchors = min(config.max_new_tokens, max(target.max_length - prompt_length, 1))
    if config.selection == "every":
        return math.ceil(anchors / config.every)
    return anchors + (prompt_length - 1 if config.selection == "all" else 0)


@dataclass(frozen=True)
class Work:
    """The documents of one shard."""

    first: int
    """Number of the first one."""
    prompts: Sequence[Prompt]


Shards = Generator[tuple[Rows, States], None, None]
Engine = Callable[[Target, Sequence[Work], Sequence[str], CaptureConfig, Callable[[int], None]], Shards]
"""engine(target, work, sites, config, tell) yields each shard's rows and states, in the order of `work`; it tells the
number of the document up to which it has come."""


def read_here(
    target: Target, work: Sequence[Work], sites: Sequence[str], config: CaptureConfig, tell: Callable[[int], None]
) -> Shards:
    """The engine `local`: one shard after the other, by the target itself."""
    for one in work:

        def within(documents: int, first: int = one.first) -> None:
            tell(first + documents)

        yield read_shard(target, one.prompts, one.first, sites, config, within)


def capture(
    target: Target,
    prompts: Sequence[Prompt],
    folder: Path,
    config: CaptureConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine = read_here,
) -> CaptureStore:
    """Answer `prompts` and keep states, labels and surface features in a store.

    `progress(done, total)` is called with documents. An interrupted call leaves whole shards behind; the same
    call again goes on after them, with this engine or another. Raises StoreError if `folder` holds another capture or
    is being written, if the disk cannot hold the store, or if too many states are not finite; ValueError if there is
    no prompt.
    """
    if not prompts:
        raise ValueError("no prompts to capture: give at least one")
    config = config or CaptureConfig()
    sites = sites_of(target, config)
    # One that is too long must not end the capture half way, so all are encoded first.
    bound = estimate_bytes(target, prompts, config)
    description = describe(target, prompts, sites, config)
    if not (folder / "manifest.json").exists() and config.selection != "matches":
        check_space(folder, bound, LESS)  # how many anchors have a match is known after the first shard

    def tell(documents: int) -> None:
        if progress:
            progress(documents, len(prompts))

    with StoreWriter(folder, description, sites, config.max_nonfinite) as store:
        shards = math.ceil(len(prompts) / config.batch)
        missing = [*store.gaps, *range(store.complete_shards, shards)]
        starts = [number * config.batch for number in missing]
        work = [Work(first, prompts[first : first + config.batch]) for first in starts]
        with closing(engine(target, work, sites, config, tell)) as made:
            for done, one in enumerate(work):
                next_bound = estimate_bytes(target, one.prompts, config)
                check_space(folder, _still_needed(store, len(work) - done, next_bound), LESS)
                rows, states = next(made)
                names = {number: prompt.id for number, prompt in enumerate(one.prompts, start=one.first)}
                written = {"written": int(rows["loss_mask"].sum())} if config.selection == "all" else {}
                store.write(rows, states, names=names, **written)
    return CaptureStore.open(folder)


def _still_needed(store: StoreWriter, shards: int, next_bound: int) -> int:
    """Bytes of the shards to come: as many each as the mean of those written, and at least the next one's bound."""
    sizes = [sum(shard["bytes"].values()) for shard in store.manifest["shards"] if shard.get("bytes")]
    return max(next_bound, round(sum(sizes) / len(sizes) * shards)) if sizes else next_bound


def describe(target: Target, prompts: Sequence[Prompt], sites: Sequence[str], config: CaptureConfig) -> dict[str, Any]:
    """The manifest's description of a capture, without its shards."""
    template = target.tokenizer.chat_template
    return {
        "target": target.fingerprint.to_dict(),
        "target_name": target.name,
        "selection": config.selection,
        "config": config.described(),
        "documents": len(prompts),
        "prompts": prompts_hash(prompts),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "chat_template": template if isinstance(template, str) else None,
        "provenance": provenance(seed=config.seed),
    }


def read_shard(
    target: Target,
    prompts: Sequence[Prompt],
    first: int,
    sites: Sequence[str],
    config: CaptureConfig,
    tell: Callable[[int], None] = lambda documents: None,
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Rows and states of the documents `first`, `first` + 1, ..., in this order; `tell(documents)` as they end.

    They depend on these prompts alone, whatever was captured before.
    """
    parts: dict[int, tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]] = {}
    for completion in _completions(target, prompts, first, config):
        number = completion.request.number
        parts[number] = read_document(target, prompts[number - first], completion, sites, config)
        tell(len(parts))
    ordered = [parts.pop(number) for number in sorted(parts)]
    rows = {k: np.concatenate([part[0][k] for part in ordered]) for k in ordered[0][0]}
    # A site's pieces go as soon as they are joined, so that a shard is never in memory twice.
    states = {site: torch.cat([part[1].pop(site) for part in ordered]) for site in sites}
    return rows, states


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

    With selection `all` the rows are those of `text_rows`, else those of `follow_rows` and the target's own numbers.
    """
    ids = completion.request.prompt + completion.tokens
    start = len(completion.request.prompt)
    first = 0 if config.selection == "all" else start - 1  # the first anchor
    cache = KVCache(1, capacity=len(ids))
    with ExitStack() as stack:
        reader = stack.enter_context(target.read({name.split("@")[0] for name in sites} - {LOOKBACK}))
        heads = stack.enter_context(watch(target, start, first)) if LOOKBACK in sites else None
        hidden = target.hidden(torch.tensor([ids[:-1]], device=target.device), cache)[0, first:]
    if config.selection == "all":
        rows = text_rows(completion.request.number, ids, start)
    else:
        rows = follow_rows(ids, start, config.labels, completion.stopped, _template_ids(target))
        rows.update(_last_step(target.logits(hidden).float(), ids, rows))
        rows["pending_class"] = np.array([token_class(target, token) for token in rows["pending"].tolist()])
        rows["document"] = np.full(len(rows["position"]), completion.request.number, dtype=np.int64)
    read = {str(site): state[0] for site, state in reader.states.items()}
    states = {name: read[name][first:].cpu() for name in sites if name in read}
    for name in (name for name in sites if "@" in name):
        states[name] = _elsewhere(read[name.split("@")[0]], name.split("@")[1], rows).cpu()
    if heads is not None:
        states[LOOKBACK] = heads.ratios().to(target.dtype).cpu()
    for name in ("group", "split", "family"):
        rows[name] = np.full(len(rows["position"]), getattr(prompt, name))
    keep: slice | np.ndarray = slice(None)
    if config.selection == "matches":
        keep = np.flatnonzero(rows["match_length"] > 0)
    elif config.selection == "every":
        keep = slice(None, None, config.every)
    rows = {k: v[keep] for k, v in rows.items()}
    if config.causal:
        anchors = rows["position"].tolist()
        rows |= causal_drops(target, ids, anchors, document_matches(ids, anchors, config.labels.match), config.removal)
    # Copies: a view would keep the whole document's states in memory.
    return rows, {k: v[keep].clone() for k, v in states.items()}


def _elsewhere(states: torch.Tensor, place: str, rows: Mapping[str, np.ndarray]) -> torch.Tensor:
    """States [rows, width] of a document's [positions, width] at a place of each row's match; zeros without one."""
    back = rows["distance"] if place == "source" else np.maximum(rows["distance"] - 2, 0)
    matched = torch.from_numpy(rows["match_length"] > 0).to(states.device)
    at = torch.from_numpy(rows["position"] - back).clamp_min(0).to(states.device)
    # A match may reach back to the first token, which no other one stands before.
    known = matched & torch.from_numpy(rows["position"] >= back).to(states.device)
    return states[at].masked_fill(~known[:, None], 0)  # not a product, which keeps what is not finite


def _last_step(logits: torch.Tensor, ids: Sequence[int], rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the logits [rows, V] at the anchors say.

    `max_prob`, `entropy` (nats) and `margin` (top-2 gap of the logits) are those of the anchor's own logits, the
    ones that chose the pending token. `next_logprob` is what the target, one position later, gives the candidate's
    first token: it is not known when the decision is taken, and is kept for the leak check only.
    """
    logp = logits.log_softmax(-1)
    top = logits.topk(2, dim=-1).values
    # The first candidate's first token; rows without a match point anywhere and are blanked below.
    candidate = np.asarray(ids)[np.where(rows["match_length"] > 0, rows["position"] + 2 - rows["distance"], 0)]
    following = logp[1:].gather(1, torch.from_numpy(candidate[:-1, None]).to(logp.device))[:, 0].cpu().numpy()
    next_logprob = np.append(following, np.nan).astype(np.float32)
    next_logprob[rows["match_length"] == 0] = np.nan
    return {
        "max_prob": logp.max(-1).values.exp().cpu().numpy(),
        "entropy": -(logp.exp() * logp).sum(-1).cpu().numpy(),
        "margin": (top[:, 0] - top[:, 1]).cpu().numpy(),
        "next_logprob": next_logprob,
    }


def token_class(target: Target, token: int) -> str:
    """word, number, punctuation (with all other signs), whitespace or special: what a token's text is."""
    if token in target.tokenizer.all_special_ids:
        return "special"
    text = target.decode([token], skip_special_tokens=False)
    for name, is_one in (("word", str.isalpha), ("number", str.isdigit)):
        if any(map(is_one, text)):
            return name
    return "punctuation" if text.strip() else "whitespace"


def _template_ids(target: Target) -> frozenset[int]:
    """Special tokens and the newline: what a chat template is made of beside role names."""
    return frozenset(target.tokenizer.all_special_ids) | frozenset(
        target.tokenizer("\n", add_special_tokens=False)["input_ids"]
    )
