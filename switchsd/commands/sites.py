"""`switchsd sites`: where a target's hidden states can be read."""

from __future__ import annotations

from typing import Annotated

import typer

from switchsd.show import AsJson, as_json, out

READ = {
    "embed": "the token embeddings",
    "resid_pre": "the residual stream entering the block",
    "attn_out": "the attention branch as it is added",
    "resid_mid": "the residual stream after the attention add",
    "mlp_out": "the MLP branch as it is added",
    "resid_post": "the residual stream leaving the block, before any final norm",
}


def sites(
    target: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")] = "smollm2",
    json: AsJson = False,
) -> None:
    """List where a target's hidden states can be read."""
    from activations.sites import KINDS, SiteReader, parse_sites
    from activations.target import load_target

    model = load_target(target)
    found: dict[str, list[str]] = {"embed": ["embed"]}
    for kind in KINDS:
        names = parse_sites([f"{kind}.*"], model.blocks)
        try:
            SiteReader(model.embed, model.layers, names).close()
        except ValueError:  # a parallel block has no resid_mid
            continue
        found[kind] = list(map(str, names))
    if json:
        as_json({"target": target, "width": model.width, "blocks": model.blocks, "sites": found})
        return
    out.print(f"{target}: width {model.width}, blocks 0 to {model.blocks - 1}")
    for kind, there in found.items():
        where = there[0] if len(there) == 1 else f"{there[0]} … {there[-1]}"
        out.print(f"  {where:28} {READ[kind]}")
    out.print("A star means every block: resid_mid.*")
