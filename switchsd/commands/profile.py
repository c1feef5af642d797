"""`switchsd profile`: what each part of a step costs on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from decoding.costs import costs_file, measure
from switchsd.loading import AUTO, LoadConfig, load
from switchsd.options import UsageError, check_output
from switchsd.show import AsJson, as_json, bar, out, table


def profile(
    loading: LoadConfig,
    target: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")] = "smollm2",
    file: Annotated[Path | None, typer.Option("--out", help="Where to write costs.json; by default the cache.")] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend.")] = 20.0,
    draft: Annotated[
        str,
        typer.Option(help="A draft model: a folder, or any model with the target's tokenizer; auto: one that fits."),
    ] = AUTO,
    json: AsJson = False,
) -> None:
    """Measure what each part of a step costs on this machine."""
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds is {seconds}; it must be above 0")
    if file is not None:
        check_output(file)
    with bar(f"loading {target}"):
        decoder = load(target, draft=draft, **asdict(loading))
        drafters = list(decoder.neural.values())
    with bar(f"measuring for about {seconds:.0f} s"):
        costs = measure(decoder.target, drafters, decoder.probe, seconds)
    where = file or costs_file(decoder.target)
    costs.save(where)
    if json:
        as_json({"file": str(where), **asdict(costs)})
        return
    rows = [
        (width, *(f"{costs.verify_ms[i][j]:.1f}" for i in range(len(costs.contexts))))
        for j, width in enumerate(costs.widths)
    ]
    heads = ["tokens verified", *(f"{c} in context" for c in costs.contexts)]
    out.print(table(heads, rows, title=f"{target} on {costs.key['machine']}: ms a step"))
    for name, times in costs.draft_ms.items():
        out.print(f"{name}: {' '.join(f'{t:.1f}' for t in times)} ms to draft 1 to {len(times)} levels")
    out.print(f"probe {costs.probe_ms:.3f} ms, suffix match {costs.match_ms:.3f} ms")
    out.print(f"written to {where}")
