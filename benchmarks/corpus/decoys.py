"""Decoys: contexts whose runs of words come again with another continuation, filled with names and numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from benchmarks.corpus.made import Made, sections

POOLS = {
    "town": (
        "Arnholt Belmere Castrow Dunfels Eskby Farlow Gresten Halvik Istrad Jorund Kelm Lorvane Mirnow Norrby Ostrel "
        "Pirano Quern Rostall Selmar Tarvik Ulden Vastra Wendle Yarmo Zellin"
    ),
    "person": (
        "Alma Bruno Cora Dario Edda Fadil Greta Hamid Ilse Jarek Katrin Leandro Mirela Nuno Oda Petra Quentin Ramona "
        "Samir Thea Ulla Viggo Wanda Yusra Zoltan"
    ),
    "item": "candles lemons lanterns blankets mirrors walnuts buttons whistles kettles ropes brushes tiles",
    "word": "ferries orchards lamps bridges choirs gardens ovens violins harbours stairs windmills pencils",
    "month": "March April May June September October November",
    "h": " ".join(map(str, range(6, 12))),
    "d": " ".join(map(str, range(2, 10))),
    "n": " ".join(map(str, range(13, 59))),
    "m": " ".join(map(str, range(10, 59))),
}


def decoys() -> Iterator[Made]:
    """One prompt for each task of a section in decoys.txt, each with names and numbers of its own.

    `$town2` in a section is the second of the towns drawn for that prompt; equal names are equal, others differ.
    """
    for number, (family, body) in enumerate(sections("decoys.txt"), start=1):
        text, *tasks = body.split("\n~ ")
        for i, task in enumerate(tasks):
            rng = random.Random(f"decoy {number} {i}")
            drawn = {name: rng.sample(pool.split(), len(pool.split())) for name, pool in POOLS.items()}
            drawn["m"] = sorted(drawn["m"][:9])  # minutes of a log go up
            repetition, _, words = task.partition(" ")
            context = _fill(text.strip("\n"), drawn)
            words = _fill(words, drawn)
            if family == "chat":
                asked, answered = context.split(" || ")
                turns: tuple[str, ...] = (asked, answered, words)
            elif (number + i) % 2 and family != "translation":  # whose tasks refer to what stands before
                turns = (f"{words}\n\n{context}",)
            else:
                turns = (f"{context}\n\n{words}",)
            yield Made(family, repetition, f"decoy-{number:02}", turns, decoy=True)


def _fill(text: str, drawn: dict[str, list[str]]) -> str:
    return re.sub(r"\$([a-z]+?)(\d)", lambda m: drawn[m[1]][int(m[2]) - 1], text)
