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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from activations.generation import Request, complete
from activations.provenance import provenance
from activations.store import write_json
from activations.target import Target, load_target
from benchmarks.records import digest, read_lines, table
from decoding.answers import MIX, Question, Questions, read_gsm8k, right
from decoding.costs import machine
from decoding.draft.model import load_draft, read_draft
from switchsd.artifacts import shipped
from switchsd.loading import AUTO

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
    return lambda _, place: threshold < 1 and bool(keep_probability(policy, place.state[None]) >= threshold)


def by_chance(rate: float, seed: int = 0) -> Decide:
    """The same at the same place."""
    return lambda question, place: random.Random(f"{seed} {question.key} {place.position}").random() < rate


def by_ratio(ratio: float) -> Decide:
    """Where the target's probability of the draft's token is that much of its own token's."""
    t, d = STATE.index("target_logp_target"), STATE.index("target_logp_draft")
    return lambda _, place: float(place.state[d] - place.state[t]) >= math.log(ratio)


def walk(answers: Explored, asked: Sequence[int], decide: Decide) -> list[Walked]:
    """How these questions are answered."""
    done: dict[int, Walked] = {}
    going: dict[int, Decisions] = dict.fromkeys(asked, ())
    while going:
        unknown = [one for one in going.items() if answers.at(*one) is None]
        if unknown:
            answers.visit(unknown)
        for question, decisions in list(going.items()):
            found = answers.at(question, decisions)
            if isinstance(found, Place):
                going[question] = (*decisions, decide(answers.questions[question], found))
            elif found is not None:
                done[question] = Walked(found.right, len(decisions), sum(decisions), found.tokens, found.forwards)
                del going[question]
    return [done[question] for question in asked]


TOGETHER = 32
"""Questions that all columns answer before the next ones are asked."""


def walks(answers: Explored, columns: Mapping[str, Decide], explored: int) -> dict[str, list[Walked]]:
    """Every column's answers. Of the first `explored` questions more is written: what their first mismatches are worth
    one by one, which the oracle knows."""
    out: dict[str, list[Walked]] = {name: [] for name in columns}
    for start in range(0, len(answers), TOGETHER):
        part = range(start, min(start + TOGETHER, len(answers)))
        known = [answers.questions[q] for q in part if q < explored]
        while jobs := [job for question in known for job in plans(answers.store, question, FIRST)]:
            answers.store.keep(answers.runner.run(jobs), jobs)
        for name, decide in columns.items():
            out[name] += walk(answers, part, decide)
        answers.store.flush()
        print(f"\r{part.stop} of {len(answers)} questions", end="", flush=True)
    print()
    return out


def mcnemar(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Two-sided exact p-value of equal accuracies, from paired answers."""
    helped = sum(a and not b for a, b in zip(one, other, strict=True))
    hurt = sum(b and not a for a, b in zip(one, other, strict=True))
    n, least = helped + hurt, min(helped, hurt)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)


def summary(asked: Sequence[Question], found: Mapping[str, Sequence[Walked]], base: Sequence[bool]) -> list[dict[str, Any]]:
    """One record a column; `base`: what the target alone gets right."""
    out = []
    for name, answers in found.items():
        marks = [a.right for a in answers]
        out.append(
            {
                "column": name,
                "questions": len(marks),
                "right": interval(marks).to_dict(),
                "right_over_ar": interval(np.subtract(marks, base, dtype=float)).to_dict(),
                "p": mcnemar(marks, base),
                "helped": sum(a and not b for a, b in zip(marks, base, strict=True)),
                "hurt": sum(b and not a for a, b in zip(marks, base, strict=True)),
                "keep_rate": sum(a.kept for a in answers) / max(sum(a.asked for a in answers), 1),
                "tokens_per_forward": sum(a.tokens for a in answers) / max(sum(a.forwards for a in answers), 1),
                "right_by_kind": {
                    kind: float(np.mean([r for r, q in zip(marks, asked, strict=True) if q.kind == kind]))
                    for kind in dict.fromkeys(q.kind for q in asked)
                },
            }
        )  # fmt: skip
    return out


# -- the command line ---------------------------------------------------------------------------------


def named(text: str) -> dict[str, str]:
    """name=folder, separated by commas."""
    return dict(part.partition("=")[::2] for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shares",))
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and the tables")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--drafts", type=named, default={"shipped": AUTO}, help="name=folder,...; auto: the shipped one"
    )
    parser.add_argument("--questions", type=int, default=2100)
    parser.add_argument("--gsm8k", help="a file in GSM8K's format, whose questions are asked too")
    parser.add_argument("--seed", type=int, default=1000, help="of the questions")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    measure_shares(given)


if __name__ == "__main__":
    main()
