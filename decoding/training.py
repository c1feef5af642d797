"""What trainings of drafters have in common: whole texts of capture stores as batches, the most frequent tokens, the
learning rate, and the state of a run on disk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from activations.store import CaptureStore, write_json

SHORTEST = 9
"""Documents of fewer rows are left out."""

Document = dict[str, torch.Tensor]
"""Tensors of one text, a row a token: `token`, `pending`, `written`, and states by the name they were asked under."""


def check_settings(config: Any, counts: Sequence[str], shares: Sequence[str]) -> None:
    """Raise ValueError for what no training takes, of the settings that all of them have and those named: counts, from
    1 on, and shares, in [0, 1]."""
    for name in (*counts, "tokens", "batch_tokens", "accumulate", "validation_documents"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be 1 or more")
    for name in shares:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must lie in [0, 1]")
    if config.precision not in ("bf16", "float32"):
        raise ValueError(f"precision is {config.precision!r}; it is bf16 or float32")
    for name in ("learning_rate", "clip", "checkpoint_seconds"):
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be above 0")


def documents(store: CaptureStore, shard: int, states: Mapping[str, Sequence[str]]) -> list[Document]:
    """The documents of a shard; `states` are sites by a name each, put side by side."""
    rows = store.shard_rows(shard, ["document", "token", "pending", "loss_mask"])
    columns = {
        "token": torch.from_numpy(rows["token"].astype(np.int64)),
        "pending": torch.from_numpy(rows["pending"].astype(np.int64)),
        "written": torch.from_numpy(rows["loss_mask"].copy()),
    }
    for name, sites in states.items():
        parts = [store.shard_states(shard, site) for site in sites]
        columns[name] = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    cuts = [*np.flatnonzero(np.diff(rows["document"], prepend=-1)).tolist(), len(rows["document"])]
    return [
        {name: column[a:b] for name, column in columns.items()}
        for a, b in itertools.pairwise(cuts)
        if b - a >= SHORTEST
    ]


def rows_of_a_pass(stores: Sequence[Path], held_out: Sequence[int]) -> int:
    """Rows that one pass over the stores trains on, without as many documents of each one's first shard as are held
    out; a store that is given twice counts twice."""
    total = 0
    for folder, left_out in zip(stores, held_out, strict=True):
        store = CaptureStore.open(folder)
        for shard in range(len(store.shards)):
            column = store.shard_rows(shard, ["document"])["document"]
            lengths = np.diff(np.flatnonzero(np.diff(column, prepend=-1)), append=len(column))
            total += int(lengths[lengths >= SHORTEST][left_out if shard == 0 else 0 :].sum())
    return total


def padded(docs: list[Document], budget: int) -> Iterator[Document]:
    """Documents of similar length together [B, T, ...], zeros behind each, at most `budget` rows or one document;
    `real` [B, T] tells rows from padding."""
    group: list[Document] = []
    for doc in [*sorted(docs, key=lambda d: len(d["pending"])), None]:
        if group and (doc is None or (len(group) + 1) * len(doc["pending"]) > budget):
            length = len(group[-1]["pending"])
            whole = [{**d, "real": torch.ones_like(d["written"])} for d in group]
            yield {
                name: torch.stack(
                    [F.pad(d[name], (0,) * (2 * d[name].dim() - 1) + (length - len(d[name]),)) for d in whole]
                )
                for name in whole[0]
            }
            group = []
        if doc is not None:
            group.append(doc)


def frequent_tokens(
    stores: Sequence[CaptureStore], size: int, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """The most frequent written tokens, int64 [tokens] (increasing ids), those to be `kept` [n] among them whatever
    their number, and the share of the text that they cover."""
    counts = np.zeros(0, dtype=np.int64)
    for store in stores:
        for shard in range(len(store.shards)):
            rows = store.shard_rows(shard, ["pending", "loss_mask"])
            fresh = np.bincount(rows["pending"][rows["loss_mask"]])
            counts = np.pad(counts, (0, max(0, len(fresh) - len(counts))))
            counts[: len(fresh)] += fresh
    ranked = np.argsort(-counts, kind="stable")
    if kept is not None:
        counts = np.pad(counts, (0, max(0, int(kept.max()) + 1 - len(counts))))
        ranked = np.concatenate([kept.numpy(), ranked[~np.isin(ranked, kept.numpy())]])
        size = max(size, len(kept))
    chosen = np.sort(ranked[:size])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / counts.sum())


def learning_rate(peak: float, progress: float) -> float:
    """Warmed up over the first 2 % of a run, then a cosine to zero; progress is in [0, 1]."""
    return peak * min(1.0, progress / 0.02 + 0.05) * 0.5 * (1 + math.cos(math.pi * progress))


# -- the state of a run ---------------------------------------------------------------------------------


def keep(
    run: Path,
    state: Mapping[str, object],
    weights: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    **more: torch.Tensor,
) -> None:
    """Replace the state in `run`; `weights` are the optimizer's parameters in its order, by names
    under which they are found again."""
    save_file({**more, **tensors_of(weights, optimizer)}, run / "state.safetensors.tmp")
    (run / "state.safetensors.tmp").replace(run / "state.safetensors")
    write_json(run / "state.json", state)


def tensors_of(weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights, and the optimizer's moments of each as `optimizer.<index>.<name>`; what `restore` takes."""
    tensors = {name: parameter.detach() for name, parameter in weights.items()}
    moments = optimizer.state_dict()["state"]
    for index in range(len(weights)):
        tensors.update({f"optimizer.{index}.{k}": v for k, v in moments.get(index, {}).items()})
    return tensors


def restore(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """What `keep` kept, into the weights and the optimizer."""
    moments: dict[int, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(tensors[name])
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = value
    if moments:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
