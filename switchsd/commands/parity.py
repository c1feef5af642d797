"""`switchsd parity`: do the hooks and TransformerLens read the same states?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from switchsd.show import AsJson, as_json, bar, out, table

if TYPE_CHECKING:
    from activations.lens import Parity

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "for i in range(3):\n    print(i)\nfor i in range(3):\n    print(i)\n",
    "Ännchen sagte: «42 % – naïve?»",
)


def parity(
    target: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")] = "smollm2",
    text: Annotated[list[str] | None, typer.Option(help="A text to compare on; may be repeated.")] = None,
    json: AsJson = False,
) -> None:
    """Compare this project's hooks with TransformerLens at every site, in float32 and float64.

    Exit code 1 if a difference is no rounding. Rounding shrinks with the machine epsilon; an error does not.
    """
    from importlib.metadata import version

    from activations import lens
    from activations.target import load_target

    with bar(f"reading {target} both ways"):
        loaded = load_target(target, dtype="float32")
        texts = [loaded.encode(one) for one in text or TEXTS]
        compared = lens.parity(loaded, texts)
    missing = [str(s) for s in lens.readable_sites(loaded) if str(s) not in {p.site for p in compared}]
    errors = [p.site for p in compared if p.verdict == "error"]
    if json:
        as_json(
            {
                "target": target,
                "attention": loaded.config._attn_implementation,
                "transformer_lens": version("transformer-lens"),
                "texts": len(texts),
                "slack": lens.SLACK,
                "verdict": "error" if errors else "agree",
                "not_in_transformer_lens": missing,
                "sites": [p.to_dict() for p in compared],
            }
        )
    else:
        _show(target, compared, missing, errors)
    if errors:
        raise typer.Exit(1)


def _show(target: str, compared: Sequence[Parity], missing: Sequence[str], errors: Sequence[str]) -> None:
    from activations.lens import SLACK
    from activations.sites import KINDS, Site

    at = {Site.parse(p.site): p for p in compared}
    kinds = [kind for kind in KINDS if any(s.kind == kind for s in at)]

    def cell(site: Site) -> str:
        if site not in at:
            return ""
        p = at[site]
        if p.verdict == "equal":
            return "equal"
        return f"{p.float32.relative:.0e} {p.float64.relative:.0e}{'  ERROR' if p.verdict == 'error' else ''}"

    blocks = 1 + max(s.block for s in at)
    rows = [[k, *(cell(Site(kind, k)) for kind in kinds)] for k in range(blocks)]
    out.print(f"{target}: hooks against TransformerLens, {compared[0].rows} positions. embed: {cell(Site('embed'))}")
    out.print(table(["block", *kinds], rows, "Largest difference of a state over its norm, in float32 and in float64"))
    if missing:
        out.print(f"TransformerLens has no {', '.join(missing)}: not compared")
    same = sum(p.verdict == "equal" for p in compared)
    if errors:
        text = f"{len(errors)} of {len(compared)} sites differ by more than rounding: {errors[0]} first"
        out.print(text, style="bold red")
    elif same == len(compared):
        out.print(f"all {same} sites are equal bit for bit")
    else:
        out.print(f"{same} of {len(compared)} sites are equal bit for bit, the others differ by rounding alone")
    out.print(
        f"Rounding: from float32 to float64 a difference shrinks as the machine epsilon, by 2^29 (within a factor of "
        f"{SLACK}), or down to {SLACK} float64 epsilons."
    )
