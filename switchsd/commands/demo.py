"""`switchsd demo`: the whole way from prompts to a probe-gated switch, in a few minutes on two CPU cores."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, colour, notes, out, table

if TYPE_CHECKING:
    from activations.corpus import Prompt
    from activations.target import Target
    from decoding.decoder import Generation

PROMPTS = {"train": 45, "validation": 15}
MODES = ("ar", "eagle", "sd", "switchsd")


def demo(
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Keep the capture store and the probe here; by default they go.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write for each of the two prompts.")] = 96,
    json: AsJson = False,
) -> None:
    """Capture about 60 prompts, fit a probe and decode with it, in front of you."""
    if max_new_tokens < 2:
        raise UsageError(f"--max-new-tokens is {max_new_tokens}; a decode speed needs at least 2")
    if folder is not None:
        check_folder(folder)
    with tempfile.TemporaryDirectory(prefix="switchsd-demo-") as scratch:
        _demo(target, folder or Path(scratch), max_new_tokens, json)


def _demo(name: str, folder: Path, max_new_tokens: int, json: bool) -> None:
    from activations.capture import CaptureConfig, capture
    from activations.corpus import load_corpus
    from activations.target import load_target
    from probes.train import TrainConfig, train
    from switchsd.loading import load

    began = perf_counter()
    with bar(f"loading {name} (about 20 s the first time)"):
        target = load_target(name)
    shown = [next(p for p in load_corpus("validation") if p.repetition == r) for r in ("heavy", "light")]
    prompts = [p for split, count in PROMPTS.items() for p in choose(load_corpus(split), count) if p not in shown]

    config = CaptureConfig(sites=sites(target), max_new_tokens=64)
    with bar(f"{name} answers prompts; its states are kept", len(prompts)) as progress:
        store = capture(target, prompts, folder / "store", config, lambda done, total: progress.to(done, total))
    rows = store.rows()
    matches = int((rows["match_length"] > 0).sum())
    notes.print(f"captured {len(store)} anchors of {len(prompts)} texts; {matches} have a suffix match of 5 tokens")

    with bar("fitting a probe at each site", 1) as progress:

        def show(done: int, total: int, what: str) -> None:
            progress.say(what)
            progress.to(done, total)

        result = train(store, TrainConfig(l2=(1e-3, 1e-2), resamples=200), show)
    probe = result.probes["best"]
    probe.save_pretrained(folder / "probe")
    found_auc = {scope: e.roc_auc for scope, e in result.evaluations["best"].items()}
    areas = {scope: area for scope, area in found_auc.items() if not math.isnan(area.estimate)}
    notes.print(f"best site {probe.config.site}, threshold {probe.config.threshold:.2f}; AUC on prompts it never saw:")
    for scope, area in areas.items():
        notes.print(f"  {'every anchor' if scope == 'all' else 'anchors with a suffix match'}: {area:.3f}")

    decoder = load(target, probe)
    needs = {"eagle": "eagle", "sd": "draft"}
    modes = [m for m in MODES if needs.get(m) is None or needs[m] in decoder.neural]
    if "eagle" not in modes:
        notes.print(f"no EAGLE-3 head for {name}: mode eagle is left out, and switchsd drafts by copying only")
    made: dict[tuple[str, str], Generation] = {}
    with bar("decoding", len(shown) * len(modes)) as progress:
        for prompt in shown:
            ids = target.encode_messages(prompt.messages)
            for mode in modes:
                decoder.generate(ids, mode=mode, max_new_tokens=4)  # warms up
                found = decoder.generate(ids, mode=mode, max_new_tokens=max_new_tokens)
                if found.interrupted:
                    raise KeyboardInterrupt
                made[_kind(prompt), mode] = found
                progress.to(len(made))
    lines = [_line(kind, mode, g, made[kind, "ar"]) for (kind, mode), g in made.items()]
    seconds = perf_counter() - began
    if json:
        auc = {scope: str(area) for scope, area in areas.items()}
        as_json({"site": probe.config.site, "auc": auc, "decoding": lines, "seconds": round(seconds, 1)})
        return
    heavy = made["copy-heavy", "switchsd"]
    out.print(f"\n{shown[0].messages[-1]['content'].strip()}\n", style="bold")
    out.print(coloured(target, heavy), soft_wrap=True)
    legend = Text()
    for source in dict.fromkeys(heavy.sources):
        legend.append(f"■ {source}", style=colour(source)).append("   ")
    out.print(legend, "\n")
    heads = ["prompt", "mode", "tokens/s", "× ar", "tokens per step", "steps copied", "same text as ar"]
    out.print(table(heads, [_cells(line) for line in lines], title=f"{name}, {str(target.dtype)[6:]}"))
    out.print(f"{seconds:.0f} s in all. Two prompts are no measurement: switchsd bench")


def choose(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, half of them copying where there are enough, evenly spread over the rest."""
    from activations.corpus import spread

    copying = [p for p in prompts if p.repetition in ("heavy", "medium")]
    light = [p for p in prompts if p.repetition not in ("heavy", "medium")]
    copying = copying[:: max(1, 2 * len(copying) // count)][: count // 2]
    wanted = min(count - len(copying), len(light))
    return copying + spread(light, wanted)


def sites(target: Target) -> tuple[str, ...]:
    """A few sites of the middle blocks, and a block boundary for the serving probe."""
    blocks = sorted({target.blocks * share // 10 for share in (3, 5, 6, 8)})
    return (*(f"resid_mid.{k}" for k in blocks), f"resid_post.{target.blocks // 2}")


def coloured(target: Target, generation: Generation) -> Text:
    """The text, every run of tokens coloured by who drafted it."""
    text = Text()
    end = len(generation.tokens) - int(generation.stopped)
    shown, at = "", 0
    while at < end:
        to = at + 1
        while to < end and generation.sources[to] == generation.sources[at]:
            to += 1
        whole = target.decode(generation.tokens[:to])
        text.append(whole[len(shown) :], style=colour(generation.sources[at]))
        shown, at = whole, to
    return text


def _kind(prompt: Prompt) -> str:
    return "copy-heavy" if prompt.repetition == "heavy" else "plain"


def _line(kind: str, mode: str, generation: Generation, ar: Generation) -> dict[str, Any]:
    return {
        "prompt": kind,
        "mode": mode,
        "tokens_per_second": generation.tokens_per_second,
        "over_ar": generation.tokens_per_second / ar.tokens_per_second,
        "tokens_per_step": generation.tokens_per_step,
        "copy_share": generation.copy_share,
        "same_text": generation.tokens == ar.tokens,
    }


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        line["prompt"],
        line["mode"],
        f"{line['tokens_per_second']:.1f}",
        f"{line['over_ar']:.2f}",
        f"{line['tokens_per_step']:.2f}",
        f"{line['copy_share']:.0%}",
        "yes" if line["same_text"] else "no (near-tie in bfloat16)",
    ]
