"""Grouped-query attention with the groups folded into query rows.

A grouped-query model has G query heads for each key head. The usual kernels either repeat the keys G
times or loop over query heads; for the few query rows of a decoding step both read the keys G times.
Folding [B, G*Hkv, Q, D] to [B, Hkv, G*Q, D] reads them once, and the result is the same.

`register()` makes it available to `transformers` under the name "folded"; no model code changes.
Masks are boolean (True = may attend); `None` means causal over the last Q keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from activations.cache import WIDE

NAME = "folded"
OBSERVERS: list[Callable[..., None]] = []
"""Each is called with (module, query, key, mask, scaling) before attention is computed."""
EDITORS: list[Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]] = []
"""Each is called with (module, what the heads give [B, Q, H, Dv]) and returns what shall stand in its place."""


@contextmanager
def attached(to: list[Callable[..., Any]], one: Callable[..., Any]) -> Iterator[None]:
    """Within, `one` is among the OBSERVERS or the EDITORS."""
    to.append(one)
    try:
        yield
    finally:
        to.remove(one)


def weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a forward without a cache, as an observer is given it: the attention of some query rows, float32 [B, H, R, T],
    and what they may see, bool [B or 1, 1, R, T].

    query [B, H, T, D], key [B, Hkv, T, D], mask bool [B or 1, 1, T, T] or None for causal.
    """
    size = query.shape[2]
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if mask is None:
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()[None, None]
    view = mask[:, :, rows, :size]
    logits = query[:, :, rows].float() @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
    return logits.masked_fill(~view, -torch.inf).softmax(-1), view


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv], mask bool [B, 1, Q, K] -> [B, Q, H, Dv].

    Raises ValueError for soft-capped attention.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError("attention soft-capping is not supported by 'folded' attention; load with attention='eager'")
    for observer in OBSERVERS:
        observer(module, query, key, attention_mask, scaling)
    groups = query.shape[1] // key.shape[1]
    if attention_mask is not None:
        if groups > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
        if attention_mask.shape[-1] < key.shape[2]:
            attention_mask = F.pad(attention_mask, (0, key.shape[2] - attention_mask.shape[-1]), value=False)
    out = attend(query, key, value, attention_mask, scaling, dropout)
    for editor in EDITORS:
        out = editor(module, out)
    return out, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv] -> [B, Q, H, Dv].

    The mask is of the folded rows, [B, 1, H / Hkv * Q, K]: boolean, or what is added to the scores.
    """
    b, h, q, d = query.shape
    hkv, k = key.shape[1], key.shape[2]
    groups = h // hkv
    if mask is None and q == k:  # a whole sequence: the kernel's own causal path skips half the work
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, dropout_p=dropout, is_causal=q > 1)
        return out.transpose(1, 2)
    if mask is None and q > 1:
        mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q).repeat(groups, 1)[None, None]
    folded = query.reshape(b, hkv, groups * q, d)  # heads of one key head are adjacent
    if query.device.type == "cpu" and b >= WIDE:  # the CPU's flash kernel is half as fast here
        scores = torch.matmul(folded * (scaling or d**-0.5), key.transpose(-1, -2))
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores.add_(mask)
        out = torch.matmul(scores.softmax(-1), value)
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling, dropout_p=dropout)
    return out.reshape(b, h, q, value.shape[3]).transpose(1, 2)


def register() -> None:
    """Make `attn_implementation="folded"` known to transformers. Safe to repeat."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
