"""`switchsd capture`: hidden states and copy labels of a target's own text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from activations.capture import CaptureConfig
from activations.corpus import load_corpus, read_prompts
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out

GIB = 2**30


def capture(
    store: Annotated[Path, typer.Argument(help="The folder to write; an interrupted capture there is continued.")],
    config: CaptureConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Prompts as JSONL; by default the embedded ones.")] = None,
    split: Annotated[str | None, typer.Option(help="Part of the embedded prompts: train or validation.")] = None,
    limit: Annotated[int, typer.Option(help="Only so many prompts, evenly spread; 0 = all.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16), bfloat16, float16 or float32.")] = "auto",
    json: AsJson = False,
) -> None:
    """Store hidden states and copy labels of a target's own text."""
    from activations.capture import capture as run
    from activations.capture import estimate_bytes
    from activations.target import load_target

    if prompts is not None and split is not None:
        raise UsageError("--split is about the embedded prompts: leave it out, or leave --prompts out")
    if limit < 0:
        raise UsageError(f"--limit is {limit}; it must be 0 (all) or more")
    check_folder(store)
    try:
        chosen = read_prompts(prompts) if prompts else load_corpus(split)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if 0 < limit < len(chosen):
        chosen = [chosen[i * len(chosen) // limit] for i in range(limit)]
    with bar(f"loading {target}"):
        model = load_target(target, dtype=dtype)
    try:
        size = estimate_bytes(model, len(chosen), config)
    except ValueError as error:  # an unknown site
        raise UsageError(str(error)) from error
    free = shutil.disk_usage(next(p for p in store.absolute().parents if p.exists())).free
    notes.print(f"{len(chosen)} prompts; the store takes at most {size / GIB:.2f} GiB, {free / GIB:.1f} GiB are free")
    if size > free:
        notes.print("[bold]That may not fit:[/bold] fewer --sites, or --selection matches, take less.")
    try:
        with bar("documents", len(chosen)) as progress:
            made = run(model, chosen, store, config, lambda done, total: progress.to(done, total))
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last whole shard in {store}")
        raise
    rows = made.rows()
    matched = int((rows["match_length"] > 0).sum())
    found = {"store": str(store), "documents": len(chosen), "rows": len(made), "with_match": matched}
    if json:
        as_json({**found, "sites": made.sites})
        return
    out.print(f"{store}: {len(chosen)} documents, {len(made)} rows, {matched} of them with a suffix match")
    out.print(f"Next: switchsd train probe {store}")
