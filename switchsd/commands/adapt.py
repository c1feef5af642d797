"""`switchsd adapt`: a probe and an EAGLE-3 head for a target of your own, into the cache."""

from __future__ import annotations

import io
import json as json_
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from activations.capture import CaptureConfig
from activations.ray_engine import RayConfig
from activations.selftext import SelfTextConfig
from decoding.eagle.training import EagleTrainConfig
from probes.evaluation import Interval
from probes.result import JSON_FILE
from probes.study import StudyConfig
from probes.train import TrainConfig
from switchsd.commands.capture import capture
from switchsd.commands.train import eagle, probe
from switchsd.commands.write import write
from switchsd.loading import LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out

if TYPE_CHECKING:
    from activations.target import Target

DEPTHS = (0.3, 0.45, 0.6, 0.75, 0.9)
"""Where among the blocks the states are kept: the middle knows most about copying."""
CAPTURES, TEXT = "captures", "text"
WHERE = {"all": "on all rows", "match": "on rows with a suffix match"}
PARALLEL = 32
"""Texts that are written at once while the speed is measured; the stages write as many or more."""


def adapt(
    loading: LoadConfig,
    target: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")],
    limit: Annotated[int, typer.Option(help="Embedded prompts to answer for the probe; 0 = all.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer to them, in tokens.")] = 192,
    tokens: Annotated[int, typer.Option(help="Tokens that the target writes for the head.")] = 300_000,
    passes: Annotated[int, typer.Option(help="How often the head is trained on that text.")] = 3,
    head: Annotated[bool, typer.Option("--head/--no-head", help="Train a head, or stop after the probe.")] = True,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where captures and text go; by default the cache.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a probe and an EAGLE-3 head for a target, where `generate` finds them."""
    from activations.packaged import cache_dir
    from activations.target import load_target
    from switchsd.artifacts import own, slug

    for name, value, least in (("limit", limit, 0), ("tokens", tokens, 1), ("passes", passes, 1)):
        if value < least:
            raise UsageError(f"--{name} is {value}; it must be {least} or more")
    began = perf_counter()
    root = folder or cache_dir() / "adapt" / slug(target)
    check_folder(root)
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    try:
        captured = CaptureConfig(sites=sites(model), max_new_tokens=max_new_tokens)
        written = SelfTextConfig(tokens=tokens)
        # So many at once are finished, however few tokens were asked for.
        written = replace(written, rows=min(written.rows, max(1, tokens // written.max_new_tokens)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    trained = EagleTrainConfig()
    mine = model.fingerprint.to_dict()
    probes, heads = own("probe", model.name, mine), own("eagle", model.name, mine)
    store, text = root / CAPTURES, root / TEXT
    with bar("measuring how fast it is"):
        plan = make_plan(model, limit, captured, written, trained, passes if head else 0, root, heads)
    notes.print(plan.told(root, probes.parent), markup=False)
    plan.check(root)
    del model  # the stages load it again, one at a time

    found: dict[str, Any] = {"target": target, "folder": str(root), "plan": asdict(plan)}
    found["capture"] = run(capture, store, captured, loading, RayConfig(), target=target, limit=limit)
    found["probe"] = fitted(store, probes) or run(probe, store, TrainConfig(), StudyConfig())
    if head:
        found["text"] = run(write, text, written, loading, target=target)
        settings = for_text(text, trained, passes)
        found["head"] = run(eagle, [text], settings, loading, target=target)
    found["seconds"] = round(perf_counter() - began, 1)
    if json:
        as_json(found)
        return
    for line in summary(found):
        out.print(line, markup=False, soft_wrap=True)


def run(command: Callable[..., None], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Another command, as if it were given with --json: what it would print. Its progress is shown."""
    with redirect_stdout(io.StringIO()) as printed:
        command(*arguments, json=True, **options)
    found: dict[str, Any] = json_.loads(printed.getvalue())
    return found


def sites(target: Target) -> tuple[str, ...]:
    """Sites for the probe: the residual stream between attention and MLP at some depths, where blocks have such a
    place, and the block boundaries there, of which the serving probe is made."""
    blocks = sorted({int(target.blocks * depth) for depth in DEPTHS})
    inner = [k for k in blocks if "resid_mid" in target.structure.layouts[k].places]
    return (*(f"resid_mid.{k}" for k in inner), *(f"resid_post.{k}" for k in blocks))


def fitted(store: Path, folder: Path) -> dict[str, Any] | None:
    """The result of the probes in `folder`, if they were fitted to exactly this store."""
    from activations.store import CaptureStore
    from probes.rows import manifest_hash

    try:
        result: dict[str, Any] = json_.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        there = all((folder / name / "config.json").is_file() for name in result["probes"])
        if there and result["store"] == manifest_hash(CaptureStore.open(store)):
            return {"folder": str(folder), **result}
    except (OSError, ValueError, KeyError):
        pass
    return None


def for_text(text: Path, config: EagleTrainConfig, passes: int) -> EagleTrainConfig:
    """The training's settings for so many passes over a store, of which a tenth of the first shard is held out."""
    written = shards(text)
    held_out = min(config.validation_documents, max(1, len(written[0]["documents"]) // 10))
    return replace(config, tokens=passes * sum(s["rows"] for s in written), validation_documents=held_out)


def shards(store: Path) -> list[dict[str, Any]]:
    """What a store's manifest says about its shards; none where there is no store yet."""
    from activations.store import CaptureStore

    return CaptureStore.open(store).shards if (store / "manifest.json").is_file() else []


def rows_trained(head: Path) -> int:
    """How many rows a head was trained on so far."""
    try:
        return int(json_.loads((head / "run" / "state.json").read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError):
        return 0


@dataclass(frozen=True)
class Plan:
    """About what will be written, and how long it takes from here on."""

    capture_bytes: int
    """At most."""
    capture_seconds: float
    text_bytes: int = 0
    text_seconds: float = 0.0
    head_bytes: int = 0
    """The head and the state of its training."""
    head_seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return self.capture_bytes + self.text_bytes + self.head_bytes

    def told(self, root: Path, artifacts: Path) -> str:
        """For people."""
        parts = [("captures for the probe", self.capture_bytes, self.capture_seconds)]
        if self.head_bytes:
            parts.append(("text for the head", self.text_bytes, self.text_seconds))
            parts.append(("the head, and the state of its training", self.head_bytes, self.head_seconds))
        lines = [f"  {what}: {_size(size)}, about {_time(seconds)}" for what, size, seconds in parts]
        return (
            f"About {_size(self.bytes)} go to {root} and {artifacts}, and it takes about "
            f"{_time(self.capture_seconds + self.text_seconds + self.head_seconds)} from here on:\n"
            + "\n".join(lines)
            + "\nIt may be interrupted at any time: the same command goes on."
        )

    def check(self, root: Path) -> None:
        """Raise StoreError if the disk cannot hold it; what is there already is counted as if it were not."""
        from activations.store import check_space

        done = sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) if root.is_dir() else 0
        check_space(root, max(0, self.bytes - done), "a lower --limit or --tokens, or --no-head")


def make_plan(
    target: Target,
    limit: int,
    captured: CaptureConfig,
    written: SelfTextConfig,
    trained: EagleTrainConfig,
    passes: int,
    root: Path,
    heads: Path,
) -> Plan:
    """Sizes by count, times by a few seconds of the work itself and by what `root` and `heads` hold already; no
    passes for no head. Raises UsageError where none can be made."""
    from activations.capture import estimate_bytes
    from activations.corpus import load_corpus, spread
    from activations.sites import eagle_sites
    from activations.store import ROW_BYTES

    prompts = load_corpus()
    prompts = spread(prompts, limit) if 0 < limit < len(prompts) else prompts
    read, write_ = speeds(target)
    answers = len(prompts) * captured.max_new_tokens
    asked = sum(len(target.encode_messages(p.messages)) for p in prompts)
    captured_seconds = answers / write_ + (answers + 2 * asked) / read
    left = 1 - min(1.0, sum(len(s["documents"]) for s in shards(root / CAPTURES)) / len(prompts))
    plan = Plan(estimate_bytes(target, prompts, captured), captured_seconds * left)
    if not passes:
        return plan
    try:
        rows_a_second, parameters = head_speed(target, trained)
        count = len(eagle_sites(target.blocks)) + 1
    except ValueError as error:
        raise UsageError(f"no head can be made for {target.name} ({error}): use --no-head") from error
    rows = (written.tokens + written.max_new_tokens) * 3 // 2  # one text too many, and the prompts are kept, too
    left = 1 - min(1.0, sum(s["written"] for s in shards(root / TEXT)) / written.tokens)
    to_train = max(0, passes * rows - rows_trained(heads))
    return replace(
        plan,
        text_bytes=rows * (count * target.width * target.dtype.itemsize + ROW_BYTES),
        head_bytes=parameters * (3 * 4 + 2),
        text_seconds=written.tokens * left / write_,
        head_seconds=to_train / rows_a_second,
    )


def speeds(target: Target, length: int = 64, steps: int = 6) -> tuple[float, float]:
    """Tokens that the target reads, and writes in parallel, in a second."""
    import torch

    from activations.cache import KVCache
    from activations.generation import Request, complete

    length = min(length, target.max_length - steps - 1)
    draw = torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(2):  # the first time warms up
        began = perf_counter()
        target.hidden(torch.tensor([draw], device=target.device), KVCache(1, capacity=length))
        read = perf_counter() - began
    requests = [Request(number, draw, steps) for number in range(PARALLEL)]
    began = perf_counter()
    made = sum(len(c.tokens) for c in complete(target, requests, PARALLEL))
    return length / read, made / (perf_counter() - began)


def head_speed(target: Target, config: EagleTrainConfig, rows: int = 512) -> tuple[float, int]:
    """Rows a second that a head for the target is trained on, and how many parameters it has."""
    import torch

    from decoding.eagle.training import Batch, initial_head, loss_of, unroll

    tokens = torch.arange(min(config.draft_vocabulary, target.vocab_size))
    head = initial_head(target, tokens)
    shape = (max(1, rows // 256), min(rows, 256))
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        torch.randn(*shape, 3 * target.width, generator=generator).to(target.dtype),
        torch.randint(len(tokens), shape, generator=generator),
        torch.randn(*shape, target.width, generator=generator).to(target.dtype),
        torch.ones(shape, dtype=torch.bool),
    )
    began = perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(unroll(head, target, batch, config.steps, config.unrolled_share, generator), config.decay)
    loss.backward()
    return rows / (perf_counter() - began), sum(p.numel() for p in head.parameters())


def summary(found: dict[str, Any]) -> list[str]:
    """What was made, a line each."""
    probe_, lines = found["probe"], []
    lines.append(f"{found['capture']['documents']} answers, {found['capture']['rows']} anchors captured")
    best = probe_["probes"]["best"]
    areas = {
        WHERE[scope]: Interval(**{name: nan if value is None else value for name, value in e["roc_auc"].items()})
        for scope, e in probe_["evaluations"]["best"].items()
    }
    told = ", ".join(f"{area:.3f} {where}" for where, area in areas.items())
    lines.append(f"probe: {best['site']}, AUC on prompts it never saw {told}: {probe_['folder']}")
    if not all(area.lower > 0.5 for area in areas.values()):
        lines.append(
            "This probe is not shown to be better than chance: capture more, with a higher --limit and --out, and "
            "until then decode with --gate match"
        )
    if "head" in found:
        made = found["head"]
        lines.append(f"{found['text']['documents']} texts, {found['text']['tokens']} tokens written")
        lines.append(f"head: loss {made['loss']:.2f}, agreement by draft step {made['agreement']}: {made['folder']}")
    neural = "" if "head" in found else " --neural none"
    lines.append(f"Captures and text can go now: {found['folder']}")
    lines.append(f"Next: switchsd generate --target {found['target']}{neural}")
    return lines


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{max(1, round(count / 2**20))} MiB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
