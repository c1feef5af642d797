"""The report as Markdown, made from the values of evaluation.json alone."""

from __future__ import annotations

from collections.abc import Sequence

from probes.tables import Table, Values, sections


def markdown(report: Values) -> str:
    """All tables of a report."""
    lines = [f"# Probes for {report['target']}, label {report['label']['name']}", ""]
    for warning in report["warnings"]:
        lines += [f"**{warning[0].upper()}{warning[1:]}.**", ""]
    for section in sections(report):
        lines += [f"## {section.title}", "", section.text, ""]
        for table in section.tables:
            lines += _table(table)
    if report["skipped"]:
        lines += ["## Not measured", "", *(f"- {one}" for one in report["skipped"]), ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    title = [table.title, ""] if table.title else []
    return [*title, *map(_line, (table.head, ["---"] * len(table.head), *table.rows)), ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
