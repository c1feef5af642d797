"""Do copy intent and copying move together when the heads that look for repetitions are taken away?

Heads are ranked by their induction score on random repeated tokens; the top k of them are ablated (each gives its
mean over the same texts), and as many random others of the same blocks as a control. Copy intent is read at the
anchor, and the target follows if its best token behind the pending one is the candidate's first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from activations.cache import KVCache
from activations.heads import Head, HeadMeans, ablated, induction_scores, repeated_tokens, top_heads
from activations.target import Target
from probes.anchors import AnchoredText, Clusters, margins
from probes.artifact import Probe, ProbeError
from probes.evaluation import Floats, Interval

COPIED = 0.3
"""A head with at least this induction score counts as an induction head in the report."""


@dataclass(frozen=True)
class Ablation:
    """What remains of copy intent and of copying without some heads, means over anchors."""

    heads: tuple[Head, ...]
    which: Literal["top", "random"]
    intent: Interval
    """Probability that the probe gives at the anchor."""
    follow: Interval
    """Share of anchors where the target's best next token is the candidate's first."""
    margin: Interval
    """Logit of the candidate's first token less that of the best other one."""
    intent_change: Interval
    """Against the whole target, paired by anchor."""
    follow_change: Interval
    margin_change: Interval
    together: Interval
    """Correlation over anchors of the change in the probe's log-odds with the change in margin."""
    over_random: dict[str, Interval] | None = None
    """For the top heads: intent, follow and margin less those with as many random heads ablated."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: heads as `block.head`, each interval as its three numbers."""
        out = {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}
        out["heads"] = [str(head) for head in self.heads]
        if self.over_random is not None:
            out["over_random"] = {k: v.to_dict() for k, v in self.over_random.items()}
        return out


@dataclass(frozen=True)
class Induction:
    """The heads' scores, and one `Ablation` for each number of heads and choice of them."""

    scores: torch.Tensor
    """float32 [blocks, heads]"""
    anchors: int
    documents: int
    ablations: tuple[Ablation, ...]
    """The first ablates nothing."""

    def to_dict(self) -> dict[str, Any]:
        ranked = top_heads(self.scores, self.scores.numel())
        return {
            "anchors": self.anchors,
            "documents": self.documents,
            "induction_heads": int((self.scores >= COPIED).sum()),
            "scores": {str(h): round(float(self.scores[h.block, h.head]), 4) for h in ranked},
            "ablations": [a.to_dict() for a in self.ablations],
        }


def random_heads(scores: torch.Tensor, top: Sequence[Head], seed: int) -> list[Head]:
    """For each top head another one of its block, at random; of any block, where its own has none left.

    `scores` [blocks, heads] only says which heads there are.
    """
    rng = np.random.default_rng(seed)
    blocks, heads = scores.shape
    left = {Head(b, h) for b in range(blocks) for h in range(heads)} - set(top)
    chosen = []
    for one in top:
        near = sorted(h for h in left if h.block == one.block) or sorted(left)
        chosen.append(near[int(rng.integers(len(near)))])
        left.discard(chosen[-1])
    return chosen


def head_counts(target: Target, counts: Sequence[int]) -> list[int]:
    """Those of `counts` for which there are as many other heads."""
    return [k for k in counts if 2 * k <= target.blocks * int(target.config.num_attention_heads)]


def tokens_needed(texts: Sequence[AnchoredText], counts: int) -> int:
    """Tokens that `induction` feeds for so many numbers of heads."""
    return (1 + 2 * counts) * sum(len(t.ids) for t in texts)


def induction(
    target: Target,
    probe: Probe,
    texts: Sequence[AnchoredText],
    counts: Sequence[int],
    resamples: int,
    seed: int,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Induction:
    """Ablate each number of `counts` (see `head_counts`) at all anchors of `texts`; `tell(tokens)` as they are fed.

    Raises TargetError where the target's heads cannot be seen, ProbeError where no text has an anchor.
    """
    texts = [t for t in texts if t.anchors]
    if not texts:
        raise ProbeError("no anchor with a match was found: take more documents, or a store of shorter matches")
    scores = induction_scores(target, repeated_tokens(target, seed=seed))
    top = top_heads(scores, max(counts, default=0))
    others = random_heads(scores, top, seed)
    clusters = Clusters([t.document for t in texts for _ in t.anchors], resamples, seed)
    means = HeadMeans()
    with means.watching():
        whole = _measure(target, probe, texts, (), None, tell)
    ablations = [_ablation(clusters, whole, whole, (), "top")]
    for k in counts:
        found = {
            which: _measure(target, probe, texts, heads[:k], means, tell)
            for which, heads in (("top", top), ("random", others))
        }
        one = _ablation(clusters, found["top"], whole, tuple(top[:k]), "top")
        over = {name: clusters.mean(found["top"][name] - found["random"][name]) for name in NAMES}
        ablations.append(replace(one, over_random=over))
        ablations.append(_ablation(clusters, found["random"], whole, tuple(others[:k]), "random"))
    return Induction(scores, clusters.rows, clusters.count, tuple(ablations))


NAMES = ("intent", "follow", "margin")


def _ablation(
    clusters: Clusters,
    found: dict[str, Floats],
    whole: dict[str, Floats],
    heads: tuple[Head, ...],
    which: Literal["top", "random"],
) -> Ablation:
    mean, change = clusters.mean, {name: found[name] - whole[name] for name in ("logit", *NAMES)}
    return Ablation(
        heads=heads,
        which=which,
        intent=mean(found["intent"]),
        follow=mean(found["follow"]),
        margin=mean(found["margin"]),
        intent_change=mean(change["intent"]),
        follow_change=mean(change["follow"]),
        margin_change=mean(change["margin"]),
        together=clusters.correlation(change["logit"], change["margin"]),
    )


def _measure(
    target: Target,
    probe: Probe,
    texts: Sequence[AnchoredText],
    heads: Sequence[Head],
    means: HeadMeans | None,
    tell: Callable[[int], None],
) -> dict[str, Floats]:
    """Values [anchors] of one pass over all texts: logit and intent (of the probe), follow, margin."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("logit", *NAMES)}
    for text in texts:
        tokens = torch.tensor([text.ids], device=target.device)
        with ablated(target, heads, means) if heads else nullcontext(), target.read(probe.config.sites) as reader:
            hidden = target.hidden(tokens, KVCache(1, capacity=len(text.ids)))[0]
        states = {str(site): state[0] for site, state in reader.states.items()}
        at = [a.position for a in text.anchors]
        logit = probe.logit(torch.cat([states[site][at] for site in probe.config.sites], dim=-1))
        candidates = [a.candidate for a in text.anchors]
        margin = margins(target.logits(hidden[[p + 1 for p in at]]), candidates)
        for name, values in (("logit", logit), ("intent", logit.sigmoid()), ("margin", margin), ("follow", margin > 0)):
            parts[name].append(values.cpu().double())
        tell(len(text.ids))
    return {name: torch.cat(values).numpy() for name, values in parts.items()}
