"""The trace: one record a step, kept in memory and written as Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class StepRecord:
    """One step of one request."""

    request: int
    step: int
    """Counts the request's steps from 0; prefill is none."""
    start: float
    """Seconds since the trace began."""
    position: int
    """Index of the pending token that the step started from."""
    mode: str
    drafters: tuple[str, ...]
    """The gate's decision: who was asked to draft."""
    reason: str
    """Why, in the gate's words."""
    intent: float | None
    """The probe's output at the anchor; None without a probe."""
    match_length: int
    """Length of the longest suffix match among the candidates; 0 = none."""
    match_start: int
    """Position of the first candidate's first token; -1 = none."""
    tokens: tuple[int, ...]
    """Drafted tokens, parents before children."""
    parents: tuple[int, ...]
    """-1 = child of the pending token."""
    source: tuple[str, ...]
    """Who drafted each."""
    logq: tuple[float, ...]
    accepted: tuple[int, ...]
    """Node indices of the accepted path."""
    pending: int
    """The new pending token."""
    rows: int
    """Requests in the same forward; its milliseconds are theirs together."""
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    """The rest of the step: gate, masks, commit, text."""
    particle: int = 0
    """Which of the request's particles."""
    log_weight: float | None = None
    """A particle's, before any resampling; None without particles."""
    ess: float | None = None
    """Effective sample size of the request's particles, before any resampling."""
    asked: int = 0
    """Mismatches at which an arbiter chose between the draft's token and the target's."""
    kept: tuple[int, ...] = ()
    """Nodes of the accepted path that the target would not have written: an arbiter kept the draft's token."""

    @property
    def copies(self) -> bool:
        return "copy" in self.drafters

    @property
    def depth(self) -> int:
        """Length of the longest drafted path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


class Trace:
    """Records in the order in which their steps were committed."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.records: list[StepRecord] = list(records)

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file, whole or not at all."""
        if Path(path).suffix in (".csv", ".json", ".jsonl"):
            raise ValueError(f"a trace is a Parquet file: name {Path(path).name} {Path(path).stem}.parquet instead")
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(
            {f.name: [getattr(r, f.name) for r in self.records] for f in fields(StepRecord)}, schema=_schema()
        )
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            pq.write_table(table, scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"cannot read the trace {os.fspath(path)}: {error}") from error
        missing = [f.name for f in fields(StepRecord) if f.name not in table.column_names and f.default is MISSING]
        if missing:
            raise ValueError(f"{os.fspath(path)} is no trace of this version: it lacks {', '.join(missing)}")
        rows = table.select([f.name for f in fields(StepRecord) if f.name in table.column_names]).to_pylist()
        return cls(_record(row) for row in rows)


def _record(row: dict[str, Any]) -> StepRecord:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return StepRecord(**values)


def _schema() -> Any:
    import pyarrow as pa

    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "str": pa.string(),
        "tuple[int, ...]": pa.list_(pa.int64()),
        "tuple[float, ...]": pa.list_(pa.float64()),
        "tuple[str, ...]": pa.list_(pa.string()),
    }
    return pa.schema(
        [pa.field(f.name, types[str(f.type)]) for f in fields(StepRecord)], metadata={"switchsd_trace": str(VERSION)}
    )
