"""The trace: the texts that were written, and one record a step; kept in memory and written as Parquet."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.request import Request

VERSION = 2
"""Version 1 held records alone."""
RECORDS, TEXTS = b"switchsd_trace", b"switchsd_texts"
"""Keys of the Parquet file's metadata: the version, and everything that is no record, as JSON."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 8
"""Most tokens of one character; what is longer is no character that is still to come."""

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special ones included."""


@dataclass(frozen=True)
class About:
    """What the steps of a trace have in common."""

    target: str
    mode: str
    lossless: bool
    gate: str
    """Class of the gate."""
    site: str | None
    """Where the probe reads; None without a probe."""
    label: str | None
    """What the probe's output is the probability of."""
    tau: float | None
    """Copy intent from which the gate copies; None where it decides otherwise."""
    kappa: int | None
    """Shortest suffix match that is copied from; None where nothing copies."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the modes."""
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedText:
    """One text that steps wrote: an answer with its prompt. Positions in records count from the prompt's begin."""

    request: int
    """Number of the request; the turns of a chat have the same one."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Generated; of particles, those that all agree on, and at the end those of the chosen one."""
    sources: tuple[str, ...]
    """Who drafted each generated token."""
    pieces: tuple[str, ...]
    """The text of each token of the prompt and the answer, special ones included; joined, they are the text. A
    character that is made of several tokens stands with the last of them."""


@dataclass(frozen=True)
class StepRecord:
    """One step of one request."""

    request: int
    step: int
    """Counts the request's steps from 0; prefill is none."""
    start: float
    """Seconds since the trace began."""
    position: int
    """Index of the pending token that the step started from."""
    mode: str
    drafters: tuple[str, ...]
    """The gate's decision: who was asked to draft."""
    reason: str
    """Why, in the gate's words."""
    intent: float | None
    """The probe's output at the anchor; None without a probe."""
    match_length: int
    """Length of the longest suffix match among the candidates; 0 = none."""
    match_start: int
    """Position of the first candidate's first token; -1 = none."""
    tokens: tuple[int, ...]
    """Drafted tokens, parents before children."""
    parents: tuple[int, ...]
    """-1 = child of the pending token."""
    source: tuple[str, ...]
    """Who drafted each."""
    logq: tuple[float, ...]
    accepted: tuple[int, ...]
    """Node indices of the accepted path."""
    pending: int
    """The new pending token."""
    rows: int
    """Requests in the same forward; its milliseconds are theirs together."""
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    """The rest of the step: gate, masks, commit, text."""
    particle: int = 0
    """Which of the request's particles."""
    log_weight: float | None = None
    """A particle's, before any resampling; None without particles."""
    ess: float | None = None
    """Effective sample size of the request's particles, before any resampling."""
    asked: int = 0
    """Mismatches at which an arbiter chose between the draft's token and the target's."""
    kept: tuple[int, ...] = ()
    """Nodes of the accepted path that the target would not have written: an arbiter kept the draft's token."""
    text: int = 0
    """Index of the step's text in the trace."""

    @property
    def milliseconds(self) -> float:
        """The whole step's, for all requests in it."""
        return self.draft_ms + self.verify_ms + self.overhead_ms

    @property
    def copies(self) -> bool:
        return "copy" in self.drafters

    @property
    def depth(self) -> int:
        """Length of the longest drafted path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


class Trace:
    """Texts in the order in which they were begun, and records in that in which their steps were committed."""

    def __init__(
        self, records: Iterable[StepRecord] = (), about: About | None = None, decode: Decode | None = None
    ) -> None:
        """`decode` gives the strings of tokens; without it they are told by their ids."""
        self.records: list[StepRecord] = list(records)
        self.about = about
        self.began = perf_counter()
        """From when records count their seconds."""
        self._decode = decode
        self._requests: list[Request] = []
        """Those of the texts, which grow with them."""
        self._read: list[TracedText] = []
        """Texts from a file."""
        self._strings: dict[int, str] = {}
        """Strings of drafted tokens, as far as they were asked for."""

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    def begin(self, request: Request) -> int:
        """A text begins; returns its index, for the records of its steps."""
        self._requests.append(request)
        return len(self._read) + len(self._requests) - 1

    def clear(self) -> None:
        """Forget all texts and records. No text may be under way."""
        self.records.clear()
        self._requests.clear()
        self._read.clear()

    @property
    def texts(self) -> list[TracedText]:
        """The texts as far as they are written; none in traces of version 1. Made anew at each call."""
        return [*self._read, *map(self._text, self._requests)]

    @property
    def numbers(self) -> list[int]:
        """The request of each text; unlike `texts` it spells nothing."""
        return [*(text.request for text in self._read), *(request.number for request in self._requests)]

    def string(self, token: int) -> str:
        """The text of a token by itself."""
        if token not in self._strings:
            self._strings[token] = f"#{token}" if self._decode is None else self._decode([token])
        return self._strings[token]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"<Trace: steps {len(self)}, texts {len(self.numbers)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the viewer, inline."""
        from decoding.viewer import inline

        return inline(self)

    def _text(self, request: Request) -> TracedText:
        count = min(len(request.generated), len(request.sources))
        tokens = [*request.prompt, *request.generated[:count]]
        pieces = [self.string(t) for t in tokens] if self._decode is None else spell(self._decode, tokens)
        return TracedText(
            request=request.number,
            prompt=tuple(request.prompt),
            tokens=tuple(tokens[len(request.prompt) :]),
            sources=tuple(request.sources[:count]),
            pieces=tuple(pieces),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file, whole or not at all. Raises ValueError for a name that ends as another kind of file."""
        check_name(path)
        import pyarrow as pa
        import pyarrow.parquet as pq

        strings = {t: self.string(t) for r in self.records for t in (*r.tokens, r.pending)}
        beside = {
            "about": None if self.about is None else asdict(self.about),
            "texts": [asdict(text) for text in self.texts],
            "strings": strings,
        }
        schema = _schema().with_metadata({RECORDS: str(VERSION), TEXTS: json.dumps(beside)})
        table = pa.table({f.name: [getattr(r, f.name) for r in self.records] for f in fields(StepRecord)}, schema)
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(scratch, "wb") as file:  # pyarrow takes no names that are not UTF-8
                pq.write_table(table, file)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a Parquet file that `save` wrote, without a target. Raises ValueError for anything else."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with open(path, "rb") as file:
                table = pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            why = str(error).removeprefix("Could not open Parquet input source '<Buffer>': ")
            raise ValueError(f"cannot read the trace {os.fspath(path)}: {why}") from error
        beside = table.schema.metadata or {}
        version = beside.get(RECORDS, b"").decode("ascii", "replace")
        if version.isdecimal() and int(version) > VERSION:
            raise ValueError(
                f"{os.fspath(path)} is a trace of version {version}, and this switchsd reads {VERSION}: update it"
            )
        missing = [f.name for f in fields(StepRecord) if f.name not in table.column_names and f.default is MISSING]
        if missing:
            raise ValueError(f"{os.fspath(path)} is no trace of this version: it lacks {', '.join(missing)}")
        try:
            trace = cls(_records(table))
        except (ValueError, KeyError, pa.ArrowException) as error:
            raise ValueError(f"the steps of the trace {os.fspath(path)} cannot be read: {error}") from error
        if TEXTS in beside:
            try:
                trace._take(json.loads(beside[TEXTS]))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"the texts of the trace {os.fspath(path)} cannot be read: {error}") from error
        return trace

    def _take(self, beside: dict[str, Any]) -> None:
        """What stood beside the records in a file."""
        about = beside["about"]
        self.about = None if about is None else _typed(About(**about))
        self._read = [_typed(TracedText(**_tuples(text))) for text in beside["texts"]]
        for text in self._read:
            if not len(text.pieces) == len(text.prompt) + len(text.tokens) == len(text.prompt) + len(text.sources):
                raise ValueError(f"the text of request {text.request} has not a string and a source for each token")
        self._strings = {int(token): str(string) for token, string in beside["strings"].items()}


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a name that ends as another kind of file."""
    file = Path(path)
    if file.suffix in (".csv", ".json", ".jsonl", ".html"):
        raise ValueError(f"a trace is a Parquet file: call it {file.stem}.parquet instead of {file.name}")


def spell(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """The text of each token where it stands; joined, they are the text.

    A character that is made of several tokens stands with the last of them.
    """
    pieces: list[str] = []
    start = done = 0  # tokens from `start` are the context in which those from `done` are decoded
    for end in range(1, len(tokens) + 1):
        before, after = decode(tokens[start:done]), decode(tokens[start:end])
        if after.endswith(BROKEN) and end < len(tokens) and end - done < LONGEST:
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        start, done = done, end
    return pieces


def _records(table: Any) -> list[StepRecord]:
    """Of a Parquet table. Raises ValueError, KeyError or ArrowException for what no engine writes."""
    import pyarrow as pa

    there = [field for field in _schema() if field.name in table.column_names]
    table = table.select([field.name for field in there]).cast(pa.schema(there))
    optional = {f.name for f in fields(StepRecord) if str(f.type).endswith("None")}
    for field_ in there:
        column = table.column(field_.name)
        missing = column.null_count
        if pa.types.is_list(field_.type):
            missing += sum(chunk.flatten().null_count for chunk in column.chunks)
        if missing and field_.name not in optional:
            raise ValueError(f"{field_.name} lacks values")
    records = [StepRecord(**_tuples(row)) for row in table.to_pylist()]
    for row, record in enumerate(records):
        wrong = _wrong(record)
        if wrong:
            raise ValueError(f"step {row}: {wrong}")
    return records


def _wrong(record: StepRecord) -> str:
    """What in a record contradicts itself; empty where nothing does."""
    count = len(record.tokens)
    for name in ("parents", "source", "logq"):
        if len(getattr(record, name)) != count:
            return f"{name} has {len(getattr(record, name))} values for {count} drafted tokens"
    for node, parent in enumerate(record.parents):
        if not -1 <= parent < node:
            return f"the parent of node {node} is {parent}; parents stand before their children"
    for name in ("accepted", "kept"):
        for node in getattr(record, name):
            if not 0 <= node < count:
                return f"{name} names node {node} of {count} drafted tokens"
    for name in ("start", "draft_ms", "verify_ms", "overhead_ms"):
        if not math.isfinite(getattr(record, name)):
            return f"{name} is {getattr(record, name)}"
    if record.position < 0 or record.match_length < 0:
        return f"position is {record.position} and match_length {record.match_length}; neither can be below 0"
    return ""


KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "bool": bool, "str | None": (str, type(None)), "int | None": (int, type(None)),
    "float | None": (int, float, type(None)), "dict[str, Any]": dict, "tuple[int, ...]": int, "tuple[str, ...]": str,
}  # fmt: skip
"""What the annotations of texts and of what stands about them say; of a tuple, of each value in it."""


def _typed(made: Any) -> Any:
    """`made`, whose fields are of the types that they should be. Raises TypeError."""
    for f in fields(made):
        value, annotation = getattr(made, f.name), str(f.type)
        several = annotation.startswith("tuple")
        if several and not isinstance(value, tuple):
            raise TypeError(f"{f.name} is no list")
        for one in value if several else (value,):
            if not isinstance(one, KINDS[annotation]):
                raise TypeError(f"{f.name} has {one!r:.40}, where {annotation} is due")
    return made


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}


def _schema() -> Any:
    import pyarrow as pa

    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "str": pa.string(),
        "tuple[int, ...]": pa.list_(pa.int64()),
        "tuple[float, ...]": pa.list_(pa.float64()),
        "tuple[str, ...]": pa.list_(pa.string()),
    }
    return pa.schema([pa.field(f.name, types[str(f.type)]) for f in fields(StepRecord)])
