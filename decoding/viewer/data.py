"""A trace as plain values: what the page is given as JSON.

Steps are held by columns. A column in which nothing was ever said is None; so is a chain's list of parents, and a list
of log-probabilities that are all 0. A text's tokens know the step that wrote them and the node of its draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from decoding.request import TARGET
from decoding.trace import StepRecord, Trace, TracedText

NONE = -1
"""No step wrote this token; the target wrote it, and no drafter."""


def trace_data(name: str, trace: Trace) -> dict[str, Any]:
    """All of a trace, as values that JSON knows. `name`: what the page calls it. Raises ValueError for a step whose
    text the trace does not hold."""
    records = trace.records
    told = {source for record in records for source in record.source} | {d for r in records for d in r.drafters}
    kept = trace.texts
    told |= {source for text in kept for source in text.sources}
    sources = [TARGET, *sorted(told - {TARGET})]
    groups = _by_text(records, kept)
    place = {source: i for i, source in enumerate(sources)}
    texts = [_text(records, rows, text) for rows, text in groups]
    ids = {token for record in records for token in (*record.tokens, record.pending)}
    return {
        "name": name,
        "about": _about(trace),
        "sources": sources,
        "strings": {str(token): trace.string(token) for token in sorted(ids)} if kept else {},
        "texts": [text | {"source": [place[source] for source in text["source"]]} for text in texts],
        "steps": _columns(records, sources),
    }


def opening(trace: Trace) -> int:
    """Index of the text that is shown first where nobody says: of a chat the last turn, of several requests the first
    one's."""
    requests = trace.numbers
    return max((i for i, request in enumerate(requests) if request == requests[0]), default=0)


def summaries(trace: Trace) -> list[dict[str, Any]]:
    """The numbers of each text, as `summary` says. Raises ValueError for a step whose text the trace does not hold."""
    groups = _by_text(trace.records, trace.texts)
    return [_text(trace.records, rows, text)["summary"] for rows, text in groups]


def summary(records: Sequence[StepRecord], written: int) -> dict[str, Any]:
    """The numbers of some steps, which wrote `written` tokens of a text.

    `steps`: forwards; particles share theirs. `seconds`: of these forwards, whole, whoever else had a share in them.
    `tokens_per_step`: accepted length + 1. `copied`, `false_copies`: steps in which copying was asked for, and those
    of them in which no drafted token was kept. `drafted`, `kept`: tokens by drafter. Milliseconds are means.
    """
    forwards = {record.start: record for record in records}.values()
    seconds = sum(r.milliseconds for r in forwards) / 1e3
    steps = len(forwards)
    copies = [r for r in records if r.copies]
    drafted: dict[str, int] = {}
    kept: dict[str, int] = {}
    for record in records:
        for source in record.source:
            drafted[source] = drafted.get(source, 0) + 1
        for node in record.accepted:
            kept[record.source[node]] = kept.get(record.source[node], 0) + 1
    return {
        "written": written,
        "steps": steps,
        "rows": len(records),
        "seconds": _number(seconds, 6),
        "tokens_per_second": _number(written / seconds, 3) if seconds else None,
        "tokens_per_step": _number(written / steps, 4) if steps else None,
        "copied": len(copies),
        "false_copies": sum(not r.accepted for r in copies),
        "drafted": drafted,
        "kept": kept,
        "against_target": sum(len(r.kept) for r in records),
        "draft_ms": _mean(r.draft_ms for r in forwards),
        "verify_ms": _mean(r.verify_ms for r in forwards),
        "rest_ms": _mean(r.overhead_ms for r in forwards),
    }


def _about(trace: Trace) -> dict[str, Any] | None:
    about = trace.about
    if about is None:
        return None
    return {
        "target": about.target,
        "mode": about.mode,
        "lossless": about.lossless,
        "gate": about.gate,
        "site": about.site,
        "label": about.label,
        "tau": _number(about.tau, 6),
        "kappa": about.kappa,
        "settings": {key: _plain(value) for key, value in about.settings.items()},
        "sampling": {key: _plain(value) for key, value in about.sampling.items()},
    }


def _plain(value: Any) -> str | float | int | bool | None:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    return _number(value, 6) if isinstance(value, float) else str(value)


# -- texts -------------------------------------------------------------------------------------------


def _by_text(records: Sequence[StepRecord], texts: Sequence[TracedText]) -> list[tuple[list[int], TracedText | None]]:
    """The rows of each text, in order. Where a trace kept no texts, a request is one, from its step 0 on."""
    if texts:
        rows: list[list[int]] = [[] for _ in texts]
        for row, record in enumerate(records):
            if not 0 <= record.text < len(texts):
                raise ValueError(f"step {row} of the trace is of text {record.text}; it holds {len(texts)} texts")
            rows[record.text].append(row)
        return list(zip(rows, texts, strict=True))
    found: list[list[int]] = []
    open_: dict[int, list[int]] = {}
    begun: set[tuple[int, int]] = set()
    for row, record in enumerate(records):
        key = (record.request, record.particle)
        again = record.step == 0 and key in begun
        if again:
            begun = {(request, particle) for request, particle in begun if request != record.request}
        begun.add(key)
        if again or record.request not in open_:
            open_[record.request] = []
            found.append(open_[record.request])
        open_[record.request].append(row)
    return [(one, None) for one in found]


def _text(records: Sequence[StepRecord], rows: Sequence[int], text: TracedText | None) -> dict[str, Any]:
    mine = [records[row] for row in rows]
    if text is None:
        start, ids = _known(mine)
        prompt, pieces = 0, [f"#{token}" for token in ids]
    else:
        start, ids = 0, [*text.prompt, *text.tokens]
        prompt, pieces = len(text.prompt), list(text.pieces)
    by, node = _writers(records, rows, ids, start)
    given = text.sources if text is not None else None
    source = []
    for place, (row, at) in enumerate(zip(by[prompt:], node[prompt:], strict=True)):
        name = given[place] if given is not None else records[row].source[at] if at != NONE else TARGET
        source.append(name)
    written = sum(row != NONE for row in by[prompt:])
    return {
        "mode": mine[0].mode if mine else "",
        "known": text is not None,
        "start": start,
        "prompt": prompt,
        "pieces": pieces,
        "source": source,
        "by": by[prompt:],
        "node": node[prompt:],
        "rows": list(rows),
        "matched": [_matched(records[row], ids, start) for row in rows],
        "summary": summary(mine, written or sum(len(r.accepted) + 1 for r in mine)),
    }


def _written(record: StepRecord) -> list[int]:
    """The tokens that a step committed, the first of them at `record.position + 1`."""
    return [*(record.tokens[node] for node in record.accepted), record.pending]


def _known(records: Sequence[StepRecord]) -> tuple[int, list[int]]:
    """Where what the steps wrote begins in the text, and the tokens. None of particles, which wrote several texts."""
    if not records or any(record.particle for record in records):
        return 0, []
    tokens = [token for record in records for token in _written(record)]
    return records[0].position + 1, tokens


def _writers(
    records: Sequence[StepRecord], rows: Sequence[int], ids: Sequence[int], start: int
) -> tuple[list[int], list[int]]:
    """For each token the row that wrote it and the node that it was in its draft, or NONE.

    Particles write several texts, and go on from one another's: a row counts where it wrote just what stands in the
    text, best where rows that do lead on to the text's end. What was cut from the end of a text is no difference.
    """
    by, node = [NONE] * len(ids), [NONE] * len(ids)
    starting: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        at, tokens = records[row].position + 1 - start, _written(records[row])
        stands = 0 <= at < len(ids) and all(a == b for a, b in zip(tokens, ids[at : at + len(tokens)], strict=False))
        if stands:
            starting.setdefault(at, []).append((row, at + len(tokens)))
    length = len(ids)
    reach = {length: length}
    best: dict[int, tuple[int, int]] = {}
    for at in sorted(starting, reverse=True):
        row, end = max(starting[at], key=lambda one: min(reach.get(one[1], one[1]), length))
        best[at], reach[at] = (row, end), min(reach.get(end, end), length)
    place = min(best, default=length)
    while place < length:
        if place not in best:
            place += 1
            continue
        row, end = best[place]
        record = records[row]
        for k, at in enumerate(range(place, min(end, length))):
            by[at] = row
            node[at] = record.accepted[k] if k < len(record.accepted) else NONE
        place = end
    return by, node


def _matched(record: StepRecord, ids: Sequence[int], start: int) -> bool:
    """The step's suffix match is seen in this text: not one in another text, of another particle, or of a prompt that
    was not kept."""
    n, end, last = record.match_length, record.match_start - start, record.position + 1 - start
    return 0 < n <= end < last <= len(ids) and list(ids[end - n : end]) == list(ids[last - n : last])


# -- columns -----------------------------------------------------------------------------------------


def _columns(records: Sequence[StepRecord], sources: Sequence[str]) -> dict[str, Any]:
    place = {source: i for i, source in enumerate(sources)}
    reasons = list(dict.fromkeys(r.reason for r in records))
    reason = {text: i for i, text in enumerate(reasons)}
    return {
        "reasons": reasons,
        "step": [r.step for r in records],
        "start": [_number(r.start, 6) for r in records],
        "position": [r.position for r in records],
        "drafters": [[place[d] for d in r.drafters] for r in records],
        "reason": [reason[r.reason] for r in records],
        "intent": _or_none([_number(r.intent, 4) for r in records]),
        "match_length": [r.match_length for r in records],
        "match_start": [r.match_start for r in records],
        "tokens": [r.tokens for r in records],
        "parents": [None if _is_chain(r.parents) else r.parents for r in records],
        "source": [_same([place[s] for s in r.source]) for r in records],
        "logq": [[_number(q, 3) for q in r.logq] if any(r.logq) else None for r in records],
        "accepted": [r.accepted for r in records],
        "pending": [r.pending for r in records],
        "rows": [r.rows for r in records],
        "particle": [r.particle for r in records] if any(r.particle for r in records) else None,
        "log_weight": _or_none([_number(r.log_weight, 3) for r in records]),
        "ess": _or_none([_number(r.ess, 3) for r in records]),
        "asked": [r.asked for r in records] if any(r.asked for r in records) else None,
        "kept": [r.kept for r in records] if any(r.kept for r in records) else None,
        "draft_ms": [_number(r.draft_ms, 3) for r in records],
        "verify_ms": [_number(r.verify_ms, 3) for r in records],
        "rest_ms": [_number(r.overhead_ms, 3) for r in records],
    }


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == i - 1 for i, parent in enumerate(parents))


def _same(values: Sequence[int]) -> int | Sequence[int]:
    """One value for many equal ones."""
    return values[0] if values and len(list(groupby(values))) == 1 else values


def _or_none(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _number(value: float | None, digits: int) -> float | str | None:
    """JSON knows no infinity: it is told in words. What is not a number is None."""
    if value is None or math.isnan(value):
        return None
    return round(float(value), digits) if math.isfinite(value) else "-inf" if value < 0 else "inf"


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else None
