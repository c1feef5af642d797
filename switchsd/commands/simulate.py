"""`switchsd simulate`: what overlapping two batches (MineDraft) would bring, before it is tried."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from decoding.costs import CostTable
from decoding.minedraft.roofline import HARDWARE, MODELS, Roofline, devices_for
from decoding.minedraft.simulator import Comparison, Curves, FromCosts, Measured, Times, Workload, compare
from switchsd.options import UsageError
from switchsd.show import AsJson, as_json, notes, out, table


@dataclass(frozen=True)
class GridConfig:
    """Where both systems are compared."""

    batch: tuple[int, ...] = (2, 4, 8, 16)
    """Requests in each of the two batches; plain decoding gets twice as many in its one batch."""
    draft_tokens: tuple[int, ...] = (1, 2, 4, 8)
    """Lengths of the draft chain."""
    rho: float = 0.0
    """Contention: an overlapped half-step takes 1 + rho times the longer of its halves."""

    def __post_init__(self) -> None:
        for name in ("batch", "draft_tokens"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {values}; it must be whole numbers, 1 or more")
        if not 0 <= self.rho < 100:
            raise ValueError(f"--rho is {self.rho}; it must be 0 (none) or a little above it")


def simulate(
    grid: GridConfig,
    work: Workload,
    hardware: Annotated[
        str | None, typer.Option(help=f"Times from published figures of a device: {', '.join(HARDWARE)}.")
    ] = None,
    target_size: Annotated[str, typer.Option(help=f"With --hardware: {', '.join(MODELS)}.")] = "8b",
    draft_size: Annotated[str, typer.Option(help="With --hardware: the draft model, of the same list.")] = "1b",
    devices: Annotated[
        int, typer.Option(help="With --hardware: devices that the target is spread over; 0 = as few as hold it.")
    ] = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="With --hardware: the drafter shares the target's device.")
    ] = False,
    context: Annotated[int, typer.Option(help="Tokens in each request's cache.")] = 512,
    costs: Annotated[Path | None, typer.Option(help="Times from a costs.json (switchsd profile).")] = None,
    drafter: Annotated[str, typer.Option(help="With --costs: whose draft times: eagle or draft.")] = "eagle",
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
    """Simulate plain speculative decoding beside two batches that overlap, with the same requests at a time."""
    if context < 0:
        raise UsageError(f"--context is {context}; it must be 0 or more")
    sources = [hardware is not None, costs is not None, verify_ms is not None or draft_ms is not None]
    if sum(sources) != 1:
        raise UsageError("name one source of times: --hardware, --costs, or --verify-ms and --draft-ms")
    notice = ""
    times: Times
    if hardware is not None:
        times = _roofline(hardware, target_size, draft_size, devices, context, shared, grid.rho)
        notice = _about(times)
    elif costs is not None:
        times = _from_costs(costs, drafter, context, grid.rho)
    else:
        times = _from_curves(verify_ms, draft_ms, grid.rho)
    found = [compare(times, work, m, k) for m in grid.batch for k in grid.draft_tokens]
    if json:
        as_json({"grid": asdict(grid), "work": asdict(work), "about": notice, "rows": [_row(one) for one in found]})
        return
    if notice:
        notes.print(notice)
    out.print(
        table(
            ["m", "k", "t(m)", "V(m)", "t(2m)", "V(2m)", "plain tok/s", "overlapped", "gain", "closed form",
             "efficiency", "target idle", "drafter idle"],
            [_cells(one) for one in found],
            title=f"{work.requests} requests, {work.per_step(grid.draft_tokens[-1]):.2f} tokens a step at "
            f"k={grid.draft_tokens[-1]}; ms",
        )
    )  # fmt: skip
    for one in found:
        out.print(f"m={one.m} k={one.k}: {one.verdict}")


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
    row |= {name: getattr(one, name) for name in ("step_ms", "gain", "closed_form", "ideal_efficiency", "verdict")}
    for name, run in (("sd", one.sd), ("psd", one.psd)):
        row[name] = {
            key: getattr(run, key)
            for key in ("tokens_per_second", "target_idle", "drafter_idle", "latency_ms", "efficiency", "steps")
        }
    return row


def _roofline(hardware: str, target: str, draft: str, devices: int, context: int, shared: bool, rho: float) -> Roofline:
    if hardware not in HARDWARE:
        raise UsageError(f"unknown hardware {hardware!r}: use {', '.join(HARDWARE)}")
    for name in (target, draft):
        if name not in MODELS:
            raise UsageError(f"unknown model size {name!r}: use {', '.join(MODELS)}")
    if devices < 0:
        raise UsageError(f"--devices is {devices}; it must be 0 (as few as hold the target) or more")
    device, model = HARDWARE[hardware], MODELS[target]
    return Roofline(device, model, MODELS[draft], context, devices or devices_for(model, device), shared, rho)


def _about(times: Roofline) -> str:
    where = "on the same device" if times.shared else "on a device of its own"
    return (
        f"{times.target.name} target on {times.devices} x {times.hardware.name}, "
        f"{times.draft_model.name} drafter {where}. "
        f"Published figures: {times.hardware.source}; {times.target.source}; {times.draft_model.source}."
    )


def _from_costs(file: Path, drafter: str, context: int, rho: float) -> FromCosts:
    found = CostTable.load(file)
    if drafter not in found.draft_ms:
        there = ", ".join(found.draft_ms) or "no drafter at all"
        raise UsageError(f"{file} has no draft times of {drafter!r}: it has {there}")
    return FromCosts(found, drafter, context, rho)


def _from_curves(verify: str | None, draft: str | None, rho: float) -> Times:
    if verify is None or draft is None:
        missing = "--verify-ms" if verify is None else "--draft-ms"
        raise UsageError(f"{missing} is missing: give both")
    drafts, verifications = _read(draft, "--draft-ms"), _read(verify, "--verify-ms")
    nested = [isinstance(next(iter(found.values())), dict) for found in (drafts, verifications)]
    if any(nested) != all(nested):
        raise UsageError("--verify-ms and --draft-ms must both be curves, or both be {requests: {draft tokens: ms}}")
    return Measured(drafts, verifications, rho) if all(nested) else Curves(drafts, verifications, rho)


def _read(text: str, option: str) -> dict[int, Any]:
    """A curve {x: ms} or a table {m: {k: ms}}, from JSON or a file of it. Raises UsageError."""
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        return _numbers(json_module.loads(text))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f'{option} cannot be read ({error}): give JSON such as {{"1": 40, "16": 61}}, or a file of it'
        ) from error


def _numbers(found: Any) -> dict[int, Any]:
    made: dict[int, Any] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            made[int(key)] = _numbers(value)
        elif float(value) > 0:
            made[int(key)] = float(value)
        else:
            raise ValueError(f"{value} ms is no time")
    if not made or min(made) < 1:
        raise ValueError("every key is a number of tokens or requests, 1 or more")
    if len({isinstance(v, dict) for v in made.values()}) > 1:
        raise ValueError("times and tables stand side by side")
    return made
