"""`switchsd simulate`: what overlapping two batches (mode `minedraft`) would bring, before it is tried."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from decoding.costs import CostTable
from decoding.minedraft.roofline import HARDWARE, MODELS, ModelSize, Roofline, devices_for, weights_gb
from decoding.minedraft.simulator import Comparison, Curves, FromCosts, Measured, Times, Workload, compare
from switchsd.options import UsageError
from switchsd.show import AsJson, as_json, notes, out, table

MOST = 100_000
"""Requests in a batch and drafted tokens, at most."""
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9
NEEDS = {
    "target_size": "hardware",
    "draft_size": "hardware",
    "devices": "hardware",
    "context": "hardware or costs",
    "drafter": "costs",
}
"""Options and the sources of times that they belong to."""
LEGEND = (
    "m = requests in each of the two batches, k = drafted tokens of each; t, V = ms to draft, to verify; "
    "plain = one batch of 2m, overlapped = two of m; gain = overlapped / plain throughput at the same k, simulated: "
    "above 1 is faster; closed form = the same with full batches all the time; "
    "efficiency = (t + V) / half-step as simulated, of that of full batches at best"
)


@dataclass(frozen=True)
class GridConfig:
    """Where both systems are compared."""

    batch: tuple[int, ...] = (2, 4, 8, 16)
    """Requests in each of the two batches; plain decoding gets twice as many in its one batch."""
    draft_tokens: tuple[int, ...] = (1, 2, 4, 8)
    """Lengths of the draft chain."""
    rho: float = 0.0
    """Contention: an overlapped half-step takes 1 + rho times as long."""

    def __post_init__(self) -> None:
        for name in ("batch", "draft_tokens"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {values}; it must be whole numbers, 1 or more")
            if max(values) > MOST:
                raise ValueError(f"--{name.replace('_', '-')} is {values}; more than {MOST} is not simulated")
        if not 0 <= self.rho < 100:
            raise ValueError(f"--rho is {self.rho}; it must be 0 (none) or a little above it")


def simulate(
    grid: GridConfig,
    work: Workload,
    hardware: Annotated[
        str | None, typer.Option(help=f"Times from published figures of a device: {', '.join(HARDWARE)}.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help=f"With --hardware: {', '.join(MODELS)}.", show_default="8b")
    ] = None,
    draft_size: Annotated[
        str | None, typer.Option(help="With --hardware: the draft model, of the same list.", show_default="1b")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="With --hardware: devices that the target is spread over; 0 = as few as hold it.", show_default="0"
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="The drafter shares the target's device, so that the halves take turns.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="With --hardware or --costs: tokens in each request's cache.", show_default="512"),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Times from a costs.json: switchsd profile --out costs.json.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="With --costs: whose draft times: eagle or draft.", show_default="eagle"),
    ] = None,
    verify_ms: Annotated[
        str | None,
        typer.Option(help="Times to verify, as JSON or a file of it: {tokens: ms} or {requests: {draft tokens: ms}}."),
    ] = None,
    draft_ms: Annotated[
        str | None,
        typer.Option(help="Times to draft, likewise: {requests: ms a token} or {requests: {draft tokens: ms}}."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Simulate MineDraft: two batches, one drafted for while the other is verified, beside plain speculative decoding
    with the same requests in one batch. Says what the overlapping gains, and why it does or does not."""
    given = {"target_size": target_size, "draft_size": draft_size, "devices": devices, "context": context}
    source = _source(given | {"drafter": drafter}, hardware, costs, verify_ms, draft_ms)
    context = 512 if context is None else context
    if context < 0:
        raise UsageError(f"--context is {context}; it must be 0 or more")
    times: Times
    if hardware is not None:
        times = _roofline(hardware, target_size or "8b", draft_size or "1b", devices or 0, context, shared, grid.rho)
        about = _about(times)
    elif costs is not None:
        times = _from_costs(costs, drafter or "eagle", context, grid.rho, shared)
        about = _about_costs(costs, times)
    else:
        times = _from_curves(verify_ms, draft_ms, grid.rho, shared)
        about = "Times: " + ", ".join(
            f"--{name} {'as given' if _is_json(text) else text}"
            for name, text in (("verify-ms", verify_ms or ""), ("draft-ms", draft_ms or ""))
        )
    about += f". Assumed: {_assumed(source, shared, grid.rho)}."
    warned = _warnings(times, grid)
    found = [compare(times, work, m, k) for m in grid.batch for k in grid.draft_tokens]
    if json:
        rows = [_row(one) for one in found]
        as_json(
            {
                "grid": asdict(grid),
                "work": asdict(work),
                "about": about,
                "notes": warned,
                "summary": _summary(found),
                "rows": rows,
            }
        )
        return
    for line in (about, *warned):
        notes.print(line)
    out.print(
        table(
            ["m", "k", "t(m)", "V(m)", "t(2m)", "V(2m)", "plain tok/s", "overlapped", "gain", "closed form",
             "efficiency", "target idle", "drafter idle"],
            [_cells(one) for one in found],
            title=f"{work.requests} requests, {work.per_step(grid.draft_tokens[-1]):.2f} tokens a step at "
            f"k={grid.draft_tokens[-1]}; ms",
        )
    )  # fmt: skip
    out.print(LEGEND, soft_wrap=True)
    out.print(_summary(found), soft_wrap=True)
    for line in _verdicts(found):
        out.print(line, soft_wrap=True)


def _source(
    given: Mapping[str, object], hardware: str | None, costs: Path | None, verify_ms: str | None, draft_ms: str | None
) -> str:
    """The source of times, one of hardware, costs and curves. Raises UsageError on none, several, or an option that
    belongs to another one."""
    named = {"hardware": hardware, "costs": costs, "curves": verify_ms if verify_ms is not None else draft_ms}
    sources = [name for name, value in named.items() if value is not None]
    if len(sources) != 1:
        raise UsageError(
            "name one source of times: --hardware (published figures), --costs costs.json (measured before with "
            "`switchsd profile --out costs.json`), or --verify-ms and --draft-ms (your own)"
        )
    for name, owner in NEEDS.items():
        if given[name] is not None and sources[0] not in owner.split(" or "):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {given[name]}; it is for --{owner.replace(' or ', ' or --')}: leave it out")
    return sources[0]


def _assumed(source: str, shared: bool, rho: float) -> str:
    """Where the drafter works, and how the halves of an overlapped half-step hinder each other."""
    if shared and source == "hardware":
        told = "the drafter on the target's devices, where the bytes and operations of both add up"
    elif shared:
        told = "the drafter on the target's device, where both take turns (an overlapped half-step takes t + V)"
    else:
        told = f"the drafter on a device of its own{'' if source == 'hardware' else ', as fast as in these times'}"
    told += f", overlapped half-steps {1 + rho:g} times as long" if rho else ", no further contention"
    others = [option for option, on in (("--shared", shared), ("--rho", rho)) if not on]
    return told + (f" (otherwise: {', '.join(others)})" if others else "")


def _warnings(times: Times, grid: GridConfig) -> list[str]:
    """What the times leave in doubt."""
    rows = [n for m in grid.batch for n in (m, 2 * m)]
    told = []
    if beyond := times.extrapolated(rows, grid.draft_tokens):
        told.append(f"note: times are extrapolated for {', '.join(beyond)}; measure there before you rely on them")
    if isinstance(times, Roofline):
        caches = max(rows) * times.context * times.target.kv_bytes / 1e9
        held = weights_gb(*_on_target(times)) + caches
        there = times.devices * times.hardware.memory
        if held > there:
            told.append(
                f"note: weights and caches of {max(rows)} requests of {times.context} tokens take {held:.0f} GB, "
                f"{times.devices} x {times.hardware.name} have {there:.0f} GB: more --devices, or a smaller --batch"
            )
    return told


def _summary(found: list[Comparison]) -> str:
    """Where overlapping is best, and whether plain decoding with another k would be faster still."""
    best = max(found, key=lambda one: one.gain)
    where = f"m={best.m}, k={best.k}, gain {best.gain:.3f}"
    paying = sum(one.outcome == "gains" for one in found)
    if not paying:
        return f"overlapping never pays here (the best: {where})"
    told = f"best: {where}; overlapping gains in {paying} of {len(found)}"
    plain = max((one for one in found if one.m == best.m), key=lambda one: one.sd.tokens_per_second)
    if plain.sd.tokens_per_second > best.psd.tokens_per_second:
        told += (
            f"; but plain decoding of the same requests is faster still with k={plain.k}: "
            f"{plain.sd.tokens_per_second:.1f} against {best.psd.tokens_per_second:.1f} tok/s"
        )
    return told


def _verdicts(found: list[Comparison]) -> list[str]:
    """One line for each outcome and reason, and where it holds."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.outcome, one.why), []).append(one)
    return [
        f"{outcome}{_size(group)} at {'every m and k' if group == found else _places(group)}: {why}"
        for (outcome, why), group in groups.items()
    ]


def _size(group: list[Comparison]) -> str:
    if group[0].outcome == "gains nothing":
        return ""
    low, high = (f"{100 * value:.2g}" for value in (f([abs(o.gain - 1) for o in group]) for f in (min, max)))
    return f" {low} %" if low == high else f" {low} to {high} %"


def _places(group: list[Comparison]) -> str:
    """`m=2,4 k=1,2; m=8 k=1`."""
    by_m: dict[int, list[str]] = {}
    for one in group:
        by_m.setdefault(one.m, []).append(str(one.k))
    by_k: dict[str, list[str]] = {}
    for m, ks in by_m.items():
        by_k.setdefault(",".join(ks), []).append(str(m))
    return "; ".join(f"m={','.join(ms)} k={ks}" for ks, ms in by_k.items())


def _cells(one: Comparison) -> list[str]:
    efficiency = "" if one.psd.efficiency is None else f"{one.psd.efficiency:.2f} of {one.ideal_efficiency:.2f}"
    return [
        *map(str, (one.m, one.k)),
        *(f"{ms:.3g}" for ms in (one.draft_ms, one.verify_ms, one.draft_all_ms, one.verify_all_ms)),
        f"{one.sd.tokens_per_second:.1f}",
        f"{one.psd.tokens_per_second:.1f}",
        f"{one.gain:.3f}",
        f"{one.closed_form:.3f}",
        efficiency,
        f"{one.psd.target_idle:.0%}",
        f"{one.psd.drafter_idle:.0%}",
    ]


def _row(one: Comparison) -> dict[str, Any]:
    row = {name: getattr(one, name) for name in ("m", "k", "draft_ms", "verify_ms", "draft_all_ms", "verify_all_ms")}
    row |= {
        name: getattr(one, name)
        for name in ("step_ms", "gain", "closed_form", "ideal_efficiency", "outcome", "why", "verdict")
    }
    for name, run in (("sd", one.sd), ("psd", one.psd)):
        row[name] = {
            key: getattr(run, key)
            for key in ("tokens_per_second", "target_idle", "drafter_idle", "latency_ms", "efficiency", "steps")
        }
    return row


def _roofline(hardware: str, target: str, draft: str, devices: int, context: int, shared: bool, rho: float) -> Roofline:
    if hardware not in HARDWARE:
        raise UsageError(
            f"unknown hardware {hardware!r}: use {', '.join(HARDWARE)}, or measure it: "
            "`switchsd profile --out costs.json`, then --costs costs.json"
        )
    for name in (target, draft):
        if name not in MODELS:
            raise UsageError(f"unknown model size {name!r}: use {', '.join(MODELS)}")
    if devices < 0:
        raise UsageError(f"--devices is {devices}; it must be 0 (as few as hold the target) or more")
    device, model, drafter = HARDWARE[hardware], MODELS[target], MODELS[draft]
    if not shared and weights_gb(drafter) > device.memory:
        raise UsageError(
            f"--draft-size {draft}: its weights take {weights_gb(drafter):.0f} GB, its device, one {hardware}, "
            f"has {device.memory:.0f} GB: take a smaller draft model"
        )
    made = Roofline(device, model, drafter, context, devices, shared, rho)
    if not devices:
        return replace(made, devices=devices_for(device, *_on_target(made)))
    needed = weights_gb(*_on_target(made))
    if needed > devices * device.memory:
        raise UsageError(
            f"--devices is {devices}: the weights of {' and '.join(m.name for m in _on_target(made))} take "
            f"{needed:.0f} GB, {devices} x {hardware} have {devices * device.memory:.0f} GB: "
            f"{math.ceil(needed / device.memory)} devices hold them (0: as few as leave room for caches)"
        )
    return made


def _on_target(times: Roofline) -> list[ModelSize]:
    """The models on the target's devices."""
    return [times.target, times.draft_model] if times.shared else [times.target]


def _about(times: Roofline) -> str:
    return (
        f"{times.target.name} target on {times.devices} x {times.hardware.name}, "
        f"{times.draft_model.name} drafter, {times.context} tokens in each cache. "
        f"Published figures: {times.hardware.source}; {times.target.source}; {times.draft_model.source}"
    )


def _from_costs(file: Path, drafter: str, context: int, rho: float, shared: bool) -> FromCosts:
    found = CostTable.load(file)
    try:
        _check(found)
    except (ValueError, TypeError, AttributeError) as error:
        again = "make it again: switchsd profile --out costs.json"
        raise UsageError(f"--costs {file} holds no usable times: {error}; {again}") from error
    if drafter not in found.draft_ms:
        there = ", ".join(found.draft_ms) or "no drafter at all"
        raise UsageError(f"{file} has no draft times of {drafter!r}: it has {there}; choose with --drafter")
    return FromCosts(found, drafter, context, rho, shared)


def _check(costs: CostTable) -> None:
    """Raises ValueError, TypeError or AttributeError where the table is not one of times."""
    for name, points in (("widths", costs.widths), ("contexts", costs.contexts)):
        if not points or sorted(set(points)) != points or not all(type(p) is int and p >= 1 for p in points):
            raise ValueError(f"{name} are {points}, not whole numbers that rise")
    if [len(times) for times in costs.verify_ms] != [len(costs.widths)] * len(costs.contexts):
        raise ValueError("verify_ms is not one list for each context, of one time for each width")
    for times in (*costs.verify_ms, *costs.draft_ms.values()):
        if not times:
            raise ValueError("a drafter has no times")
        for ms in times:
            _ms(ms)


def _about_costs(file: Path, times: FromCosts) -> str:
    key = times.costs.key
    name, place = key.get("target", "unknown target"), key.get("machine", "an unknown machine")
    of = "for one request after the other" if times.drafter != "draft" else "for all requests in one forward"
    return (
        f"Times: {file}, {name} on {place}, measured with one request and {times.context} tokens in its cache; "
        f"drafter {times.drafter}, which drafts {of}"
    )


def _from_curves(verify: str | None, draft: str | None, rho: float, shared: bool) -> Times:
    if verify is None or draft is None:
        missing = "--verify-ms" if verify is None else "--draft-ms"
        raise UsageError(f"{missing} is missing: give both")
    drafts, verifications = _read(draft, "--draft-ms"), _read(verify, "--verify-ms")
    nested = [isinstance(next(iter(found.values())), dict) for found in (drafts, verifications)]
    if any(nested) != all(nested):
        raise UsageError("--verify-ms and --draft-ms must both be curves, or both be {requests: {draft tokens: ms}}")
    if all(nested):
        return Measured(drafts, verifications, rho, shared)
    return Curves(drafts, verifications, rho, shared)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith(("{", "["))


def _read(text: str, option: str) -> dict[int, Any]:
    """A curve {x: ms} or a table {m: {k: ms}}, from JSON or a file of it. Raises UsageError."""
    try:
        if not _is_json(text):
            text = Path(text).read_text(encoding="utf-8")
        return _numbers(json_module.loads(text))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f'{option} cannot be read ({error}): give JSON such as {{"1": 40, "16": 61}}, or a file of it'
        ) from error


def _numbers(found: Any, depth: int = 2) -> dict[int, Any]:
    made: dict[int, Any] = {}
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__} where {{number: ms}} belongs")
    for key, value in found.items():
        if isinstance(value, dict) and depth == 1:
            raise ValueError("tables three deep; {requests: {draft tokens: ms}} is two")
        made[int(key)] = _numbers(value, depth - 1) if isinstance(value, dict) else _ms(value)
    if not made or min(made) < 1 or max(made) > 1e9:
        raise ValueError("every key is a number of tokens or requests, 1 or more")
    if len({isinstance(v, dict) for v in made.values()}) > 1:
        raise ValueError("times and tables stand side by side")
    return made


def _ms(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not SHORTEST_MS <= value <= LONGEST_MS:
        raise ValueError(f"{value!r} ms is no time: it must be a number from {SHORTEST_MS:g} to {LONGEST_MS:g}")
    return float(value)
