"""The causal label: does the target's belief in a candidate rest on the source that the candidate is copied from?

At an anchor with a suffix match, the source is taken away and the log-probability of the candidate's first token
is asked again. It is taken away in two ways: hidden (no later token may attend to it) or replaced (by other tokens
of the same text). A genuine copy loses its support, an accidental match does not. Slow: three forwards from the
source on for every anchor, so it is for evaluation.

Both ways compute everything behind the source anew. To mask the source at the last token alone would not do: the
tokens in between have read it and carry what they read, the suffix above all, which in a copy was itself copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from activations.cache import KVCache
from activations.labels import UNKNOWN
from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from activations.target import Target

COLUMNS = ("causal_mask", "causal_replace", "causal_control")


@dataclass(frozen=True)
class CausalConfig:
    """How sources are taken away, and what counts as a loss."""

    causal_delta: float = 1.0
    """A candidate is a genuine copy if its first token loses more than this many nats."""
    causal_keep: int = 5
    """Last tokens of the context, pending token included, that stay in place and in view whatever they repeat."""
    causal_batch: int = 8
    """Contexts computed at once."""
    causal_seed: int = 0
    """Keys the replacing tokens and the places of the controls."""

    def __post_init__(self) -> None:
        for name in ("causal_keep", "causal_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.causal_delta >= 0:
            raise ValueError(f"causal_delta is {self.causal_delta}; it must be 0 or more nats")


@dataclass(frozen=True)
class Removal:
    """What one anchor's source is, and how it is taken away. Positions are those of the context."""

    end: int
    """Tokens in the context, pending token included."""
    token: int
    """The candidate's first token, whose log-probability is asked."""
    hidden: np.ndarray
    """int64 [n], increasing: the source's positions."""
    replacing: np.ndarray | None
    """int64 [n]: the tokens put there instead; None where the context has no other token."""
    control: np.ndarray | None
    """int64 [n], increasing: spans of the same lengths elsewhere; None where there is no room."""


def document_matches(ids: Sequence[int], positions: Sequence[int], config: MatchConfig | None = None) -> list[Matches]:
    """The suffix matches at each anchor of a text; an anchor at position t has the context ids[:t+2]."""
    index = SuffixIndex(config)
    found: dict[int, Matches] = {}
    for position in sorted({int(p) for p in positions}):
        index.extend(ids[len(index) : position + 2])
        found[position] = index.find()
    return [found[int(p)] for p in positions]


def removal(ids: Sequence[int], matches: Matches, config: CausalConfig | None = None) -> Removal | None:
    """How to take the source away from the context ids[:matches.end]; None where it cannot be.

    The source is every listed occurrence of the suffix that is followed by the first candidate's first token: the
    matched tokens and that token. With one of several left in view, the loss would tell of redundancy,
    not of copying. The last `causal_keep` tokens are no source, nor is position 0, where attention rests if it has
    nothing to look at. Where the token to be copied lies among these, there is nothing to be learnt: None.
    """
    config = config or CausalConfig()
    end = matches.end
    if not matches.starts:
        return None
    context = np.asarray(ids[:end], dtype=np.int64)
    token = int(context[matches.starts[0]])
    source = np.zeros(end, bool)
    for start, length in zip(matches.starts, matches.lengths, strict=True):
        if context[start] != token:
            continue
        if start >= end - config.causal_keep:
            return None
        source[start - length : start + 1] = True
    source[0] = False
    source[max(end - config.causal_keep, 0) :] = False
    hidden = np.flatnonzero(source)
    random = np.random.default_rng((config.causal_seed, end))
    return Removal(end, token, hidden, _replacing(context, hidden, random), _control(hidden, source, config, random))


def _replacing(context: np.ndarray, hidden: np.ndarray, random: np.random.Generator) -> np.ndarray | None:
    """For each hidden position a token drawn from the context, other than its own."""
    out = context[hidden].copy()
    open_places = np.arange(len(hidden))
    if (context == context[0]).all():
        return None
    while len(open_places):
        out[open_places] = random.choice(context, len(open_places))
        open_places = open_places[out[open_places] == context[hidden[open_places]]]
    return out


def _control(
    hidden: np.ndarray, source: np.ndarray, config: CausalConfig, random: np.random.Generator
) -> np.ndarray | None:
    """As many positions in spans of the same lengths, away from the source and from what stays in view."""
    free = ~source
    free[0] = free[len(free) - config.causal_keep :] = False
    placed = []
    for span in sorted(np.split(hidden, np.flatnonzero(np.diff(hidden) > 1) + 1), key=len, reverse=True):
        room = np.flatnonzero(np.convolve(free, np.ones(len(span), int), "valid") == len(span))
        if not len(room):
            return None
        start = random.choice(room)
        free[start : start + len(span)] = False
        placed.append(np.arange(start, start + len(span)))
    return np.sort(np.concatenate(placed))


def causal_drops(
    target: Target,
    ids: Sequence[int],
    positions: Sequence[int],
    matches: Sequence[Matches],
    config: CausalConfig | None = None,
) -> dict[str, np.ndarray]:
    """Columns float32 [anchors] of a text: by how many nats the candidate's first token falls, NaN if not computed.

    ids        the text: prompt and completion
    positions  the anchors; the one at t has the context ids[:t+2]
    matches    the suffix matches of each anchor's context (`document_matches`)

    causal_mask     the source hidden from every later token
    causal_replace  the source replaced by tokens drawn from the context
    causal_control  random other spans of the same lengths hidden

    Positive is a loss. NaN without a match and where the source, the replacement or the control has no place. In
    bfloat16 a drop carries rounding of the order of 0.1 nats. Raises ValueError for matches of another context.
    """
    config = config or CausalConfig()
    columns = {name: np.full(len(positions), np.nan, np.float32) for name in COLUMNS}
    removals: dict[int, Removal] = {}
    for row, (position, found) in enumerate(zip(positions, matches, strict=True)):
        if found.end != position + 2 or found.end > len(ids):
            raise ValueError(
                f"the matches of the anchor at {position} are those of a context of {found.end} tokens; "
                f"they must be those of {position + 2}, and the text has {len(ids)}"
            )
        one = removal(ids, found, config)
        if one is not None:
            removals[row] = one
    if not removals:
        return columns

    end = max(one.end for one in removals.values())
    document = torch.tensor([list(ids[:end])], device=target.device)
    cache = KVCache(1, capacity=end)
    hidden = target.hidden(document, cache)[0]
    cache.commit([range(end)])
    rows = list(removals)
    before = _log_probability(target, hidden[[removals[r].end - 1 for r in rows]], [removals[r].token for r in rows])

    jobs: list[_Job] = []
    for base, row in zip(before, rows, strict=True):
        one = removals[row]
        jobs.append(_Job("causal_mask", row, one, base, one.hidden, None))
        if one.replacing is not None:
            jobs.append(_Job("causal_replace", row, one, base, one.hidden, one.replacing))
        if one.control is not None:
            jobs.append(_Job("causal_control", row, one, base, one.control, None))
    jobs.sort(key=lambda job: job.size)  # rows of one batch are padded to the longest
    for first in range(0, len(jobs), config.causal_batch):
        batch = jobs[first : first + config.causal_batch]
        for job, after in zip(batch, _without(target, document[0], cache, batch), strict=True):
            columns[job.column][job.row] = job.before - after
    return columns


def causal_labels(drop: np.ndarray, delta: float = CausalConfig.causal_delta) -> np.ndarray:
    """int8 [rows]: 1 if the drop is more than `delta` nats, 0 if not, -1 where it is NaN."""
    return np.where(np.isnan(drop), UNKNOWN, drop > delta).astype(np.int8)


@dataclass(frozen=True)
class _Job:
    """One context to be computed again."""

    column: str
    row: int
    removal: Removal
    before: float
    places: np.ndarray
    """Positions taken away."""
    tokens: np.ndarray | None
    """What stands there instead; None to hide them."""

    @property
    def start(self) -> int:
        """The first position whose state changes."""
        return int(self.places[0])

    @property
    def size(self) -> int:
        return self.removal.end - self.start


def _without(target: Target, document: torch.Tensor, cache: KVCache, jobs: Sequence[_Job]) -> list[float]:
    """Log-probability of each job's token, everything from its first place on computed anew.

    What comes before is taken from `cache`, which holds the whole document [T] and stays as it is.
    """
    device, width = document.device, max(job.size for job in jobs)
    tokens = document.new_zeros(len(jobs), width)
    own = torch.eye(width, dtype=torch.bool, device=device)
    view = own.repeat(len(jobs), 1, 1)
    for i, job in enumerate(jobs):
        size, places = job.size, torch.from_numpy(job.places - job.start).to(device)
        tokens[i, :size] = document[job.start : job.removal.end]
        view[i, :size, :size] = own.new_ones(size, size).tril()
        if job.tokens is None:  # a hidden token still sees itself: a row of the mask must not be empty
            view[i, :, places] = own[:, places]
        else:
            tokens[i, places] = torch.from_numpy(job.tokens).to(device)
    hidden = target.hidden(tokens, cache.branches([job.start for job in jobs], width), view)
    last = hidden[range(len(jobs)), [job.size - 1 for job in jobs]]
    return _log_probability(target, last, [job.removal.token for job in jobs])


def _log_probability(target: Target, hidden: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Of one token for each normed final state [rows, width], in nats."""
    out: list[float] = []
    for first in range(0, len(tokens), 32):  # the logits of a whole document would not fit beside a large target
        logp = target.logits(hidden[first : first + 32]).float().log_softmax(-1)
        chosen = torch.tensor(tokens[first : first + 32], device=logp.device)
        out.extend(float(x) for x in logp.gather(1, chosen[:, None])[:, 0].tolist())
    return out
