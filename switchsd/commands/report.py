"""`switchsd report`: what `train probe` or `evaluate` found, as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from switchsd.options import UsageError, check_output, write_page
from switchsd.show import AsJson, as_json, bar, out


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `train probe` or `evaluate` wrote, or their evaluation.json; several are compared."
        ),
    ],
    file: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
    json: AsJson = False,
) -> None:
    """Show evaluations as one HTML page that needs nothing else."""
    from probes.page import page
    from probes.result import JSON_FILE, read_report

    check_output(file)
    read = {}
    for result in results:
        source = result / JSON_FILE if result.is_dir() else result
        if not source.is_file():
            raise UsageError(f"{source} is not there: name what `switchsd train probe` or `switchsd evaluate` wrote")
        if str(result) in read:
            raise UsageError(f"{result} is named twice")
        if file.resolve() == source.resolve():
            raise UsageError(f"--out is {file}, which is read: choose another name for the page")
        read[str(result)] = read_report(source)
    with bar("drawing"):
        text = page(read)
    write_page(file, text)
    if json:
        as_json({"file": str(file), "reports": list(read)})
        return
    out.print(f"{file}: open it in a browser", markup=False, soft_wrap=True)
