"""Counters of two worker processes, read by a third as vLLM's endpoint does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="it comes with vLLM")

WORKER = """
from decoding.serving.vllm.counters import Counters
counters = Counters("smollm2", {replica})
counters.decided([0.05, 0.93], 1, 3, False)
counters.decided([0.97], 1, 1, True)
counters.settled(8, 5)
counters.settled(8, 0)
Counters("smollm2", {replica}).settled(4, 4)
"""
READER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def ran(code: str, folder: Path) -> str:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_workers_are_seen_in_another_process(tmp_path: Path) -> None:
    for replica in (0, 1, 1):  # a replica that was started again
        ran(WORKER.format(replica=replica), tmp_path)
    found = {}
    for line in ran(READER, tmp_path).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    for replica, times in (("0", 1), ("1", 2)):
        labels = f'{{engine="{replica}",model_name="smollm2"}}'
        counts = {
            "steps": 2, "row_steps": 4, "copy_steps": 2, "false_copies": 1, "copied_tokens": 20,
            "copied_tokens_kept": 9, "neural_skipped": 1,
        }  # fmt: skip
        for name, value in counts.items():
            assert found[f"switchsd:{name}_total{labels}"] == value * times
        assert found[f"switchsd:probe_score_count{labels}"] == 3 * times
        assert found[f'switchsd:probe_score_bucket{{engine="{replica}",le="0.1",model_name="smollm2"}}'] == times
        assert found[f'switchsd:probe_score_bucket{{engine="{replica}",le="1.0",model_name="smollm2"}}'] == 3 * times
