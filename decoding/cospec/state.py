"""What an arbiter sees of a mismatch: what both models make of both tokens, where it is, and what was done before.

All features of a state are float32 and finite. Their names, in order, are `STATE`: they stand in a policy's artifact,
and a policy that was trained on others does not load.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from activations.target import Target

STATE = (
    "target_logp_target",  # log p(t), p being the target's law and t its token
    "target_logp_draft",  # log p(d), d being the draft's token
    "draft_logp_draft",  # log q(d), q being the draft's law
    "draft_logp_target",  # log q(t)
    "target_entropy",  # of p, in nats
    "draft_entropy",
    "target_rank_draft",  # log of 1 + tokens that the target finds likelier than d
    "draft_rank_target",  # log of 1 + tokens that the draft finds likelier than t
    "target_margin",  # log p of the first choice minus that of the second
    "draft_margin",
    "divergence",  # Jensen-Shannon of p and q, in nats, over the TOP likeliest tokens of either; the rest is one more
    "block_position",  # tokens accepted before it in the same block, in eights
    "answer_position",  # log of 1 + tokens written before it
    "mismatches",  # log of 1 + mismatches of the answer before it
    "keep_rate",  # share of these whose drafts were kept
    "last_keep",  # whether the latest of them was: 1, -1, or 0 where there was none
    "acceptance",  # share of the answer's drafted tokens before it that were the target's own
    "target_digit", "target_letter", "target_space", "target_stop",  # what t is, 0 or 1
    "draft_digit", "draft_letter", "draft_space", "draft_stop",  # what d is
    "before_digit", "before_letter", "before_space",  # what stands before them
)  # fmt: skip
"""Names of the features."""
FLOOR = -20.0
"""Lowest log-probability, and minus the largest margin; what a draft does not propose at all has it too."""
TOP = 64
DIGIT, LETTER, SPACE, STOP = range(4)
BLOCK = 8
"""Positions in a block count in units of this many tokens."""


class Mismatches(NamedTuple):
    """Places where the target chose another token than the draft, a row each."""

    target_logits: torch.Tensor
    """[m, V]"""
    draft_logits: torch.Tensor
    """[m, V] or wider."""
    target: torch.Tensor
    """[m]: the target's tokens."""
    draft: torch.Tensor
    """[m]: the draft's."""
    before: torch.Tensor
    """[m]: the tokens before them."""
    block: torch.Tensor
    """[m]: tokens accepted before in the same block."""
    answer: torch.Tensor
    """[m]: tokens written before."""
    asked: torch.Tensor
    """[m]: mismatches of the answer before it."""
    kept: torch.Tensor
    """[m]: how many of these kept the draft's token."""
    last: torch.Tensor
    """[m]: 1 or -1, whether the latest did; 0 for none."""
    drafted: torch.Tensor
    """[m]: drafted tokens that were looked at before it."""
    matched: torch.Tensor
    """[m]: how many of these the target would have written."""


def states(mismatches: Mismatches, classes: torch.Tensor) -> torch.Tensor:
    """Float32 [m, len(STATE)], on the logits' device. `classes`: those of the tokens, from `token_classes`."""
    m = mismatches
    target, draft = m.target[:, None], m.draft[:, None]
    p = _Law(m.target_logits.float())
    q = _Law(m.draft_logits[:, : p.log.shape[1]].float().to(p.log.device))
    numbers = [
        p.of(target), p.of(draft), q.of(draft), q.of(target), p.entropy, q.entropy, p.rank(draft), q.rank(target),
        p.margin, q.margin, _divergence(p, q),
        m.block / BLOCK, m.answer.float().log1p(),
        m.asked.float().log1p(), m.kept / (m.asked + 1), m.last, (m.matched + 1) / (m.drafted + 2),
    ]  # fmt: skip
    rest = [classes[m.target], classes[m.draft], classes[m.before][:, :STOP]]
    return torch.cat([torch.stack([n.float() for n in numbers], 1), *(c.float() for c in rest)], 1)


class _Law:
    """Log-probabilities [m, V], and what is asked of them."""

    def __init__(self, logits: torch.Tensor) -> None:
        """Finite or -inf, in each row at least one finite."""
        self.log = logits.log_softmax(-1)
        self.probability = self.log.exp()
        self.top = self.log.topk(min(TOP, logits.shape[1]), dim=-1)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """[m], of tokens [m, 1]."""
        return self.log.gather(1, tokens)[:, 0].clamp(min=FLOOR)

    def rank(self, tokens: torch.Tensor) -> torch.Tensor:
        """[m]"""
        return (self.log > self.log.gather(1, tokens)).sum(-1).float().log1p()

    @property
    def entropy(self) -> torch.Tensor:
        return torch.special.entr(self.probability).sum(-1)

    @property
    def margin(self) -> torch.Tensor:
        values = self.top.values.clamp(min=2 * FLOOR)
        first, second = values[:, 0], values[:, min(1, values.shape[1] - 1)]
        return (first - second).clamp(max=-FLOOR)


def _divergence(p: _Law, q: _Law) -> torch.Tensor:
    """Jensen-Shannon divergence [m], at most log 2."""
    ids = torch.cat([p.top.indices, q.top.indices], 1)  # [m, 2 x TOP]
    again = (q.top.indices[:, :, None] == p.top.indices[:, None, :]).any(-1)
    counted = torch.cat([torch.ones_like(p.top.indices, dtype=torch.bool), ~again], 1)
    a, b = (law.probability.gather(1, ids) * counted for law in (p, q))
    a, b = (torch.cat([x, (1 - x.sum(-1, keepdim=True)).clamp(min=0)], 1) for x in (a, b))
    mean = (a + b) / 2
    entropies = (torch.special.entr(a).sum(-1) + torch.special.entr(b).sum(-1)) / 2
    return (torch.special.entr(mean).sum(-1) - entropies).clamp(0, math.log(2))


# -- what tokens are ----------------------------------------------------------------------------------

_CLASSES: WeakKeyDictionary[Target, torch.Tensor] = WeakKeyDictionary()
_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"})
"""How vocabularies write spaces."""


def token_classes(target: Target) -> torch.Tensor:
    """Bool [V, 4]: whether a token is digits, letters, nothing but space, a stop. Spaces around it do not matter."""
    found = _CLASSES.get(target)
    if found is None:
        size = target.vocab_size
        found = torch.zeros(size, 4, dtype=torch.bool)
        known = min(size, len(target.tokenizer))
        for token, text in enumerate(target.tokenizer.convert_ids_to_tokens(list(range(known)))):
            if text:
                bare = text.translate(_MARKS).strip()
                found[token, :STOP] = torch.tensor([bare.isdigit(), bare.isalpha(), not bare])
        found[[t for t in target.stop_ids if t < size], STOP] = True
        found = _CLASSES[target] = found.to(target.device)
    return found
