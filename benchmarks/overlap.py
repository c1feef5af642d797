"""Two batches that overlap (MineDraft) beside plain speculative decoding, with the same requests at a time.

    python -m benchmarks.overlap --out FOLDER            the whole grid; the same command again goes on
    python -m benchmarks.overlap --out FOLDER --quick    a few cells, to see that it runs

Systems, all of them on the same prompts, interleaved, drafts of k tokens:

    sd          one batch of 2m; the drafter has a process and a core of its own, the target the other core
    minedraft   two batches of m; processes and cores as for sd
    sd-here     one batch of 2m; both in one process, with all cores for both halves

For one cell sd with m requests is measured, too: t(m) and V(m), each alone. What is measured is a window of whole steps
in which all requests run, after a few that do not count. Prompts are cut to --context tokens. Drafters: cut:BLOCKS (the
target cut to so many blocks, untrained: its time counts, its drafts are poor), draft:FOLDER (made by `switchsd train
draft`), eagle, copy. The tables of t(m) and V(m) are written as files that `switchsd simulate --draft-ms FILE
--verify-ms FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from activations.corpus import load_corpus, spread
from activations.target import Target, load_target
from decoding.budgets import FixedBudget
from decoding.costs import machine
from decoding.drafters import CopyDrafter, Drafter
from decoding.engine import Asked, Commit, Draft, Engine
from decoding.gates import Always, Choice
from decoding.minedraft.remote import RemoteDrafter
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.minedraft.worker import DrafterSpec
from decoding.modes import Plan
from decoding.request import Request
from decoding.scheduler import Scheduler, SequentialScheduler
from switchsd.loading import first_fitting

TARGET_CORE, DRAFTER_CORE = 0, 1
SYSTEMS = ("sd", "minedraft", "sd-here")
TIMES = ("t_m", "v_m", "t_2m", "v_2m", "t_contended", "v_contended", "sd_step_ms", "half_step_ms")
WARM_UP = 2
"""Steps that do not count."""


class TimedEngine(Engine):
    """Says how long its halves took, and for how many rows."""

    spent: dict[str, float]

    def begin(self, requests: Sequence[Request] | None = None) -> Asked:
        began = perf_counter()
        asked = super().begin(requests)
        self.spent = {"drafted": len(asked.rows), "begin": (perf_counter() - began) * 1e3, "verified": 0, "verify": 0.0}
        return asked

    def finish(self, asked: Asked) -> list[Draft]:
        began = perf_counter()
        drafts = super().finish(asked)
        self.spent["finish"] = (perf_counter() - began) * 1e3
        return drafts

    def verify(self, drafts: Sequence[Draft]) -> list[Commit]:
        began = perf_counter()
        commits = super().verify(drafts)
        self.spent["verified"] = len(commits)
        self.spent["verify"] = (perf_counter() - began) * 1e3
        return commits


@dataclass
class Window:
    """What was measured while all requests ran."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Of each (half-)step: milliseconds in all, to draft and to verify, rows of both, and tokens."""
    texts: list[list[int]] = field(default_factory=list)
    """What was generated, the warm-up included."""

    def row(self) -> dict[str, Any]:
        whole = [s for s in self.steps if s["verified"]]
        drafting = [s["draft"] for s in self.steps if s["drafted"]]
        seconds = sum(s["ms"] for s in self.steps) / 1e3
        return {
            "tokens_per_second": sum(s["tokens"] for s in self.steps) / seconds,
            "step_ms": float(np.mean([s["ms"] for s in whole])),
            "draft_ms": float(np.mean(drafting)) if drafting else 0.0,
            "verify_ms": float(np.mean([s["verify"] for s in whole])),
            "per_step": sum(s["tokens"] for s in whole) / sum(s["verified"] for s in whole),
            "steps": len(whole),
            "texts": self.texts,
        }


def window(kind: type[Scheduler], engine: TimedEngine, requests: list[Request], steps: int) -> Window:
    """Run some whole steps of all requests. A half-step counts half."""
    found = Window()
    scheduler = kind(engine)
    halves = 2 if kind is OverlappedScheduler else 1
    drafter = next(iter(engine.plan.drafters))
    step, seen = scheduler._step, [0]

    def timed() -> list[Commit]:
        began = perf_counter()
        commits = step()
        ms = (perf_counter() - began) * 1e3
        seen[0] += 1
        if seen[0] > halves * WARM_UP:
            spent = engine.spent
            elsewhere = isinstance(drafter, RemoteDrafter)
            draft = drafter.spent_ms if elsewhere else spent["begin"] + spent["finish"]
            found.steps.append(
                {"ms": ms, "draft": draft, "verify": spent["verify"], "drafted": spent["drafted"],
                 "verified": spent["verified"], "tokens": sum(len(c.tokens) for c in commits)}
            )  # fmt: skip
        return commits

    scheduler._step = timed  # type: ignore[method-assign]
    running = scheduler.run(iter(requests), lambda commit: bool(commit.cut))
    for _ in running:
        if seen[0] >= halves * (WARM_UP + steps):
            break
    running.close()
    found.texts = [list(r.generated) for r in requests]
    return found


@dataclass
class Machine:
    """Where the parent runs: on one core with one thread, or on all."""

    cores: set[int] = field(default_factory=lambda: os.sched_getaffinity(0))

    def __post_init__(self) -> None:
        if not {TARGET_CORE, DRAFTER_CORE} <= self.cores:
            sys.exit(f"this needs cores {TARGET_CORE} and {DRAFTER_CORE}; there are {sorted(self.cores)}")
        self.threads = len(self.cores)
        torch.set_num_threads(self.threads)
        torch.ones(2048, 2048) @ torch.ones(2048, 2048)  # its threads start while they may run on every core

    def one(self) -> None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {TARGET_CORE})

    def all(self) -> None:
        os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self.threads)


def label(drafter: str) -> str:
    """A drafter's name in the tables: of a folder only its last part."""
    kind, colon, what = drafter.partition(":")
    return f"{kind}{colon}{Path(what).name}"


def drafter_spec(name: str, target: str, dtype: str, folder: Path | None) -> DrafterSpec | None:
    """What the other process is to build; None for copies, which cost nothing anywhere."""
    where: dict[str, Any] = {"target": target, "dtype": dtype, "cores": (DRAFTER_CORE,)}
    if name.startswith("cut:"):
        return DrafterSpec("draft", blocks=int(name.removeprefix("cut:")), **where)
    if name.startswith("draft:"):
        return DrafterSpec("draft", folder=name.removeprefix("draft:"), **where)
    if name == "eagle":
        if folder is None:
            sys.exit(f"there is no EAGLE head for {target}")
        return DrafterSpec("eagle", folder=str(folder), **where)
    if name != "copy":
        sys.exit(f"unknown drafter {name!r}: use cut:BLOCKS, draft:FOLDER, eagle or copy")
    return None


def drafter_here(name: str, target: Target, folder: Path | None) -> Drafter:
    if name == "copy":
        return CopyDrafter()
    if name == "eagle":
        from decoding.eagle.drafter import EagleDrafter
        from decoding.eagle.formats import load_head

        assert folder is not None
        return EagleDrafter(target, load_head(folder, target.vocab_size))
    from decoding.draft.drafter import DraftModelDrafter, drafter_of
    from decoding.draft.model import cut

    kind, _, what = name.partition(":")
    return DraftModelDrafter(target, cut(target, int(what))) if kind == "cut" else drafter_of(what, target)


def plan_for(drafter: Drafter, k: int) -> Plan:
    """Always that drafter: a chain of k, a tree of k levels and 2k nodes from a head."""
    nodes = 2 * k if drafter.name == "eagle" else k
    return Plan(Always(Choice(drafter.name, FixedBudget(nodes, k))), (drafter,))


def measure(given: argparse.Namespace, rows: list[dict[str, Any]], file: Path) -> None:
    """Every cell that has no row yet, one round of the whole grid after the other."""
    place, target = Machine(), load_target(given.target, dtype=given.dtype)
    folder = first_fitting("eagle", target)
    done = {key(row) for row in rows}
    prompts = [target.encode_messages(p.messages)[-given.context :] for p in spread(load_corpus("validation"), 64)]
    with file.open("a", encoding="utf-8") as out:
        for name in given.drafters:
            spec, here = drafter_spec(name, given.target, given.dtype, folder), drafter_here(name, target, folder)
            there = here if spec is None else RemoteDrafter(spec)
            for number in range(given.rounds):
                for m in given.m:
                    for k in given.k:
                        cells = [(s, 2 * m) for s in SYSTEMS if s != "sd-here" or not given.no_here]
                        if m == min(given.m) or m // 2 not in given.m:
                            cells.append(("sd", m))  # else it is another cell's 2m
                        turn = number % len(cells)
                        for system, count in cells[turn:] + cells[:turn]:
                            cell = {"drafter": label(name), "system": system, "rows": count, "k": k, "round": number}
                            if key(cell) in done:
                                continue
                            place.all() if system == "sd-here" else place.one()
                            plan = plan_for(here if system == "sd-here" else there, k)
                            engine = TimedEngine(target, plan, count)
                            requests = [Request(i, prompts[i], max_new_tokens=10_000) for i in range(count)]
                            kind = OverlappedScheduler if system == "minedraft" else SequentialScheduler
                            load = os.getloadavg()[0]
                            try:
                                found = window(kind, engine, requests, given.steps).row()
                            finally:
                                engine.close()
                            rows.append({**cell, **found, "load": load})
                            done.add(key(cell))
                            out.write(json.dumps(rows[-1]) + "\n")
                            out.flush()
                            print({k: v for k, v in rows[-1].items() if k != "texts"}, flush=True)
            if isinstance(there, RemoteDrafter):
                there.shut_down()


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("drafter", "system", "rows", "k", "round"))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and a bootstrap 95 % interval over rounds."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(np.mean(values)), float(low), float(high)


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a cell (drafter, m, k): times alone and overlapped, gains measured beside predicted."""
    by_key = {key(row): row for row in rows}
    cells = sorted({(r["drafter"], r["rows"] // 2, r["k"]) for r in by_key.values() if r["system"] == "minedraft"})
    out = []
    for name, m, k in cells:
        rounds = [
            n
            for n in sorted({r["round"] for r in by_key.values()})
            if all((name, s, c, k, n) in by_key for s, c in (("sd", m), ("sd", 2 * m), ("minedraft", 2 * m)))
        ]
        if not rounds:
            continue
        found: dict[str, list[float]] = {}
        same = requests = 0
        for n in rounds:
            one, both = by_key[name, "sd", m, k, n], by_key[name, "sd", 2 * m, k, n]
            mine, here = by_key[name, "minedraft", 2 * m, k, n], by_key.get((name, "sd-here", 2 * m, k, n))
            t, v = one["draft_ms"], one["verify_ms"]
            values = {
                "t_m": t, "v_m": v, "t_2m": both["draft_ms"], "v_2m": both["verify_ms"],
                "t_contended": mine["draft_ms"], "v_contended": mine["verify_ms"],
                "sd_step_ms": both["step_ms"], "half_step_ms": mine["step_ms"],
                "efficiency": (t + v) / mine["step_ms"], "ideal_efficiency": (t + v) / max(t, v),
                "rho": mine["step_ms"] / max(t, v) - 1,
                "gain": mine["tokens_per_second"] / both["tokens_per_second"],
                "predicted": (both["draft_ms"] + both["verify_ms"]) / (2 * max(t, v)),
                "step_gain": both["step_ms"] / (2 * mine["step_ms"]),
                "tokens_per_second": mine["tokens_per_second"],
            }  # fmt: skip
            if here is not None:
                values["gain_over_here"] = mine["tokens_per_second"] / here["tokens_per_second"]
            for what, value in values.items():
                found.setdefault(what, []).append(value)
            for a, b in zip(both["texts"], mine["texts"], strict=True):
                same += a[: len(b)] == b[: len(a)]
                requests += 1
        record: dict[str, Any] = {"drafter": name, "m": m, "k": k, "rounds": len(rounds)}
        record |= {what: interval(values) for what, values in found.items()}
        out.append({**record, "same_texts": same, "texts": requests})
    return out


def tables(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[int, dict[int, float]]]]:
    """Drafter -> draft_ms and verify_ms, {rows: {k: ms}}: medians of what plain decoding took alone."""
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for row in rows:
        if row["system"] == "sd":
            for what in ("draft_ms", "verify_ms"):
                found.setdefault((row["drafter"], what, row["rows"], row["k"]), []).append(row[what])
    made: dict[str, dict[str, dict[int, dict[int, float]]]] = {}
    for (name, what, count, k), values in sorted(found.items()):
        made.setdefault(name, {}).setdefault(what, {}).setdefault(count, {})[k] = float(np.median(values))
    return made


def markdown(records: Sequence[dict[str, Any]]) -> str:
    heads = ("drafter", "m", "k", "t(m)", "V(m)", "t(2m)", "V(2m)", "t overlapped", "V overlapped", "sd step",
             "half-step", "(t+V)/step", "ideal",
             "rho", "gain over sd", "predicted", "gain by steps", "gain over sd-here", "same texts")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for r in records:
        cells = [r["drafter"], str(r["m"]), str(r["k"])]
        cells += [f"{r[x][0]:.1f}" for x in TIMES]
        cells += [f"{r[x][0]:.2f}" for x in ("efficiency", "ideal_efficiency", "rho")]
        for x in ("gain", "predicted", "step_gain", "gain_over_here"):
            cells.append("{:.3f} [{:.3f}, {:.3f}]".format(*r[x]) if x in r else "")
        cells.append(f"{r['same_texts']} of {r['texts']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl, result.json and table.md")
    parser.add_argument("--quick", action="store_true", help="m 2, k 2, 2 rounds of 4 steps, cut:2 and copy")
    parser.add_argument(
        "--drafters", type=lambda text: text.split(","), default=["cut:2", "cut:4", "cut:8", "eagle", "copy"]
    )
    parser.add_argument("--m", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--k", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="whole steps in a window")
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--no-here", action="store_true", help="leave sd-here out")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if given.quick:
        given.drafters, given.m, given.k, given.rounds, given.steps = ["cut:2", "copy"], [2], [2], 2, 4
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    try:
        measure(given, rows, file)
    finally:
        records = summary(rows)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
        about = {"machine": machine(), "torch": torch.__version__, "settings": settings}
        (given.out / "result.json").write_text(json.dumps({**about, "cells": records}, indent=1))
        (given.out / "table.md").write_text(markdown(records))
        for name, found in tables(rows).items():
            for what, table in found.items():
                (given.out / f"{what}.{name.replace(':', '-')}.json").write_text(json.dumps(table))
    print(markdown(records))


if __name__ == "__main__":
    main()
