"""Put the embedded corpus together: `python -m benchmarks.make_corpus` in the project's folder.

The prompts numbered below 100 in `activations/prompts` were written one by one and stay as they are. The others
are made again from the material in `benchmarks/corpus`, which is part of this project and under its licence. The
result depends on these files alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from activations.corpus import FAMILIES, SPLITS, Prompt, load_corpus
from benchmarks.corpus import decoys, invented, tasks
from benchmarks.corpus.made import HEAVY, LIGHT, MEDIUM, Made

PROMPTS = Path(__file__).parents[1] / "activations" / "prompts"
TOTAL = 1000
LEAST = 57
"""Prompts that every family keeps."""
MIX = {HEAVY: 110, MEDIUM: 120, LIGHT: 770}
"""Wanted prompts, by repetition; the material decides how near they come."""
VALIDATION = {HEAVY: 22, MEDIUM: 24, LIGHT: 154}
"""Prompts held out, by repetition."""
FIRST_MADE = 100
"""Number of the first made prompt of a family."""


def candidates() -> list[Made]:
    """All that the material gives; decoys first, so that they are kept."""
    makers = (
        decoys.decoys, tasks.articles, tasks.code, tasks.letters, tasks.songs, tasks.foreign,
        invented.tables, invented.logs, invented.settings, invented.sums, invented.lists, tasks.written,
    )  # fmt: skip
    return [made for maker in makers for made in maker()]


def choose(kept: list[Prompt], made: list[Made]) -> list[Made]:
    """Leave out made prompts until TOTAL are left, always of the repetition that there is most too much of."""
    chosen = list(made)
    if len(kept) + len(chosen) < TOTAL:
        raise SystemExit(f"the material gives {len(kept) + len(chosen)} prompts, {TOTAL} are wanted: add some")
    while len(kept) + len(chosen) > TOTAL:
        everything: list[Prompt | Made] = [*kept, *chosen]
        repetitions, families = (
            Counter(str(getattr(p, name)) for p in everything) for name in ("repetition", "family")
        )
        over = max(MIX, key=lambda repetition: repetitions[repetition] / MIX[repetition])
        spare = [m for m in chosen if m.repetition == over and not m.decoy and families[m.family] > LEAST]
        chosen.remove(max(spare[::-1], key=lambda m: families[m.family]))
    return chosen


def split(kept: list[Prompt], made: list[Made]) -> dict[str, str]:
    """The side of each made group: families and repetitions held out in proportion, groups whole."""
    groups: dict[str, list[Made]] = defaultdict(list)
    for m in made:
        groups[m.group].append(m)
    held = [p for p in kept if p.split == "validation"]
    both: list[Prompt | Made] = [*kept, *made]
    total = Counter(p.family for p in both)
    for seed in range(1000):
        room = Counter(VALIDATION) - Counter(str(p.repetition) for p in held)
        families = Counter({f: -(-n // 4) for f, n in total.items()}) - Counter(p.family for p in held)
        sides = dict.fromkeys(groups, "train")
        for group in random.Random(seed).sample(sorted(groups), len(groups)):
            need = Counter(m.repetition for m in groups[group])
            asked = Counter(m.family for m in groups[group])
            if need <= room and asked <= families:
                room, families = room - need, families - asked
                sides[group] = "validation"
        if not room:
            return sides
    raise SystemExit("no split holds out the wanted numbers: change VALIDATION")


def corpus() -> dict[str, list[dict[str, object]]]:
    """The records of both splits."""
    kept = [p for p in load_corpus() if int(p.id.rpartition("-")[2]) < FIRST_MADE]
    chosen = choose(kept, candidates())
    number: Counter[str] = Counter()
    named: list[tuple[str, Made]] = []
    for m in chosen:
        id = f"{m.family}-{FIRST_MADE + number[m.family]}"
        number[m.family] += 1
        named.append((id, Made(m.family, m.repetition, m.group or id, m.turns, m.decoy)))
    sides = split(kept, [m for _, m in named])
    records: dict[str, list[dict[str, object]]] = {side: [] for side in SPLITS}
    for p in kept:
        records[str(p.split)].append(_record(p.id, p.family, p.group, str(p.split), p.repetition, p.messages, p.decoy))
    for id, m in named:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(m.turns)]
        side = sides[m.group]
        records[side].append(_record(id, m.family, m.group, side, m.repetition, messages, m.decoy))
    for side in SPLITS:
        records[side].sort(key=lambda r: (FAMILIES.index(str(r["family"])), str(r["id"]).rjust(40)))
    return records


def _record(
    id: str, family: str, group: str, side: str, repetition: str | None, messages: Iterable[object], decoy: bool
) -> dict[str, object]:
    record: dict[str, object] = {
        "id": id, "family": family, "group": group, "split": side, "repetition": repetition,
    }  # fmt: skip
    return {**record, **({"decoy": True} if decoy else {}), "messages": list(messages)}


def as_lines(records: Iterable[dict[str, object]]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def overlaps(records: Iterable[dict[str, object]], benchmarks: Iterable[Path]) -> list[str]:
    """Ids of the prompts that share 13 words in a row with a benchmark file."""
    from activations.selftext import benchmark_ngrams, word_ngrams  # imports torch

    grams = benchmark_ngrams(benchmarks)
    plain = {tuple(re.sub(r"\W", "", word) for word in gram) for gram in grams}
    found = []
    for record in records:
        text = "\n".join(str(m["content"]) for m in record["messages"])  # type: ignore[attr-defined]
        mine = word_ngrams(text)
        if not (mine.isdisjoint(grams) and {tuple(re.sub(r"\W", "", w) for w in g) for g in mine}.isdisjoint(plain)):
            found.append(str(record["id"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="benchmark files to share nothing with")
    arguments = parser.parse_args()
    records = corpus()
    if arguments.against and (found := overlaps([r for s in SPLITS for r in records[s]], arguments.against)):
        raise SystemExit(f"{len(found)} prompts share 13 words in a row with a benchmark: {', '.join(found)}")
    for side in SPLITS:
        file = PROMPTS / f"{side}.jsonl"
        text = as_lines(records[side])
        if arguments.check and text != file.read_text(encoding="utf-8"):
            raise SystemExit(f"{file} is not what its material gives: run this script without --check")
        if not arguments.check:
            file.write_text(text, encoding="utf-8")
        counts = Counter(r["repetition"] for r in records[side])
        decoys = sum(bool(r.get("decoy")) for r in records[side])
        print(f"{side}: {len(records[side])} prompts, {dict(counts)}, {decoys} decoys")


if __name__ == "__main__":
    main()
