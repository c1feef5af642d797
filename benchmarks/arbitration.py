"""Two models that are each right where the other is wrong, and how often.

    python -m benchmarks.arbitration shares --out FOLDER --drafts shipped=auto,pair=PATH

`shares` lets the target and every draft model answer held-out questions (`decoding.answers`) alone, greedily, and
tells how often both are right, only the draft, only the target, and neither. Rows are kept in FOLDER/shares.jsonl, and
those that are there are not written again: the same command goes on, with more questions or drafts as well.
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
