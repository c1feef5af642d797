"""The logit lens: what the target would say if it ended after a block.

The state behind each block goes through the final norm and the output matrix (nostalgebraist 2020, "interpreting GPT:
the logit lens"). States in the middle were never meant for that matrix, so low values there say little; where a token
rises, and beside what, says more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from activations.cache import KVCache
from activations.sites import Site
from activations.target import Target


def logit_lens(target: Target, ids: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """float32 [blocks, positions]: log-probability, in nats, of one token at each position of a text.

    `tokens[i]` is asked at `positions[i]`, where the target predicts the token behind it. The last row is the
    target's own. Raises ValueError for a position outside the text, and TargetError where the final norm of the
    target was not found.
    """
    if len(positions) != len(tokens):
        raise ValueError(f"{len(positions)} positions and {len(tokens)} tokens: give a token for each position")
    if outside := [p for p in positions if not 0 <= p < len(ids)]:
        raise ValueError(f"position {outside[0]} is outside the text, which has {len(ids)} tokens")
    sites = [Site("resid_post", k) for k in range(target.blocks)]
    with target.read(sites) as reader:
        target.hidden(torch.tensor([list(ids)], device=target.device), KVCache(1, capacity=len(ids)))
    wanted = torch.tensor(list(tokens), device=target.device)[:, None]
    found = []
    for site in sites:
        states = target.final_norm(reader.states[site][0, list(positions)])
        found.append(target.logits(states).float().log_softmax(-1).gather(1, wanted)[:, 0].cpu())
    return torch.stack(found)
