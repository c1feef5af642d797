"""kill -9 of a real capture: `benchmarks/capture.py kill` with few kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the captures are forked")
def test_a_capture_that_is_killed_again_and_again_equals_one_that_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/capture.py", "kill", "--kills", "3", "--documents", "16"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    reached = found["shards_after_each_kill"]
    assert found["difference"] is None
    assert len(reached) == 3 and reached == sorted(reached)
    assert any(0 < shards < found["shards"] for shards in reached), "a kill must have met a store that was half done"
