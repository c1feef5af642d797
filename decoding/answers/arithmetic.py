"""Questions about numbers."""

from __future__ import annotations

import random

from activations.tasks import NAMES, THINGS
from decoding.answers.question import Made

ONLY = "Say only the number."


def total(rng: random.Random, level: int) -> Made:
    """Two numbers of one digit at level 1, of two digits at level 2; a number more at each level from 3 on."""
    numbers = [rng.randint(2, 9) if level == 1 else rng.randint(11, 99) for _ in range(max(2, level))]
    answer = str(sum(numbers))
    if rng.random() < 0.5:
        return Made(f"What is {' + '.join(map(str, numbers))}? {ONLY}", answer, check="number")
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    more = "".join(f" Then {name} gets {number} more." for number in numbers[1:])
    text = f"{name} has {numbers[0]} {things}.{more} How many {things} does {name} have now? {ONLY}"
    return Made(text, answer, check="number")


def difference(rng: random.Random, level: int) -> Made:
    """Of two numbers of `level` digits each."""
    low, high = 10 ** (level - 1), 10**level - 1
    a, b = sorted((rng.randint(low, high), rng.randint(low, high)), reverse=True)
    if rng.random() < 0.5:
        return Made(f"What is {a} - {b}? {ONLY}", str(a - b), check="number")
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    text = f"{name} has {a} {things} and gives {b} away. How many {things} are left? {ONLY}"
    return Made(text, str(a - b), check="number")


def product(rng: random.Random, level: int) -> Made:
    """Of a number of `level` digits and one of one digit."""
    a, b = rng.randint(max(2, 10 ** (level - 1)), 10**level - 1), rng.randint(2, 9)
    if rng.random() < 0.5:
        return Made(f"What is {a} times {b}? {ONLY}", str(a * b), check="number")
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    text = f"{name} buys {b} boxes of {a} {things}. How many {things} is that? {ONLY}"
    return Made(text, str(a * b), check="number")


def steps(rng: random.Random, level: int) -> Made:
    """A story of two steps, with numbers up to 10 x level."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    high = 10 * level
    if rng.random() < 0.5:
        a, b = rng.randint(2, high), rng.randint(2, high)
        c = rng.randint(1, a + b - 1)
        text = f"{name} has {a} {things}, gets {b} more and loses {c}."
        return Made(f"{text} How many {things} are left? {ONLY}", str(a + b - c), check="number")
    a, b, c = rng.randint(2, 5), rng.randint(2, 9), rng.randint(1, high)
    text = f"{name} has {a} boxes of {b} {things} and {c} more."
    return Made(f"{text} How many {things} is that? {ONLY}", str(a * b + c), check="number")
