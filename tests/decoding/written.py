"""A capture store of a small target's own greedy text, as `switchsd write` makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from activations.cache import KVCache
from activations.sites import eagle_sites, last_site
from activations.store import StoreWriter
from activations.target import Target

PROMPT, WRITTEN = 4, 20
"""Tokens of each document."""


def write_store(target: Target, folder: Path, shards: int = 2, documents: int = 4, seed: int = 0) -> Path:
    """Random prompts, and what the target writes after them, with its states."""
    sites = [*eagle_sites(target.blocks), last_site(target.blocks)]
    description = {"target": target.fingerprint.to_dict(), "config": {}, "selection": "all"}
    rng = np.random.default_rng(seed)
    with StoreWriter(folder, description, sites) as writer:
        for shard in range(shards):
            rows: dict[str, list] = {k: [] for k in ("document", "position", "token", "pending", "loss_mask")}
            states: dict[str, list] = {s: [] for s in sites}
            for document in range(documents):
                ids = rng.integers(0, target.vocab_size - 2, PROMPT).tolist()
                cache = KVCache(1)
                with target.read(sites) as reader:
                    logits = target.forward(torch.tensor([ids]), cache)
                    cache.commit([range(PROMPT)])
                    parts = {s: [v[0]] for s, v in reader.states.items()}
                    for _ in range(WRITTEN):
                        ids.append(int(logits[0, -1].argmax()))
                        logits = target.forward(torch.tensor([ids[-1:]]), cache)
                        cache.commit([[0]])
                        for site, state in reader.states.items():
                            parts[site].append(state[0])
                n = len(ids) - 1
                rows["document"] += [shard * documents + document] * n
                rows["position"] += range(n)
                rows["token"] += ids[:-1]
                rows["pending"] += ids[1:]
                rows["loss_mask"] += [i >= PROMPT - 1 for i in range(n)]
                for site, states_of in parts.items():
                    states[str(site)].append(torch.cat(states_of)[:n])
            writer.write(
                {k: np.array(v) for k, v in rows.items()},
                {s: torch.cat(v) for s, v in states.items()},
                written=documents * WRITTEN,
                contaminated=0,
            )
    return folder
