"""`benchmarks/fit_probe.py` on few rows: its promises about AUC and memory, and none about time."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="benchmarks lie in a checkout only")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.fit_probe")


def test_speed_compares_at_equal_auc(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = benchmark.main(["speed", "--rows", "4000", "--width", "24", "--quick"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["ok"] and found["ours"]["auc"] > 0.8
    assert found["ours"]["auc"] == pytest.approx(found["scikit-learn"]["auc"], abs=0.01)


def test_a_worse_auc_fails(benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benchmark, "L2", 1e3)
    assert benchmark.main(["speed", "--rows", "4000", "--width", "24", "--quick"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_sweep_fits_every_site(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = benchmark.main(["sweep", "--rows", "1000", "--width", "12", "--sites", "3", "--quick"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["sites"] == 3 and found["auc"][0] > 0.8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the store is written by a fork")
def test_stream_adds_less_than_the_states_take(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fit_probe", "stream", "--gib", "0.05", "--limit-mib", "100", "--width", "64",
         "--shard-rows", "10000", "--folder", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["MiB of states in float32"] > 100 > found["MiB at the peak"] - found["MiB before"]
    assert found["auc of its last rows"] > 0.8
    assert not list(tmp_path.iterdir())  # the store is gone
