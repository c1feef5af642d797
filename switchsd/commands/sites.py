"""`switchsd sites`: where a target's hidden states can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from switchsd.loading import LoadConfig
from switchsd.options import UsageError
from switchsd.show import AsJson, as_json, notes, out, table

if TYPE_CHECKING:
    from activations.target import Target

READ = {
    "embed": "the token embeddings",
    "resid_pre": "the residual stream entering the block",
    "attn_out": "the attention branch as it is added",
    "resid_mid": "the residual stream after the attention add",
    "mlp_out": "the MLP branch as it is added",
    "resid_post": "the residual stream leaving the block, before any final norm",
}


def sites(
    loading: LoadConfig,
    target: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")] = "smollm2",
    json: AsJson = False,
) -> None:
    """List where a target's hidden states can be read."""
    from activations.target import load_target

    if Path(target).is_file():
        raise UsageError(f"{target} is a file: name the folder that holds the model")
    model = load_target(target, **asdict(loading), check=False)
    rows = places(model)
    remarks = [f"{kind}: {why}" for kind, why in missing(model).items()]
    if json:
        named: dict[str, list[str]] = {}
        for row in rows:
            named.setdefault(row["kind"], []).extend([f"{row['kind']}.{k}" for k in row["blocks"]] or ["embed"])
        found = {"target": target, "width": model.width, "blocks": model.blocks, "sites": named}
        as_json({**found, "places": rows, "notes": remarks})
    else:
        out.print(f"{target}: {type(model.model).__name__}, width {model.width}, blocks 0 to {model.blocks - 1}")
        lines = [(_span(row["kind"], row["blocks"]), READ[row["kind"]], _where(row)) for row in rows]
        made = table(["site", "what it is", "where it is read"], lines)
        for column in made.columns:
            column.justify = "left"
        out.print(made)
        out.print("A star means every block: resid_post.*")
        for remark in remarks:
            notes.print(remark)
    model.check_structure()


def places(model: Target) -> list[dict[str, Any]]:
    """One entry a kind of site and place: kind, module (K is the block), end, times (an attribute), blocks."""
    from activations.sites import KINDS
    from activations.structure import Place

    names = {module: name for name, module in model.model.named_modules()}
    blocks, embed = names[model.layers], names[model.embed]
    rows = [{"kind": "embed", "module": embed, "end": "output", "times": None, "blocks": []}]
    for kind in KINDS:
        at: dict[Place, list[int]] = {}
        for number, layout in enumerate(model.structure.layouts):
            if kind in layout.places:
                at.setdefault(layout.places[kind], []).append(number)
        for place, numbers in at.items():
            module = f"{blocks}.K.{place.path}".rstrip(".")
            end = "input" if place.is_input else "output"
            rows.append({"kind": kind, "module": module, "end": end, "times": place.scale, "blocks": numbers})
    return rows


def missing(model: Target) -> dict[str, str]:
    """Kinds that some block does not have, and why."""
    from activations.sites import KINDS

    found: dict[str, str] = {}
    for kind in KINDS:
        for layout in model.structure.layouts:
            try:
                layout.place(kind)
            except ValueError as error:
                found.setdefault(kind, str(error))
    return found


def _where(row: dict[str, Any]) -> str:
    return f"{row['end']} of {row['module']}" + (f" x {row['times']}" if row["times"] else "")


def _span(kind: str, blocks: Sequence[int]) -> str:
    """`kind.0 … kind.7` for a run of blocks, every name where there are gaps."""
    if not blocks:
        return kind
    if len(blocks) > 2 and list(blocks) == list(range(blocks[0], blocks[-1] + 1)):
        return f"{kind}.{blocks[0]} … {kind}.{blocks[-1]}"
    return ", ".join(f"{kind}.{k}" for k in blocks)
