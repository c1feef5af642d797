"""Traces survive the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.trace import StepRecord, Trace


def record(step: int, intent: float | None) -> StepRecord:
    return StepRecord(
        request=3, step=step, start=0.25 * step, position=10 + step, mode="switchsd", drafters=("copy",) * (step % 2),
        reason="intent", intent=intent, match_length=5 * step, match_start=-1 if step == 0 else 4,
        tokens=(7, 8, 9)[:step], parents=(-1, 0, 0)[:step], source=("copy",) * step, logq=(0.0, -1.5, -0.5)[:step],
        accepted=(0,)[:step], pending=11, rows=2, draft_ms=0.5, verify_ms=40.25, overhead_ms=0.125,
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    trace = Trace(record(i, intent) for i, intent in enumerate([None, 0.75, 0.0, None]))
    trace.save(tmp_path / "t.parquet")
    assert Trace.load(tmp_path / "t.parquet").records == trace.records
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"], "scratch was left behind"


def test_an_empty_trace(tmp_path: Path) -> None:
    Trace().save(tmp_path / "t.parquet")
    assert len(Trace.load(tmp_path / "t.parquet")) == 0


def test_depth_is_that_of_the_longest_path() -> None:
    assert [record(i, None).depth for i in range(4)] == [0, 1, 2, 2]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"cannot read the trace .*broken\.parquet"):
        Trace.load(broken)
    pq.write_table(pa.table({"request": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="lacks step, start"):
        Trace.load(tmp_path / "other.parquet")
