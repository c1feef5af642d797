"""Does the target use what a probe reads? On request, because it is slow: the target runs again many times.

Two experiments: the probe's direction is changed at anchors (`probes.direction`), and induction heads are taken away
(`probes.induction`). Both are about the same documents of a store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from activations.cache import KVCache
from activations.corpus import Prompt
from activations.labels import LabelConfig
from activations.provenance import provenance
from activations.target import Target
from activations.texts import stored_text
from probes import direction, induction
from probes.anchors import AnchoredText, anchored
from probes.artifact import Probe, ProbeError
from probes.rows import Store, manifest_hash

FILE = "causality.json"


@dataclass(frozen=True)
class CausalityConfig:
    """How much is tried."""

    documents: int = 40
    """Documents of the store's validation part, or of all of it where it has none; drawn at random."""
    anchors: int = 4
    """Most genuine and most accidental anchors of a document at which the probe's direction is changed."""
    directions: int = 8
    """Random directions that the probe's is compared with."""
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of induction heads that are ablated; numbers above half of the target's heads are left out."""
    resamples: int = 1000
    """Bootstrap resamples behind each interval."""
    seed: int = 0
    """Draws documents, anchors, directions, heads and resamples."""

    def __post_init__(self) -> None:
        for name in ("documents", "anchors", "directions", "resamples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if any(k < 1 for k in self.heads):
            raise ValueError(f"heads is {list(self.heads)}; each number must be 1 or more")


@dataclass(frozen=True)
class Causality:
    """What was found."""

    probe: dict[str, Any]
    """Site, label, target and dtype."""
    store: str
    """sha256 of its manifest."""
    part: str
    """Which documents: validation, or all."""
    config: CausalityConfig
    effects: tuple[direction.Effect, ...]
    induction: induction.Induction
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "probe": self.probe,
            "store": self.store,
            "part": self.part,
            "config": asdict(self.config),
            "direction": [e.to_dict() for e in self.effects],
            "induction": self.induction.to_dict(),
            "provenance": dict(self.provenance),
        }

    def save(self, folder: Path) -> Path:
        """Write causality.json, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILE
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        os.replace(scratch, file)
        return file


def choose_documents(rows: Mapping[str, NDArray[Any]], most: int, seed: int) -> tuple[list[int], str]:
    """Document numbers, in order, and the part that they are of."""
    validation = np.array([s == "validation" for s in rows["split"].tolist()])
    part = "validation" if validation.any() else "all"
    numbers = np.unique(rows["document"][validation] if validation.any() else rows["document"])
    return sorted(np.random.default_rng(seed).permutation(numbers)[:most].tolist()), part


class Study:
    """The experiments on one store, made ready: the texts are found, and nothing slow has run."""

    def __init__(
        self, target: Target, probe: Probe, store: Store, prompts: Sequence[Prompt], config: CausalityConfig
    ) -> None:
        """`prompts` are all of the store's (see `activations.texts.prompts_of`).

        Raises ProbeError for a store of another target or without both classes of anchors, ChoiceError for a probe of
        another target or without a direction, and StoreError where rows and prompts do not fit.
        """
        self.target, self.probe, self.store, self.config = target, probe, store, config
        probe.check_target(target.fingerprint, target.name)
        if store.manifest["target"] != target.fingerprint.to_dict():
            raise ProbeError(
                f"the store was captured from another target ({store.manifest.get('target_name')}) than "
                f"{target.name}: choose a store of this target"
            )
        direction.unit_direction(probe)
        rows = store.rows()
        numbers, self.part = choose_documents(rows, config.documents, config.seed)
        labels = LabelConfig(**store.manifest["config"]["labels"])
        kappa = max(probe.config.kappa, labels.kappa)
        texts = (stored_text(target, rows, n, prompts[n]) for n in numbers)
        found = [anchored(text, rows, labels, kappa) for text in texts]
        self.texts: list[AnchoredText] = [text for text in found if text.anchors]
        self.chosen = direction.choose_anchors(self.texts, config.anchors, config.seed)
        self.counts = induction.head_counts(target, config.heads)

    @property
    def tokens(self) -> int:
        """Tokens that will be fed, branches included."""
        return direction.tokens_needed(self.chosen, self.config.directions) + induction.tokens_needed(
            self.texts, len(self.counts)
        )

    def seconds(self) -> float:
        """A rough estimate of the time, from one forward of the longest text."""
        longest = max(self.texts, key=lambda t: len(t.ids))
        tokens = torch.tensor([longest.ids], device=self.target.device)
        begun = time.perf_counter()
        float(self.target.hidden(tokens, KVCache(1, capacity=len(longest.ids))).sum())
        return (time.perf_counter() - begun) * self.tokens / len(longest.ids)

    def run(self, progress: Callable[[int], None] = lambda tokens: None) -> Causality:
        """Both experiments; `progress(done)` is called with tokens, up to `tokens`."""
        done = 0

        def tell(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done)

        target, probe, config = self.target, self.probe, self.config
        how = {"resamples": config.resamples, "seed": config.seed, "tell": tell}
        effects = direction.direction_effects(target, probe, self.chosen, config.directions, **how)  # type: ignore[arg-type]
        heads = induction.induction(target, probe, self.texts, self.counts, **how)  # type: ignore[arg-type]
        described = {
            "site": probe.config.site,
            "label": probe.config.label,
            "target": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
        }
        return Causality(
            described, manifest_hash(self.store), self.part, config, tuple(effects), heads, provenance(config.seed)
        )
