"""`switchsd evaluate`: how good finished probes are, on any store of their target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from probes.finished import EvaluateConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out, table

STEPS = 60
"""About how many steps an evaluation tells of."""


def evaluate(
    probe: Annotated[str, typer.Argument(help="What `train probe` wrote, or one probe (folder, name, hub id).")],
    store: Annotated[Path, typer.Argument(help="A capture store of the probe's target.")],
    config: EvaluateConfig,
    folder: Annotated[Path, typer.Option("--out", help="Where evaluation.json and evaluation.md go.")] = Path(
        "evaluation"
    ),
    fitted: Annotated[
        Path | None, typer.Option(help="The store that fitted the probe: baselines are then fitted on it, too.")
    ] = None,
    sampled: Annotated[
        Path | None, typer.Option(help="A store of the target's sampled text, for transfer from greedy text.")
    ] = None,
    random_init: Annotated[
        Path | None, typer.Option(help="A store of a randomly initialised target of the same shape, as a control.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure probes: baselines, calibration, strata, controls, transfer."""
    from probes.finished import evaluate_probes, load_run
    from probes.result import JSON_FILE

    check_folder(folder)
    if (folder / JSON_FILE).is_file() and any(folder.glob("*/config.json")):
        raise UsageError(f"{folder} holds a training run, whose numbers would be lost: choose another --out")
    run = load_run(probe)
    opened = open_store(store)
    more = {"fitted": fitted, "sampled": sampled, "random_init": random_init}
    stores = {name: open_store(path) for name, path in more.items() if path is not None}
    done = 0
    with bar("measuring", STEPS) as progress:

        def say(what: str) -> None:
            nonlocal done
            done = min(done + 1, STEPS - 1)
            progress.say(what)
            progress.to(done)

        report = evaluate_probes(run, opened, config, say=say, **stores)
    report.save(folder)
    if json:
        as_json({"folder": str(folder), **report.to_dict()})
        return
    show(report)
    tables = folder / "evaluation.md"
    out.print(f"All tables: {tables}; as a page: switchsd report {folder}", markup=False, soft_wrap=True)


def open_store(path: Path) -> Any:
    """A checked store with copy labels."""
    from activations.store import CaptureStore

    opened = CaptureStore.open(path)
    if opened.manifest.get("selection") == "all":
        raise UsageError(f"{path} has no copy labels, which a probe needs: make one with `switchsd capture`")
    with bar(f"checking {path}"):
        opened.verify()
    return opened


def show(report: Any) -> None:
    """The first tables of a report, and its warnings."""
    from probes.tables import headline
    from probes.task import SCOPES

    found, sites = report.findings, {name: f" ({p['site']})" for name, p in report.probes.items()}
    for scope, text in SCOPES.items():
        scores = [(name, e[scope]) for name, e in found.evaluations.items() if scope in e]
        if scores:
            rows = [(name + sites.get(name, ""), e.roc_auc, e.average_precision) for name, e in scores]
            title = f"test part, {text}: {scores[0][1].rows} rows, base rate {scores[0][1].base_rate.estimate:.3f}"
            out.print(table(["score", "AUC [95 %]", "average precision [95 %]"], rows, title=title))
    gains = [(name, SCOPES[s], g["roc_auc"]) for name, scopes in found.gains.items() for s, g in scopes.items()]
    if gains:
        title = (
            f"what a probe adds to {found.gain_over} (the better of both baselines, whatever the score's own learner)"
        )
        out.print(table(["score", "rows", "AUC difference [95 %]"], gains, title=title))
    controls = [(c.name, c.roc_auc) for c in found.controls if c.roc_auc is not None]
    if controls:
        of = SCOPES[headline(report.to_dict())]
        out.print(table(["control", "AUC [95 %]"], controls, title=f"controls of the best probe, {of}"))
    for line in found.skipped:
        notes.print(f"not measured: {line}", markup=False)
    for line in found.warnings:
        notes.print(f"warning: {line}", style="bold")
