"""The suffix matcher in plain torch: the same result as the kernel's, on any device, at many times its cost."""

from __future__ import annotations

import torch

from activations.matching.match import MatchConfig
from activations.matching.tensors import NONE, TensorMatches
from activations.matching.trie import merge


def find_matches(
    buffer: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    config: MatchConfig,
    rows: torch.Tensor | None = None,
) -> TensorMatches:
    """Suffix matches of the contexts buffer[r, :lengths[r]], for each r of `rows`; by default for all.

    `buffer` int32 [R, capacity]; `lengths` and `prompts` (tokens of the prompt) integers [R], at most capacity;
    `rows` integers [B]. Nothing waits for the device. It copies the contexts that `rows` names, reads them
    `max_length` times and keeps 8 bytes a place.
    """
    if rows is not None:
        buffer, lengths, prompts = buffer[rows], lengths[rows], prompts[rows]
    requests, capacity = buffer.shape
    w, d = config.candidates, config.depth
    place = torch.arange(capacity, device=buffer.device)
    end = lengths[:, None].long()
    going = (place < end).expand(requests, capacity)
    length = torch.zeros(requests, capacity, dtype=torch.int64, device=buffer.device)
    for back in range(1, min(config.max_length, capacity - 1) + 1):
        wanted = buffer.gather(1, (end - back).clamp(min=0))
        same = torch.zeros(requests, capacity, dtype=torch.bool, device=buffer.device)
        same[:, back:] = buffer[:, :-back] == wanted
        going = going & same
        length += going
    hit = length >= config.kappa
    top = torch.full((requests, w), NONE, dtype=torch.int64, device=buffer.device)
    kept = min(w, capacity)
    top[:, :kept] = torch.where(hit, length * capacity + place, NONE).topk(kept, dim=1).values
    found = top >= 0
    starts = torch.where(found, top % capacity, NONE)
    matched = torch.where(found, top // capacity, 0)

    period = torch.where(found, end - starts, 1)[:, :, None]
    at = starts[:, :, None] + torch.arange(d, device=buffer.device) % period
    tokens = buffer.gather(1, at.clamp(min=0).reshape(requests, -1)).reshape(requests, w, d)
    tokens = torch.where(found[:, :, None], tokens, NONE)
    some = found[:, 0]
    summary = [
        lengths,
        hit.sum(1),
        matched[:, 0],
        torch.where(some, lengths - starts[:, 0], 0),
        (found & (tokens[:, :, 0] == tokens[:, :1, 0])).sum(1),
        some & (starts[:, 0] < prompts),
    ]
    whole = torch.stack([column.to(torch.int32) for column in summary], dim=1)
    return TensorMatches(starts.to(torch.int32), matched.to(torch.int32), tokens, *merge(tokens), whole)
