"""The verifier: which drafted path the target follows, and what comes after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from activations.sampling import Sampling, choose
from decoding.request import Request
from decoding.tree import DraftTree

Intent = Callable[[torch.Tensor], torch.Tensor]
"""Copy intents [B] of the anchors at the given slots [B] (0 = pending token, i + 1 = node i) of the last forward, or
[B, 1 + n] with n more numbers that a gate asks for."""


@dataclass(frozen=True)
class Verdict:
    """What one row's verification found."""

    path: list[int]
    """Accepted node indices, from the top down."""
    pending: int
    """The target's own next token after them."""
    intent: float | None = None
    """Copy intent at the new anchor, where a probe reads it."""
    readings: tuple[float, ...] = ()
    """What else was read there."""
    ancestor: int | None = None
    """Resampling: which of the rows judged together this one goes on from; None = itself."""
    rests: bool = False
    """A particle that had ended before: nothing is added to it."""
    log_weight: float | None = None
    """Of a particle, after this step and before any resampling."""
    ess: float | None = None
    """Effective sample size of its group then, in particles."""
    asked: int = 0
    """Mismatches at which an arbiter chose between the draft's token and the target's."""
    kept: tuple[int, ...] = ()
    """Nodes of the path that stand although the target would have written another token."""


class Verifier:
    """Exact: the target's next token is chosen at a node, by argmax or by keyed sampling; if a child has that
    token, verification descends to it, else the token is the new pending one.

    Under the key (seed, request, position) the choice does not depend on the tree, so that every mode gives the
    text that the target alone gives.
    """

    lossless = True
    keyed = True
    """The text is the one that the target writes alone at the same seed, not only one of the same law."""
    opens = False
    """Drafts compete for a text's first token too: prefill leaves the prompt's last token pending."""

    def describe(self) -> dict[str, Any]:
        """Settings that the text depends on, for JSON; none where it is the target's own."""
        return {}

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for a sampling that cannot be followed, and says what can."""

    def pick(self, group: Request) -> Request | None:
        """Once all particles of a group have ended, the one whose text is the request's."""
        return None

    def close(self, group: Request) -> None:
        """Forget a request. Safe to repeat."""

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        """Judge `logits` [B, Q, V] of [pending token, nodes of the tree, padding] in each row."""
        if logits.device.type == "cpu":
            return self._accept_lazily(trees, logits, requests, intent)
        return self._accept_at_once(trees, logits, requests, intent)

    def _accept_lazily(
        self, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request], intent: Intent | None
    ) -> list[Verdict]:
        """Only the nodes on the path are looked at: a choice over a large vocabulary is dear on a CPU."""
        paths: list[list[int]] = [[] for _ in requests]
        pending = [0] * len(requests)
        walking = list(range(len(requests)))
        while walking:  # all rows take a step down together
            slots = [paths[row][-1] + 1 if paths[row] else 0 for row in walking]
            here = [requests[row] for row in walking]
            positions = [len(requests[row].tokens) + len(paths[row]) for row in walking]
            further = []
            chosen = self._next(logits[walking, slots], here, positions)
            for row, slot, token in zip(walking, slots, chosen, strict=True):
                child = trees[row].children.get((slot - 1, token)) if len(trees[row]) else None
                if child is None or self._ended(requests[row]):
                    pending[row] = token
                else:
                    paths[row].append(child)
                    further.append(row)
            walking = further
        found = list(zip(paths, pending, strict=True))
        scores: list[list[float]] = [[] for _ in found]
        if intent is not None:
            ends = torch.tensor([path[-1] + 1 if path else 0 for path, _ in found], device=logits.device)
            scores = columns(intent(ends)).tolist()
        return [Verdict(path, chosen, *split(score)) for (path, chosen), score in zip(found, scores, strict=True)]

    def _next(self, logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
        """The target's next tokens for logits [N, V], of requests whose texts are `positions` [N] tokens long there."""
        return [int(token) for token in _choose(logits, requests, positions).tolist()]

    def _ended(self, request: Request) -> bool:
        """Whether the token that was last chosen for a request ends its text, so that no draft is followed further."""
        return False

    def _accept_at_once(
        self, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request], intent: Intent | None
    ) -> list[Verdict]:
        """All nodes are judged on the device; one packed copy brings the outcome to the host."""
        b, q, _ = logits.shape
        device = logits.device
        tokens = torch.full((b, q), -1, dtype=torch.long)
        above = torch.zeros(b, q, dtype=torch.long)
        depths = torch.zeros(b, q, dtype=torch.long)
        off_path = torch.ones(b, q, q, dtype=torch.bool)  # True where node j is no ancestor of i
        for row, tree in enumerate(trees):
            n = len(tree)
            if n == 0:
                continue
            tokens[row, 1 : n + 1] = torch.tensor(tree.tokens)
            above[row, 1 : n + 1] = torch.tensor([max(p, -1) + 1 for p in tree.parents])
            depths[row, 1 : n + 1] = torch.tensor(tree.depths)
            for i, line in enumerate(tree.ancestors):
                off_path[row, i + 1, [a + 1 for a in line]] = False
        starts = torch.tensor([len(r.tokens) for r in requests])
        packed = torch.stack([tokens, above, depths, starts[:, None] + depths]).to(device, non_blocking=True)
        tokens, above, depths, positions = packed.unbind(0)
        off_path = off_path.to(device, non_blocking=True)
        chosen = _choose(logits.flatten(0, 1), [r for r in requests for _ in range(q)], positions.flatten()).view(b, q)
        followed = chosen.gather(1, above) == tokens
        followed |= torch.arange(q, device=device) == 0
        accepted = (followed[:, None, :] | off_path).all(-1) & (depths > 0)
        best = (accepted * depths).argmax(-1)  # 0, the pending token itself, where nothing is accepted
        outcome = [best[:, None].double(), chosen.gather(1, best[:, None]).double()]
        if intent is not None:
            outcome.append(columns(intent(best)).double())
        verdicts = []
        for tree, (slot, pending, *score) in zip(trees, torch.cat(outcome, 1).tolist(), strict=True):
            path = list(tree.ancestors[int(slot) - 1]) if slot else []
            verdicts.append(Verdict(path, int(pending), *split(score)))
        return verdicts


def columns(read: torch.Tensor) -> torch.Tensor:
    """What was read at the anchors [B] or [B, n], as [B, n]."""
    return read[:, None] if read.dim() == 1 else read


def split(score: Sequence[float]) -> tuple[float | None, tuple[float, ...]]:
    """Copy intent and the other readings; no intent is nan among other readings."""
    if not score:
        return None, ()
    return None if math.isnan(score[0]) else score[0], tuple(score[1:])


def _choose(logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The target's next tokens [N] for logits [N, V]."""
    return choose([r.sampling for r in requests], logits, [r.key for r in requests], positions)
