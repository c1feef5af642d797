"""Several capture stores of one target as one store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from activations.provenance import provenance
from activations.store import (
    VERSION,
    CaptureStore,
    StoreError,
    check_space,
    checksums,
    lock,
    shard_files,
    write_hashed,
    write_json,
)

SAME = ("target", "selection", "sites", "dtype", "attention", "chat_template")
"""Entries of a manifest that must be equal in stores that are merged; the config's fields are compared one by one."""
FREE = ("seed", "batch", "shard_documents")
"""Config fields that may differ: they say which texts were written, and how many at once."""


def merge(folders: Sequence[Path], folder: Path, progress: Callable[[int, int], None] | None = None) -> CaptureStore:
    """Make a store of all shards of `folders`, in this order, in `folder`.

    The documents of each store get the numbers behind those of the stores before it; groups stay as they are, so
    that near-duplicates of two stores stay together. Files of states are linked where the file system can, else
    copied. `progress(done, total)` is called with shards. Raises StoreError, naming the field, if the stores do not
    belong together.
    """
    stores = [CaptureStore.open(f) for f in folders]
    _check(stores)
    if (folder / "manifest.json").exists():
        raise StoreError(f"{folder} holds a store already: choose a new folder")
    check_space(folder, sum(_copied(store, folder) for store in stores), "fewer stores")
    for name in ("rows", "states"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    total = sum(len(store.shards) for store in stores)
    with lock(folder):
        shards: list[dict[str, Any]] = []
        parts = []
        offset = 0
        for store in stores:
            parts.append({"first_document": offset, **_part(store)})
            highest = -1
            for number, info in enumerate(store.shards):
                shards.append(_take(store, number, info, folder, len(shards), offset))
                highest = max(highest, *info["documents"], -1)
                if progress:
                    progress(len(shards), total)
            offset += highest + 1
        manifest = {
            **{k: v for k, v in stores[0].manifest.items() if k not in ("documents", "shards")},
            "version": VERSION,
            "documents": sum(int(part["documents"]) for part in parts),
            # No capture has these prompts, so none goes on in a merged store.
            "prompts": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
            "merged": parts,
            "provenance": provenance(),
            "shards": shards,
        }
        write_json(folder / "manifest.json", manifest)  # last: without it the folder is no store
    return CaptureStore.open(folder)


def _check(stores: Sequence[CaptureStore]) -> None:
    """Whether the stores belong together and hold different documents."""
    if len(stores) < 2:
        raise StoreError("merging needs at least two stores")
    first = stores[0]
    seen: dict[str, CaptureStore] = {}
    for store in stores:
        for name, mine, theirs in _fields(first, store):
            if mine != theirs:
                raise StoreError(
                    f"{first.folder} and {store.folder} differ in {name} ({_short(mine)} and {_short(theirs)}): "
                    "only stores of one target and one way of capturing can be merged"
                )
        config = store.manifest.get("config", {})
        key = repr([store.manifest.get("prompts") or str(store.folder.resolve()), config.get("seed")])
        if key in seen:
            raise StoreError(
                f"{seen[key].folder} and {store.folder} hold the same prompts, answered with the same seed: "
                "name only one of them"
            )
        seen[key] = store


def _fields(first: CaptureStore, other: CaptureStore) -> list[tuple[str, object, object]]:
    """What must be equal: names and both values."""
    found = [(name, first.manifest.get(name), other.manifest.get(name)) for name in SAME]
    configs = [s.manifest.get("config", {}) for s in (first, other)]
    names = dict.fromkeys([*configs[0], *configs[1]])
    found += [(f"config.{n}", configs[0].get(n), configs[1].get(n)) for n in names if n not in FREE]
    if first.shards and other.shards:
        columns = [pq.read_schema(shard_files(s.folder, 0)["rows"]).names for s in (first, other)]
        found.append(("columns", columns[0], columns[1]))
    return found


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _part(store: CaptureStore) -> dict[str, Any]:
    """What the merged manifest keeps of a store."""
    manifest = store.manifest
    return {
        "documents": sum(len(info["documents"]) for info in store.shards),
        "shards": len(store.shards),
        **{name: manifest.get(name) for name in ("prompts", "config", "provenance")},
    }


def _copied(store: CaptureStore, folder: Path) -> int:
    """Bytes that merging a store into `folder` writes: its rows, and its states where they cannot be linked."""
    there = next(p for p in folder.absolute().parents if p.exists())
    names = ["rows"] if os.stat(store.folder).st_dev == os.stat(there).st_dev else ["rows", "states"]
    return sum(shard_files(store.folder, n)[name].stat().st_size for n in range(len(store.shards)) for name in names)


def _take(
    store: CaptureStore, number: int, info: dict[str, Any], folder: Path, new: int, offset: int
) -> dict[str, Any]:
    """Put shard `number` of a store into `folder` as shard `new`; its entry of the manifest."""
    source, made = shard_files(store.folder, number), shard_files(folder, new)
    table = pq.read_table(source["rows"])
    place = table.schema.get_field_index("document")
    renumbered = pc.add(table["document"], pa.scalar(offset, table.schema.field(place).type))
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(place, "document", renumbered), sink)
    digest = write_hashed(made["rows"], [sink.getvalue()])
    made["states"].unlink(missing_ok=True)  # of a merge that was cut
    try:
        os.link(source["states"], made["states"])
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source["states"], made["states"])
    taken = {
        **info,
        "documents": [document + offset for document in info["documents"]],
        "bytes": {name: file.stat().st_size for name, file in made.items()},
        "checksums": {"rows": digest, "states": checksums(info)["states"]},
    }
    taken.pop("sha256", None)
    if "nonfinite_rows" in info:
        taken["nonfinite_rows"] = {str(int(d) + offset): count for d, count in info["nonfinite_rows"].items()}
    return taken
