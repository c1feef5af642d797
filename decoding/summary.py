"""What the rows of a benchmark say: speed by group, paired ratios with intervals, and how the gate did.

Speeds are decode speeds: tokens after the first one over the seconds after it. A group's speed is its total tokens
over its total seconds, so that long answers weigh as much as they take. A prompt loops if any text that was written
for it holds a loop (`decoding.loops`); every speed is also told over the prompts that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoding.loops import in_loops
from probes.evaluation import Interval

OVERALL = "overall"
HEAVY = "copy-heavy"
BASES = ("ar", "hf", "hf-lookup", "eagle")
"""Columns that speeds are shown over, where they are in a run."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Drafts:
    """What one drafter's drafts came to, over steps in which it drafted."""

    steps: int = 0
    accepted: int = 0
    """Drafted tokens that were kept."""
    empty: int = 0
    """Steps that kept no drafted token, whoever drafted it; of the copy drafter, its false copies."""
    empty_seconds: float = 0.0
    """What those steps took."""

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.steps + other.steps,
            self.accepted + other.accepted,
            self.empty + other.empty,
            self.empty_seconds + other.empty_seconds,
        )


@dataclass(frozen=True)
class Row:
    """One prompt decoded in one mode."""

    key: str
    group: str
    copy_heavy: bool
    mode: str
    settings: str
    """Hash over everything that the numbers depend on."""
    prompt_tokens: int
    tokens: list[int]
    """Generated ids."""
    decoded: int
    """Tokens that came after the first forward, the one that reads the prompt."""
    steps: int
    """Forwards of the target after that one; 0 where a peer does not tell."""
    first_token_seconds: float
    decode_seconds: float
    drafts: dict[str, Drafts] = field(default_factory=dict)
    """By drafter; empty for modes that do not tell."""
    step_seconds: float = 0.0
    """What the steps took by the trace, text and bookkeeping around them left out; 0 where there is no trace."""

    @property
    def looped(self) -> int:
        """Generated tokens that lie in a loop."""
        return int(in_loops(self.tokens).sum())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "looped": self.looped}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Row:
        drafts = {name: Drafts(**d) for name, d in record["drafts"].items()}
        return cls(**{**{k: v for k, v in record.items() if k != "looped"}, "drafts": drafts})


def speed(rows: Sequence[Row]) -> float:
    """Decoded tokens a second."""
    seconds = sum(r.decode_seconds for r in rows)
    return sum(r.decoded for r in rows) / seconds if seconds else float("nan")


def ratio(rows: Sequence[Row], base: Sequence[Row], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Speed of `rows` over speed of `base`, prompts resampled in pairs. Both hold the same prompts in one order.

    Raises ValueError if they do not.
    """
    if [r.key for r in rows] != [r.key for r in base]:
        raise ValueError("paired ratios need the same prompts on both sides")
    columns = np.array(
        [(a.decoded, a.decode_seconds, b.decoded, b.decode_seconds) for a, b in zip(rows, base, strict=True)]
    )
    if not len(columns):
        return Interval(float("nan"), float("nan"), float("nan"))

    def of(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            result: np.ndarray = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
        return result

    if len(columns) == 1:
        return Interval(float(of(columns.sum(0))), float("nan"), float("nan"))
    low, high = np.nanpercentile(of(_draws(len(columns), seed, resamples) @ columns), [2.5, 97.5])
    return Interval(float(of(columns.sum(0))), float(low), float(high))


@lru_cache(maxsize=64)
def _draws(count: int, seed: int, resamples: int) -> NDArray[np.int64]:
    """How often each of `count` prompts was drawn in each resample."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)


def divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first generated token that differs; None if both are equal."""
    for i, (a, b) in enumerate(zip(tokens, reference, strict=False)):
        if a != b:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def counterpart(column: str, base: str, columns: Sequence[str]) -> str | None:
    """The column that `column` is shown over for a base: the base's own, with as many of the column's settings as
    one has (`eagle/temperature=1` over `ar/temperature=1`); None if there is none but itself."""
    name, *wanted = base.split("/")
    mine = {*wanted, *column.split("/")[1:]}
    found = [(len(c.split("/")), c) for c in columns if c != column and c.split("/")[0] == name]
    fitting = [(n, c) for n, c in found if set(wanted) <= set(c.split("/")[1:]) <= mine]
    return max(fitting)[1] if fitting else None


def summarize(
    rows: Sequence[Row],
    modes: Sequence[str],
    over: Sequence[str] = BASES,
    oracle: Mapping[str, Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """One record for each group and mode, over the prompts that every mode has finished.

    `oracle` holds by mode and group the share of the step oracle's gain that was reached, where a replay found it.
    """
    by_mode = {mode: {r.key: r for r in rows if r.mode == mode} for mode in modes}
    common = set.intersection(*(set(found) for found in by_mode.values())) if by_mode else set()
    loops = {r.key for found in by_mode.values() for r in found.values() if r.key in common and r.looped}
    first = next(iter(by_mode.values()), {})
    order = [r for key, r in first.items() if key in common]
    groups = list(dict.fromkeys(r.group for r in order))
    members: dict[str, list[str]] = {g: [r.key for r in order if r.group == g] for g in groups}
    heavy = [r.key for r in order if r.copy_heavy]
    if heavy:
        members[HEAVY] = heavy
    members[OVERALL] = [r.key for r in order]
    out = []
    for group, keys in members.items():
        free = [k for k in keys if k not in loops]
        for mode in modes:
            mine = [by_mode[mode][k] for k in keys]
            record: dict[str, Any] = {"group": group, "mode": mode, "prompts": len(mine), **_numbers(mine)}
            record |= _ratios(by_mode, mode, over, keys)
            plain = counterpart(mode, "ar", modes)
            record |= _lost(mine, [by_mode[plain][k] for k in keys] if plain else [])
            record["no_loops"] = {
                "prompts": len(free),
                "tokens_per_second": speed([by_mode[mode][k] for k in free]) if free else None,
                **_ratios(by_mode, mode, over, free),
            }
            if oracle is not None:
                record["oracle_share"] = oracle.get(mode, {}).get(group)
            out.append(record)
    return out


def _ratios(
    by_mode: Mapping[str, Mapping[str, Row]], mode: str, over: Sequence[str], keys: Sequence[str]
) -> dict[str, Any]:
    found = {}
    for base in over:
        other = counterpart(mode, base, list(by_mode))
        if other is not None:
            rows, others = ([by_mode[m][k] for k in keys] for m in (mode, other))
            found[f"over_{base}"] = ratio(rows, others).to_dict()
    return found


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    told = [r for r in rows if r.steps]
    steps, decoded = sum(r.steps for r in told), sum(r.decoded for r in rows)
    drafts = _total(rows)
    drafting = sum(d.steps for d in drafts.values())
    written = sum(len(r.tokens) for r in rows)
    copies = drafts.get("copy")
    return {
        "tokens_per_second": speed(rows),
        "tokens_per_step": sum(r.decoded for r in told) / steps if steps else None,
        "accepted_length": sum(d.accepted for d in drafts.values()) / drafting if drafting else None,
        "copy_steps": copies.steps / steps if copies and steps else None,
        "false_copies": copies.empty / copies.steps if copies and copies.steps else None,
        "first_token_seconds": float(np.median([r.first_token_seconds for r in rows])) if rows else None,
        "looped": sum(r.looped for r in rows) / written if written else None,
        "decoded": decoded,
        "steps": steps,
        "decode_seconds": sum(r.decode_seconds for r in rows),
    }


def _lost(rows: Sequence[Row], plain: Sequence[Row]) -> dict[str, Any]:
    """Milliseconds lost to false copies: what these steps took beyond as many mean steps of the target alone on the
    same prompt in the same run, which give the same tokens."""
    copies = [(r.drafts["copy"], base) for r, base in zip(rows, plain, strict=False) if "copy" in r.drafts]
    if not copies or not all(base.steps and base.step_seconds for _, base in copies):
        return {"lost_ms": None, "lost_share": None}
    lost = sum(d.empty_seconds - d.empty * base.step_seconds / base.steps for d, base in copies)
    seconds = sum(r.decode_seconds for r in rows)
    return {"lost_ms": lost * 1e3, "lost_share": lost / seconds if seconds else None}


def _total(rows: Sequence[Row]) -> dict[str, Drafts]:
    total: dict[str, Drafts] = {}
    for row in rows:
        for name, drafts in row.drafts.items():
            total[name] = total.get(name, Drafts()) + drafts
    return total


def gate_quality(rows: Sequence[Row], mode: str, always: str) -> dict[str, Any] | None:
    """How a gated mode's copying compares with a mode that copies at every suffix match, on the same prompts."""
    mine = {r.key: r for r in rows if r.mode == mode}
    theirs = {r.key: r for r in rows if r.mode == always}
    keys = [k for k in mine if k in theirs]
    gated = _total([mine[k] for k in keys]).get("copy", Drafts())
    free = _total([theirs[k] for k in keys]).get("copy", Drafts())
    if not free.steps:
        return None
    return {
        "mode": mode,
        "always": always,
        "prompts": len(keys),
        "copy_steps": gated.steps,
        "always_copy_steps": free.steps,
        "kept_tokens": gated.accepted / free.accepted if free.accepted else None,
        "avoided_empty_steps": 1 - gated.empty / free.empty if free.empty else None,
    }
