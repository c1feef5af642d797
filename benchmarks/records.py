"""What benchmarks of answers have in common: rows on disk, hashes of settings, intervals, and tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from probes.evaluation import Interval


def digest(value: object) -> str:
    """A short hash of what a row depends on."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines that may have been cut off; what is no whole line is removed."""
    if not file.is_file():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        file.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def interval(values: Sequence[float] | np.ndarray, seed: int = 0, resamples: int = 2000) -> Interval:
    """A mean and its 95 % bootstrap interval."""
    x = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    low, high = np.percentile(x[draws].mean(1), [2.5, 97.5])
    return Interval(float(x.mean()), float(low), float(high))


def cell(value: dict[str, float | None], form: str) -> str:
    """An interval that went through JSON."""
    return format(Interval(**{k: float("nan") if v is None else v for k, v in value.items()}), form)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines in markdown."""
    bar = "|".join("---" if i == 0 else "--:" for i in range(len(heads)))
    return [f"| {' | '.join(heads)} |", f"|{bar}|", *(f"| {' | '.join(row)} |" for row in rows)]
