"""`switchsd train`: a probe, or an EAGLE-3 head, from capture stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decoding.eagle.training import EagleTrainConfig
from switchsd.show import AsJson, as_json, bar, notes, out


def eagle(
    stores: Annotated[list[Path], typer.Argument(help="Capture stores, as `switchsd write` makes them.")],
    config: EagleTrainConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the head goes; by default where `generate` finds it.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on text that the target wrote."""
    from activations.store import CaptureStore
    from activations.target import load_target
    from decoding.eagle.training import train
    from switchsd.artifacts import cached

    for store in stores:
        CaptureStore.open(store)  # a wrong folder is told before the model is loaded
    with bar(f"loading {target}"):
        model = load_target(target)
    where = folder or cached("eagle", model.name)
    record: dict[str, object] = {}
    try:
        with bar("training rows", config.tokens) as progress:
            for record in train(model, stores, where, config):
                progress.to(min(int(str(record["rows"])), config.tokens))
                notes.print(" ".join(f"{k}={v}" for k, v in record.items()))
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last state in {where / 'run'}")
        raise
    if json:
        as_json({"folder": str(where), **record})
        return
    out.print(f"{where}: loss {record.get('loss')}, agreement with the target by draft step {record.get('agreement')}")


SUBCOMMANDS = (eagle,)
