"""Particles (mode smcsd) beside the target alone and exact speculative decoding: speed and right answers.

    python -m benchmarks.particles run --out FOLDER     writes answers to questions, columns interleaved; resumes
    python -m benchmarks.particles costs --out FOLDER   what a round's parts cost here, and what that predicts
    python -m benchmarks.particles table --out FOLDER   result.json and table.md from what is there

`--quick` asks few questions with few columns. The questions (`decoding.answers`) are written by code. Every question
has a sampling seed of its own, the same in all columns, so that `ar` and `sd` write the same text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from activations.cache import KVCache
from activations.provenance import provenance
from activations.sampling import Sampling, choose
from activations.store import write_json
from activations.target import Target
from benchmarks.records import Answered, answers, cell, interval, latest, number, table
from decoding.answers import questions
from decoding.budgets import FixedBudget
from decoding.columns import ModeColumn, column
from decoding.costs import machine
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.packing import tree_forward
from decoding.request import Request
from decoding.smc.verifier import ParticleVerifier
from decoding.summary import ratio, speed
from decoding.tree import DraftTree
from switchsd.loading import AUTO, load

KINDS = ("extract", "lookup", "copy", "sum", "convert")
PARTICLES, TOKENS = (1, 2, 4, 8), (2, 4, 8)
CONTEXT = 128
"""Tokens behind which costs are measured: those of a question and half its answer."""
PAPER = {"1B for 8B": 1.24 / 8.03, "1B for 70B": 1.24 / 70.6}
"""Draft model to target: bytes of Llama 3's weights, which are what a memory-bound GPU waits for."""


# -- running ------------------------------------------------------------------------------------------


def columns_of(temperature: float, particles: Sequence[int], tokens: Sequence[int]) -> list[str]:
    warm = f"temperature={temperature}"
    return [
        "ar", f"ar/{warm}", f"sd/{warm}",
        *(f"smcsd/particles={n}/draft_tokens={k}/{warm}" for n in particles for k in tokens),
    ]  # fmt: skip


def weights(one: ModeColumn) -> dict[str, float]:
    """Mean of ESS / N over the latest answer's rounds, and the share of them that ended in resampling; nothing without
    particles."""
    sizes = {r.step: r.ess for r in one.decoder.trace if r.ess is not None}
    if not sizes:
        return {}
    n, share = one.decoder.settings.particles, one.decoder.settings.ess_threshold
    return {
        "ess": float(np.mean(list(sizes.values()))) / n,
        "resampled": float(np.mean([size < share * n for size in sizes.values()])),
    }


# -- costs --------------------------------------------------------------------------------------------


def costs(decoder: Decoder, particles: Sequence[int], tokens: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of a token of `ar` and of a round's parts, medians of interleaved measurements."""
    sampling = Sampling(0.7)
    drafter = decoder.neural["draft"]
    assert isinstance(drafter, DraftModelDrafter)
    points = [(n, k) for n in particles for k in tokens]
    times: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds):
        times.setdefault(("ar", 1, 0), []).append(_verify(decoder.target, 1, 0, sampling)[0])
        for n, k in points:
            forward, judged = _verify(decoder.target, n, k, sampling)
            times.setdefault(("forward", n, k), []).append(forward)
            times.setdefault(("judge", n, k), []).append(judged)
            times.setdefault(("draft", n, k), []).append(_draft(drafter.drawing("own"), n, k, sampling))
    best = {key: round(median(found[1:] or found), 3) for key, found in times.items()}
    token = best["ar", 1, 0]
    few, many = min(tokens), max(tokens)
    step = {n: (best["draft", n, many] - best["draft", n, few]) / max(many - few, 1) for n in particles}
    widest = max(points, key=lambda p: p[0] * (p[1] + 1))
    slots = widest[0] * (widest[1] + 1)
    slope = (best["forward", *widest] - token) / (slots - 1)
    return {
        "context": CONTEXT,
        "ar_ms": token,
        "rounds_ms": [
            {"particles": n, "draft_tokens": k, **{part: best[part, n, k] for part in ("draft", "forward", "judge")}}
            for n, k in points
        ],
        "draft_step_ms": step,
        "rho": step[min(particles)] / token,
        "ridge": token / slope,
        "rho_bytes": _bytes(drafter.model) / _bytes(decoder.target),
    }


def _verify(target: Target, n: int, k: int, sampling: Sampling) -> tuple[float, float]:
    """Of a forward of n rows with k drafted tokens each; of the choice or the weighing behind it."""
    one = KVCache(1, capacity=CONTEXT)
    ids = [1 + i % (target.vocab_size - 1) for i in range(CONTEXT)]
    target.forward(torch.tensor([ids], device=target.device), one, logits_to_keep=1)
    one.commit([range(CONTEXT)])
    cache = one.branches([CONTEXT] * n, k + 1)
    law = torch.randn(n, max(k, 1), target.vocab_size, device=target.device)
    group = Request(0, ids, 4 * k + 8, sampling, tokens=[*ids, 5])
    rows = group.split(n)
    for row in rows:
        row.tokens = list(group.tokens)
    chain = DraftTree.chain([7 + i for i in range(k)], "draft")
    trees = [replace(chain, q_logits=law[i, :k]) for i in range(n)]
    verifier = ParticleVerifier(n, target.stop_ids)
    began = perf_counter()
    logits = tree_forward(target, cache, [5] * n, trees)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    forward = perf_counter()
    if k:
        verifier.accept(trees, logits, rows)
    else:
        choose([sampling], logits[:, 0], [0], [CONTEXT]).tolist()
    ended = perf_counter()
    return ((ended if not k else forward) - began) * 1e3, (ended - forward) * 1e3


def _draft(drafter: DraftModelDrafter, n: int, k: int, sampling: Sampling) -> float:
    """Of k drafted tokens in n rows, with two tokens to catch up with."""
    ids = [1 + i % 1000 for i in range(CONTEXT)]
    group = Request(0, ids, 4 * k + 8, sampling, tokens=[*ids, 5])
    rows = group.split(n)
    for row in rows:
        row.tokens = list(group.tokens)
    budgets = [FixedBudget(k, k)] * n
    try:
        for row, tree in zip(rows, drafter.propose(rows, budgets), strict=True):
            assert tree is not None
            row.tokens += [*tree.tokens, 5]
        began = perf_counter()
        drafter.propose(rows, budgets)
        return (perf_counter() - began) * 1e3
    finally:
        for row in rows:
            drafter.close(row)


def _bytes(model: Target) -> int:
    """Weights that one token reads: the blocks and the output matrix."""
    blocks = sum(weight.numel() * weight.element_size() for weight in model.layers.state_dict().values())
    return blocks + model.vocab_size * model.width * model.dtype.itemsize


def memory_bound(k: int, rho: float) -> float:
    """Tokens in the time of one of `ar`, where a forward costs the same for any number of tokens."""
    return (k + 1) / (rho * k + 1)


def compute_bound(n: int, k: int, rho: float, ridge: float) -> float:
    """The same, where a forward of more than `ridge` tokens takes as much longer as it has more."""
    return (k + 1) / (max(rho, rho * n / ridge) * k + max(1.0, n * (k + 1) / ridge))


# -- telling ------------------------------------------------------------------------------------------


def summary(found: Sequence[Answered], names: Sequence[str], base: str) -> list[dict[str, Any]]:
    """One record a column, over the questions that all columns have answered."""
    by = {name: {a.row.key: a for a in found if a.row.mode == name} for name in names}
    keys = sorted(set.intersection(*(set(mine) for mine in by.values())))
    out = []
    for name in names:
        mine, theirs = [by[name][k] for k in keys], [by[base][k] for k in keys]
        marks, other = (np.array([a.right for a in x], dtype=float) for x in (mine, theirs))
        rows = [a.row for a in mine]
        told = [a.more for a in mine if a.more]
        out.append(
            {
                "column": name,
                "questions": len(keys),
                "tokens_per_second": speed(rows),
                "over_ar": ratio(rows, [a.row for a in theirs]).to_dict(),
                "tokens_per_step": sum(r.decoded for r in rows) / max(sum(r.steps for r in rows), 1),
                "right": interval(marks).to_dict(),
                "right_over_ar": interval(marks - other).to_dict(),
                "right_by_kind": {
                    kind: float(np.mean([a.right for a in mine if a.row.group == kind]))
                    for kind in dict.fromkeys(r.group for r in rows)
                },
                "ess": float(np.mean([m["ess"] for m in told])) if told else None,
                "resampled": float(np.mean([m["resampled"] for m in told])) if told else None,
            }
        )
    return out


def markdown(result: dict[str, Any]) -> str:
    records, about = result["summary"], result["settings"]
    lines = [
        f"# Particles on {about['target']}, {about['dtype']}, {about['machine']}, {about['threads']} threads", "",
        f"{records[0]['questions']} questions, at most {about['max_new_tokens']} tokens each; greedy where no "
        "temperature is named. Speeds leave out the first token. Brackets hold 95 % bootstrap intervals over "
        f"questions, paired with `{about['base']}`.", "",
    ]  # fmt: skip
    heads = ["column", "tokens/s", "× ar", "right", "right − ar's", "tokens a step", "ESS / N", "rounds resampled"]
    body = [
        [
            r["column"], f"{r['tokens_per_second']:.1f}", cell(r["over_ar"], ".2f"), cell(r["right"], ".2f"),
            cell(r["right_over_ar"], "+.2f"), f"{r['tokens_per_step']:.2f}", number(r["ess"]),
            number(r["resampled"]),
        ]
        for r in records
    ]  # fmt: skip
    lines += [*table(heads, body), "", "Right answers by kind:", ""]
    kinds = list(records[0]["right_by_kind"])
    lines += table(
        ["column", *kinds], [[r["column"], *(f"{r['right_by_kind'][k]:.2f}" for k in kinds)] for r in records]
    )
    if result["costs"]:
        lines += ["", *_costs_told(result["costs"], {r["column"]: r["over_ar"]["estimate"] for r in records}, about)]
    return "\n".join(lines) + "\n"


def _costs_told(found: dict[str, Any], measured: dict[str, float], about: dict[str, Any]) -> list[str]:
    rho, ridge, by_bytes = found["rho"], found["ridge"], found["rho_bytes"]
    gpus = {f"this draft ({by_bytes:.2f})": by_bytes, **{f"{k} ({v:.2f})": v for k, v in PAPER.items()}}
    body = []
    for point in found["rounds_ms"]:
        n, k = point["particles"], point["draft_tokens"]
        spent = point["draft"] + point["forward"] + point["judge"]
        here = measured.get(f"smcsd/particles={n}/draft_tokens={k}/temperature={about['temperature']}")
        body.append(
            [
                str(n), str(k), *(f"{point[part]:.0f}" for part in ("draft", "forward", "judge")), number(here),
                f"{(k + 1) * found['ar_ms'] / spent:.2f}", f"{compute_bound(n, k, rho, ridge):.2f}",
                f"{memory_bound(k, rho):.2f}", *(f"{memory_bound(k, r):.2f}" for r in gpus.values()),
            ]
        )  # fmt: skip
    return [
        f"A token of `ar` takes {found['ar_ms']:.1f} ms here behind {found['context']} tokens, a step of the draft "
        f"model {rho:.2f} of it (ρ), and a forward grows as if it were bound by arithmetic from R = {ridge:.1f} tokens "
        "on. Speed over `ar`, measured and as these numbers predict it: from the parts of a round; from (K + 1) / "
        "(ρ̂ K + N (K + 1) / R); from (K + 1) / (ρ K + 1), where memory is the bound. On a GPU whose memory is the "
        "bound ρ is the ratio of the weights that are read.",
        "",
        *table(
            ["N", "K", "draft ms", "forward ms", "weigh ms", "measured", "from parts", "compute-bound", "memory-bound",
             *(f"GPU: {name}" for name in gpus)],
            body,
        ),
    ]  # fmt: skip


# -- the command line ---------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def levels(text: str) -> dict[str, int]:
    """kind=level, separated by commas."""
    return {kind: int(level or 1) for kind, _, level in (part.partition("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "costs", "table"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and the tables")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default=AUTO, help="a draft model: a folder or a hub id; auto: one that fits")
    parser.add_argument("--particles", type=numbers, default=PARTICLES)
    parser.add_argument("--draft-tokens", type=numbers, default=TOKENS)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--kinds", type=levels, default=dict.fromkeys(KINDS, 1), help="kind=level,...")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7, help="of the costs")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.particles, given.draft_tokens, given.questions, given.rounds = (1, 4), (2, 4), 5, 3
    given.out.mkdir(parents=True, exist_ok=True)
    names = columns_of(given.temperature, given.particles, given.draft_tokens)
    base = names[1]
    rows, priced, about = given.out / "rows.jsonl", given.out / "costs.json", given.out / "settings.json"
    if given.what != "table":
        decoder = load(given.target, probe=None, drafter=None, draft=given.draft)
        if "draft" not in decoder.neural:
            parser.error(f"there is no draft model for {given.target}: name one with --draft")
        target = decoder.target
        write_json(
            about,
            {
                "target": target.name, "fingerprint": target.fingerprint.to_dict(), "machine": machine(),
                "dtype": str(target.dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
                "draft": decoder.neural["draft"].describe(), "temperature": given.temperature, "base": base,
                "columns": names, "kinds": given.kinds, "questions": given.questions, "seed": given.seed,
                "max_new_tokens": given.max_new_tokens, "provenance": provenance(given.seed),
            },
        )  # fmt: skip
        if given.what == "costs":
            write_json(priced, costs(decoder, given.particles, given.draft_tokens, given.rounds))
            print(priced.read_text())
            return
        decoder.costs("draft")  # before any column is timed
        made = {name: one for name in names if isinstance(one := column(decoder, name), ModeColumn)}
        answers(made, questions(given.kinds, given.questions, given.seed), given.max_new_tokens, rows, weights)
    if not rows.is_file() or not about.is_file():
        parser.error(f"{given.out} holds no rows: begin with `run`")
    settings = json.loads(about.read_text())
    result = {
        "settings": settings,
        "summary": summary(latest(rows), settings["columns"], settings["base"]),
        "costs": json.loads(priced.read_text()) if priced.is_file() else None,
    }
    write_json(given.out / "result.json", result)
    (given.out / "table.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
