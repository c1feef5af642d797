"""What the rows of a benchmark say: speed by group, paired ratios with intervals, and how the gate did.

Speeds are decode speeds: tokens after the first one over the seconds after it. A group's speed is its total tokens
over its total seconds, so that long answers weigh as much as they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.evaluation import Interval

OVERALL = "overall"
HEAVY = "copy-heavy"
RESAMPLES = 2000


@dataclass(frozen=True)
class Drafts:
    """What one drafter's drafts came to, over steps in which it drafted."""

    steps: int = 0
    accepted: int = 0
    """Drafted tokens that were kept."""
    empty: int = 0
    """Steps that kept no drafted token."""

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.steps + other.steps, self.accepted + other.accepted, self.empty + other.empty)


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
    """Forwards of the target after that one."""
    first_token_seconds: float
    decode_seconds: float
    drafts: dict[str, Drafts] = field(default_factory=dict)
    """By drafter; empty for modes that do not tell."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Row:
        drafts = {name: Drafts(**d) for name, d in record["drafts"].items()}
        return cls(**{**record, "drafts": drafts})


def speed(rows: Sequence[Row]) -> float:
    """Decoded tokens a second."""
    seconds = sum(r.decode_seconds for r in rows)
    return sum(r.decoded for r in rows) / seconds if seconds else float("nan")


def ratio(rows: Sequence[Row], base: Sequence[Row], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Speed of `rows` over speed of `base`, prompts resampled in pairs. Both hold the same prompts in one order."""
    if [r.key for r in rows] != [r.key for r in base]:
        raise ValueError("paired ratios need the same prompts on both sides")
    columns = np.array(
        [(a.decoded, a.decode_seconds, b.decoded, b.decode_seconds) for a, b in zip(rows, base, strict=True)]
    )
    if not len(columns):
        return Interval(float("nan"), float("nan"), float("nan"))
    draw = np.random.default_rng(seed)
    times = draw.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=resamples)  # how often each was drawn

    def of(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            result: np.ndarray = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
        return result

    if len(columns) == 1:
        return Interval(float(of(columns.sum(0))), float("nan"), float("nan"))
    low, high = np.nanpercentile(of(times @ columns), [2.5, 97.5])
    return Interval(float(of(columns.sum(0))), float(low), float(high))


def divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first generated token that differs; None if both are equal."""
    for i, (a, b) in enumerate(zip(tokens, reference, strict=False)):
        if a != b:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def summarize(rows: Sequence[Row], modes: Sequence[str]) -> list[dict[str, Any]]:
    """One record for each group and mode, over the prompts that every mode has finished."""
    by_mode = {mode: {r.key: r for r in rows if r.mode == mode} for mode in modes}
    common = set.intersection(*(set(found) for found in by_mode.values())) if by_mode else set()
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
        for mode in modes:
            mine = [by_mode[mode][k] for k in keys]
            record: dict[str, Any] = {"group": group, "mode": mode, "prompts": len(mine), **_numbers(mine)}
            for base in ("ar", "hf"):
                if base in by_mode and mode != base:
                    record[f"over_{base}"] = ratio(mine, [by_mode[base][k] for k in keys]).to_dict()
            out.append(record)
    return out


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    steps, decoded = sum(r.steps for r in rows), sum(r.decoded for r in rows)
    drafts = _total(rows)
    drafting = sum(d.steps for d in drafts.values())
    return {
        "tokens_per_second": speed(rows),
        "tokens_per_step": decoded / steps if steps else None,
        "accepted_length": sum(d.accepted for d in drafts.values()) / drafting if drafting else None,
        "copy_steps": drafts["copy"].steps / steps if "copy" in drafts and steps else None,
        "first_token_seconds": float(np.median([r.first_token_seconds for r in rows])) if rows else None,
        "decoded": decoded,
        "steps": steps,
        "decode_seconds": sum(r.decode_seconds for r in rows),
    }


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


# -- for people -------------------------------------------------------------------------------------


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return format(Interval(**{k: float("nan") if v is None else v for k, v in value.items()}), ".2f")
    return format(value, form)


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens_per_second", "tokens/s", ".1f"),
    ("over_ar", "× ar [95 %]", ""),
    ("over_hf", "× hf [95 %]", ""),
    ("tokens_per_step", "tokens per step", ".2f"),
    ("accepted_length", "accepted length when drafting", ".2f"),
    ("copy_steps", "steps copied", ".0%"),
    ("first_token_seconds", "first token s (median)", ".3f"),
)


def table_cells(record: dict[str, Any]) -> list[str]:
    return [record["mode"], *(_cell(record.get(name), form) for name, _, form in COLUMNS)]


def markdown(result: dict[str, Any]) -> str:
    """The whole result as Markdown tables: all prompts first, then each group."""
    records = result["summary"]
    groups = list(dict.fromkeys(r["group"] for r in records))
    groups.sort(key=lambda g: {OVERALL: 0, HEAVY: 1}.get(g, 2))
    settings = result["settings"]
    lines = [
        f"# {settings['target']}, {settings['dtype']}, {settings['device']}, {settings['threads']} threads",
        "",
        f"At most {settings['max_new_tokens']} new tokens a prompt, greedy. Speeds leave out the first token, which "
        "has a column of its own. Ratios are paired over prompts; brackets hold 95 % bootstrap intervals.",
    ]
    heads = ["mode", *(head for _, head, _ in COLUMNS)]
    for group in groups:
        members = [r for r in records if r["group"] == group]
        lines += ["", f"## {group} ({members[0]['prompts']} prompts)", "", _line(heads), _line(["---"] * len(heads))]
        lines += [_line(table_cells(r)) for r in members]
    for gate in result["gate"]:
        lines += [
            "",
            f"## Gate of {gate['mode']} beside {gate['always']} (copies at every suffix match)",
            "",
            _line(["copy steps", "copy steps without a gate", "kept copy tokens", "avoided empty copy steps"]),
            _line(["---"] * 4),
            _line(
                [
                    str(gate["copy_steps"]),
                    str(gate["always_copy_steps"]),
                    _cell(gate["kept_tokens"], ".1%"),
                    _cell(gate["avoided_empty_steps"], ".1%"),
                ]
            ),
        ]
    same = result["equality"]
    lines += ["", f"## Same text as {same['reference']}", ""]
    lines += [_line(["mode", "prompts", "equal", "first differences that are near-ties"]), _line(["---"] * 4)]
    for mode, found in same["modes"].items():
        ties = f"{found['near_ties']} of {found['different']}" if found["different"] else "–"
        lines.append(_line([mode, str(found["prompts"]), str(found["prompts"] - found["different"]), ties]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(result: dict[str, Any], file: Path) -> None:
    """Bars of tokens/s for each group and mode."""
    from matplotlib.figure import Figure

    records = result["summary"]
    groups = list(dict.fromkeys(r["group"] for r in records))
    modes = list(dict.fromkeys(r["mode"] for r in records))
    figure = Figure(figsize=(max(7.0, 1.5 * len(groups)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(modes)
    value: Callable[[str, str], float] = lambda g, m: next(  # noqa: E731
        r["tokens_per_second"] for r in records if r["group"] == g and r["mode"] == m
    )
    for i, mode in enumerate(modes):
        places = [g + (i - (len(modes) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(places, [value(g, mode) for g in groups], width, label=mode)
    axes.set_xticks(range(len(groups)), [g.replace(" ", "\n", 1).replace("_", "\n", 1) for g in groups], fontsize=8)
    axes.set_ylabel("tokens/s after the first token")
    axes.set_title(f"{result['settings']['target']}, {result['settings']['dtype']}, {result['settings']['device']}")
    axes.legend(frameon=False, fontsize=8, ncols=min(len(modes), 6))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=150)
