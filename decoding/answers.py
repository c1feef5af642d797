"""Questions whose answers can be checked, for small models: written by code, from seeds.

kind       asks for                                                       right is a text that
extract    the place or job of one of a passage's people                  holds it, before any other of its sort
lookup     the value that stands behind a key                             holds it, before any other value
copy       a list again, with bullets or numbers                          holds its items in order, and nothing between
sum        the sum of numbers, as a small story or plainly                has it as its last number
convert    facts as JSON                                                  holds that JSON object

A kind's level, from 1 on, sets how much there is to read, to copy or to add up.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activations.tasks import NAMES, THINGS


@dataclass(frozen=True)
class Question:
    """A prompt and what a right answer says."""

    key: str
    """Unique among the questions of one seed."""
    kind: str
    level: int
    messages: tuple[Mapping[str, str], ...]
    """Goes through the chat template like any prompt."""
    answer: str
    """As a good answer has it."""
    wrong: tuple[str, ...] = ()
    """What an answer must not say before it."""


def questions(
    kinds: Sequence[str] | Mapping[str, int] | None = None, count: int = 100, seed: int = 0
) -> list[Question]:
    """`count` questions, the kinds in turn. `kinds`: names, at level 1, or levels by name; None = all kinds.

    The same kinds, levels and seed give the same questions, and a larger count only adds to them.
    """
    levels = dict.fromkeys(KINDS, 1) if kinds is None else kinds
    if not isinstance(levels, Mapping):
        levels = dict.fromkeys(levels, 1)
    if not levels:
        raise ValueError(f"no kind of question is named: choose from {', '.join(KINDS)}")
    for kind, level in levels.items():
        if kind not in KINDS:
            raise ValueError(f"unknown kind of question {kind!r}: choose from {', '.join(KINDS)}")
        if level < 1:
            raise ValueError(f"the level of {kind!r} is {level}; it must be 1 or more")
    if count < 1:
        raise ValueError(f"count is {count}; ask for 1 question or more")
    out = []
    for number in range(count):
        kind = list(levels)[number % len(levels)]
        level = levels[kind]
        rng = random.Random(f"{seed} {kind} {level} {number}")  # no question depends on the ones before it
        prompt, answer, wrong = KINDS[kind](rng, level)
        message = {"role": "user", "content": prompt}
        out.append(Question(f"{kind}-{level}-{number}", kind, level, (message,), answer, tuple(wrong)))
    return out


def right(question: Question, text: str) -> bool:
    """Whether a text answers the question. Case, spaces and what stands around the answer do not matter."""
    if question.kind == "sum":
        numbers = re.findall(r"-?\d+", text.replace(",", ""))
        return bool(numbers) and numbers[-1] == question.answer
    if question.kind == "convert":
        wanted = _plain(json.loads(question.answer))
        return any(_plain(found) == wanted for found in _objects(text))
    return _place(text, question.answer) < min((_place(text, other) for other in question.wrong), default=math.inf)


# -- checking ---------------------------------------------------------------------------------------


def _place(text: str, answer: str) -> float:
    """Where the words of an answer stand in a text, one after the other and whole, infinity if nowhere; between its
    lines there may be bullets or numbers."""
    lines = [r"\s+".join(re.escape(word) for word in line.split()) for line in answer.lower().splitlines()]
    found = re.search(r"(?<!\w)" + r"[\W\d]+".join(lines) + r"(?!\w)", text.lower())
    return found.start() if found else math.inf


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text."""
    found, at, decoder = [], text.find("{"), json.JSONDecoder()
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except ValueError:
            end = at + 1
        at = text.find("{", end)
    return found


def _plain(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts without case, and a number the same with or without quotes."""
    return {str(key).lower(): str(value).lower() for key, value in facts.items()}


# -- the kinds: (random state, level) -> prompt, answer, what may not be said before it ----------------

PLACES = ("Oslo", "Lima", "Cairo", "Tokyo", "Dublin", "Athens", "Madrid", "Warsaw", "Quito", "Hanoi", "Accra", "Riga")
JOBS = ("teacher", "nurse", "pilot", "farmer", "baker", "lawyer", "painter", "doctor", "driver", "judge")
PETS = ("dog", "cat", "parrot", "rabbit", "horse", "turtle", "hamster", "goat")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange", "pink", "brown")
WORDS = (
    "river", "candle", "garden", "window", "bridge", "pepper", "silver", "mirror", "forest", "island", "basket",
    "pencil", "button", "jacket", "ladder", "rocket", "violin", "tunnel", "blanket", "hammer", "lemon", "castle",
)  # fmt: skip

Made = tuple[str, str, Sequence[str]]


def _extract(rng: random.Random, level: int) -> Made:
    """One of 2 x level people is asked about."""
    n = min(2 * level, len(NAMES))
    people = list(
        zip(rng.sample(NAMES, n), rng.choices(JOBS, k=n), rng.sample(PLACES, min(n, len(PLACES))), strict=False)
    )
    lines = []
    for name, job, place in people:
        year, pet = rng.randint(1950, 2005), rng.choice(PETS)
        lines.append(f"{name} is a {job} from {place}. {name} was born in {year} and has a {pet}.")
    name, job, place = people[rng.randrange(len(people))]
    text = " ".join(lines)
    if rng.random() < 0.5:
        return f"{text}\n\nWhich city does {name} come from?", place, [p for _, _, p in people if p != place]
    others = sorted({j for _, j, _ in people} - {job})
    return f"{text}\n\nWhat is the job of {name}?", job, others


def _lookup(rng: random.Random, level: int) -> Made:
    """One of 2 + 2 x level lines is asked for."""
    n = min(2 + 2 * level, len(WORDS))
    keys, values = rng.sample(WORDS, n), rng.sample(range(100, 1000), n)
    lines = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    at = rng.randrange(n)
    others = [str(v) for v in values if v != values[at]]
    return f"{lines}\n\nWhat is the number of {keys[at]}?", str(values[at]), others


def _copy(rng: random.Random, level: int) -> Made:
    """2 + level items."""
    items = rng.sample(WORDS, min(2 + level, len(WORDS)))
    bullet = rng.choice(("- {item}", "* {item}", "{i}. {item}"))
    lines = [bullet.format(item=item, i=i) for i, item in enumerate(items, start=1)]
    return "Repeat this list:\n" + "\n".join(lines), "\n".join(items), ()


def _sum(rng: random.Random, level: int) -> Made:
    """Two numbers of one digit at level 1, of two digits at level 2; a number more at each level from 3 on."""
    numbers = [rng.randint(2, 9) if level == 1 else rng.randint(11, 99) for _ in range(max(2, level))]
    total = str(sum(numbers))
    if rng.random() < 0.5:
        return f"What is {' + '.join(map(str, numbers))}? Say only the number.", total, ()
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    more = "".join(f" Then {name} gets {number} more." for number in numbers[1:])
    return (
        f"{name} has {numbers[0]} {things}.{more} How many {things} does {name} have now? Say only the number.",
        total,
        (),
    )


def _convert(rng: random.Random, level: int) -> Made:
    """1 + level facts."""
    facts: dict[str, str | int] = {
        "name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(PLACES), "job": rng.choice(JOBS),
        "pet": rng.choice(PETS), "color": rng.choice(COLORS),
    }  # fmt: skip
    facts = dict(list(facts.items())[: 1 + level])
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return f"Write this as one JSON object and say nothing else:\n{lines}", json.dumps(facts), ()


KINDS: dict[str, Callable[[random.Random, int], Made]] = {
    "extract": _extract, "lookup": _lookup, "copy": _copy, "sum": _sum, "convert": _convert,
}  # fmt: skip
