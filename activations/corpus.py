"""Prompts: the embedded corpus that probes are trained and tuned on, and the files that users bring.

The corpus is two JSONL files in `activations/prompts`, one a split, one record a line:
`{"id", "family", "group", "split", "repetition", "messages"}`. It was written for this project and shares no
13 words in a row with the benchmarks. Everything is tuned on its validation part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

FAMILIES = (
    "code-rename", "code-completion", "unit-tests", "data-transform", "quote", "summarise-quotes", "translation",
    "rag", "log-analysis", "email-reply", "math", "table", "config-edit", "poem", "list", "chat", "qa",
)  # fmt: skip
SPLITS = ("train", "validation")
REPETITIONS = ("heavy", "medium", "light")
ROLES = ("system", "user", "assistant")
FORMATS = (
    'write {"messages": [{"role": "user", "content": "..."}]}, {"turns": ["..."]} or {"prompt": "..."} on each line'
)


class PromptError(ValueError):
    """A prompt file that cannot be used; the message starts with `file:line`."""


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for an answer."""

    id: str
    """Unique in its file."""
    family: str
    """Kind of task: one of FAMILIES in the corpus, the category of a Spec-Bench file, "user" where none is given."""
    group: str
    """Near-duplicates share it, and never stand on both sides of a split."""
    split: str | None
    """"train" or "validation"; None where the file does not say."""
    repetition: str | None
    """How much of a good answer repeats the prompt, or the answer's own earlier lines: "heavy" (most of it),
    "medium" (whole lines or sentences), "light" (names and phrases at most); None where the file does not say."""
    messages: tuple[Mapping[str, str], ...]
    """`{"role", "content"}`, the last one the user's."""


def load_corpus(split: str | None = None) -> list[Prompt]:
    """The embedded prompts of one split, or of both (train first)."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}, or None for both")
    prompts: list[Prompt] = []
    for name in (split,) if split else SPLITS:
        file = resources.files("activations") / "prompts" / f"{name}.jsonl"
        prompts.extend(_parse(file.read_text(encoding="utf-8"), file.name))
    return prompts


def prompts_hash(prompts: Sequence[Prompt]) -> str | None:
    """sha256 over ids and messages, for manifests; None where there are none."""
    if not prompts:
        return None
    return hashlib.sha256(repr([(p.id, p.messages) for p in prompts]).encode()).hexdigest()


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSONL file; each line is in the corpus format (only `messages` is required), in Spec-Bench's
    (`{"question_id", "category", "turns"}`; the first turn is the prompt), or `{"prompt": "..."}`. Empty lines are
    skipped. What a line does not say: the id is the file's name and the line number, the group is the id.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PromptError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PromptError(f"{path}:{line}: not UTF-8 text: save the file as UTF-8") from None
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    prompts = list(_parse(text, str(path)))
    if not prompts:
        raise PromptError(f"{path}: holds no prompts: {FORMATS}")
    return prompts


def _parse(text: str, name: str) -> Iterator[Prompt]:
    first_seen: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(_record(line), f"{Path(name).stem}-{number}")
            if prompt.id in first_seen:
                raise PromptError(f"id {prompt.id!r} is already that of line {first_seen[prompt.id]}: ids are unique")
        except PromptError as error:
            raise PromptError(f"{name}:{number}: {error}") from error.__cause__
        first_seen[prompt.id] = number
        yield prompt


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON ({error.msg} at column {error.colno}): {FORMATS}") from error
    if not isinstance(record, dict):
        raise PromptError(f"a JSON object is needed, not {_kind(record)}: {FORMATS}")
    return record


def _prompt(record: dict[str, Any], default_id: str) -> Prompt:
    kinds = [key for key in ("messages", "turns", "prompt") if key in record]
    if len(kinds) != 1:
        found = " and ".join(map(repr, kinds)) if kinds else "no 'messages', 'turns' or 'prompt'"
        raise PromptError(f"has {found}: {FORMATS}")
    if kinds == ["messages"]:
        id = _id(record, "id", default_id)
        return Prompt(
            id=id,
            family=_text(record, "family", "user"),
            group=_text(record, "group", id),
            split=_choice(record, "split", SPLITS),
            repetition=_choice(record, "repetition", REPETITIONS),
            messages=_messages(record["messages"]),
        )
    if kinds == ["turns"]:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise PromptError(f"'turns' is {_kind(turns)}: a list with at least one text is needed")
        content, where = turns[0], "the first of 'turns'"
        id = _id(record, "question_id", default_id)
        family = _text(record, "category", "user")
    else:
        content, where = record["prompt"], "'prompt'"
        id = _id(record, "id", default_id)
        family = _text(record, "family", "user")
    return Prompt(id, family, id, None, None, ({"role": "user", "content": _content(content, where)},))


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"'messages' is {_kind(value)}: a list with at least one message is needed")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise PromptError(f"messages[{i}] must be an object with 'role' and 'content', and nothing else")
        if message["role"] not in ROLES:
            raise PromptError(f"messages[{i}] has role {message['role']!r}: use one of {', '.join(ROLES)}")
        messages.append({"role": message["role"], "content": _content(message["content"], f"messages[{i}]")})
    if messages[-1]["role"] != "user":
        raise PromptError(f"the last message has role {messages[-1]['role']!r}: it must be the user's")
    return tuple(messages)


def _content(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where} is {_kind(value)}: a text is needed")
    if not value.strip():
        raise PromptError(f"{where} is empty: write a prompt, or remove the line")
    return value


def _id(record: dict[str, Any], key: str, default: str) -> str:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise PromptError(f"{key!r} is {value!r}: a text or a whole number is needed")
    return str(value)


def _text(record: dict[str, Any], key: str, default: str) -> str:
    value = record.get(key, default)
    if not isinstance(value, str) or not value:
        raise PromptError(f"{key!r} is {value!r}: a text that is not empty is needed")
    return value


def _choice(record: dict[str, Any], key: str, choices: tuple[str, ...]) -> str | None:
    value = record.get(key)
    if value is not None and value not in choices:
        raise PromptError(f"{key!r} is {value!r}: use one of {', '.join(choices)}, or leave it out")
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    if value is None:
        return "null"
    return f"an empty {names[type(value)].split()[1]}" if value in ([], {}, "") else names[type(value)]
