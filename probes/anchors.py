"""Anchors with a suffix match in finished texts, and what is measured there when something in the target is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from activations.cache import KVCache
from activations.causal import document_matches
from activations.labels import LabelConfig
from activations.target import Target
from activations.texts import StoredText
from probes.evaluation import Floats, Interval, interval

CLASSES = ("genuine", "accidental")


@dataclass(frozen=True)
class Anchor:
    """A position whose match the target then follows (genuine) or does not follow (accidental)."""

    position: int
    """The state here is the anchor's; the pending token stands behind it, and the candidate would follow that."""
    match_length: int
    """Tokens, the pending one included."""
    candidate: int
    """First token of the first candidate."""
    genuine: bool
    """The target's next token is that one. Where it is that of another candidate there is no `Anchor`."""


@dataclass(frozen=True)
class AnchoredText:
    """A text up to the pending token of its last anchor."""

    document: int
    ids: list[int]
    anchors: tuple[Anchor, ...]
    """In order of position."""


def anchored(text: StoredText, rows: Mapping[str, NDArray[Any]], labels: LabelConfig, kappa: int) -> AnchoredText:
    """Anchors of a text with a match of at least `kappa` tokens whose outcome is known, from a store's rows."""
    where = rows["document"] == text.document
    where &= (rows["match_length"] >= max(kappa, 1)) & ~rows["censored"]
    where &= rows["position"] + 2 < len(text.ids)
    positions = rows["position"][where].tolist()
    found: list[Anchor] = []
    matches = document_matches(text.ids, positions, labels.match)
    columns = (rows[name][where].tolist() for name in ("match_length", "accepted"))
    for position, match, length, accepted in zip(positions, matches, *columns, strict=True):
        if not match.starts:
            continue
        candidate = text.ids[match.starts[0]]
        genuine = text.ids[position + 2] == candidate
        if genuine or not accepted:
            found.append(Anchor(position, int(length), candidate, genuine))
    end = max((a.position for a in found), default=0) + 2
    return AnchoredText(text.document, text.ids[:end], tuple(sorted(found, key=lambda a: a.position)))


def margins(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [rows]: the logit of one token less that of the best other one, for logits [rows, V]."""
    logits, wanted = logits.float(), torch.tensor(tokens, device=logits.device)
    best = logits.topk(2, dim=-1)
    other = torch.where(best.indices[:, 0] == wanted, best.values[:, 1], best.values[:, 0])
    return logits.gather(1, wanted[:, None])[:, 0] - other


def margins_behind(target: Target, text: AnchoredText) -> torch.Tensor:
    """float32 [anchors]: the logit of each anchor's candidate less that of the best other token, with the pending
    token fed.

    A leak where copying is to be foreseen: it belongs to the step that verifies, one position behind all that a probe
    may see. Above 0 the target follows, so that it tells genuine from accidental but for rounding.
    """
    tokens = torch.tensor([text.ids], device=target.device)
    hidden = target.hidden(tokens, KVCache(1, capacity=len(text.ids)))[0]
    logits = target.logits(hidden[[a.position + 1 for a in text.anchors]])
    return margins(logits, [a.candidate for a in text.anchors])


class Clusters:
    """Means over rows with intervals from a bootstrap over their documents, the same draws for all of them."""

    def __init__(self, documents: ArrayLike, resamples: int, seed: int) -> None:
        names, self._inverse = np.unique(np.asarray(documents), return_inverse=True)
        self.rows, self.count = len(self._inverse), len(names)
        draws = np.random.default_rng(seed).multinomial(self.count, np.full(self.count, 1 / self.count), resamples)
        self._draws = np.vstack([np.ones((1, self.count)), draws][: 1 if self.count == 1 else 2])

    def _sums(self, values: Floats) -> Floats:
        sums: Floats = self._draws @ np.bincount(self._inverse, weights=values, minlength=self.count)
        return sums

    def mean(self, values: ArrayLike) -> Interval:
        """The mean of values [rows]."""
        numbers = np.asarray(values, dtype=np.float64)
        return interval(self._sums(numbers) / self._sums(np.ones(self.rows)))

    def correlation(self, first: ArrayLike, second: ArrayLike) -> Interval:
        """Pearson's, of two columns [rows]; undefined (NaN) where one of them does not vary."""
        x, y = (np.asarray(v, dtype=np.float64) for v in (first, second))
        x, y = x - x.mean(), y - y.mean()
        n = self._sums(np.ones(self.rows))
        mx, my = self._sums(x) / n, self._sums(y) / n
        cov = self._sums(x * y) / n - mx * my
        spread = np.maximum(self._sums(x * x) / n - mx**2, 0) * np.maximum(self._sums(y * y) / n - my**2, 0)
        return interval(np.divide(cov, np.sqrt(spread), out=np.full_like(cov, np.nan), where=spread > 1e-24))
