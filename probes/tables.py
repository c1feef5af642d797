"""The report as sections of tables, made from the values of evaluation.json alone; `markdown` and `page` show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes.artifact import JOIN
from probes.task import SCOPES

Values = Mapping[str, Any]
"""What evaluation.json holds; see `probes.result.Report`."""


@dataclass(frozen=True)
class Table:
    """Rows under a head, all of them text."""

    head: Sequence[str]
    """One a column."""
    rows: list[list[str]]
    """As many cells each."""
    title: str = ""
    """A line above it."""
    long: bool = False
    """Whether it holds details that a picture shows as well."""


@dataclass(frozen=True)
class Section:
    """Tables that belong together."""

    key: str
    """Short name, the same in every report."""
    title: str
    """Its heading."""
    text: str
    """What the tables show."""
    tables: list[Table]
    """Some; a section without any is left out."""


def sections(report: Values) -> list[Section]:
    """All tables of a report."""
    made = [
        _test(report), _gains(report), _calibration(report), _thresholds(report), _loops(report), _strata(report),
        _controls(report), _transfer(report), _sweep(report), _split(report),
    ]  # fmt: skip
    return [section for section in made if section.tables]


def headline(report: Values) -> str:
    """The scope whose number is told first: rows with a match, if both classes occur there, else all."""
    scopes = report["evaluations"]["best"]
    both = [name for name, e in scopes.items() if 0 < (e["base_rate"]["estimate"] or 0) < 1]
    return (both or list(scopes))[-1]


def comparison(reports: Mapping[str, Values]) -> Table:
    """The best probe of each report, by the report's name, on the rows of its headline."""
    rows = []
    for name, report in reports.items():
        scope = headline(report)
        e = report["evaluations"]["best"][scope]
        gain = main_gain(report)
        rows.append(
            [name, report["target"], report["label"]["name"], report["probes"]["best"]["site"], SCOPES[scope],
             cell(e["rows"]), *map(cell, (e["base_rate"], e["roc_auc"], e["average_precision"], e.get("f1"),
                                          e.get("ece"), gain[1] if gain else None))]
        )  # fmt: skip
    heads = ["report", "target", "label", "site", "of", "rows", "base rate", "AUC", "AP", "F1", "ECE"]
    return Table([*heads, "AUC gained over surface + logits"], rows)


def main_gain(report: Values) -> tuple[str, Values] | None:
    """What the probe's score adds in the first of the stacked scores, and that score's name."""
    for name, scopes in report["gains"].items():
        return name, scopes[headline(report)]["roc_auc"]
    return None


def score_name(report: Values, name: str) -> str:
    """A score as people read it: a probe with its site."""
    return f"{name} probe ({report['probes'][name]['site']})" if name in report["probes"] else name


def cell(value: Any, short: bool = False) -> str:
    """A number, or an interval's estimate with its bounds."""
    if not isinstance(value, Mapping):
        return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
    if value["estimate"] is None:
        return "undefined"
    if short or value["lower"] is None:
        return f"{value['estimate']:.4f}"
    return f"{value['estimate']:.4f} [{value['lower']:.4f}, {value['upper']:.4f}]"


def _test(report: Values) -> Section:
    heads = ["score", "AUC", "best probe's AUC - this", "AP", "TPR at 1 % FPR", "at 5 %", "F1", "precision", "recall",
             "ECE"]  # fmt: skip
    tables, found = [], report["evaluations"]
    for scope, best in found["best"].items():
        rows = []
        for name, scopes in found.items():
            if scope not in scopes:
                continue
            e, behind = scopes[scope], report["differences"].get(name, {}).get(scope, {})
            at = [cell(e.get(k), short=True) for k in ("tpr_at_1", "tpr_at_5", "f1", "precision", "recall", "ece")]
            numbers = (e["roc_auc"], behind.get("roc_auc"), e["average_precision"])
            rows.append([score_name(report, name), *map(cell, numbers), *at])
        of = f"On {SCOPES[scope]}: {best['rows']} rows of {best['documents']} documents"
        tables.append(Table(heads, rows, f"{of}, base rate {cell(best['base_rate'])}."))
    rows = [
        [n, p["site"], p["estimator"], cell(p["threshold"]), p["threshold_rule"]] for n, p in report["probes"].items()
    ]
    tables.append(Table(["probe", "site", "estimator", "threshold", "chosen by"], rows, "The probes:"))
    text = "Brackets hold 95 % intervals from a bootstrap over documents; differences are paired, on the same rows."
    return Section("test", "Test part", text, tables)


def _gains(report: Values) -> Section:
    rows = [
        [name, SCOPES[scope], *(cell(found.get(k)) for k in ("roc_auc", "average_precision", "brier", "ece"))]
        for name, scopes in report["gains"].items()
        for scope, found in scopes.items()
    ]
    heads = ["score", "rows", "AUC", "AP", "Brier (less is better)", "ECE (less is better)"]
    text = (
        f"Each score minus {report['gain_over']} (the better of both baselines, whatever the score's own learner), on "
    )
    text += "the same rows and folds."
    return Section("gains", "What a probe adds", text, [Table(heads, rows)] if rows else [])


def _calibration(report: Values) -> Section:
    rows = [[c["probe"], c["method"], cell(c["brier"]), cell(c["ece"])] for c in report["calibration"]]
    text = "Ways to calibrate, fitted on the selection part; as saved is what the probe says."
    table = Table(["probe", "method", "Brier", "ECE"], rows)
    return Section("calibration", "Calibration", text, [table] if rows else [])


def _thresholds(report: Values) -> Section:
    rows = [
        [t["rule"], "never" if t["threshold"] is None else cell(t["threshold"]),
         *map(cell, (t["precision"], t["recall"], t["f1"], t["called"], t["tokens_per_ms"], t["gain"]))]
        for t in report["thresholds"]
    ]  # fmt: skip
    heads = ["rule", "threshold", "precision", "recall", "F1", "called", "tokens per ms", "over never copying"]
    text = "Chosen on the selection part by the best probe, measured on the test part."
    return Section("thresholds", "Thresholds", text, [Table(heads, rows)] if rows else [])


def _loops(report: Values) -> Section:
    rows = [[SCOPES[s], *(cell(v[k]) for k in ("rows", "positives", "negatives"))] for s, v in report["loops"].items()]
    table = Table(["of", "rows", "positive rows", "negative rows"], rows)
    text = "Share of rows whose suffix match is the target repeating itself, a short way back."
    return Section("loops", "Loops", text, [table] if rows else [])


def _strata(report: Values) -> Section:
    heads = ["by", "kind", "rows", "documents", "base rate", "AUC", f"AUC over {report['gain_over']}"]
    tables = []
    for scope, found in report["strata"].items():
        rows = [
            [s["by"], s["value"], *map(cell, (s["rows"], s["documents"], s["base_rate"], s["roc_auc"],
                                              s["over_baseline"]))]
            for s in found
        ]  # fmt: skip
        tables.append(Table(heads, rows, f"Of {SCOPES[scope]}:", long=True))
    return Section("strata", "Strata", "The best probe in each kind of row.", tables)


def _controls(report: Values) -> Section:
    rows = [
        [c["name"], c["skipped"] or cell(c["roc_auc"]), cell(c["difference"]), c["expected"]]
        for c in report["controls"]
    ]
    text = "The best probe's recipe with one thing taken away, where an honest probe falls as expected; "
    text += f"on {SCOPES[headline(report)]}."
    table = Table(["control", "AUC", "probe's AUC - this", "expected"], rows)
    return Section("controls", "Controls", text, [table] if rows else [])


def _transfer(report: Values) -> Section:
    cells: Sequence[Values] = report["transfer"]
    tables = []
    for by in dict.fromkeys(c["by"] for c in cells):
        found = {(c["train"], c["test"]): c["roc_auc"] for c in cells if c["by"] == by}
        tests = list(dict.fromkeys(test for _, test in found))
        rows = [
            [train, *(cell(found.get((train, test)), short=len(tests) > 3) for test in tests)]
            for train in dict.fromkeys(train for train, _ in found)
        ]
        tables.append(Table([f"{by}: fitted on", *tests], rows, long=True))
    return Section("transfer", "Transfer", "AUC on documents that fitted nothing.", tables)


def _sweep(report: Values) -> Section:
    heads = ["label", "site", "estimator", "AUC", "AP", "F1", "l2"]
    rows = [
        [s["label"], s["site"], s["estimator"], *map(cell, (s["roc_auc"], s["average_precision"], s["f1"])),
         "" if s["l2"] is None else f"{s['l2']:g}"]
        for s in report["sites"]
    ]  # fmt: skip
    tables = [Table(heads, rows, long=True)] if rows else []
    chosen = report["chosen"]
    if len(chosen) > 1 or any(c["site"] != report["probes"]["best"]["site"] for c in chosen):
        rows = [
            [c["label"], c["site"].replace(JOIN, f" {JOIN} "), c["estimator"], cell(c["tries"]), SCOPES[scope],
             *map(cell, (e["base_rate"], e["roc_auc"]))]
            for c in chosen
            for scope, e in c["test"].items()
        ]  # fmt: skip
        heads = ["label", "site", "estimator", "tries", "rows", "base rate", "AUC"]
        tables.append(Table(heads, rows, "Chosen for each label, on the test part:"))
    return Section("sweep", "Sweep", "On the selection part: these numbers chose the site, and are no result.", tables)


def _split(report: Values) -> Section:
    rows = [[name, *map(cell, part.values())] for name, part in report["split"].items() if isinstance(part, Mapping)]
    table = Table(["part", "groups", "documents", "rows"], rows)
    return Section("split", "Split", f"{report['split']['rule']}.", [table])
