"""Questions whose answers can be checked, for small models: written by code, from seeds.

kind        asks for                                                       right is a text that
extract     the place or job of one of a passage's people                  says it, before any other of its sort
lookup      the value that stands behind a key                             says it, before any other value
copy        a list again, with bullets or numbers                          has its items in order, and nothing between
sum         the sum of numbers, as a small story or plainly                has it as its last number
difference  what is left of a number, as a small story or plainly          has it as its last number
product     some times a number, as a small story or plainly               has it as its last number
steps       the end of a story of two steps                                has it as its last number
count       how many words a list has                                      has it as its last number
item        the first, second, ... or last word of a list                  says it, before any other of the list
longest     the longest of some words                                      says it, before any other of them
reverse     a list from its end                                            has it on a line, and nothing else in it
order       words by the alphabet, numbers by size                         has them on a line, and nothing else in it
capitals    words in capital letters                                       writes them, to the letter
initials    the first letters of words                                     says them
join        words with a sign between them                                 writes it, to the letter
convert     facts as JSON                                                  holds that JSON object
pairs       facts as key=value                                             has them in order, and nothing between
csv         the values of facts in one line                                has them on a line, and nothing else in it
date        a date in figures, or in words                                 writes it, to the letter

A kind's level, from 1 on, sets how much there is to read, to copy or to reckon.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from decoding.answers import arithmetic, facts, lists
from decoding.answers.gsm8k import read_gsm8k
from decoding.answers.question import Made, Question, right

__all__ = ["KINDS", "MIX", "SPLITS", "Question", "Questions", "held_out", "questions", "read_gsm8k", "right"]

KINDS: dict[str, Callable[[random.Random, int], Made]] = {
    "extract": facts.extract, "lookup": facts.lookup, "copy": facts.copy, "sum": arithmetic.total,
    "convert": facts.convert, "difference": arithmetic.difference, "product": arithmetic.product,
    "steps": arithmetic.steps, "count": lists.count, "item": lists.item, "longest": lists.longest,
    "reverse": lists.reverse, "order": lists.order, "capitals": lists.capitals, "initials": lists.initials,
    "join": lists.join, "pairs": facts.pairs, "csv": facts.csv, "date": facts.date,
}  # fmt: skip
MIX: dict[str, tuple[int, ...]] = {
    "extract": (1, 2), "lookup": (1, 2), "convert": (1, 2), "csv": (1, 2), "date": (1, 2),
    "sum": (1, 2), "difference": (1, 2), "product": (1, 2), "steps": (1, 2),
    "count": (1, 2), "item": (1, 2, 3), "longest": (1, 2), "reverse": (1, 2, 3), "order": (1, 2), "capitals": (1, 2),
}  # fmt: skip
"""Kinds and levels of which small models can do a part, each another one."""
SPLITS = ("train", "held-out")

Levels = Sequence[str] | Mapping[str, int | Sequence[int]] | None
"""Names of kinds, at level 1, or a level or several by name, taken in turn; None = all kinds, at level 1."""


class Questions:
    """Questions without end, by number: the kinds in turn. `split`: only those of this side, so that none with the
    prompt of one is on the other, whatever the seeds."""

    def __init__(self, kinds: Levels = None, seed: int = 0, split: str | None = None) -> None:
        named = dict.fromkeys(KINDS, 1) if kinds is None else kinds
        by_name = named if isinstance(named, Mapping) else dict.fromkeys(named, 1)
        if not by_name:
            raise ValueError(f"no kind of question is named: choose from {', '.join(KINDS)}")
        for kind, level in by_name.items():
            if kind not in KINDS:
                raise ValueError(f"unknown kind of question {kind!r}: choose from {', '.join(KINDS)}")
            if level in ((), []) or min((level,) if isinstance(level, int) else level) < 1:
                raise ValueError(f"the level of {kind!r} is {level}; it must be 1 or more")
        if split not in (None, *SPLITS):
            raise ValueError(f"unknown split of the questions {split!r}: choose from {', '.join(SPLITS)}")
        self._levels = {k: (level,) if isinstance(level, int) else tuple(level) for k, level in by_name.items()}
        self._kinds, self._seed, self._split = list(self._levels), seed, split

    def __getitem__(self, number: int) -> Question:
        turn, which = divmod(number, len(self._kinds))
        kind = self._kinds[which]
        level = self._levels[kind][turn % len(self._levels[kind])]
        rng = random.Random(f"{self._seed} {kind} {level} {number}")  # no question depends on the ones before it
        made = KINDS[kind](rng, level)
        while self._split is not None and held_out(made.prompt) != (self._split == "held-out"):
            made = KINDS[kind](rng, level)
        message = {"role": "user", "content": made.prompt}
        return Question(f"{kind}-{level}-{number}", kind, level, (message,), made.answer, tuple(made.wrong), made.check)


def questions(kinds: Levels = None, count: int = 100, seed: int = 0, split: str | None = None) -> list[Question]:
    """The first `count` of them. The same kinds, levels, seed and split give the same questions, and a larger count
    only adds to them. Raises ValueError for a count below 1."""
    if count < 1:
        raise ValueError(f"count is {count}; ask for 1 question or more")
    source = Questions(kinds, seed, split)
    return [source[number] for number in range(count)]


def held_out(prompt: str) -> bool:
    """Whether a prompt is on the held-out side: one of eight, by its hash."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0
