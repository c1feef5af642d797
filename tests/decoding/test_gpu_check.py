"""The GPU check's code, on a CPU with a tiny shape."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.trace import StepRecord

ROOT = Path(__file__).parents[2]
ACCEPTANCE = ROOT / "benchmarks" / "acceptance.json"
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="benchmarks lie in a checkout only")
HEAVY = {
    "datasets", "pyarrow", "sklearn", "matplotlib", "pandas", "rich", "typer", "gguf", "xxhash", "transformer_lens",
    "ray", "switchsd",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("gpu") / "check.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "skipped: matcher times" in done.stderr
    return json.loads(out.read_text())


def test_every_part_runs_and_what_is_left_out_is_said(found: dict) -> None:
    assert all(row["right"] for row in found["matcher"])
    assert {(r["mode"], r["batch"]) for r in found["steps"]["modes"]} == {
        (m, b) for m in ("ar", "copy", "eagle", "switchsd") for b in (1, 2)
    }
    assert all(r["step_ms"] > 0 for r in found["steps"]["modes"])
    assert found["steps_peak_mib"] > 0
    assert found["skipped"] == ["matcher times and CUDA kernels: they need a GPU"]


def test_nothing_heavy_is_imported(found: dict) -> None:
    assert {"torch", "transformers"} <= set(found["imported"])
    assert HEAVY.isdisjoint(found["imported"])


def test_the_recorded_acceptance_is_replayed(found: dict) -> None:
    modes = json.loads(ACCEPTANCE.read_text())["modes"]
    for row in found["steps"]["modes"]:
        if row["batch"] > 1 or row["mode"] == "ar":
            continue
        steps = [step for request in modes[row["mode"]] for step in request][: row["steps"]]
        kept = [min(step[-1], max((depth for _, _, depth in step[:-1]), default=0)) for step in steps]
        expected = sum(kept) / len(kept) + 1
        if row["mode"] == "copy":
            assert row["tokens_per_step"] == pytest.approx(expected, abs=1e-3)
        else:  # a head with random weights may grow a shallower tree than the recorded one
            assert 1 < row["tokens_per_step"] <= expected + 1e-3


def test_a_step_is_recorded_by_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    as_step = importlib.import_module("benchmarks.gpu_check").as_step
    record = StepRecord(
        request=0, step=0, start=0.0, position=9, mode="switchsd", drafters=("copy", "eagle"), reason="", intent=None,
        match_length=5, match_start=2, tokens=(1, 2, 3, 4), parents=(-1, 0, 0, -1),
        source=("copy", "copy", "eagle", "eagle"), logq=(0.0,) * 4, accepted=(0, 2), pending=7, rows=1,
        draft_ms=1.0, verify_ms=1.0, overhead_ms=1.0,
    )  # fmt: skip
    assert as_step(record) == [["copy", 2, 2], ["eagle", 2, 2], 2]


def test_without_a_gpu_the_default_says_what_to_do(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "x.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU here" in done.stderr
