"""`switchsd captures`: look at capture stores, check them, put them together, and export them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, counted, notes, out, table

if TYPE_CHECKING:
    from activations.store import CaptureStore

Store = Annotated[Path, typer.Argument(help="A capture store.")]
LABELS = ("span_0", "span_1", "span_2", "follow")
FLAGS = ("loss_mask", "censored")


def verify(store: Store, json: AsJson = False) -> None:
    """Compare every file of a store with its manifest: checksums, rows, documents and sites."""
    from activations.store import CaptureStore, StoreError

    opened = CaptureStore.open(store)
    total = len(opened.shards)
    damages = []
    with bar(f"checking {store}", total) as progress:
        for done, damage in enumerate(opened.damages(), start=1):
            damages += [damage] if damage else []
            progress.to(done)
    if json:
        as_json({"store": str(store), "shards": total, "rows": len(opened), "damages": damages})
    if damages:
        for damage in damages[:-1]:
            notes.print(damage)
        raise StoreError(f"{damages[-1]} (damaged: {len(damages)} of {counted(total, 'shard')})")
    if not json:
        out.print(f"{store}: {counted(total, 'shard')}, {counted(len(opened), 'row')}, all as they were written")


def info(store: Store, json: AsJson = False) -> None:
    """Say what a store holds: target, sites, rows, bytes, label shares, families, states that are not finite."""
    from activations.store import GIB, CaptureStore

    opened = CaptureStore.open(store)
    with bar(f"reading {store}"):
        found = summary(opened)
    if json:
        as_json(found)
        return
    manifest, target = opened.manifest, opened.manifest["target"]
    documents, shards = counted(found["planned"], "document"), counted(len(opened.shards), "shard")
    out.print(f"{store}: {found['documents']} of {documents}, {counted(found['rows'], 'row')}, "
              f"{found['bytes'] / GIB:.2f} GiB in {shards}")  # fmt: skip
    name = manifest.get("target_name", target["architecture"])
    out.print(f"target     {name}: {target['architecture']}, width {target['width']}, {target['blocks']} blocks, "
              f"{found['dtype']}, revision {target['revision']}")  # fmt: skip
    out.print(f"selection  {found['selection']}")
    out.print(f"sites      {len(opened.sites)}: {', '.join(opened.sites)}", soft_wrap=True)
    if found["labels"]:
        rows = [(k, f"{v['share']:.3f}", v["known"]) for k, v in found["labels"].items()]
        out.print(table(["column", "share", "of rows"], rows))
    if found["families"]:
        out.print(table(["family", "documents", "rows"],
                        [(k, v["documents"], v["rows"]) for k, v in found["families"].items()]))  # fmt: skip
    broken = found["nonfinite"]
    if broken["values"]:
        listed = (
            ", ".join(f"{d} ({counted(n, 'row')})" for d, n in broken["documents"].items())
            or "(not recorded by document)"
        )
        out.print(f"{broken['values']} values are not finite, in document {listed}", soft_wrap=True)


def summary(store: CaptureStore) -> dict[str, Any]:
    """What `info` says. One shard's columns are in memory at a time.

    `labels` holds, by column, the share of 1 among the rows where it is `known`.
    """
    from activations.causal import COLUMNS, CausalConfig, causal_labels
    from activations.store import NONE, checksums, shard_files

    manifest = store.manifest
    known: Counter[str] = Counter()
    ones: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    broken: dict[str, int] = {}
    size = 0
    removal = manifest.get("config", {}).get("removal", {})
    delta = removal.get("causal_delta", CausalConfig.causal_delta)
    for shard, entry in enumerate(store.shards):
        if NONE in checksums(entry).values():  # what is there does not count
            continue
        broken.update(entry.get("nonfinite_rows", {}))
        size += sum(file.stat().st_size for file in shard_files(store.folder, shard).values() if file.exists())
        columns = store.shard_rows(shard)
        columns |= {name: causal_labels(columns[name], delta) for name in COLUMNS if name in columns}
        for name in (n for n in (*LABELS, *COLUMNS) if n in columns):
            known[name] += int((columns[name] >= 0).sum())
            ones[name] += int((columns[name] > 0).sum())
        for name in (n for n in FLAGS if n in columns):
            known[name] += len(columns[name])
            ones[name] += int(columns[name].sum())
        if "match_length" in columns:
            known["match"] += len(columns["match_length"])
            ones["match"] += int((columns["match_length"] > 0).sum())
        if "family" in columns:
            rows.update(columns["family"].tolist())
            documents.update(dict(zip(columns["document"].tolist(), columns["family"].tolist(), strict=True)).values())
    captured = sum(len(entry["documents"]) for entry in store.shards)
    return {
        "store": str(store.folder),
        "target": manifest["target"],
        "dtype": manifest.get("dtype"),
        "selection": manifest.get("selection"),
        "sites": store.sites,
        "documents": captured,
        "planned": manifest.get("documents", captured),
        "rows": len(store),
        "bytes": size,
        "labels": {n: {"share": ones[n] / known[n] if known[n] else 0.0, "known": known[n]} for n in known},
        "families": {n: {"documents": documents[n], "rows": rows[n]} for n in sorted(rows)},
        "nonfinite": {"values": sum(int(e.get("nonfinite", 0)) for e in store.shards), "documents": broken},
    }


def merge(
    stores: Annotated[list[Path], typer.Argument(help="Stores of one target, captured in one way.")],
    folder: Annotated[Path, typer.Option("--out", help="The new store.")],
    json: AsJson = False,
) -> None:
    """Put several stores together in a new one; files of states are linked, not copied, where that is possible.

    Stores that answer the same prompts with the same seed, or share a shard, are refused. Sets of prompts that merely
    overlap are not noticed: their documents are then in the new store twice.
    """
    from activations.merge import merge as run

    check_folder(folder)
    if len(stores) < 2:
        raise UsageError("merging needs at least two stores")
    with bar("merging shards", 1) as progress:
        made = run(stores, folder, lambda done, total: progress.to(done, total))
    found = {"store": str(folder), "documents": made.manifest["documents"], "rows": len(made)}
    if json:
        as_json(found)
        return
    out.print(
        f"{folder}: {counted(found['documents'], 'document')}, {counted(found['rows'], 'row')} of {len(stores)} stores"
    )


def export(
    store: Store,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder.")],
    format: Annotated[Literal["speculators", "specforge"], typer.Option(help="Whose files are written.")],
    target: Annotated[
        str | None, typer.Option(help="The store's target, whose final norm specforge's files need.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a store with selection all as another trainer's hidden-state files."""
    from activations.export import export as run
    from activations.export import needed_sites
    from activations.store import CaptureStore

    check_folder(folder)
    opened = CaptureStore.open(store)
    needed_sites(opened)  # a store that does not do is told before the model is loaded
    norm = final_norm(opened, target) if format == "specforge" else None
    with bar("exporting shards", len(opened.shards)) as progress:
        found = run(opened, folder, format, norm, lambda done, total: progress.to(done, total))
    if json:
        as_json({"folder": str(folder), **found})
        return
    out.print(f"{folder}: {counted(found['documents'], 'document')}, {found['tokens']} tokens for {format}")
    if found["left_out"]:
        out.print(f"left out: {counted(found['left_out'], 'document')} with states that are not finite")


def final_norm(store: CaptureStore, target: str | None) -> Any:
    """The final norm of the store's target, which must be the one named."""
    from activations.target import Fingerprint, load_target

    name = target or store.manifest.get("target_name")
    if not name:
        raise UsageError(f"{store.folder} does not say its target's name: give it with --target")
    with bar(f"loading {name}"):
        model = load_target(name, dtype=str(store.manifest.get("dtype", "auto")))
    difference = model.fingerprint.mismatch(Fingerprint(**store.manifest["target"]))
    if difference:
        raise UsageError(f"{store.folder} was captured from another target than {name} ({'; '.join(difference)}): "
                         "name that target with --target")  # fmt: skip
    return lambda states: model.final_norm(states.to(model.device))


SUBCOMMANDS = (info, verify, merge, export)
