"""Arbitration (mode cospec) between a target and a draft that are each right where the other is wrong.

    python -m benchmarks.arbitration shares --out FOLDER --drafts shipped=auto,pair=PATH
    python -m benchmarks.arbitration run --out FOLDER --draft PATH --policy PATH
    python -m benchmarks.arbitration speed --out FOLDER --draft PATH --policy PATH
    python -m benchmarks.arbitration table --out FOLDER

`shares` lets the target and every draft model answer held-out questions (`decoding.answers`) alone, greedily, and
tells how often both are right, only the draft, only the target, and neither.

`run` answers held-out questions with every way of arbitrating: exactly (`sd`), by the policy at several thresholds, at
random as often as the policy keeps a draft, by the ratio of the target's probabilities, and always for the draft.
Greedily an answer is a function of the decisions at its mismatches, so that what two columns decide alike is written
once (`decoding.cospec.branches`), many answers together. `speed` measures a part of the questions one at a time, the
columns interleaved. `table` writes result.json and table.md from what is there.

Everything that was written is kept in FOLDER, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from activations.generation import Request, complete
from activations.provenance import provenance
from activations.store import write_json
from activations.target import Target, load_target
from benchmarks.records import answers, cell, digest, interval, read_lines, table
from decoding.answers import MIX, Question, Questions, read_gsm8k, right
from decoding.columns import ModeColumn, column
from decoding.cospec.branches import BranchStore, Decisions, Explored, Place, Runner, examples, explore
from decoding.cospec.branches import shares as branch_shares
from decoding.cospec.state import STATE
from decoding.cospec.training import agreement
from decoding.cospec.verifier import PolicyArbiter
from decoding.costs import machine
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.draft.model import load_draft, read_draft
from decoding.policies.policy import Policy, PolicyArtifact
from decoding.summary import ratio, speed
from switchsd.artifacts import shipped
from switchsd.loading import AUTO, load

FIRST = 3
"""Of how many of the target's first mismatches the oracle is told what both tokens lead to."""
ROWS = 32
"""Questions that are answered together."""


# -- the questions ------------------------------------------------------------------------------------


def held_out(count: int, seed: int, kinds: Mapping[str, Sequence[int]] = MIX) -> list[Question]:
    """`count` held-out questions, no prompt twice."""
    source, found, number = Questions(kinds, seed, "held-out"), dict[str, Question](), 0
    while len(found) < count:
        question = source[number]
        found.setdefault(question.prompt, question)
        number += 1
        if number > 50 * count:
            raise ValueError(f"there are no {count} different held-out questions of these kinds: ask for fewer")
    return list(found.values())


# -- each model alone ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """One model's answer to one question."""

    model: str
    settings: str
    """Hash of what the text depends on."""
    key: str
    kind: str
    level: int
    right: bool
    tokens: int
    text: str


def alone(name: str, model: Target, about: object, asked: Sequence[Question], most: int, file: Path) -> list[Told]:
    """The greedy answers of one model, in the order of the questions."""
    settings = digest([about, most])
    stored = {row.key: row for row in map(_told, read_lines(file)) if (row.model, row.settings) == (name, settings)}
    open_ = [q for q in asked if q.key not in stored]
    requests = (Request(i, model.encode_messages(q.messages), most) for i, q in enumerate(open_))
    with file.open("a", encoding="utf-8") as out:
        for done, completion in enumerate(complete(model, requests, ROWS), start=1):
            question = open_[completion.request.number]
            text = model.decode([t for t in completion.tokens if t not in model.stop_ids])
            row = Told(
                name, settings, question.key, question.kind, question.level, right(question, text),
                len(completion.tokens), text,
            )  # fmt: skip
            stored[row.key] = row
            out.write(json.dumps(asdict(row)) + "\n")
            out.flush()
            print(f"\r{name}: {done} of {len(open_)} answers", end="", flush=True)
    print()
    return [stored[q.key] for q in asked]


def _told(record: dict[str, Any]) -> Told:
    return Told(**record)


def shares(target: Sequence[Told], draft: Sequence[Told]) -> dict[str, Any]:
    """How often both are right, only one, or neither, by kind and over all."""
    pairs = [(t.kind, t.right, d.right) for t, d in zip(target, draft, strict=True)]
    out = {}
    for kind in [*dict.fromkeys(k for k, _, _ in pairs), "all"]:
        found = [(t, d) for k, t, d in pairs if kind in (k, "all")]
        n = len(found)
        out[kind] = {
            "questions": n,
            "both": sum(t and d for t, d in found) / n,
            "only_draft": sum(d and not t for t, d in found) / n,
            "only_target": sum(t and not d for t, d in found) / n,
            "neither": sum(not t and not d for t, d in found) / n,
        }
    return out


def shares_markdown(result: dict[str, Any]) -> str:
    about = result["settings"]
    lines = [
        f"# Who is right: {about['target']} and its draft models", "",
        f"{about['questions']} held-out questions, greedy, at most {about['max_new_tokens']} tokens, each model alone.",
    ]  # fmt: skip
    for name, found in result["shares"].items():
        heads = ["kind", "questions", "both", "only draft", "only target", "neither", "target", "draft", "either"]
        body = []
        for kind, r in found.items():
            one = [r["both"] + r["only_target"], r["both"] + r["only_draft"], 1 - r["neither"]]
            parts = [r["both"], r["only_draft"], r["only_target"], r["neither"], *one]
            body.append([kind, str(r["questions"]), *(f"{100 * x:.1f}" for x in parts)])
        lines += ["", f"## {name}", "", "In percent.", "", *table(heads, body)]
    return "\n".join(lines) + "\n"


def measure_shares(given: argparse.Namespace) -> None:
    target = load_target(given.target)
    asked = held_out(given.questions, given.seed)
    if given.gsm8k:
        asked += read_gsm8k(given.gsm8k)
    rows = given.out / "shares.jsonl"
    fingerprint = target.fingerprint.to_dict()
    alone_target = alone("target", target, fingerprint, asked, given.max_new_tokens, rows)
    found = {}
    for name, folder in given.drafts.items():
        where = shipped("draft", target.name) if folder == AUTO else Path(folder)
        trained = read_draft(where)
        about = [fingerprint, trained["blocks"], trained.get("updates"), trained.get("provenance")]
        model = load_draft(where, target)
        told = alone(f"{name} after {trained.get('updates')} updates", model, about, asked, given.max_new_tokens, rows)
        found[told[0].model] = shares(alone_target, told)
    result = {
        "settings": {
            "target": target.name, "fingerprint": fingerprint, "machine": machine(), "seed": given.seed,
            "threads": torch.get_num_threads(), "questions": len(asked), "max_new_tokens": given.max_new_tokens,
            "provenance": provenance(given.seed),
        },
        "shares": found,
    }  # fmt: skip
    write_json(given.out / "shares.json", result)
    (given.out / "shares.md").write_text(shares_markdown(result), encoding="utf-8")
    print(shares_markdown(result))


# -- arbitration ---------------------------------------------------------------------------------------

Decide = Callable[[Question, Place], bool]
"""Whether the draft's token is kept at a mismatch."""


class Walked(NamedTuple):
    """How a way of arbitrating answered a question."""

    right: bool
    asked: int
    kept: int
    tokens: int
    forwards: int


def by_policy(policy: Policy, threshold: float) -> Decide:
    arbiter = PolicyArbiter(policy, threshold)
    return lambda _, place: bool(arbiter.choose(place.state[None]))


def by_chance(rate: float, seed: int = 0) -> Decide:
    """The same at the same place."""
    return lambda question, place: random.Random(f"{seed} {question.key} {place.position}").random() < rate


def by_ratio(ratio: float) -> Decide:
    """Where the target's probability of the draft's token is that much of its own token's."""
    t, d = STATE.index("target_logp_target"), STATE.index("target_logp_draft")
    return lambda _, place: float(place.state[d] - place.state[t]) >= math.log(ratio)


def walk(branches: Explored, asked: Sequence[int], decide: Decide) -> list[Walked]:
    """How these questions are answered."""
    done: dict[int, Walked] = {}
    going: dict[int, Decisions] = dict.fromkeys(asked, ())
    while going:
        unknown = [one for one in going.items() if branches.at(*one) is None]
        if unknown:
            branches.visit(unknown)
        for question, decisions in list(going.items()):
            found = branches.at(question, decisions)
            if isinstance(found, Place):
                going[question] = (*decisions, decide(branches.questions[question], found))
            elif found is not None:
                done[question] = Walked(found.right, len(decisions), sum(decisions), found.tokens, found.forwards)
                del going[question]
    return [done[question] for question in asked]


def walks(branches: Explored, columns: Mapping[str, Decide]) -> dict[str, list[Walked]]:
    """Every column's answers; all columns answer some questions before the next ones are asked."""
    out: dict[str, list[Walked]] = {name: [] for name in columns}
    for start in range(0, len(branches), ROWS):
        part = range(start, min(start + ROWS, len(branches)))
        for name, decide in columns.items():
            out[name] += walk(branches, part, decide)
        print(f"\r{part.stop} of {len(branches)} questions", end="", flush=True)
    print()
    branches.store.flush()
    return out


def mcnemar(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Two-sided exact p-value of equal accuracies, from paired answers."""
    helped = sum(a and not b for a, b in zip(one, other, strict=True))
    hurt = sum(b and not a for a, b in zip(one, other, strict=True))
    n, least = helped + hurt, min(helped, hurt)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)


def summary(
    asked: Sequence[Question], found: Mapping[str, Sequence[Walked]], base: Sequence[bool], policy: str = ""
) -> list[dict[str, Any]]:
    """One record a column, over the first questions, as many as it has answered; `base`: what the target alone gets
    right; `policy`: a column that the others are held against too."""
    out = []
    own = [a.right for a in found[policy]] if policy else []
    for name, walked in found.items():
        marks, alone_, these = [a.right for a in walked], base[: len(walked)], asked[: len(walked)]
        out.append(
            {
                "column": name,
                "questions": len(marks),
                "right": interval(marks).to_dict(),
                "right_over_ar": _over(marks, alone_),
                "p": mcnemar(marks, alone_),
                "helped": sum(a and not b for a, b in zip(marks, alone_, strict=True)),
                "hurt": sum(b and not a for a, b in zip(marks, alone_, strict=True)),
                "policy_over_it": _over(own[: len(marks)], marks) if own else None,
                "keep_rate": sum(a.kept for a in walked) / max(sum(a.asked for a in walked), 1),
                "tokens_per_forward": sum(a.tokens for a in walked) / max(sum(a.forwards for a in walked), 1),
                "right_by_kind": {
                    kind: float(np.mean([r for r, q in zip(marks, these, strict=True) if q.kind == kind]))
                    for kind in dict.fromkeys(q.kind for q in these)
                },
            }
        )  # fmt: skip
    return out


def _over(one: Sequence[bool], other: Sequence[bool]) -> dict[str, float | None]:
    """How much more often one is right, with its interval."""
    return interval(np.subtract(one, other, dtype=float)).to_dict()


def ceiling(store: BranchStore, asked: Sequence[Question]) -> dict[str, Any]:
    """Of the explored questions: what the best of the visited decisions gets right, beside each model's own."""
    return {k: v if k == "questions" else round(v, 4) for k, v in branch_shares(store, asked).items()}


def measure(given: argparse.Namespace) -> None:
    """`run`"""
    decoder, artifact = loaded(given)
    drafter = decoder.neural["draft"]
    assert isinstance(drafter, DraftModelDrafter)
    asked = held_out(given.questions, given.seed)
    target, rows = decoder.target, given.out / "shares.jsonl"
    plain = alone("target", target, target.fingerprint.to_dict(), asked, given.max_new_tokens, rows)
    tokens = decoder.settings.draft_tokens
    stops = artifact is None or bool(artifact.settings["stops"])
    runner = Runner(target, drafter, tokens, given.max_new_tokens, stops, ROWS)
    try:
        store = BranchStore(given.out / "branches", runner.describe())
        for done in explore(store, runner, asked[: given.explored], FIRST, ROWS):
            print(f"\r{done} of {given.explored} questions explored", end="", flush=True)
        print()
        branches = Explored(store, runner, asked)
        columns: dict[str, Decide] = {"sd": lambda *_: False}
        own = None
        if artifact is not None:
            policy, own = artifact.networks["arbitration"], float(artifact.settings["threshold"])
            for threshold in sorted({*given.thresholds, own}):
                columns[f"cospec at {threshold:g}"] = by_policy(policy, threshold)
        found = walks(branches, columns)
        others: dict[str, Decide] = {f"ratio {ratio:g}": by_ratio(ratio) for ratio in given.ratios}
        others["draft"] = lambda *_: True
        for rate in given.rates if own is None else [rate_of(found[f"cospec at {own:g}"])]:
            others[f"random {rate:.3f}"] = by_chance(rate)
        found |= walks(Explored(store, runner, asked[: given.others]), others)
    finally:
        runner.close()
    known = asked[: given.explored]
    result = {
        "settings": {**about(given, target), "questions": len(asked), "threshold": own, "draft_tokens": tokens,
                     "stops": stops, "draft": drafter.describe()},
        "columns": summary(
            asked, found, [t.right for t in plain], "" if own is None else f"cospec at {own:g}"
        ),
        "ceiling": ceiling(store, known),
        "oracle": {
            f"cospec at {t:g}": agreement(artifact.networks["arbitration"], examples(store, known, first=FIRST), t)
            for t in sorted({*given.thresholds, own or 0.5})
        } if artifact is not None else {},
        "right_alone": interval([t.right for t in plain]).to_dict(),
    }  # fmt: skip
    write_json(given.out / "run.json", result)


def rate_of(answers: Sequence[Walked]) -> float:
    return sum(a.kept for a in answers) / max(sum(a.asked for a in answers), 1)


def measure_speed(given: argparse.Namespace) -> None:
    """`speed`"""
    decoder, artifact = loaded(given)
    names = ["ar", "sd"]
    if artifact is not None:
        thresholds = sorted({*given.thresholds, float(artifact.settings["threshold"])})
        names += [f"cospec/arbitration={threshold:g}" for threshold in thresholds]
    made = {name: one for name in names if isinstance(one := column(decoder, name), ModeColumn)}
    decoder.costs("draft")  # before any column is timed
    asked = held_out(given.questions, given.seed)[: given.timed]
    file = given.out / "speed.jsonl"
    found = answers(made, asked, given.max_new_tokens, file, decisions)
    by = {name: [a for a in found if a.row.mode == name] for name in names}
    order = {q.key: i for i, q in enumerate(asked)}
    rows = {name: sorted((a.row for a in mine), key=lambda r: order[r.key]) for name, mine in by.items()}
    result = {
        "settings": {**about(given, decoder.target), "questions": len(asked)},
        "columns": [
            {
                "column": name,
                "tokens_per_second": speed(rows[name]),
                "over_ar": ratio(rows[name], rows["ar"]).to_dict(),
                "over_sd": ratio(rows[name], rows["sd"]).to_dict(),
                "tokens_per_step": sum(r.decoded for r in rows[name]) / max(sum(r.steps for r in rows[name]), 1),
                "right": interval([a.right for a in by[name]]).to_dict(),
                "kept": sum(a.more["kept"] for a in by[name]),
                "asked": sum(a.more["asked"] for a in by[name]),
            }
            for name in names
        ],
    }
    write_json(given.out / "speed.json", result)


def decisions(one: ModeColumn) -> dict[str, float]:
    """Of the latest answer: mismatches that an arbiter was asked about, and drafts that it kept."""
    records = one.decoder.trace.records
    return {"asked": float(sum(r.asked for r in records)), "kept": float(sum(len(r.kept) for r in records))}


def loaded(given: argparse.Namespace) -> tuple[Decoder, PolicyArtifact | None]:
    """A decoder that drafts as many tokens as its policy was trained with, where nothing else is asked for."""
    decoder = load(given.target, probe=None, drafter=None, draft=given.draft, policy=None)
    artifact, trained = None, None
    if given.policy:
        artifact = PolicyArtifact.load(given.policy)
        artifact.check("cospec", decoder.target, decoder.neural["draft"])
        decoder.policies = {"cospec": artifact}
        trained = int(artifact.settings["draft_tokens"])
    tokens = given.draft_tokens or trained or decoder.settings.draft_tokens
    decoder.settings = replace(decoder.settings, draft_tokens=tokens)
    return decoder, artifact


def about(given: argparse.Namespace, target: Target) -> dict[str, Any]:
    return {
        "target": target.name, "fingerprint": target.fingerprint.to_dict(), "machine": machine(),
        "dtype": str(target.dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "seed": given.seed,
        "max_new_tokens": given.max_new_tokens, "provenance": provenance(given.seed),
    }  # fmt: skip


def markdown(run: dict[str, Any], timed: dict[str, Any] | None) -> str:
    s, ar = run["settings"], run["right_alone"]
    lines = [
        f"# Arbitration on {s['target']}, {s['dtype']}", "",
        f"{s['questions']} held-out questions, at most {s['max_new_tokens']} tokens, greedy; in percent. The target "
        f"alone (`ar`) gets {_percent(ar)} right. Brackets hold 95 % bootstrap intervals, paired with `ar`; p is "
        "McNemar's, exact. The policy's own threshold is "
        f"{'none' if s['threshold'] is None else format(s['threshold'], 'g')}.", "",
    ]  # fmt: skip
    heads = [
        "column",
        "questions",
        "right",
        "right − ar's",
        "p",
        "the policy's − right",
        "helped",
        "hurt",
        "drafts kept",
        "tokens a forward",
    ]
    body = [
        [
            r["column"], str(r["questions"]), _percent(r["right"]), _percent(r["right_over_ar"], "+"), f"{r['p']:.2g}",
            "–" if r["policy_over_it"] is None else _percent(r["policy_over_it"], "+"), str(r["helped"]),
            str(r["hurt"]), f"{100 * r['keep_rate']:.1f}", f"{r['tokens_per_forward']:.2f}",
        ]
        for r in run["columns"]
    ]  # fmt: skip
    kinds = list(run["columns"][0]["right_by_kind"])
    lines += [*table(heads, body), "", "Right answers by kind:", ""]
    by_kind = [[r["column"], *(f"{100 * r['right_by_kind'][k]:.0f}" for k in kinds)] for r in run["columns"]]
    lines += table(["column", *kinds], by_kind)
    c = run["ceiling"]
    if c["questions"]:
        lines += [
            "",
            f"Of {c['questions']} explored questions the target alone gets {100 * c['target']:.1f} right, the draft "
            f"wherever it may {100 * c['draft']:.1f}, and the best of the visited decisions {100 * c['best']:.1f}.",
        ]
    told = {k: v for k, v in run["oracle"].items() if v["mismatches"]}
    if told:
        heads = ["column", "mismatches", "not tied", "agreement", "without ties", "always target", "always draft"]
        shown = ("agreement", "agreement_without_ties", "take_without_ties", "keep_without_ties")
        body = [
            [k, str(v["mismatches"]), str(v["clear"]), *(f"{100 * v[x]:.1f}" for x in shown)] for k, v in told.items()
        ]
        lines += ["", "Agreement with the oracle branch choice:", "", *table(heads, body)]
    if timed is not None:
        t = timed["settings"]
        heads = ["column", "tokens/s", "× ar", "× sd", "tokens a step", "right", "asked", "kept"]
        body = [
            [
                r["column"], f"{r['tokens_per_second']:.1f}", cell(r["over_ar"], ".2f"), cell(r["over_sd"], ".2f"),
                f"{r['tokens_per_step']:.2f}", _percent(r["right"]), f"{r['asked']:.0f}", f"{r['kept']:.0f}",
            ]
            for r in timed["columns"]
        ]  # fmt: skip
        lines += [
            "", f"Speed, {t['questions']} of the questions one at a time, {t['machine']}, {t['threads']} threads; it "
            "leaves out the first token:", "", *table(heads, body),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _percent(value: dict[str, float | None], sign: str = "") -> str:
    return cell({k: None if v is None else 100 * v for k, v in value.items()}, f"{sign}.1f")


# -- the command line ---------------------------------------------------------------------------------


def named(text: str) -> dict[str, str]:
    """name=folder, separated by commas."""
    return dict(part.partition("=")[::2] for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shares", "run", "speed", "table"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and the tables")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--drafts", type=named, default={"shipped": AUTO}, help="name=folder,...; auto: the shipped one"
    )
    parser.add_argument("--draft", default=AUTO, help="a draft model's folder; auto: one that fits")
    parser.add_argument("--policy", help="an arbitration policy's folder; without one the baselines run alone")
    parser.add_argument("--draft-tokens", type=int, help="drafted at a step; by default as the policy was trained")
    parser.add_argument("--thresholds", type=numbers, default=(0.3, 0.5, 0.8))
    parser.add_argument("--ratios", type=numbers, default=(0.3, 0.03))
    parser.add_argument("--rates", type=numbers, default=(0.5,), help="of random arbitration, without a policy")
    parser.add_argument("--questions", type=int, default=2100)
    parser.add_argument("--others", type=int, help="questions that the rules without a policy are tried on; all")
    parser.add_argument("--explored", type=int, default=200, help="questions that the oracle is told of")
    parser.add_argument("--timed", type=int, default=150, help="questions that speed is measured on")
    parser.add_argument("--gsm8k", help="a file in GSM8K's format, whose questions `shares` asks too")
    parser.add_argument("--seed", type=int, default=1000, help="of the questions")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "shares":
        measure_shares(given)
        return
    if given.what == "run":
        measure(given)
    if given.what == "speed":
        measure_speed(given)
    run, timed = given.out / "run.json", given.out / "speed.json"
    if not run.is_file():
        if given.what == "table":
            parser.error(f"{given.out} holds no answers: begin with `run`")
        return
    found = json.loads(run.read_text())
    about_speed = json.loads(timed.read_text()) if timed.is_file() else None
    write_json(given.out / "result.json", {"run": found, "speed": about_speed})
    (given.out / "table.md").write_text(markdown(found, about_speed), encoding="utf-8")
    print(markdown(found, about_speed))


if __name__ == "__main__":
    main()
