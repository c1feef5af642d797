"""A question, and what makes a text a right answer to it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


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
    """The text of a good answer."""
    wrong: tuple[str, ...] = ()
    """What an answer must not say before it."""
    check: str = "says"
    """How a text is judged: one of `CHECKS`."""

    @property
    def prompt(self) -> str:
        return self.messages[-1]["content"]


class Made(NamedTuple):
    """A prompt and its answer, before they are a question."""

    prompt: str
    answer: str
    wrong: Sequence[str] = ()
    check: str = "says"


def right(question: Question, text: str) -> bool:
    """Whether a text answers the question. What stands around the answer does not matter."""
    return CHECKS[question.check](question, text)


def _says(question: Question, text: str) -> bool:
    """Whatever the case, and bullets or numbers between an answer's lines, before anything that is wrong."""
    first = _place(text, question.answer)
    return first < min((_place(text, other) for other in question.wrong), default=math.inf)


def _place(text: str, answer: str) -> float:
    """Where the words of an answer stand in a text, one after the other and whole, infinity if nowhere; between its
    lines there may be bullets or numbers."""
    lines = [r"\s+".join(re.escape(word) for word in line.split()) for line in answer.lower().splitlines()]
    found = re.search(r"(?<!\w)" + r"[\W\d]+".join(lines) + r"(?!\w)", text.lower())
    return found.start() if found else math.inf


def _number(question: Question, text: str) -> bool:
    """The last number of the text."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return bool(numbers) and float(numbers[-1]) == float(question.answer)


def _list(question: Question, text: str) -> bool:
    """The items, whatever separates them, and no item before or behind them in their line."""
    items = r"[^\w\n]+".join(re.escape(item) for item in question.answer.lower().split(", "))
    return re.search(rf"(?:^|[:\n])[^\w\n]*{items}[^\w\n]*(?:$|\n)", text.lower()) is not None


def _writes(question: Question, text: str) -> bool:
    """To the letter: a run of text with nothing glued to it but quotes, brackets and the end of a sentence."""
    edge = "\\s\"'`*()"
    return re.search(rf"(?:^|[{edge}]){re.escape(question.answer)}(?:[.!,]?(?:$|[{edge}]))", text) is not None


def _json(question: Question, text: str) -> bool:
    wanted = _plain(json.loads(question.answer))
    return any(_plain(found) == wanted for found in _objects(text))


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


CHECKS: dict[str, Callable[[Question, str], bool]] = {
    "says": _says, "number": _number, "list": _list, "writes": _writes, "json": _json,
}  # fmt: skip
