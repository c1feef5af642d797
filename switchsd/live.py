"""Text as it comes, every token coloured by who drafted it, and its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from time import perf_counter
from typing import Any, NamedTuple

from rich.text import Text

from decoding.decoder import Decoder, Event, Generation
from decoding.gates import COPY
from decoding.modes import MODES
from switchsd.show import colour, notes, out

WHO = {"target": "the target itself", "copy": "copied", "eagle": "EAGLE head", "draft": "draft model"}


class Shown(NamedTuple):
    """How a text ended."""

    interrupted: bool
    cut: str
    """Why before its own end: out of memory; else empty."""


def show_events(decoder: Decoder, events: Generator[Event, None, None], mode: str) -> Shown:
    """Print the text as it comes and the numbers after it."""
    counts: Counter[str] = Counter()
    first = last = 0.0
    began = perf_counter()
    done: Generation | None = None
    trace, interrupted = decoder.trace, False
    before = len(trace)
    try:
        for event in events:
            last = perf_counter()
            first = first or last
            done = event.done
            counts[event.source] += len(event.tokens)
            out.print(Text(event.text, style=colour(event.source)), end="", soft_wrap=True)
            out.file.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        events.close()  # now, and not when it is collected: a chat takes note of how far an answer went
    out.print()
    records = decoder.trace.records[before if decoder.trace is trace else 0 :]  # a chat's trace goes on
    tokens, steps = sum(counts.values()), len({record.start for record in records})  # particles share their steps
    legend = Text()
    for source, count in (+counts).most_common():
        legend.append(f"■ {WHO.get(source, source)} {count}", style=colour(source)).append("   ")
    notes.print(legend)
    if tokens:
        copied = sum(record.copies for record in records)
        decoded = done.decoded if done is not None else tokens - 1
        speed = f"{decoded / (last - first):.1f} tokens/s" if decoded > 0 and last > first else "one token"
        rates = f", {decoded / steps:.2f} tokens per step, {copied / steps:.0%} of steps copied" if steps else ""
        if copied and not counts[COPY]:
            rates += " and kept nothing of it"
        kind = "lossless" if MODES[mode].lossless else "not lossless"
        dtype = str(decoder.target.dtype).removeprefix("torch.")
        if MODES[mode].lossless and mode != "ar" and dtype != "float32":
            kind = f"lossless but for near-ties in {dtype}"
        if mode == "sd" and decoder.settings.acceptance == "rejection":
            kind = "lossless in distribution: another text than ar's"
        notes.print(f"{speed}{rates}; first token after {first - began:.2f} s; {mode} ({kind})")
    return Shown(interrupted, done.cut if done is not None else "")


def told(made: Generation) -> dict[str, Any]:
    """A finished text for machines."""
    return {
        "text": made.text,
        "tokens": made.tokens,
        "sources": made.sources,
        "prompt_tokens": made.prompt_tokens,
        "steps": made.steps,
        "tokens_per_second": made.tokens_per_second,
        "tokens_per_step": made.tokens_per_step,
        "copy_share": made.copy_share,
        "first_token_seconds": made.first_token_seconds,
        "decode_seconds": made.decode_seconds,
        "stopped": made.stopped,
        "interrupted": made.interrupted,
        "cut": made.cut,
    }
