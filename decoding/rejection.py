"""Rejection sampling: the classical verifier of chains that were drawn from a known law.

Sources: Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from activations.sampling import Sampling, gumbel, uniform
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict, Verifier, columns, split

ACCEPT, REST = "accept", "rest"
"""Streams of noise: whether a drafted token is accepted, and what comes after the accepted ones."""


class RejectionVerifier(Verifier):
    """A drafted token d is accepted with probability min(1, p(d) / q(d)), where p is the target's law and q the one
    that d was drawn from (all on d itself where a tree tells no `q_logits`). At the first that is not, the next token
    is drawn from the positive part of p - q; after the last one, from p.

    The text has the target's law, and does not depend on the batch; yet it is another text than the one that the
    target writes alone at the same seed. Greedy requests get the target's own.
    """

    lossless = True
    keyed = False

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        """Judge `logits` [B, Q, V] of [pending token, nodes of the chain, padding] in each row. Raises ValueError for a
        tree that branches."""
        for tree in trees:
            if not tree.is_chain:
                raise ValueError("rejection sampling judges chains, and a draft branches: use acceptance=keyed")
        device = logits.device
        kept = torch.zeros(len(trees), dtype=torch.long, device=device)  # accepted tokens of each row
        pending = torch.zeros_like(kept)
        samplings = [r.sampling for r in requests]
        for sampling in dict.fromkeys(samplings):
            rows = [row for row, s in enumerate(samplings) if s == sampling]
            q = 1 + max(len(trees[row]) for row in rows)
            mine = logits if len(rows) == len(requests) else logits[rows]
            found = _judge(sampling, [trees[row] for row in rows], mine[:, :q], [requests[row] for row in rows])
            kept[rows], pending[rows] = found
        outcome = [kept[:, None].double(), pending[:, None].double()]
        if intent is not None:
            outcome.append(columns(intent(kept)).double())
        return [
            Verdict(list(range(int(count))), int(token), *split(score))
            for count, token, *score in torch.cat(outcome, 1).tolist()
        ]


def _judge(
    sampling: Sampling, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens of each row's chain are accepted [B], and what comes after them [B], for logits [B, Q, V]."""
    b, q, _ = logits.shape
    device = logits.device
    drafted = torch.full((b, q), -1, dtype=torch.long)  # by the slot that judges it
    for i, tree in enumerate(trees):
        drafted[i, : len(tree)] = torch.tensor(tree.tokens, dtype=torch.long)
    drafted = drafted.to(device)
    row = torch.arange(b, device=device)
    if sampling.greedy:
        chosen = logits.argmax(-1)
        kept = (chosen == drafted).long().cumprod(1).sum(1)
        return kept, chosen[row, kept]
    keys = torch.tensor([r.key for r in requests], device=device)
    starts = torch.tensor([len(r.tokens) for r in requests], device=device)
    p = sampling.process(logits).softmax(-1)  # [B, Q, V]
    at = drafted.clamp(min=0)[..., None]
    p_drafted = p.gather(-1, at)[..., 0].double()
    law = _drafting_law(trees, p)  # [B, n, V]
    q_drafted = torch.ones_like(p_drafted)
    if law is not None:
        n = law.shape[1]
        q_drafted[:, :n] = law.gather(-1, at[:, :n])[..., 0].double()
    u = torch.stack([uniform(sampling.seed, keys, starts + slot, ACCEPT) for slot in range(q)], 1)
    kept = ((u * q_drafted < p_drafted) & (drafted >= 0)).long().cumprod(1).sum(1)
    rest = p[row, kept]  # [B, V]
    refused = drafted[row, kept] >= 0
    if law is not None:
        less = law[row, kept.clamp(max=law.shape[1] - 1)]
    else:
        less = torch.zeros_like(rest).scatter_(1, at[row, kept], 1.0)
    left = (rest - less * refused[:, None]).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, rest)  # equal up to rounding
    noise = gumbel(sampling.seed, keys, starts + kept, torch.arange(p.shape[-1], device=device), REST)
    return kept, (left.log() + noise).argmax(-1)


def _drafting_law(trees: Sequence[DraftTree], p: torch.Tensor) -> torch.Tensor | None:
    """Probabilities [B, n, V] that the nodes were drawn from; None where all of them were certain."""
    if all(tree.q_logits is None for tree in trees):
        return None
    laws = []
    for tree in trees:
        if tree.q_logits is not None:
            laws.append(tree.q_logits.to(p.device).float().softmax(-1))
        else:
            tokens = torch.tensor(tree.tokens, dtype=torch.long, device=p.device)
            laws.append(p.new_zeros(len(tree), p.shape[-1]).scatter_(1, tokens[:, None], 1.0))
    return pad_sequence(laws, batch_first=True)
