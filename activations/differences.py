"""How two manifests differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST = 60
"""Characters of a value that are shown."""
MOST = 5
"""Names of a list that are shown."""


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str], free: Sequence[str] = ()
) -> list[str]:
    """Those of the entries `names` that differ, with both values: `config.seed (0 and 1)`.

    Entries of entries are compared one by one, but for those in `free`, which may differ.
    """
    found = []
    for name in names:
        mine, theirs = (dict(_flat(name, _plain(manifest.get(name)))) for manifest in (first, second))
        for entry in dict.fromkeys([*mine, *theirs]):
            a, b = mine.get(entry), theirs.get(entry)
            if a != b and entry not in free:  # two hashes of prompts would tell nobody anything
                found.append(entry if entry == "prompts" else f"{entry} ({_both(a, b)})")
    return found


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value


def _both(mine: object, theirs: object) -> str:
    """Two values; of lists what only one of them has, of long texts what follows their common beginning."""
    if isinstance(mine, list) and isinstance(theirs, list):
        only = [[x for x in a if x not in b] for a, b in ((mine, theirs), (theirs, mine))]
        if any(only):
            return ", ".join(f"only the {n} has {_few(x)}" for n, x in zip(("first", "second"), only, strict=True) if x)
    texts = ["none" if v is None else json.dumps(v, ensure_ascii=False) for v in (mine, theirs)]
    if max(map(len, texts)) <= LONGEST:
        return " and ".join(texts)
    equal = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(equal - 10, 0)
    return " and ".join(
        ("..." if start else "") + t[start : start + LONGEST] + ("..." if len(t) > start + LONGEST else "")
        for t in texts
    )


def _few(names: Sequence[object]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(map(str, names[:MOST])) + more


def _plain(value: object) -> object:
    """As it is after a way through JSON: tuples are lists."""
    return json.loads(json.dumps(value))
