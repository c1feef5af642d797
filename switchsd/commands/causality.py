"""`switchsd causality`: does the target use what a probe reads?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from probes.causality import CausalityConfig
from switchsd.loading import LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out, table


def causality(
    probe: Annotated[str, typer.Argument(help="A linear probe of one site (folder, name, hub id).")],
    store: Annotated[Path, typer.Argument(help="A capture store of its target, with selection anchors.")],
    config: CausalityConfig,
    loading: LoadConfig,
    target: Annotated[str | None, typer.Option(help="An alias, a hub id or a folder; by default the probe's.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Where the store's prompts came from; by default the embedded ones.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where causality.json goes.")] = Path("causality"),
    json: AsJson = False,
) -> None:
    """Change a probe's direction, ablate induction heads, and see whether copying follows.

    Slow: the target runs over the documents many times, in float32 unless --dtype says otherwise. The time is
    estimated first.
    """
    from activations.corpus import load_corpus, read_prompts
    from activations.store import CaptureStore
    from activations.target import load_target
    from activations.texts import prompts_of
    from probes.artifact import Probe
    from probes.causality import Study

    check_folder(folder)
    opened = CaptureStore.open(store)
    selection = opened.manifest.get("selection")
    if selection != "anchors":
        raise UsageError(
            f"{store} has selection {selection!r}, from which the texts cannot be had: capture with selection anchors"
        )
    loaded = Probe.from_pretrained(probe)
    pools = [read_prompts(prompts)] if prompts else [load_corpus(), load_corpus("train"), load_corpus("validation")]
    asked = prompts_of(opened.manifest, pools)
    if loading.dtype == "auto":  # in bfloat16 the rounding of a changed state is as large as some changes
        loading = replace(loading, dtype="float32")
    name = target or loaded.config.target_name
    with bar(f"loading {name}"):
        model = load_target(name, **asdict(loading))
        study = Study(model, loaded, opened, asked, config)
    with bar("estimating the time"):
        seconds = study.seconds()
    notes.print(f"{study.tokens} tokens to be computed: about {max(1, round(seconds / 60))} min")
    with bar("tokens", study.tokens) as progress:
        found = study.run(progress.to)
    file = found.save(folder)
    if json:
        as_json({"file": str(file), **found.to_dict()})
        return
    show(found)
    out.print(f"All numbers: {file}")


def show(found: Any) -> None:
    """The two tables."""
    rows = []
    for e in found.effects:
        for predicted, change in (("next", e.next), ("own", e.own)):
            changes = (f"{i:.3f}" for i in (change.probe, change.random, change.difference))
            before = f"{change.before.estimate:.2f}"
            rows.append((f"{e.intervention} {e.where}", e.kind, predicted, before, *changes, change.beyond))
    kinds = {e.kind: f"{e.anchors} {e.kind} anchors of {e.documents} documents" for e in found.effects}
    out.print(
        f"The direction of {found.probe['site']} changed at {' and '.join(kinds.values())}, against "
        f"{found.config.directions} random directions.\nThe margin is the logit of the token (next: the candidate's "
        "first, own: the pending one) less the best other one; brackets hold 95 % intervals."
    )
    heads = ["change", "anchors", "prediction", "margin", "by probe", "by random", "difference", "random beyond"]
    out.print(table(heads, rows))
    lines = []
    for a in found.induction.ablations:
        values = [f"{i:.3f}" for i in (a.intent, a.follow, a.intent_change, a.follow_change, a.together)]
        lines.append((f"{len(a.heads)} {a.which}" if a.heads else "none", *values))
    ranked = list(found.induction.to_dict()["scores"].items())[:8]
    out.print(
        f"Heads ablated, {found.induction.anchors} anchors of {found.induction.documents} documents; the highest "
        f"induction scores: {', '.join(f'{head} {score:.2f}' for head, score in ranked)}."
    )
    heads = ["heads", "copy intent", "follow rate", "intent change", "follow change", "correlation of changes"]
    out.print(table(heads, lines))
