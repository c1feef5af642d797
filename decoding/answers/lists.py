"""Questions about words and lists of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from decoding.answers.question import Made

COMMON = (
    "apple", "arm", "baby", "ball", "bank", "bath", "bear", "bed", "bird", "boat", "book", "bottle", "box", "boy",
    "bread", "brother", "bus", "butter", "cake", "camera", "car", "cat", "chair", "cheese", "chicken", "church", "city",
    "clock", "cloud", "coat", "coffee", "computer", "corn", "cow", "cup", "desk", "dinner", "doctor", "dog", "door",
    "dress", "duck", "ear", "egg", "engine", "eye", "face", "family", "farm", "father", "field", "finger", "fire",
    "fish", "flower", "foot", "game", "garden", "gate", "girl", "glass", "gold", "grass", "hair", "hand", "hat",
    "head", "heart", "hill", "horse", "hotel", "house", "ice", "iron", "island", "kitchen", "knife", "lake", "lamp",
    "leaf", "letter", "library", "lion", "map", "market", "meat", "milk", "money", "moon", "mother", "mountain",
    "mouse", "music", "night", "nose", "ocean", "office", "orange", "paper", "park", "pen", "phone", "piano", "picture",
    "pig", "plane", "plate", "queen", "rain", "ring", "river", "road", "rock", "roof", "room", "rose", "salt", "school",
    "sea", "ship", "shirt", "shoe", "silver", "sister", "snow", "song", "star", "stone", "street", "sugar", "summer",
    "sun", "table", "tea", "teacher", "train", "tree", "village", "wall", "water", "window", "winter", "wood", "yard",
)  # fmt: skip
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.sample(COMMON, min(count, len(COMMON)))


def _told(items: Sequence[str]) -> str:
    return ", ".join(items)


def item(rng: random.Random, level: int) -> Made:
    """One of 2 + level words, by its place."""
    words = _words(rng, 2 + level)
    at = rng.randrange(min(len(words), len(PLACES) + 1))
    place = "last" if at == min(len(words), len(PLACES) + 1) - 1 else PLACES[at]
    answer = words[-1] if place == "last" else words[at]
    wrong = [word for word in words if word != answer]
    return Made(f"Say only the {place} word of this list: {_told(words)}", answer, wrong)


def reverse(rng: random.Random, level: int) -> Made:
    """1 + level words."""
    words = _words(rng, 1 + level)
    return Made(f"Write this list in reverse order: {_told(words)}", _told(words[::-1]), check="list")


def order(rng: random.Random, level: int) -> Made:
    """1 + level words by the alphabet, or numbers by size."""
    if rng.random() < 0.5:
        numbers = rng.sample(range(10, 100), min(1 + level, 90))
        text = f"Write these numbers from small to large: {_told([str(n) for n in numbers])}"
        return Made(text, _told([str(n) for n in sorted(numbers)]), check="list")
    words = _words(rng, 1 + level)
    return Made(f"Write these words in alphabetical order: {_told(words)}", _told(sorted(words)), check="list")


def count(rng: random.Random, level: int) -> Made:
    """A list of 2 to 3 + 2 x level words."""
    words = _words(rng, rng.randint(2, 3 + 2 * level))
    text = f"How many words are in this list: {_told(words)}? Say only the number."
    return Made(text, str(len(words)), check="number")


def capitals(rng: random.Random, level: int) -> Made:
    """`level` words."""
    words = _words(rng, level)
    return Made(f"Write in capital letters: {' '.join(words)}", " ".join(words).upper(), check="writes")


def initials(rng: random.Random, level: int) -> Made:
    """Of 1 + level words."""
    words = _words(rng, 1 + level)
    text = f"Write only the first letter of each word, with spaces between: {_told(words)}"
    return Made(text, " ".join(word[0] for word in words))


def join(rng: random.Random, level: int) -> Made:
    """1 + level words, with a separator."""
    words, sign = _words(rng, 1 + level), rng.choice("-+/_")
    return Made(f"Join these words with {sign} and no spaces: {_told(words)}", sign.join(words), check="writes")


def longest(rng: random.Random, level: int) -> Made:
    """Of 1 + level words."""
    while True:
        words = _words(rng, 1 + level)
        by_length = sorted(words, key=len)
        if len(by_length[-1]) > len(by_length[-2]):
            break
    text = f"Say only the longest of these words: {_told(words)}"
    return Made(text, by_length[-1], [word for word in words if word != by_length[-1]])
