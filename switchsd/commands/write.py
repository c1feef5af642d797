"""`switchsd write`: bulk text that the target writes itself, for training drafters."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from activations.corpus import read_prompts
from activations.selftext import SelfTextConfig
from switchsd.loading import LoadConfig, chosen_prompts
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out

TARGET = "smollm2"
"""What `train` takes too where no target is named."""


def write(
    store: Annotated[Path, typer.Argument(help="The capture store to write; an existing one is continued.")],
    config: SelfTextConfig,
    loading: LoadConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = TARGET,
    benchmark: Annotated[
        list[Path] | None,
        typer.Option(help="A benchmark file; documents that share 13 words in a row with it are dropped. Repeatable."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts as JSONL to answer, again and again; by default tasks and chats.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Answer this part of the embedded prompts: train or validation.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Let the target write bulk text, with its states, for training drafters."""
    from activations import selftext
    from activations.store import CaptureStore
    from activations.target import load_target

    check_folder(store)
    chosen = chosen_prompts(prompts, split)
    for path in benchmark or ():
        if not path.is_file():
            raise UsageError(f"no such benchmark file: {path}")
        read_prompts(path)  # checks it, line by line
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    try:
        with bar("writing tokens", config.tokens) as progress:
            for total in selftext.write(model, store, config, benchmark or (), chosen):
                progress.to(min(total, config.tokens))
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last whole shard in {store}")
        raise
    shards = CaptureStore.open(store).shards
    found = {
        "store": str(store),
        "documents": sum(len(s["documents"]) for s in shards),
        "tokens": sum(s["written"] for s in shards),
        "contaminated": sum(s["contaminated"] for s in shards),
    }
    if json:
        as_json(found)
        return
    out.print(f"{store}: {found['documents']} documents, {found['tokens']} tokens written by {target}")
    if benchmark:
        out.print(f"{found['contaminated']} more were dropped: they share 13 words in a row with a benchmark file")
    same = shlex.join([str(store), *(() if target == TARGET else ("--target", target))])
    out.print(f"Next: switchsd train eagle {same}, or switchsd train draft {same}", soft_wrap=True)
