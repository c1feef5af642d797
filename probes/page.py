"""The report as one HTML page that needs nothing else: no network, no scripts, pictures as SVG in the text.

All text is escaped where it enters an element (`_tag`), whatever it is and wherever it comes from.
"""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

from probes import plots
from probes.tables import Section, Table, Values, cell, comparison, headline, main_gain, sections
from probes.task import SCOPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASKS = {
    "span_0": "is the anchor's own token copied?",
    "span_1": "is the pending token copied?",
    "span_2": "is the first drafted token copied?",
    "follow": "does the target follow the candidate for at least {} tokens?",
}


SHORT = 26
"""Most letters of a cell on one line."""


class Html(str):
    """Markup: text that is already escaped."""

    __slots__ = ()


def page(reports: Mapping[str, Values]) -> str:
    """The reports, by their names, one under the other; several are compared first."""
    several = len(reports) > 1
    [first, *_] = reports.values()
    title = f"{len(reports)} evaluations of probes" if several else f"Probes for {first['target']}"
    parts: list[Html] = []
    if several:
        links = [_tag("li", _tag("a", name, href=f"#report-{n}")) for n, name in enumerate(reports, 1)]
        text = "The best probe of each report, on the rows that a gate asks about."
        shown = [_tag("h2", "Comparison"), _tag("p", text), _table(comparison(reports)), _tag("ul", *links)]
        parts += [_tag("h1", title), _tag("section", *shown, id="comparison")]
    for number, (name, report) in enumerate(reports.items(), 1):
        parts.append(_tag("article", *_report(name, report, number), id=f"report-{number}"))
    head = _tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        _tag("title", title),
        _tag("style", Html(STYLE)),
    )
    return "<!DOCTYPE html>\n" + _tag("html", head, _tag("body", _tag("main", *parts)), lang="en") + "\n"


def _report(name: str, report: Values, number: int) -> Iterator[Html]:
    label = report["label"]
    asked = ASKS.get(label["label"], "").format(label["follow_m"])
    of = "rows with a suffix match" if label["only_matches"] or label["label"] == "follow" else "all rows"
    about = f"Label {label['name']} ({asked}) on {of}; a suffix match is of {label['match']} tokens or more."
    yield _tag("header", _tag("h1", f"Probes for {report['target']}"), _tag("p", about), _tag("p", name, role="note"))
    for warning in report["warnings"]:
        yield _tag("p", _tag("strong", "Warning: "), warning, role="alert")
    yield _tag("div", *(_tile(*tile) for tile in _tiles(report)), **{"class": "tiles"})
    for section in sections(report):
        yield _section(section, report, number)
    yield _provenance(report, number)
    if report["skipped"]:
        items = [_tag("li", line) for line in report["skipped"]]
        yield _tag("section", _tag("h2", "Not measured"), _tag("ul", *items), id=f"skipped-{number}")


def _tiles(report: Values) -> Iterator[tuple[str, Values | None, str]]:
    """Name, interval and a remark of each headline number."""
    scope = headline(report)
    e, of = report["evaluations"]["best"][scope], SCOPES[scope]
    yield "AUC", e["roc_auc"], f"best probe at {report['probes']['best']['site']}, {of}"
    rate = cell(e["base_rate"], short=True)
    yield "average precision", e["average_precision"], f"the base rate is {rate}"
    threshold = cell(report["probes"]["best"]["threshold"])
    at = " and ".join(f"{k} {cell(e.get(k), short=True)}" for k in ("precision", "recall"))
    yield "F1", e.get("f1"), f"{at} at threshold {threshold}"
    yield "TPR at 1 % FPR", e["tpr_at_1"], f"{cell(e['tpr_at_5'], short=True)} at 5 %"
    yield "calibration error", e.get("ece"), "ECE of the saved probe"
    if gain := main_gain(report):
        yield "AUC gained", gain[1], f"{gain[0]}, over {report['gain_over']}"


def _tile(name: str, value: Values | None, remark: str) -> Html:
    number, bounds = "none", ""
    if value is not None and value["estimate"] is not None:
        number = f"{value['estimate']:.3f}"
        bounds = "" if value["lower"] is None else f"{value['lower']:.3f} to {value['upper']:.3f}"
    parts = [_tag("dt", name), _tag("dd", number), _tag("dd", bounds), _tag("dd", remark)]
    return _tag("dl", *parts)


def _section(section: Section, report: Values, number: int) -> Html:
    parts = [_tag("h2", section.title), _tag("p", section.text)]
    pictures = [_picture(figure, told, f"{section.key}-{number}-{i}")
                for i, (told, figure) in enumerate(_figures(section.key, report))]  # fmt: skip
    if pictures:
        parts.append(_tag("div", *pictures, **{"class": "figures"}))
    parts += [_table(table, folded=table.long and bool(pictures)) for table in section.tables]
    return _tag("section", *parts, id=f"{section.key}-{number}")


def _figures(key: str, report: Values) -> Iterator[tuple[str, Figure]]:
    """The pictures of a section, each with what it shows."""
    scopes = list(report["evaluations"]["best"])
    if key == "test":
        for scope in reversed(scopes):
            if report["curves"].get("best", {}).get(scope, {}).get("roc", {}).get("fpr"):
                yield f"ROC curves on {SCOPES[scope]}", plots.curve(report, "roc", scope)
                yield f"Precision-recall curves on {SCOPES[scope]}", plots.curve(report, "pr", scope)
            yield f"AUC of the best probe minus that of other scores, {SCOPES[scope]}", plots.behind(report, scope)
    elif key == "gains":
        for scope in reversed(scopes):
            yield f"AUC that a probe adds, {SCOPES[scope]}", plots.gains(report, scope)
    elif key == "calibration":
        yield "Reliability of the saved probes", plots.reliability(report)
    elif key == "strata":
        for scope in reversed(list(report["strata"])):
            yield f"AUC in each kind of row, of {SCOPES[scope]}", plots.strata(report, scope)
    elif key == "transfer":
        for by in dict.fromkeys(c["by"] for c in report["transfer"]):
            yield f"AUC by what was fitted and measured on: {by}", plots.transfer(report, by)
    elif key == "sweep":
        for label, estimator in dict.fromkeys((s["label"], s["estimator"]) for s in report["sites"]):
            if figure := plots.sweep_map(report, label, estimator):
                yield f"AUC by kind of site and block: {label}, {estimator}", figure


def _provenance(report: Values, number: int) -> Html:
    told = {
        "store (sha256 of its manifest)": report["store"],
        **report["provenance"],
        "seconds": report["seconds"],
        **{f"config.{key}": value for key, value in _flat(report["config"])},
    }
    rows = [[key, value if isinstance(value, str) else cell(value)] for key, value in _flat(told)]
    table = Table(["what", "value"], rows)
    return _tag("section", _tag("h2", "Provenance"), _table(table), id=f"provenance-{number}")


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in _flat(value))
        else:
            yield key, ", ".join(map(str, value)) if isinstance(value, list) else value


def _table(table: Table, folded: bool = False) -> Html:
    """`folded`: closed until it is clicked on."""
    head = _tag("tr", *(_tag("th", name, scope="col", **_room(name)) for name in table.head))
    body = [
        _tag("tr", _tag("th", line[0], scope="row"), *(_tag("td", text, **_room(text)) for text in line[1:]))
        for line in table.rows
    ]
    made = _tag("div", _tag("table", _tag("thead", head), _tag("tbody", *body)), tabindex="0", **{"class": "wide"})
    title = table.title or f"Table: {', '.join(table.head[:4])}"
    if folded:
        return _tag("details", _tag("summary", title), made)
    return Html(_tag("p", table.title) + made) if table.title else made


def _room(text: str) -> dict[str, str]:
    """An interval stays on one line; sentences get some width, and the table is moved sideways if need be."""
    return {"class": "short" if len(text) <= SHORT else "long"}


def _picture(figure: Figure, told: str, key: str) -> Html:
    """The figure as SVG in the text: black takes the page's own colour, and ids are those of this picture alone."""
    import matplotlib

    file = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#| id=")', rf"\g<1>{key}-", text)
    text = text.replace("xlink:href", "href").replace("#000000", "currentColor")
    text = re.sub(r"font(?:-family)?: ?((?:[\d.]+px)?)[^;\"]*", r"font-size: \1", text)
    inner = text[text.index(">") + 1 :]
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(told)}">{inner}'
    return _tag("figure", Html(svg))


def _tag(name: str, *children: str, **attributes: str) -> Html:
    """An element; children that are not markup, and attributes, are escaped."""
    inner = "".join(child if isinstance(child, Html) else html.escape(child) for child in children)
    given = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{inner}</{name}>")


STYLE = """
:root { --back: #ffffff; --text: #1c2127; --soft: #59636e; --line: #d3d9df; --tile: #f4f6f8; --link: #0b5cad;
  --alert: #9a3412; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181d; --text: #e3e8ee; --soft: #9aa6b2; --line: #353d46; --tile: #1e242b; --link: #7db8f5;
    --alert: #fdba74; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 1rem clamp(1rem, 3vw, 3rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1.2rem 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p, li { max-width: 75ch; overflow-wrap: anywhere; }
p { margin: .4rem 0 .8rem; }
a { color: var(--link); }
[role=note] { color: var(--soft); font-size: .85rem; }
[role=alert] { border-left: 4px solid var(--alert); padding: .4rem .8rem; background: var(--tile); }
* + article { margin-top: 4rem; border-top: 4px solid var(--line); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1rem 0; }
.tiles dl { margin: 0; padding: .7rem .9rem; background: var(--tile); border-radius: 6px; min-width: 0; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: .85rem; overflow-wrap: anywhere; }
dt + dd { font-size: 1.7rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
dd:last-child { color: var(--soft); font-size: .75rem; margin-top: .3rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; }
figure { margin: .5rem 0; flex: 1 1 min(390px, 100%); max-width: 450px; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: currentColor; font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; margin: .2rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; min-width: 9rem; }
td { min-width: 4rem; overflow-wrap: break-word; max-width: 30rem; }
.short { white-space: nowrap; }
.long { min-width: 15rem; }
summary { cursor: pointer; color: var(--link); margin: .4rem 0; }
@media (max-width: 600px) { th, td { padding: .3rem .45rem; } tbody th { min-width: 7.5rem; } }
@media print { details > .wide { display: block; } }
"""
