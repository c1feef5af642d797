"""A benchmark's result for people, as Markdown tables. Its pictures: `decoding.plots`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decoding.summary import HEAVY, OVERALL
from probes.evaluation import Interval

if TYPE_CHECKING:
    from decoding.trace import Trace

STEPS: tuple[tuple[str, str, str], ...] = (
    ("tokens_per_step", "tokens per step", ".2f"),
    ("accepted_length", "accepted length when drafting", ".2f"),
    ("copy_steps", "copy steps", ".0%"),
    ("false_copies", "false copies", ".0%"),
    ("lost_ms", "ms lost to them", ",.0f"),
    ("lost_share", "of the time", ".1%"),
    ("looped", "tokens in loops", ".0%"),
    ("first_token_seconds", "first token s (median)", ".3f"),
    ("oracle_share", "of the oracle's gain", ".0%"),
)
"""What steps came to: key in a summary record, head, format. A column that no record fills is left out."""
EXPLAINED = (
    "Speeds leave out the first token, which has a column of its own. Ratios are paired over prompts; brackets hold "
    "95 % bootstrap intervals. Tokens per step = accepted length + 1, over all steps. Accepted length when drafting "
    "= drafted tokens that were kept, over drafts. Copy steps: share of all steps; false copies: share of the copy "
    "steps that kept no drafted token; ms lost: what those took beyond as many mean steps of `ar` on the same prompt "
    "in this run. A loop: a period of at most 40 tokens three times and more in a row; a prompt loops if any text "
    "written for it does."
)


def cell(value: Any, form: str) -> str:
    """A number in the given format, an interval as `1.23 [1.10, 1.35]`, or a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, dict):
        return format(Interval(**{k: float("nan") if v is None else v for k, v in value.items()}), ".2f")
    return format(value, form)


def counted(record: dict[str, Any]) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{record['prompts']} prompt{'s' * (record['prompts'] != 1)}"


def speed_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: tokens/s and the ratios, of records or of their `no_loops` parts."""
    bases = list(dict.fromkeys(key for r in records for key in r if key.startswith("over_")))
    heads = ["mode", "tokens/s", *(f"× {key.removeprefix('over_')} [95 %]" for key in bases)]
    rows = [[r["mode"], cell(r["tokens_per_second"], ".1f"), *(cell(r.get(key), "") for key in bases)] for r in records]
    return heads, rows


def without_loops(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records over the prompts that do not loop; empty where all or none do."""
    return [{"mode": r["mode"], **r["no_loops"]} for r in records if 0 < r["no_loops"]["prompts"] < r["prompts"]]


def steps_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: what steps and drafts came to."""
    shown = [c for c in STEPS if any(r.get(c[0]) is not None for r in records)]
    return ["mode", *(head for _, head, _ in shown)], [
        [r["mode"], *(cell(r.get(key), form) for key, _, form in shown)] for r in records
    ]


def in_order(records: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Records by group: all prompts first, then the copy-heavy ones, then each group."""
    groups = sorted({r["group"]: 0 for r in records}, key=lambda g: {OVERALL: 0, HEAVY: 1}.get(g, 2))
    return [(group, [r for r in records if r["group"] == group]) for group in groups]


def markdown(result: dict[str, Any]) -> str:
    """The whole result."""
    settings = result["settings"]
    lines = [
        f"# {settings['target']}, {settings['dtype']}, {settings['device']}, {settings['threads']} threads",
        "",
        f"At most {settings['max_new_tokens']} new tokens a prompt, greedy where no temperature is named. {EXPLAINED}",
    ]
    lines += ["", *(f"- {column}: {text}" for column, text in result["differs"].items())] if result["differs"] else []
    for group, members in in_order(result["summary"]):
        lines += ["", f"## {group} ({counted(members[0])})", "", *_table(*speed_table(members))]
        rest = without_loops(members)
        if rest:
            lines += ["", f"Where nothing loops ({counted(rest[0])}):", "", *_table(*speed_table(rest))]
        lines += ["", *_table(*steps_table(members))]
    if result["sweep"]:
        lines += ["", f"## {result['sweep']['setting']}", "", *_table(*sweep_table(result["sweep"]))]
    for gate in result["gate"]:
        lines += ["", f"## Gate of {gate['mode']} beside {gate['always']} (copies at every suffix match)", ""]
        heads = ["copy steps", "copy steps without a gate", "kept copy tokens", "avoided empty copy steps"]
        counts = [str(gate["copy_steps"]), str(gate["always_copy_steps"])]
        shares = [cell(gate["kept_tokens"], ".1%"), cell(gate["avoided_empty_steps"], ".1%")]
        lines += _table(heads, [[*counts, *shares]])
    same = result["equality"]["modes"]
    lines += ["", "## Same text", ""]
    rows = []
    for mode, found in same.items():
        ties = f"{found['near_ties']} of {found['different']}" if found["near_ties"] is not None else "–"
        equal = str(found["prompts"] - found["different"])
        rows.append([mode, found["reference"], str(found["prompts"]), equal, ties if found["different"] else "–"])
    lines += _table(["mode", "as", "prompts", "equal", "first differences that are near-ties"], rows)
    return "\n".join(lines) + "\n"


def as_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table for notebooks, whose cells show as they are, whatever they hold."""
    return "\n".join(_table([_literal(head) for head in heads], [[_literal(text) for text in row] for row in rows]))


def _literal(text: str) -> str:
    return re.sub(r"[^\w\s.,:;%+()=/'\"–×-]|_", lambda found: f"&#{ord(found[0])};", text)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def sweep_table(sweep: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: tokens/s of each mode at each value, and its ratio over `ar` where there is one."""
    values = list(dict.fromkeys(p["value"] for p in sweep["points"]))
    modes = list(dict.fromkeys(p["mode"] for p in sweep["points"]))
    at = {(p["mode"], p["value"]): p for p in sweep["points"]}
    rows = []
    for mode in modes:
        cells = []
        for value in values:
            point = at.get((mode, value))
            over = point.get("over_ar") if point else None
            text = cell(point["tokens_per_second"] if point else None, ".1f")
            cells.append(f"{text} (× {cell(over, '')})" if over else text)
        rows.append([mode, *cells])
    return ["mode", *(f"{sweep['setting']}={value}" for value in values)], rows


def step_table(trace: Trace, text: int = 0) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of one text of a trace, a row a step: what was known, what was drafted, what came of it.

    A drafted tree is told by its first branch, so that what was accepted may be none of it. Strings of tokens are
    quoted, so that spaces and line ends are seen.
    """
    heads = ["step", "pending", "intent", "match", "drafted by", "why", "draft (first branch)", "accepted", "ms"]
    texts = trace.texts
    pieces = texts[text].pieces if texts else ()
    rows = []
    for record in (r for r in trace if r.text == text):
        pending = pieces[record.position] if record.position < len(pieces) else ""
        drafted = "".join(trace.string(record.tokens[i]) for i in _first_path(record.parents))
        accepted = "".join(trace.string(record.tokens[i]) for i in record.accepted)
        rows.append([
            str(record.step), repr(pending), cell(record.intent, ".2f"), str(record.match_length),
            " + ".join(dict.fromkeys(record.source)) or "–", record.reason, repr(drafted) if drafted else "",
            repr(accepted) if accepted else "", f"{record.milliseconds:.1f}",
        ])  # fmt: skip
    return heads, rows


def _first_path(parents: Sequence[int]) -> list[int]:
    """Nodes from the first child of the pending token on, always by the first child."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path
