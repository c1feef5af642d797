"""`switchsd bench`: modes on the same prompts, beside Hugging Face generate and other engines."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from decoding.bench import Bench, BenchConfig, unequal
from decoding.modes import MODES, ModeSettings, get_mode
from decoding.peers.start import INSTALLED, PEERS, PeerConfig, installed
from decoding.suite import BUILT_IN, load_suite
from decoding.summary import HEAVY, OVERALL
from decoding.tables import counted, in_order, speed_table, steps_table, sweep_table, without_loops
from switchsd.loading import AUTO, LoadConfig, load, measure_costs
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out, table


def bench(
    config: BenchConfig,
    settings: ModeSettings,
    loading: LoadConfig,
    peers: PeerConfig,
    suite: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts as JSONL, in Spec-Bench's format for example; or an embedded suite: validation (the default; "
            "held out from training), or decoys (those of them whose repeated words mislead). Repeatable."
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", help="Where rows and results go; an existing run is continued.")
    ] = Path("runs/bench"),
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    probe: Annotated[str, typer.Option(help="Folder, shipped name or hub id of a probe; auto: one that fits.")] = AUTO,
    drafter: Annotated[str, typer.Option(help="Folder of an EAGLE-3 head; auto: one that fits.")] = AUTO,
    draft: Annotated[
        str,
        typer.Option(help="A draft model: a folder, or any model with the target's tokenizer; auto: one that fits."),
    ] = AUTO,
    policy: Annotated[
        str, typer.Option(help="Folder of a learned mode's policy (switchsd train-policy); auto: one that fits.")
    ] = AUTO,
    replay: Annotated[
        Path | None,
        typer.Option(
            help='JSON with {"oracle_share": {column: {group: share}}}, the share of the step oracle\'s gain.'
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare modes on prompts, beside Hugging Face generate and other engines."""
    for mode in config.modes:
        get_mode(mode.split("/")[0])
    check_folder(folder)
    oracle = _oracle(replay) if replay else None
    prompts = load_suite(suite or (), config.limit)
    for name in {str(s) for s in suite or BUILT_IN[:1]} & set(BUILT_IN):
        chosen = sum(p.key.startswith(f"{name}:") for p in prompts)
        notes.print(f"{name}: {chosen} embedded prompts, all held out; those that were trained on are left out")
    with bar(f"loading {target}"):
        decoder = load(target, probe, drafter, draft=draft, policy=policy, **asdict(loading), **asdict(settings))
    if INSTALLED in config.baselines:
        named = [b for b in config.baselines if b != INSTALLED]
        found, missing = installed([p for p in PEERS if p not in named], peers, decoder.target)
        for line in missing:
            notes.print(f"left out: {line}")
        config = replace(config, baselines=(*named, *found))
    measure_costs(decoder, config.modes)
    run = Bench(decoder, prompts, config, folder, peers)
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
        result = run.result(oracle)
    if json:
        as_json(result)
    else:
        _show(result, folder)
    wrong = unequal(result)
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} wrote other text than the reference, and not at a near-tie: see 'equality' in "
            f"{folder / 'result.json'}"
        )


def _oracle(file: Path) -> Mapping[str, Mapping[str, float]]:
    try:
        found: Any = json_module.loads(file.read_text(encoding="utf-8"))["oracle_share"]
        return {column: {str(g): float(v) for g, v in groups.items()} for column, groups in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        shape = '{"oracle_share": {column: {group: share}}}'
        raise UsageError(f"--replay {file} cannot be read as {shape}: {error!r}") from error


def _show(result: dict[str, Any], folder: Path) -> None:
    for group, records in in_order(result["summary"]):
        if group not in (OVERALL, HEAVY):
            continue
        title = f"{group}, {result['settings']['target']}, {counted(records[0])}"
        out.print(table(*speed_table(records), title=title))
        rest = without_loops(records)
        if rest:
            out.print(table(*speed_table(rest), title=f"{group}, where nothing loops ({counted(rest[0])})"))
        out.print(table(*steps_table(records)))
    if result["sweep"]:
        out.print(table(*sweep_table(result["sweep"]), title=f"tokens/s by {result['sweep']['setting']}"))
    for name, text in result["differs"].items():
        out.print(f"{name}: {text}")
    for mode, same in result["equality"]["modes"].items():
        equal = same["prompts"] - same["different"]
        ties = f", {same['near_ties']} of the others first differ at a near-tie" if same["different"] else ""
        if same["near_ties"] is None:
            ties = ""
        name = mode.split("/")[0]
        kind = "" if name not in MODES or MODES[name].lossless else "; it is not lossless, and need not write them"
        out.print(f"{mode}: {equal} of {same['prompts']} texts are {same['reference']}'s{ties}{kind}")
    files = ["table.md", "result.json", "plot.png", *(["sweep.png"] if result["sweep"] else [])]
    out.print(f"All groups: {', '.join(str(folder / name) for name in files)}")
