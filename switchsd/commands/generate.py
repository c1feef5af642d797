"""`switchsd generate`: text as it comes, every token coloured by who drafted it."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from decoding.modes import MODES, ModeSettings, told_modes
from switchsd.live import show_events, told
from switchsd.loading import AUTO, LoadConfig, load, measure_costs
from switchsd.options import UsageError, check_trace
from switchsd.show import AsJson, as_json, bar, notes


def generate(
    settings: ModeSettings,
    loading: LoadConfig,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without one, standard input is read.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    mode: Annotated[str, typer.Option(help=f"How to decode: {told_modes()}.")] = "switchsd",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Keys the sampling noise.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the generation. Repeatable.")] = None,
    probe: Annotated[str, typer.Option(help="Folder, shipped name or hub id of a probe; auto: one that fits.")] = AUTO,
    drafter: Annotated[str, typer.Option(help="Folder of an EAGLE-3 head; auto: one that fits.")] = AUTO,
    draft: Annotated[
        str,
        typer.Option(help="A draft model: a folder, or any model with the target's tokenizer; auto: one that fits."),
    ] = AUTO,
    policy: Annotated[
        str, typer.Option(help="Folder of a learned mode's policy (switchsd train-policy); auto: one that fits.")
    ] = AUTO,
    trace: Annotated[Path | None, typer.Option(help="Write one record a step to this Parquet file.")] = None,
    json: AsJson = False,
) -> None:
    """Write text; every token is coloured by who drafted it."""
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: use {', '.join(MODES)}")
    if trace is not None:
        check_trace(trace)
        settings = replace(settings, read_intent=True)
    text = read_prompt(prompt, file)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}] if system else text
    with bar(f"loading {target}"):
        decoder = load(target, probe, drafter, draft=draft, policy=policy, **asdict(loading), **asdict(settings))
    measure_costs(decoder, (mode,))
    if mode == "minedraft":
        notes.print("one request leaves nothing to overlap: decode several together, from Python with batch=...")
    options: dict[str, Any] = {
        "mode": mode, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "seed": seed, "stop": stop or (),
    }  # fmt: skip
    if json:
        made = decoder.generate(messages, **options)
        as_json({"mode": mode, "lossless": MODES[mode].lossless, **told(made)})
        interrupted, cut = made.interrupted, made.cut
    else:
        interrupted, cut = show_events(decoder, decoder.stream(messages, **options), mode)
    if trace is not None:
        decoder.trace.save(trace)
        if not json:
            notes.print(f"{trace}: switchsd view {quote(str(trace))} shows it")
    if interrupted:
        raise KeyboardInterrupt
    if cut:
        raise typer.Exit(1)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or standard input."""
    if prompt is not None and file is not None:
        raise UsageError("a prompt and --file were both given: choose one")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
            raise UsageError(f"cannot read the prompt from {file}: {why}") from error
    if prompt is None or prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError('no prompt: switchsd generate "your prompt", or --file, or standard input')
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"cannot read the prompt from standard input: it is no UTF-8 text ({error})") from error
        if not text.strip():
            raise UsageError('standard input is empty: switchsd generate "your prompt", or --file')
        return text
    return prompt
