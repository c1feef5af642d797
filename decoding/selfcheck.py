"""The self-check behind every lossless mode: a tree forward equals the forwards of its paths."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

import torch
import transformers

from activations import packaged
from activations.cache import KVCache
from activations.target import Target, TargetError
from decoding.packing import tree_forward
from decoding.tree import DraftTree

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference of logits allowed, in units of the largest logit."""


def check_tree_forward(target: Target) -> None:
    """Raise TargetError unless a small random tree and its paths give the same logits. About 5 short forwards."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(target.vocab_size, (14,), generator=generator).tolist()
    context, pending, nodes = draw[:6], draw[6], draw[7:]
    tree = DraftTree(nodes, [-1, 0, -1, 2, 2, 4, 1], ["check"] * 7, [0.0] * 7)
    device = target.device

    def prefilled() -> KVCache:
        cache = KVCache(1, capacity=32)
        target.forward(torch.tensor([context], device=device), cache, logits_to_keep=1)
        cache.commit([range(len(context))])
        return cache

    whole = tree_forward(target, prefilled(), [pending], [tree])
    cache = prefilled()
    for path in tree.paths:
        cache.crop_row(0, len(context))
        chain = torch.tensor([[pending, *(nodes[i] for i in path)]], device=device)
        alone = target.forward(chain, cache)[0].float()
        mine = whole[0, [0, *(i + 1 for i in path)]].float()
        error = float((mine - alone).abs().max() / alone.abs().max())
        if not error <= TOLERANCE.get(target.dtype, 1e-3):
            raise TargetError(
                f"{target.name}: the logits of a draft tree differ from those of its paths by {error:.2g} of the "
                f"largest logit ({type(target.model).__name__}, {target.dtype}, attention "
                f"{target.model.config._attn_implementation!r}). Drafting would change this target's text: "
                "load it with the default attention, or use mode 'ar'."
            )


def ensure_tree_forward(target: Target) -> None:
    """The check, once for each kind of target on this computer: its outcome is remembered in the user's cache."""
    if getattr(target, "_tree_forward_checked", False):
        return
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    how = f"{target.dtype}, {target.model.config._attn_implementation}, {target.device.type}"
    key = json.dumps([target.fingerprint.to_dict(), how, versions])
    marker = packaged.cache_dir() / "checks" / hashlib.sha256(key.encode()).hexdigest()[:16]
    known = target.fingerprint.revision != "unknown"
    if not (known and marker.is_file()):
        check_tree_forward(target)
        if known:
            with suppress(OSError):  # a full or read-only disk costs the next run the same check, nothing else
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.write_text(key)
    target._tree_forward_checked = True  # type: ignore[attr-defined]
