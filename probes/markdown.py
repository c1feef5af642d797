"""The report as Markdown, made from the values of evaluation.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.task import SCOPES

Values = Mapping[str, Any]


def markdown(report: Values) -> str:
    """All tables of a report."""
    lines = [f"# Probes for {report['target']}, label {report['label']['name']}", ""]
    for warning in report["warnings"]:
        lines += [f"**{warning[0].upper()}{warning[1:]}.**", ""]
    lines += (
        _split(report) + _test(report) + _probes(report) + _gains(report) + _calibration(report) + _thresholds(report)
    )
    lines += _loops(report) + _strata(report) + _controls(report) + _transfer(report) + _sweep(report)
    if report["skipped"]:
        lines += ["## Not measured", "", *(f"- {one}" for one in report["skipped"]), ""]
    return "\n".join(lines)


def _split(report: Values) -> list[str]:
    parts = [[name, *part.values()] for name, part in report["split"].items() if isinstance(part, Mapping)]
    head = [f"Split: {report['split']['rule']}.", ""]
    return head + _table(["part", "groups", "documents", "rows"], parts)


def _test(report: Values) -> list[str]:
    lines = ["## Test part", "", "Brackets hold 95 % intervals from a bootstrap over documents.", ""]
    found = report["evaluations"]
    for scope in found["best"]:
        best = found["best"][scope]
        lines += [f"On {SCOPES[scope]} ({best['rows']} rows, base rate {_cell(best['base_rate'])}):", ""]
        rows = []
        for name, scopes in found.items():
            if scope not in scopes:
                continue
            e, behind = scopes[scope], report["differences"].get(name, {}).get(scope, {})
            at = [_cell(e.get(k), short=True) for k in ("tpr_at_1", "tpr_at_5", "f1", "precision", "recall", "ece")]
            rows.append(
                [_name(report, name), *map(_cell, (e["roc_auc"], behind.get("roc_auc"), e["average_precision"])), *at]
            )
        heads = [
            "score",
            "AUC",
            "best probe's AUC - this",
            "AP",
            "TPR at 1 % FPR",
            "at 5 %",
            "F1",
            "precision",
            "recall",
        ]
        lines += _table([*heads, "ECE"], rows)
    return lines


def _probes(report: Values) -> list[str]:
    rows = [[n, p["site"], p["estimator"], p["threshold"], p["threshold_rule"]] for n, p in report["probes"].items()]
    return _table(["probe", "site", "estimator", "threshold", "chosen by"], rows)


def _gains(report: Values) -> list[str]:
    if not report["gains"]:
        return []
    lines = ["## What a probe adds", "", f"Over {report['gain_over']}, on the same rows and folds.", ""]
    rows = [
        [name, SCOPES[scope], *(_cell(found.get(k)) for k in ("roc_auc", "average_precision", "brier", "ece"))]
        for name, scopes in report["gains"].items()
        for scope, found in scopes.items()
    ]
    return lines + _table(["score", "rows", "AUC", "AP", "Brier (less is better)", "ECE (less is better)"], rows)


def _calibration(report: Values) -> list[str]:
    rows = [[c["probe"], c["method"], _cell(c["brier"]), _cell(c["ece"])] for c in report["calibration"]]
    return ["## Calibration", "", *_table(["probe", "method", "Brier", "ECE"], rows)] if rows else []


def _thresholds(report: Values) -> list[str]:
    rows = [
        [t["rule"], "never" if t["threshold"] is None else t["threshold"],
         *map(_cell, (t["precision"], t["recall"], t["f1"], t["called"], t["tokens_per_ms"], t["gain"]))]
        for t in report["thresholds"]
    ]  # fmt: skip
    heads = ["rule", "threshold", "precision", "recall", "F1", "called", "tokens per ms", "over never copying"]
    text = ["## Thresholds", "", "Chosen on the selection part by the best probe, measured on the test part.", ""]
    return text + _table(heads, rows) if rows else []


def _loops(report: Values) -> list[str]:
    if not report["loops"]:
        return []
    lines = ["## Loops", "", "Share of rows whose suffix match is the target repeating itself, a short way back.", ""]
    rows = [[SCOPES[s], *(_cell(v[k]) for k in ("rows", "positives", "negatives"))] for s, v in report["loops"].items()]
    return lines + _table(["of", "rows", "positive rows", "negative rows"], rows)


def _strata(report: Values) -> list[str]:
    lines = []
    for scope, found in report["strata"].items():
        lines += [f"## Strata, {SCOPES[scope]}", ""]
        rows = [
            [s["by"], s["value"], s["rows"], s["documents"],
             *map(_cell, (s["base_rate"], s["roc_auc"], s["over_baseline"]))]
            for s in found
        ]  # fmt: skip
        heads = ["by", "kind", "rows", "documents", "base rate", "AUC", f"AUC over {report['gain_over']}"]
        lines += _table(heads, rows)
    return lines


def _controls(report: Values) -> list[str]:
    rows = [
        [c["name"], c["skipped"] or _cell(c["roc_auc"]), _cell(c["difference"]), c["expected"]]
        for c in report["controls"]
    ]
    return ["## Controls", "", *_table(["control", "AUC", "probe's AUC - this", "expected"], rows)] if rows else []


def _transfer(report: Values) -> list[str]:
    cells: Sequence[Values] = report["transfer"]
    lines = ["## Transfer", "", "AUC on documents that fitted nothing.", ""] if cells else []
    for by in dict.fromkeys(c["by"] for c in cells):
        found = {(c["train"], c["test"]): c["roc_auc"] for c in cells if c["by"] == by}
        tests = list(dict.fromkeys(test for _, test in found))
        rows = [
            [train, *(_cell(found.get((train, test)), short=len(tests) > 3) for test in tests)]
            for train in dict.fromkeys(train for train, _ in found)
        ]
        lines += _table([f"{by}: fitted on", *tests], rows)
    return lines


def _sweep(report: Values) -> list[str]:
    if not report["sites"]:
        return []
    lines = ["## Sweep, on the selection part", "", "These chose the site; they are no result.", ""]
    heads = ["label", "site", "estimator", "AUC", "AP", "F1", "l2"]
    rows = [
        [s["label"], s["site"], s["estimator"], *map(_cell, (s["roc_auc"], s["average_precision"], s["f1"])),
         "" if s["l2"] is None else f"{s['l2']:g}"]
        for s in report["sites"]
    ]  # fmt: skip
    lines += _table(heads, rows)
    if len(report["chosen"]) > 1:
        lines += ["Chosen for each label, on the test part:", ""]
        chosen = [
            [
                c["label"],
                c["site"],
                c["estimator"],
                c["tries"],
                SCOPES[scope],
                *map(_cell, (e["base_rate"], e["roc_auc"])),
            ]
            for c in report["chosen"]
            for scope, e in c["test"].items()
        ]
        lines += _table(["label", "site", "estimator", "tries", "rows", "base rate", "AUC"], chosen)
    return lines


def _name(report: Values, name: str) -> str:
    return f"{name} probe ({report['probes'][name]['site']})" if name in report["probes"] else name


def _cell(value: Any, short: bool = False) -> str:
    """A number, or an interval's estimate with its bounds."""
    if not isinstance(value, Mapping):
        return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
    if value["estimate"] is None:
        return "undefined"
    if short or value["lower"] is None:
        return f"{value['estimate']:.4f}"
    return f"{value['estimate']:.4f} [{value['lower']:.4f}, {value['upper']:.4f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines] + [""]
