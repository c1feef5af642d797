"""Questions about facts: found in a text, or written in another form."""

from __future__ import annotations

import json
import random

from activations.tasks import NAMES
from decoding.answers.question import Made

PLACES = ("Oslo", "Lima", "Cairo", "Tokyo", "Dublin", "Athens", "Madrid", "Warsaw", "Quito", "Hanoi", "Accra", "Riga")
JOBS = ("teacher", "nurse", "pilot", "farmer", "baker", "lawyer", "painter", "doctor", "driver", "judge")
PETS = ("dog", "cat", "parrot", "rabbit", "horse", "turtle", "hamster", "goat")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange", "pink", "brown")
WORDS = (
    "river", "candle", "garden", "window", "bridge", "pepper", "silver", "mirror", "forest", "island", "basket",
    "pencil", "button", "jacket", "ladder", "rocket", "violin", "tunnel", "blanket", "hammer", "lemon", "castle",
)  # fmt: skip


def extract(rng: random.Random, level: int) -> Made:
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
        return Made(f"{text}\n\nWhich city does {name} come from?", place, [p for _, _, p in people if p != place])
    others = sorted({j for _, j, _ in people} - {job})
    return Made(f"{text}\n\nWhat is the job of {name}?", job, others)


def lookup(rng: random.Random, level: int) -> Made:
    """One of 2 + 2 x level lines is asked for."""
    n = min(2 + 2 * level, len(WORDS))
    keys, values = rng.sample(WORDS, n), rng.sample(range(100, 1000), n)
    lines = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    at = rng.randrange(n)
    others = [str(v) for v in values if v != values[at]]
    return Made(f"{lines}\n\nWhat is the number of {keys[at]}?", str(values[at]), others)


def copy(rng: random.Random, level: int) -> Made:
    """2 + level items."""
    items = rng.sample(WORDS, min(2 + level, len(WORDS)))
    bullet = rng.choice(("- {item}", "* {item}", "{i}. {item}"))
    lines = [bullet.format(item=item, i=i) for i, item in enumerate(items, start=1)]
    return Made("Repeat this list:\n" + "\n".join(lines), "\n".join(items))


def some(rng: random.Random, level: int) -> dict[str, str | int]:
    """1 + level facts about one person."""
    facts: dict[str, str | int] = {
        "name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(PLACES), "job": rng.choice(JOBS),
        "pet": rng.choice(PETS), "color": rng.choice(COLORS),
    }  # fmt: skip
    return dict(list(facts.items())[: 1 + level])


def convert(rng: random.Random, level: int) -> Made:
    """1 + level facts."""
    facts = some(rng, level)
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return Made(f"Write this as one JSON object and say nothing else:\n{lines}", json.dumps(facts), check="json")


def pairs(rng: random.Random, level: int) -> Made:
    """1 + level facts as key=value."""
    facts = some(rng, level)
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return Made(f"Write each line as key=value:\n{lines}", "\n".join(f"{k}={v}" for k, v in facts.items()))


def csv(rng: random.Random, level: int) -> Made:
    """The values of 1 + level facts in one line, with commas."""
    facts = some(rng, level)
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return Made(f"Write the values as one CSV line:\n{lines}", ", ".join(map(str, facts.values())), check="list")


MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def date(rng: random.Random, level: int) -> Made:
    """A day of 10 x level years, from words to figures; from level 2 on the other way as well."""
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), 2030 - rng.randint(1, 10 * level)
    words, figures = f"{day} {MONTHS[month - 1]} {year}", f"{year}-{month:02}-{day:02}"
    if level > 1 and rng.random() < 0.5:
        return Made(f"Write this date in words: {figures}", words, check="writes")
    return Made(f"Write this date as YYYY-MM-DD: {words}", figures, check="writes")
