"""Prompts: the embedded corpus that probes are trained and tuned on, and the documents that users bring.

The corpus is two JSONL files in `activations/prompts`, one a split, one record a line:
`{"id", "family", "group", "split", "repetition", "messages"}`, and `"decoy": true` where it is one. It was written
for this project and shares no 13 words in a row with the benchmarks; `benchmarks/make_corpus.py` puts it together.
Everything is tuned on its validation part.

Documents of users are read one at a time: a JSONL file of any size, a folder of text files, or a `datasets` name.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
COLUMNS = ("messages", "turns", "prompt", "text")
"""Where a record keeps its prompt."""
FORMATS = (
    'write {"messages": [{"role": "user", "content": "..."}]}, {"turns": ["..."]} or {"prompt": "..."} on each line'
)
TEXT_SUFFIXES = (".txt", ".md")
DOCUMENT_LIMIT = 64 * 2**20
"""Bytes of the longest line or text file that is read: far beyond any context, and a file without line ends must
not fill the memory."""
DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


class PromptError(ValueError):
    """Prompts that cannot be used; the message starts with the place, `file:line` in a JSONL file."""


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
    decoy: bool = False
    """The prompt holds runs of at least five words that go on in two ways, so that a suffix match misleads."""


@dataclass
class Skipped:
    """Collects the documents that a reader leaves out. A reader that is given none stops at the first bad one."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """What was wrong with the first ten of them, each with its place."""

    def add(self, error: PromptError) -> None:
        self.count += 1
        if len(self.first) < 10:
            self.first.append(str(error))


def load_corpus(split: str | None = None) -> list[Prompt]:
    """The embedded prompts of one split, or of both (train first). Raises ValueError for an unknown split."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}, or None for both")
    prompts: list[Prompt] = []
    for name in (split,) if split else SPLITS:
        with resources.as_file(resources.files("activations") / "prompts" / f"{name}.jsonl") as file:
            prompts.extend(stream_prompts(file))
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of the prompts, evenly spread. A store's texts are found again by this choice: `activations.texts`."""
    return [prompts[i * len(prompts) // count] for i in range(count)]


def prompts_hash(prompts: Sequence[Prompt]) -> str | None:
    """sha256 of ids and messages, for manifests; None where there are none. Makes no second copy of them."""
    if not prompts:
        return None
    digest = hashlib.sha256(b"[")
    for number, prompt in enumerate(prompts):
        digest.update((", " if number else "").encode() + repr((prompt.id, prompt.messages)).encode())
    digest.update(b"]")
    return digest.hexdigest()


def read_prompts(
    source: str | os.PathLike[str], *, column: str | None = None, skipped: Skipped | None = None
) -> list[Prompt]:
    """All of `stream_prompts(source)`."""
    return list(stream_prompts(source, column=column, skipped=skipped))


def stream_prompts(
    source: str | os.PathLike[str], *, column: str | None = None, skipped: Skipped | None = None
) -> Iterator[Prompt]:
    """Prompts of a source, one at a time; only ids and the present document are kept in memory.

    A source is
    - a JSONL file, each line in the corpus format (only `messages` is required), in Spec-Bench's (`{"question_id",
      "category", "turns"}`; the first turn is the prompt), `{"prompt": "..."}` or `{"text": "..."}`. Empty lines do
      not count. Where a line has no id, it is the file's name and the line number; the group is the id.
    - a folder: each .txt or .md file in it, in folders below it too, is one prompt, in the order of their names,
      hidden ones left out; or one such file.
    - a name that `datasets.load_dataset` knows, as `owner/name` or `owner/name:configuration`: the rows of `train`,
      or of its first split, from the first of the columns messages, turns, prompt and text. An answer that a row's
      messages end with is dropped. It is streamed.
    `column` names the key or column that holds the prompt, where that is another: a text, messages, or turns;
    nothing else of the record is then read.

    A bad document raises PromptError with its place; with `skipped`, it is added there and the rest is read. A
    source that cannot be opened, or holds nothing that can be used, raises PromptError in any case.
    """
    name = os.fspath(source)
    path = Path(name)
    documents: Iterable[tuple[str, str, Callable[[], dict[str, Any]]]]
    if path.is_dir() or path.suffix in TEXT_SUFFIXES:
        if column is not None:
            raise PromptError(f"{name}: text files have no column {column!r}: leave it out")
        documents = _texts(path)
    elif path.exists() or not DATA_SET.fullmatch(name) or path.suffix in (".jsonl", ".json"):
        documents = _lines(path, column)
    else:
        documents = _rows(name, column)

    first_seen: dict[str, str] = {}
    found = skipped.count if skipped else 0  # the collector may have seen other sources
    try:
        for place, default_id, read in documents:
            try:
                prompt = _prompt(read(), default_id)
                if prompt.id in first_seen:
                    raise PromptError(f"id {prompt.id!r} is already that of {first_seen[prompt.id]}: ids are unique")
            except PromptError as error:
                placed = PromptError(f"{place}: {error}")
                if skipped is None:
                    raise placed from error.__cause__
                skipped.add(placed)
                continue
            first_seen[prompt.id] = place
            yield prompt
    except FileNotFoundError:
        raise PromptError(f"{name}: no such file") from None
    except OSError as error:
        raise PromptError(f"{name}: cannot be read: {error.strerror}") from error
    if not first_seen:
        if skipped and skipped.count > found:
            raise PromptError(f"{name}: none of {skipped.count - found} prompts can be used; {skipped.first[0]}")
        raise PromptError(f"{name}: holds no prompts: {FORMATS}")


# Sources: each document as (place, id where it has none, what reads it as a record)


def _lines(path: Path, column: str | None) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    # Bytes, for two reasons: a line in another encoding spoils no other line, and text mode would end lines at
    # more than "\n", such as U+2028 after splitlines(), which JSON strings may hold.
    with path.open("rb") as handle:
        number = 0
        while line := handle.readline(DOCUMENT_LIMIT + 1):
            number += 1
            if number == 1:
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise PromptError(f"{path}: is UTF-16 text: save the file as UTF-8")
                line = line.removeprefix(codecs.BOM_UTF8)
            part = line
            while len(part) > DOCUMENT_LIMIT and not part.endswith(b"\n"):  # the rest of a line that is too long
                part = handle.readline(DOCUMENT_LIMIT + 1)
            if line.strip():
                yield f"{path}:{number}", f"{path.stem}-{number}", partial(_json, line.rstrip(b"\r\n"), column)


def _json(line: bytes, column: str | None) -> dict[str, Any]:
    if len(line) > DOCUMENT_LIMIT:
        raise PromptError(f"is longer than {DOCUMENT_LIMIT // 2**20} MiB: write one prompt a line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise PromptError("not UTF-8 text: save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON ({error.msg} at column {error.colno}): {FORMATS}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise PromptError(f"not JSON that can be read ({error}): {FORMATS}") from None
    if not isinstance(record, dict):
        raise PromptError(f"a JSON object is needed, not {_kind(record)}: {FORMATS}")
    return record if column is None else _column(record, column)


def _texts(path: Path) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    files = [path]
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix in TEXT_SUFFIXES
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise PromptError(f"{path}: the folder holds no {' or '.join(TEXT_SUFFIXES)} files: name another")
    for file in files:
        place = file.relative_to(path).as_posix() if path.is_dir() else file.name
        yield str(file), place, partial(_text_file, file)


def _text_file(file: Path) -> dict[str, Any]:
    if file.stat().st_size > DOCUMENT_LIMIT:
        raise PromptError(f"is larger than {DOCUMENT_LIMIT // 2**20} MiB: split it into one file a prompt")
    try:
        return {"prompt": file.read_text(encoding="utf-8-sig")}
    except UnicodeDecodeError:
        raise PromptError("not UTF-8 text: save the file as UTF-8") from None


def _rows(name: str, column: str | None) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    from datasets import load_dataset  # seconds to import

    path, _, configuration = name.partition(":")
    number = 0
    try:
        splits = load_dataset(path, configuration or None, streaming=True)
        rows = iter(splits["train"] if "train" in splits else next(iter(splits.values())))
    except Exception as error:  # the libraries below raise errors of many kinds
        raise PromptError(
            f"{name}: no such file or folder, and no data set of that name can be loaded ({_first_line(error)}): "
            "name a JSONL file, a folder of text files, or a data set that is cached or reachable"
        ) from error
    while True:
        number += 1
        try:
            row = next(rows, None)
        except Exception as error:
            raise PromptError(f"{name}:{number}: the data set broke off ({_first_line(error)})") from error
        if row is None:
            return
        if column is None:
            column = next((key for key in COLUMNS if key in row), None)
        if column is None or column not in row:  # the same for all rows, so there is nothing to skip
            wanted = repr(column) if column else ", ".join(COLUMNS)
            raise PromptError(f"{name}: no column {wanted}; it has {', '.join(row)}: name the one with the prompts")
        yield f"{name}:{number}", f"{path.rpartition('/')[2]}-{number}", partial(_row, row, column)


def _row(row: dict[str, Any], column: str) -> dict[str, Any]:
    record = _column(row, column)
    messages = record.get("messages")
    if messages and all(isinstance(m, dict) for m in messages):
        # Arrow gives every message the keys of all; training sets end with the answer.
        messages = [{k: v for k, v in m.items() if k in ("role", "content")} for m in messages]
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        record["messages"] = messages
    return record


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.: ')}" if lines else type(error).__name__


# Records


def _column(record: dict[str, Any], column: str) -> dict[str, Any]:
    """The record in the format that the type of its column's value calls for."""
    if column not in record:
        raise PromptError(f"has no {column!r}, only {', '.join(map(repr, record)) or 'nothing'}")
    value = record[column]
    if isinstance(value, list) and value:
        return {"messages" if isinstance(value[0], dict) else "turns": value}
    return {"prompt": value}


def _prompt(record: dict[str, Any], default_id: str) -> Prompt:
    kinds = [key for key in COLUMNS if key in record]
    if len(kinds) != 1:
        found = " and ".join(map(repr, kinds)) if kinds else "no 'messages', 'turns', 'prompt' or 'text'"
        raise PromptError(f"has {found}: {FORMATS}")
    kind = kinds[0]
    if kind == "messages":
        id = _id(record, "id", default_id)
        return Prompt(
            id=id,
            family=_text(record, "family", "user"),
            group=_text(record, "group", id),
            split=_choice(record, "split", SPLITS),
            repetition=_choice(record, "repetition", REPETITIONS),
            messages=_messages(record["messages"]),
            decoy=_flag(record, "decoy"),
        )
    if kind == "turns":
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise PromptError(f"'turns' is {_kind(turns)}: a list with at least one text is needed")
        content, where = turns[0], "the first of 'turns'"
        id = _id(record, "question_id", default_id)
        family = _text(record, "category", "user")
    else:
        content, where = record[kind], repr(kind)
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
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{where} holds half a surrogate pair at character {error.start}: remove it") from None
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


def _flag(record: dict[str, Any], key: str) -> bool:
    value = record.get(key, False)
    if not isinstance(value, bool):
        raise PromptError(f"{key!r} is {value!r}: use true or false, or leave it out")
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    if value is None:
        return "null"
    if type(value) not in names:
        return f"a {type(value).__name__}"
    return f"an empty {names[type(value)].split()[1]}" if value in ([], {}, "") else names[type(value)]
