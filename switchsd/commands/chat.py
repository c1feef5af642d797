"""`switchsd chat`: a conversation in the terminal, whose turns share what was computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from decoding.chat import Chat
from decoding.modes import MODES, ModeSettings, told_modes
from decoding.trace import Trace
from switchsd.live import show_events, told
from switchsd.loading import AUTO, LoadConfig, load, measure_costs
from switchsd.options import UsageError, check_trace
from switchsd.show import AsJson, as_json, bar, notes

HELP = "/reset starts again, /quit (or Ctrl-D) ends; Ctrl-C stops an answer."


def chat(
    settings: ModeSettings,
    loading: LoadConfig,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    mode: Annotated[str, typer.Option(help=f"How to decode: {told_modes()}.")] = "switchsd",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Keys the sampling noise.")] = 0,
    probe: Annotated[str, typer.Option(help="Folder, shipped name or hub id of a probe; auto: one that fits.")] = AUTO,
    drafter: Annotated[str, typer.Option(help="Folder of an EAGLE head; auto: one that fits.")] = AUTO,
    draft: Annotated[
        str,
        typer.Option(help="A draft model: a folder, or any model with the target's tokenizer; auto: one that fits."),
    ] = AUTO,
    policy: Annotated[
        str, typer.Option(help="Folder of a learned mode's policy (switchsd train-policy); auto: one that fits.")
    ] = AUTO,
    trace: Annotated[Path | None, typer.Option(help="Write one record a step to this Parquet file at the end.")] = None,
    json: AsJson = False,
) -> None:
    """Talk with a target; every turn starts from what the last one has computed. Lines of a pipe are turns too.

    With --json, one object a turn."""
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: use {', '.join(MODES)}")
    if trace is not None:
        check_trace(trace)
        settings = replace(settings, read_intent=True)
    with bar(f"loading {target}"):
        decoder = load(target, probe, drafter, draft=draft, policy=policy, **asdict(loading), **asdict(settings))
    measure_costs(decoder, (mode,))
    options: dict[str, Any] = {
        "mode": mode, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "seed": seed,
    }  # fmt: skip
    with Chat(decoder, system, **options) as conversation:
        try:
            _talk(conversation, mode, json)
        finally:  # whatever ended it, what was said is kept
            if trace is not None:
                _keep(decoder.trace, trace, json)


def _talk(conversation: Chat, mode: str, json: bool) -> None:
    """Turns until the user has enough."""
    if sys.stdin.isatty():
        notes.print(HELP)
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            conversation.reset()
            continue
        if line.startswith("/"):
            notes.print(f"unknown command {line.split()[0]}: {HELP}")
            continue
        if json:
            as_json(
                {
                    "mode": mode,
                    "lossless": MODES[mode].lossless,
                    **told(conversation.send(line)),
                    "reused_tokens": conversation.reused,
                }
            )
            continue
        show_events(conversation.decoder, conversation.stream(line), mode)
        notes.print(f"{conversation.reused} of {conversation.prompt_tokens} prompt tokens were there already")


def _keep(trace: Trace, file: Path, json: bool) -> None:
    """Write the trace; one without a turn would only overwrite what is there."""
    if not trace.texts:
        notes.print(f"nothing was said: {file} is not written")
        return
    trace.save(file)
    if not json:
        notes.print(f"{file}: switchsd view {quote(str(file))} shows it")


def _lines() -> Iterator[str]:
    """What the user types, without empty lines; a prompt is shown where somebody sits."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()
