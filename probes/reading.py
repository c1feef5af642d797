"""States at a site of a store, or at several side by side: whole where memory holds them, else a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from probes.artifact import JOIN, ProbeError
from probes.rows import BLOCK_BYTES, Store, StoredStates, check_finite, choose_sites, is_site

SERVING_KINDS = ("resid_post", "resid_pre")
"""Block boundaries: the only states that serving engines hand out."""
HELD_BYTES = 2 << 30
"""States that take more in float32 are read a block at a time."""


def sites_of(store: Store, patterns: Sequence[str]) -> list[str]:
    """The store's sites that a pattern names, and the joined ones as they stand. Raises ChoiceError."""
    joined = [p for p in patterns if JOIN in p]
    for one in joined:
        for site in one.split(JOIN):
            choose_sites(store, [site])
    plain = [p for p in patterns if JOIN not in p]
    return [*(choose_sites(store, plain) if plain or not joined else []), *dict.fromkeys(joined)]


def is_serving(site: str) -> bool:
    """Whether serving engines hand out every state that is read."""
    return all(one.split(".")[0] in SERVING_KINDS for one in site.split(JOIN))


def is_held(store: Store, site: str, rows: int) -> bool:
    """Whether the states of a site may be in memory at once; always, where the store cannot be read in parts."""
    if not hasattr(store, "shard_states"):
        return True
    width = sum(store.shard_states(0, name, 0, 1).shape[-1] for name in site.split(JOIN))
    return rows * width * 4 <= HELD_BYTES


def states_at(store: Store, site: str, rows: int) -> torch.Tensor:
    """[rows, width] in the stored dtype. Raises ProbeError for states of another shape, or that are not finite."""
    target = store.manifest.get("target")
    width = target.get("width") if isinstance(target, Mapping) else None
    parts = []
    for name in site.split(JOIN):
        states = store.states(name)
        if states.ndim != 2 or len(states) != rows:
            raise ProbeError(f"the store has {rows} rows, but states of shape {list(states.shape)} at {name}")
        if width is not None and is_site(name) and states.shape[1] != width:
            raise ProbeError(
                f"the store has states of width {states.shape[1]} at {name}, and its target has width {width}: "
                "capture again"
            )
        check_finite(states, np.arange(rows), f"at {name}")
        parts.append(states)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def logits_at(
    store: Store, site: str, rows: int, score: Callable[[torch.Tensor], torch.Tensor | NDArray[Any]]
) -> NDArray[np.float64]:
    """What `score` says of the states [some, width], float32, of every row: [rows]."""
    out = np.empty(rows)
    for where, states in _blocks(store, site, rows):
        out[where] = np.asarray(score(states))
    return out


def _blocks(store: Store, site: str, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    if not is_held(store, site, rows):
        yield from StoredStates(store, site.split(JOIN)).blocks()  # type: ignore[arg-type]
        return
    states = states_at(store, site, rows)
    step = max(1, BLOCK_BYTES // (4 * states.shape[1]))
    for start in range(0, rows, step):
        where = slice(start, min(start + step, rows))
        yield where, states[where].float()
