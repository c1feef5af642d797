"""A trained head with a larger draft vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch

from activations.target import Target
from decoding.eagle.head import EagleHead, HeadError

RIDGE = 1e-4
"""Of the mean square of the target's output rows: keeps the map small where the old rows do not determine it."""


def grown(head: EagleHead, target: Target, tokens: torch.Tensor) -> EagleHead:
    """The head with the draft vocabulary `tokens` [draft vocabulary] (increasing target ids), which holds all that it
    has.

    Old rows stay as they are. A new token's row is the target's own, sent through the linear map that best makes the
    head's old rows from the target's: training has turned the head's outputs away from the target's space, and all
    rows alike. Raises HeadError for a vocabulary that lacks old tokens, and for an output matrix with a bias.
    """
    old = head.draft_tokens
    place = torch.searchsorted(tokens, old).clamp(max=len(tokens) - 1)
    if not torch.equal(tokens[place], old):
        raise HeadError("a head's draft vocabulary can grow, and cannot lose tokens")
    if "lm_head" in head.config.biases:
        raise HeadError("the draft vocabulary of a head whose output matrix has a bias cannot grow")
    made = EagleHead(replace(head.config, draft_vocab_size=len(tokens)))
    state = {k: v for k, v in head.state_dict().items() if k not in ("lm_head.weight", "d2t", "t2d")}
    made.load_state_dict(state, strict=False)
    with torch.no_grad():
        rows = target.head.weight.detach().float().cpu()
        known, trained = rows[old], head.lm_head.weight.float()
        square = known.T @ known
        square += RIDGE * square.diagonal().mean() * torch.eye(len(square))
        through = torch.linalg.solve(square, known.T @ trained)  # [target width, head width]
        made.lm_head.weight.copy_(rows[tokens] @ through)
        made.lm_head.weight[place] = trained
    made.set_vocabulary(tokens)
    return made
