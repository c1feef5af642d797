"""What the small model is taught: tasks whose answers copy the prompt, and tasks in which copying misleads.

kind       the answer                                                       copying
repeat     the text again, once or twice                                    right
lookup     one line of a table, asked for by its first words                right, from the middle of the prompt
set        the table again, with one word in place of every value           wrong behind every key
swap       the text again, with one of its words replaced                   wrong where that word stood
two        one of two lines that begin alike, asked for by its tag          wrong for the other line

Words are half the text's own and half invented, so that nothing but the prompt tells what comes next.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

REPEAT = (
    "Repeat this:", "Say this again:", "Copy this text:", "Write this once more:", "Print the text below unchanged:",
    "Repeat after me:", "Give me the same text back:", "Copy the lines below:",
)  # fmt: skip
TWICE = ("Say this twice:", "Repeat this two times:", "Write the text below twice:")
LOOKUP = ("Which line begins with {key}?", "Print the line of {key}.", "Find {key} in the table.")
SET = ("Copy the table with {word} for every value:", "Write the table again, but every value is {word}:")
SWAP = ("Copy this with {new} for {old}:", "Repeat this, but write {new} instead of {old}:")
TWO = ("Say the {tag} line.", "Which line is the {tag} one?")
BULLETS = ("", "- ", "* ")
TAGS = ("first", "second", "north", "south", "red", "blue", "old", "new")
PASSAGE_CHARACTERS = 240
"""Longest run of lines of a text that a prompt holds."""


@dataclass(frozen=True)
class Task:
    """A prompt with the only right answer."""

    kind: str
    prompt: str
    answer: str


class TaskWriter:
    """Writes tasks about the words and lines of a text. The same random state gives the same task."""

    def __init__(self, text: str) -> None:
        counts = Counter(re.findall(r"\b[a-z]{3,9}\b", text))
        self.words = sorted(counts, key=lambda word: (-counts[word], word))[:2000]
        self.lines = [line for line in text.splitlines() if line.strip()]
        if len(self.words) < 20 or len(self.lines) < 20:
            raise ValueError("the text is too short to write tasks about: 20 words and 20 lines are needed")
        self._kinds: dict[str, Callable[[random.Random], tuple[str, str]]] = {
            "repeat": self._repeat, "lookup": self._lookup, "set": self._set, "swap": self._swap, "two": self._two,
        }  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def task(self, rng: random.Random, kind: str | None = None) -> Task:
        """A task of this kind; of a random one, `repeat` three times as often as each other, if None is named."""
        kind = kind or rng.choice([*self._kinds, "repeat", "repeat"])
        return Task(kind, *self._kinds[kind](rng))

    # -- material -----------------------------------------------------------------------------------

    def word(self, rng: random.Random) -> str:
        """A word of the text, or one that no text holds."""
        if rng.random() < 0.5:
            return rng.choice(self.words)
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))

    def phrase(self, rng: random.Random, least: int, most: int) -> str:
        return " ".join(self.word(rng) for _ in range(rng.randint(least, most)))

    def passage(self, rng: random.Random) -> str:
        """Lines of the text that stand together."""
        first = rng.randrange(len(self.lines))
        text = "\n".join(self.lines[first : first + rng.randint(1, 6)]).strip()
        return text[:PASSAGE_CHARACTERS].strip()

    def text(self, rng: random.Random) -> str:
        """Anything that can be repeated."""
        choice = rng.randrange(6)
        if choice == 0:
            return self.passage(rng)
        if choice == 1:
            return self.phrase(rng, 3, 6).capitalize() + ". " + self.phrase(rng, 4, 9).capitalize() + "."
        if choice == 2:
            return " ".join(str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(rng.randint(3, 12)))
        if choice == 3:
            bullet = rng.choice(BULLETS)
            return "\n".join(bullet + self.phrase(rng, 1, 4) for _ in range(rng.randint(3, 8)))
        if choice == 4:
            return "\n".join(": ".join(entry) for entry in self.table(rng))
        return self.phrase(rng, 3, 32)

    def table(self, rng: random.Random) -> list[tuple[str, str]]:
        """Keys, all different, and their values."""
        most = rng.choice((2, 4, 8))
        keys = {self.phrase(rng, 1, most): None for _ in range(rng.randint(3, 7))}
        return [(key, self.phrase(rng, 1, 2)) for key in keys]

    # -- kinds --------------------------------------------------------------------------------------

    def _repeat(self, rng: random.Random) -> tuple[str, str]:
        text = self.text(rng)
        if rng.random() < 0.15:
            return f"{rng.choice(TWICE)}\n{text}", f"{text}\n{text}"
        if "\n" not in text and rng.random() < 0.2:
            return f'{rng.choice(REPEAT)} "{text}"', f'"{text}"'
        return f"{rng.choice(REPEAT)}\n{text}", text

    def _lookup(self, rng: random.Random) -> tuple[str, str]:
        table = self.table(rng)
        lines = [": ".join(entry) for entry in table]
        number = rng.randrange(len(table))
        return "\n".join([*lines, rng.choice(LOOKUP).format(key=table[number][0])]), lines[number]

    def _set(self, rng: random.Random) -> tuple[str, str]:
        table, bullet, word = self.table(rng), rng.choice(BULLETS), self.word(rng)
        lines = [f"{bullet}{key}: {value}" for key, value in table]
        answer = "\n".join(f"{bullet}{key}: {word}" for key, _ in table)
        return "\n".join([rng.choice(SET).format(word=word), *lines]), answer

    def _swap(self, rng: random.Random) -> tuple[str, str]:
        words = self.phrase(rng, 8, 32).split(" ")
        old, new = words[rng.randrange(3, len(words))], self.word(rng)
        for _ in range(rng.randint(0, 3)):
            words[rng.randrange(1, len(words))] = old
        answer = " ".join(new if word == old else word for word in words)
        return f"{rng.choice(SWAP).format(new=new, old=old)}\n{' '.join(words)}", answer

    def _two(self, rng: random.Random) -> tuple[str, str]:
        tags, shared = rng.sample(TAGS, 2), self.phrase(rng, 4, 9)
        lines = [f"{shared} {self.phrase(rng, 2, 5)}" for _ in tags]
        number = rng.randrange(2)
        prompt = [f"{tag}: {line}" for tag, line in zip(tags, lines, strict=True)]
        return "\n".join([*prompt, rng.choice(TWO).format(tag=tags[number])]), lines[number]
