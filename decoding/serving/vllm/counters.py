"""What the switch does, as Prometheus counters beside vLLM's own.

They are made in a worker's process. vLLM's endpoint shows them where that process shares a folder with it:
`PROMETHEUS_MULTIPROC_DIR`, set before either starts (`switchsd serve` sets it). Without it they are in the worker's own
`prometheus_client.REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LABELS = ("model_name", "engine")
"""As vLLM labels its own: the served name, and the number of the data-parallel replica."""
BUCKETS = tuple(k / 10 for k in range(1, 11))
COUNTED = {
    "steps": "Steps in which drafts were asked for.",
    "row_steps": "Steps of requests: one for each request that drafted in a step.",
    "copy_steps": "Steps of requests in which a copy was drafted.",
    "false_copies": "Copied drafts of which no token was kept.",
    "copied_tokens": "Tokens of copied drafts.",
    "copied_tokens_kept": "Tokens of copied drafts that were kept.",
    "neural_skipped": "Steps in which the head drafted for nobody, so that its further passes were left out.",
}


class Counters:
    """The counters of one replica."""

    def __init__(self, model: str, replica: int) -> None:
        """`model`: the name that the model is served under; `replica`: its number among data-parallel ones."""
        labels = (model, str(replica))
        self._counts = {name: metric.labels(*labels) for name, metric in _counters().items()}
        self._scores = _histogram().labels(*labels)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Counters:
        """Those of an engine."""
        model = vllm_config.model_config
        names = model.served_model_name
        name = names[0] if isinstance(names, list) else names or model.model
        return cls(name, vllm_config.parallel_config.data_parallel_index)

    def decided(self, scores: Sequence[float], copies: int, rows: int, skipped: bool) -> None:
        """One step: the copy intents [0..1] that were asked for, how many of the drafting requests copy, how many
        there are, and whether the head's further passes were left out."""
        self._counts["steps"].inc()
        self._counts["row_steps"].inc(rows)
        self._counts["copy_steps"].inc(copies)
        if skipped:
            self._counts["neural_skipped"].inc()
        for score in scores:
            self._scores.observe(score)

    def settled(self, drafted: int, kept: int) -> None:
        """What came of one copied draft: its tokens, and how many of them were kept."""
        self._counts["copied_tokens"].inc(drafted)
        self._counts["copied_tokens_kept"].inc(kept)
        if kept == 0:
            self._counts["false_copies"].inc()


@cache  # a process that makes a second engine must not register them twice
def _counters() -> dict[str, Counter]:
    return {name: Counter(f"switchsd:{name}", text, LABELS) for name, text in COUNTED.items()}


@cache
def _histogram() -> Histogram:
    return Histogram("switchsd:probe_score", "Copy intent where a suffix match was found.", LABELS, buckets=BUCKETS)
