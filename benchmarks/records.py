"""What benchmarks of answers have in common: answers as rows on disk, hashes of settings, intervals, and tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from decoding.answers import Question, right
from decoding.columns import ModeColumn
from decoding.summary import Row
from probes.evaluation import Interval


@dataclass(frozen=True)
class Answered:
    """One answer to one question in one column."""

    row: Row
    right: bool
    more: dict[str, float] = field(default_factory=dict)
    """What the column's trace tells beside."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "row": self.row.to_dict()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Answered:
        return cls(**{**record, "row": Row.from_dict(record["row"])})


def answers(
    made: Mapping[str, ModeColumn],
    asked: Sequence[Question],
    most: int,
    file: Path,
    more: Callable[[ModeColumn], dict[str, float]] = lambda one: {},
) -> list[Answered]:
    """Every column's answers, one question at a time, the columns in another order at each. Rows are appended as they
    end, and those that are there are not measured again. `more` is asked of a column after each of its answers."""
    hashes = {
        name: digest([one.describe(), one.decoder.target.fingerprint.to_dict(), most]) for name, one in made.items()
    }
    wanted = {(q.key, name, hashes[name]) for q in asked for name in made}
    stored = [Answered.from_dict(record) for record in read_lines(file)]
    found = [a for a in stored if (a.row.key, a.row.mode, a.row.settings) in wanted]
    there = {(a.row.key, a.row.mode) for a in found}
    names, warm = list(made), set[str]()
    with file.open("a", encoding="utf-8") as out:
        for i, question in enumerate(asked):
            turn = i % len(names)
            for name in (*names[turn:], *names[:turn]):
                if (question.key, name) in there:
                    continue
                if name not in warm:
                    warm.add(name)
                    answer(made[name], question, i, min(most, 16))
                done = answer(made[name], question, i, most)
                row = replace(done.row, mode=name, settings=hashes[name])
                done = replace(done, row=row, more=more(made[name]))
                out.write(json.dumps(done.to_dict()) + "\n")
                out.flush()
                found.append(done)
                print(f"\r{len(found)} of {len(wanted)} answers", end="", flush=True)
    print()
    return found


def answer(one: ModeColumn, question: Question, seed: int, most: int) -> Answered:
    target = one.decoder.target
    seeded = one if one.sampling.greedy else replace(one, sampling=replace(one.sampling, seed=seed))
    ids = target.encode_messages(question.messages)
    written = seeded.write(ids, most)
    text = target.decode([t for t in written.tokens if t not in target.stop_ids])
    return Answered(Row(question.key, question.kind, False, "", "", len(ids), **vars(written)), right(question, text))


def latest(file: Path) -> list[Answered]:
    """One answer a question and column: the last one, where settings have changed between runs."""
    return list({(a.row.key, a.row.mode): a for a in map(Answered.from_dict, read_lines(file))}.values())


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
