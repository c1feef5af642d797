"""`switchsd capture`: hidden states and copy labels of a target's own text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from activations.capture import CaptureConfig
from activations.corpus import Skipped, load_corpus, spread
from activations.ray_engine import RayConfig, RayEngine, find_ray
from switchsd.loading import LoadConfig, chosen_prompts
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, counted, notes, out


def capture(
    store: Annotated[Path, typer.Argument(help="The folder to write; an interrupted capture there is continued.")],
    config: CaptureConfig,
    loading: LoadConfig,
    cluster: RayConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompts: JSONL, a folder of text files or a datasets name; by default the embedded ones."),
    ] = None,
    column: Annotated[str | None, typer.Option(help="What in --prompts holds the prompt, if not a usual name.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out prompts that cannot be read, or not be taken by the target.")
    ] = False,
    split: Annotated[str | None, typer.Option(help="Part of the embedded prompts: train or validation.")] = None,
    limit: Annotated[int, typer.Option(help="Only so many prompts, evenly spread; 0 = all.")] = 0,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Capture in this process, or in workers on a Ray cluster.")
    ] = "local",
    json: AsJson = False,
) -> None:
    """Store hidden states and copy labels of a target's own text."""
    from activations.capture import capture as run
    from activations.capture import estimate_bytes, read_here, suitable
    from activations.store import GIB, free_bytes
    from activations.target import load_target

    if prompts is None and (column is not None or skip_bad):
        raise UsageError("--column and --skip-bad are about --prompts: name a source, or leave them out")
    if engine == "local" and cluster != RayConfig():
        raise UsageError("--address, --actors, --actor-cpus, --actor-gpus and --patience need --engine ray")
    if limit < 0:
        raise UsageError(f"--limit is {limit}; it must be 0 (all) or more")
    check_folder(store)
    if engine == "ray":
        find_ray()
    skipped = Skipped() if skip_bad else None
    chosen = chosen_prompts(prompts, split, column=column, skipped=skipped) or load_corpus()
    if 0 < limit < len(chosen):
        chosen = spread(chosen, limit)
    with bar(f"loading {target}"):
        # The devices are the workers': this copy only tells them what must be equal.
        placed = loading.device_map is not None or loading.quantization is not None
        model = load_target(target, device="cpu" if engine == "ray" and not placed else None, **asdict(loading))
    if skipped is not None:
        chosen = suitable(model, chosen, skipped)
    if skipped and skipped.count:
        more = ", the first of them" if skipped.count > len(skipped.first) else ""
        notes.print("\n  ".join([f"left out: {counted(skipped.count, 'prompt')}{more}:", *skipped.first]))
        if not chosen:
            raise UsageError("no prompt is left: choose other ones, or another target")
    try:
        size = estimate_bytes(model, chosen, config)
    except ValueError as error:  # an unknown site
        raise UsageError(str(error)) from error
    free = free_bytes(store) / GIB
    notes.print(
        f"{counted(len(chosen), 'prompt')}; the store takes at most {size / GIB:.2f} GiB, {free:.1f} GiB are free"
    )
    name = str(Path(target).absolute()) if Path(target).is_dir() else target  # workers stand in other folders
    reader = RayEngine({"name": name, **asdict(loading)}, cluster) if engine == "ray" else read_here
    try:
        with bar("documents", len(chosen)) as progress:
            made = run(model, chosen, store, config, lambda done, total: progress.to(done, total), reader)
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last whole shard in {store}")
        raise
    found = {"store": str(store), "documents": len(chosen), "rows": len(made)}
    text = f"{store}: {counted(len(chosen), 'document')}, {counted(len(made), 'row')}"
    if config.selection != "all":
        shards = range(len(made.shards))
        matched = sum(int((made.shard_rows(n, ["match_length"])["match_length"] > 0).sum()) for n in shards)
        found["with_match"] = matched
        text += f", {matched} of them with a suffix match"
    broken = sum(sum(shard.get("nonfinite_rows", {}).values()) for shard in made.shards)
    if broken:
        what = f"{counted(broken, 'row')} with states that are not finite"
        notes.print(f"{what}: switchsd captures info {store} names the documents")
    if json:
        as_json({**found, "sites": made.sites})
        return
    out.print(text)
    out.print(f"Next: switchsd {'train eagle' if config.selection == 'all' else 'train probe'} {store}")
