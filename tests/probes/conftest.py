"""A capture store in memory: states that know the label at some sites, surface features that know a little of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations.store import CaptureStore, StoreWriter
from activations.target import Fingerprint

TARGET = Fingerprint("LlamaForCausalLM", 12, 3, "0123456789abcdef", "aaaa")
SIGNAL = {"embed": 0.0, "attn_out.1": 0.6, "resid_mid.1": 3.0, "resid_post.1": 1.5, "resid_post.2": 0.3}


class FakeStore:
    def __init__(self, documents: int = 60, length: int = 40, seed: int = 0, split: bool = True) -> None:
        rng = np.random.default_rng(seed)
        count = documents * length
        document = np.repeat(np.arange(documents), length)
        copied = rng.random(count) < 0.35
        matched = rng.random(count) < np.where(copied, 0.9, 0.3)
        accepted = np.where(matched, np.where(copied, rng.integers(1, 9, count), rng.integers(0, 3, count)), 0)
        part = np.where(np.arange(documents) % 3 == 0, "validation", "train")
        candidate = np.where(matched, rng.integers(1, 4, count), 0)
        self._rows: dict[str, np.ndarray] = {
            "document": document,
            "group": np.array([f"g{d // 2 if d % 3 == 1 else d}-{part[d]}" for d in range(documents)])[document],
            "split": part[document].astype(object) if split else np.full(count, None),
            "family": np.full(count, "qa"),
            "position": np.tile(np.arange(length, dtype=np.int32), documents),
            "match_length": np.where(matched, 5 + rng.poisson(2 + 2 * copied), 0).astype(np.int32),
            "occurrences": candidate.astype(np.int32),
            "distance": np.where(matched, rng.integers(6, 200, count), 0).astype(np.int32),
            "agreement": np.where(matched, 1 / np.maximum(candidate, 1), 0).astype(np.float32),
            "source": np.where(matched, np.where(rng.random(count) < 0.5, "prompt", "output"), ""),
            "accepted": accepted.astype(np.int32),
            "censored": matched & (rng.random(count) < 0.02),
            "max_prob": rng.random(count).astype(np.float32),
            "entropy": rng.random(count).astype(np.float32),
            "margin": rng.random(count).astype(np.float32),
            "next_logprob": np.where(matched, -2 + 2 * copied + 0.1 * rng.normal(size=count), np.nan).astype("f4"),
        }
        tokens = np.random.default_rng(seed + 1).integers(0, 40, (2, count), dtype=np.int32)
        self._rows |= {"token": tokens[0], "pending": tokens[1]}
        for ahead in range(3):
            span = copied.astype(np.int8)
            span[np.arange(count) % length >= length - 1 - ahead] = -1
            self._rows[f"span_{ahead}"] = span
        base = rng.normal(size=(documents, 12))[document] + rng.normal(size=(count, 12))
        direction = rng.normal(size=12) / np.sqrt(12)
        self._states = {
            site: torch.from_numpy(base + signal * copied[:, None] * direction + 3).to(torch.bfloat16)
            for site, signal in SIGNAL.items()
        }
        self.manifest: dict[str, Any] = {
            "target": asdict(TARGET),
            "target_name": "small",
            "config": {"labels": {"span_n": 5, "kappa": 5}},
            "sites": list(SIGNAL),
        }

    @property
    def sites(self) -> list[str]:
        return list(self._states)

    def rows(self) -> dict[str, np.ndarray]:
        return dict(self._rows)

    def states(self, site: str) -> torch.Tensor:
        return self._states[site]


@pytest.fixture(scope="session")
def fake_store() -> type[FakeStore]:
    """fake_store(documents=60, length=40, seed=0, split=True) -> FakeStore, a new one each time."""
    return FakeStore


@pytest.fixture
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CaptureStore]:
    """stored({site: states}, shard=50, **columns) -> a capture store on disk, `shard` rows in a shard."""

    def make(states: dict[str, torch.Tensor], shard: int = 50, **columns: np.ndarray) -> CaptureStore:
        folder: Path = tmp_path_factory.mktemp("store")
        count = len(next(iter(states.values())))
        columns = {"document": np.arange(count) // 10, **columns}
        with StoreWriter(folder, {"target": TARGET.to_dict(), "config": {}}, list(states)) as writer:
            for start in range(0, count, shard):
                rows = slice(start, start + shard)
                writer.write(
                    {name: column[rows] for name, column in columns.items()},
                    {site: state[rows] for site, state in states.items()},
                )
        return CaptureStore.open(folder)

    return make
