"""`switchsd bench`: modes on the same prompts, beside Hugging Face generate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from decoding.bench import Bench, BenchConfig, unequal
from decoding.modes import ModeSettings, get_mode
from decoding.suite import load_suite
from decoding.summary import COLUMNS, HEAVY, OVERALL, table_cells
from switchsd.loading import AUTO, LoadConfig, load, measure_costs
from switchsd.options import check_folder
from switchsd.show import AsJson, as_json, bar, notes, out, table


def bench(
    config: BenchConfig,
    settings: ModeSettings,
    loading: LoadConfig,
    suite: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts as JSONL, in Spec-Bench's format for example. Repeatable; default: embedded ones."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", help="Where rows and results go; an existing run is continued.")
    ] = Path("runs/bench"),
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    probe: Annotated[str, typer.Option(help="Folder, shipped name or hub id of a probe; auto: one that fits.")] = AUTO,
    drafter: Annotated[str, typer.Option(help="Folder of an EAGLE-3 head; auto: one that fits.")] = AUTO,
    json: AsJson = False,
) -> None:
    """Compare modes on prompts, beside Hugging Face generate."""
    for mode in config.modes:
        get_mode(mode.split("/")[0])
    check_folder(folder)
    prompts = load_suite(suite or (), config.limit)
    with bar(f"loading {target}"):
        decoder = load(target, probe, drafter, **asdict(loading), **asdict(settings))
        run = Bench(decoder, prompts, config, folder)
    measure_costs(decoder, settings, config.modes)
    if run.done:
        notes.print(f"{run.done} of {run.total} rows are there already: going on")
    try:
        with bar("generations", run.total) as progress:
            progress.to(run.done)
            for row in run.run():
                progress.say(f"{row.mode} on {row.key}")
                progress.to(run.done)
    except KeyboardInterrupt:
        notes.print(f"\n{run.done} of {run.total} rows are in {folder}; run the same command again to go on")
        raise
    with bar("comparing texts"):
        result = run.result()
    if json:
        as_json(result)
    else:
        for group in (OVERALL, HEAVY):
            rows = [table_cells(r) for r in result["summary"] if r["group"] == group]
            if rows:
                heads = ["mode", *(head for _, head, _ in COLUMNS)]
                out.print(table(heads, rows, title=f"{group}, {result['settings']['target']}"))
        for mode, same in result["equality"]["modes"].items():
            ties = f", {same['near_ties']} of the others first differ at a near-tie" if same["different"] else ""
            equal = same["prompts"] - same["different"]
            out.print(f"{mode}: {equal} of {same['prompts']} texts are {result['equality']['reference']}'s{ties}")
        out.print(f"All groups: {folder / 'table.md'}, {folder / 'result.json'}, {folder / 'plot.png'}")
    wrong = unequal(result)
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} wrote other text than {result['equality']['reference']}, and not at a near-tie: "
            f"see 'equality' in {folder / 'result.json'}"
        )
