"""`switchsd head`: check a head against its target, and export it."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from switchsd.loading import LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out, table

if TYPE_CHECKING:
    from activations.target import Target
    from decoding.eagle.head import EagleHead

Head = Annotated[Path, typer.Argument(help="A head: config.json and weights, of any published EAGLE format.")]
TargetName = Annotated[str, typer.Option(help="An alias, a hub id or a folder.")]


def check(
    head: Head,
    loading: LoadConfig,
    target: TargetName = "smollm2",
    prompts: Annotated[str | None, typer.Option(help="Prompts: a JSONL file or a hub id; by default embedded ones.")]
    = None,
    limit: Annotated[int, typer.Option(help="Most prompts, evenly spread.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the target's greedy text after each prompt.")] = 64,
    steps: Annotated[int, typer.Option(help="Draft steps.")] = 5,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Say how many of a head's choices are the target's, by draft step and position; and which setting is wrong."""
    from activations.corpus import spread
    from decoding.eagle.head import HeadError
    from decoding.eagle.selfcheck import check_head
    from switchsd.loading import chosen_prompts

    for name, value in (("limit", limit), ("max-new-tokens", max_new_tokens), ("steps", steps)):
        if value < 1:
            raise UsageError(f"--{name} is {value}; it must be 1 or more")
    source = chosen_prompts(prompts, None if prompts is not None else "validation")
    model, loaded = _load(head, target, loading)
    asked = [model.encode_messages(p.messages) for p in spread(source, min(limit, len(source)))]
    with bar("drafting on the target's own text"):
        found = check_head(model, loaded, asked, max_new_tokens, steps)
    sites = list(loaded.config.sites(model.blocks))
    if json:
        as_json({"head": str(head), "target": model.name, "format": loaded.format, "sites": sites,
                 "config": loaded.config.to_dict(), **found.to_dict()})  # fmt: skip
    else:
        c = loaded.config
        out.print(f"{head}: EAGLE-{c.eagle}, {loaded.format} format, {c.num_hidden_layers} blocks of width "
                  f"{c.hidden_size}, {c.draft_vocab_size} of {c.vocab_size} tokens, reads {', '.join(sites)}",
                  soft_wrap=True)  # fmt: skip
        rows: list[tuple[Any, ...]] = [
            (k, f"{a:.3f}", f"{b:.3f}")
            for k, (a, b) in enumerate(zip(found.agreement, found.accepted, strict=True), start=1)
        ]
        out.print(table(["draft step", "agreement", "accepted"], rows))
        spans = [(f"{s.start}-{s.end - 1}", s.rows, f"{s.agreement:.3f}") for s in found.positions]
        out.print(table(["position", "rows", "agreement"], spans))
        out.print(f"tokens per step of a draft of one token a level: {found.tokens_per_step:.2f} "
                  f"({found.rows} positions)")  # fmt: skip
    if not found.fits:
        raise HeadError(found.told())


def export(
    head: Head,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    loading: LoadConfig,
    format: Annotated[Literal["safeailab", "speculators"], typer.Option(help="Whose format.")] = "speculators",
    target: TargetName = "smollm2",
    verifier: Annotated[
        str, typer.Option(help="What the target is called where the head will be used; by default as it is named here.")
    ] = "",
    speculative_tokens: Annotated[int, typer.Option(help="How many tokens speculators proposes.")] = 5,
    json: AsJson = False,
) -> None:
    """Write a head in the format of SafeAILab or speculators."""
    from decoding.eagle.export import export_head
    from decoding.eagle.formats import read_config

    check_folder(folder)
    if speculative_tokens < 1:
        raise UsageError(f"--speculative-tokens is {speculative_tokens}; it must be 1 or more")
    model, loaded = _load(head, target, loading)
    made = read_config(head).get("switchsd")
    extra = {"switchsd": made} if made is not None else {}
    export_head(loaded, folder, format, model, verifier, speculative_tokens, **extra)
    if json:
        as_json({"folder": str(folder), "format": format, "sites": list(loaded.config.sites(model.blocks))})
        return
    out.print(f"{folder}: the head in {format} format")


def _load(head: Path, target: str, loading: LoadConfig) -> tuple[Target, EagleHead]:
    """Target and head; what is guessed about the head is told."""
    from activations.target import load_target
    from decoding.eagle.formats import load_head, read_config

    read_config(head)  # a wrong one is told before the target is loaded
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = load_head(head, model.vocab_size)
    for warning in told:
        notes.print(str(warning.message))
    return model, loaded


SUBCOMMANDS = (check, export)
