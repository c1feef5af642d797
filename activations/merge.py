"""Several capture stores of one target as one store.

No document should be in it twice. Stores that answer the same prompts with the same seed, or share a whole shard, are
refused, also where one of them was merged before. Sets of prompts that merely overlap are not noticed.
"""

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

from activations.differences import differences
from activations.provenance import provenance
from activations.store import (
    VERSION,
    CaptureStore,
    StoreError,
    check_space,
    checksums,
    cut_file,
    damaged,
    intact,
    lock,
    shard_files,
    write_hashed,
    write_json,
)

SAME = ("target", "selection", "sites", "dtype", "attention", "chat_template")
"""Entries of a manifest that must be equal in stores that are merged; the config's fields are compared one by one."""
FREE = ("config.seed", "config.batch", "config.shard_documents")
"""Config fields that may differ: they say which texts were written, and how many at once."""


def merge(folders: Sequence[Path], folder: Path, progress: Callable[[int, int], None] | None = None) -> CaptureStore:
    """Make a store of all shards of `folders`, in this order, in `folder`.

    The documents of each store get the numbers behind those of the stores before it; groups stay as they are, so
    that near-duplicates of two stores stay together. Files of states are linked where the file system can, else
    copied. `progress(done, total)` is called with shards. Raises StoreError, naming the field, if the stores do not
    belong together, or the file, if one is not as it was written; states that are linked are not read for that.
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
        parts: list[dict[str, Any]] = []
        offset = 0
        for store in stores:
            parts += [{**part, "first_document": offset + part["first_document"]} for part in _parts(store)]
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
        for number, info in enumerate(store.shards):
            if cut := cut_file(shard_files(store.folder, number), info):
                raise StoreError(damaged(cut))
        changed = differences(first.manifest, store.manifest, (*SAME, "config"), FREE)
        if first.shards and store.shards:
            changed += differences(_columns(first), _columns(store), ("columns",))
        if changed:
            raise StoreError(
                f"{first.folder} and {store.folder} differ in {', '.join(changed)}: "
                "only stores of one target and one way of capturing can be merged"
            )
        marks = _marks(store)
        for mark in marks & seen.keys():
            raise StoreError(
                f"{seen[mark].folder} and {store.folder} hold the same prompts, answered with the same seed, or some "
                "of them: leave one of the two out"
            )
        seen.update(dict.fromkeys(marks, store))


def _columns(store: CaptureStore) -> dict[str, list[str]]:
    """The names of the rows' columns."""
    return {"columns": pq.read_schema(_sound_rows(store, 0)).names}


def _sound_rows(store: CaptureStore, number: int) -> Path:
    """A shard's file of rows, with its checksum compared: the merged store's would cover damage up."""
    file = shard_files(store.folder, number)["rows"]
    if not intact(file, store.shards[number], "rows"):
        raise StoreError(damaged(file))
    return file


def _marks(store: CaptureStore) -> set[str]:
    """What another store with the same texts has too: prompts and their seed, and checksums of states."""
    made = [part for part in (store.manifest, *_parts(store)) if part.get("prompts")]
    answered = {repr([part["prompts"], (part.get("config") or {}).get("seed")]) for part in made}
    return answered | {checksums(info)["states"] for info in store.shards if info["rows"]}


def _parts(store: CaptureStore) -> list[dict[str, Any]]:
    """What a merged manifest keeps of a store, or of each of those that it was merged from."""
    manifest = store.manifest
    whole = {
        "first_document": 0,
        "documents": sum(len(info["documents"]) for info in store.shards),
        "shards": len(store.shards),
        **{name: manifest.get(name) for name in ("prompts", "config", "provenance")},
    }
    return list(manifest.get("merged", [whole]))


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
    table = pq.read_table(_sound_rows(store, number))
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
        if not intact(made["states"], info, "states"):
            raise StoreError(damaged(source["states"])) from None
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
