"""The capture store: states, rows and labels in a folder that can be read without the model.

    manifest.json              what was captured, how, and per shard: rows, bytes, checksums, non-finite states
    rows/00000.parquet         one line a row (labels, surface features, token ids)
    states/00000.safetensors   one tensor [rows, width] a site, in the target's dtype

Rows and states are joined by (shard, row). A shard counts once the manifest lists it; the manifest is replaced
whole, so a run that is cut goes on at the first missing shard. One run at a time writes a folder.

Checksums are there to find damage, not forgery: xxh3_128 costs nothing beside a write, sha256 three times as much
as the write itself. Format version 1 differs in having `sha256` and neither `bytes` nor `nonfinite_rows`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from activations.differences import differences

VERSION = 2
DECIDES = ("target", "sites", "config", "prompts", "dtype", "attention")
"""Entries of a manifest that must be equal for a capture to be continued."""
TARGET = ("architecture", "width", "blocks", "vocabulary", "revision")
"""What a manifest says of its target."""
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
"""Names of the dtypes of states in the safetensors format."""
EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}
"""For each dtype an integer of its size, and the bits of its exponent."""
ROW_BYTES = 64
"""About what a row's columns take in a Parquet file."""
GIB = 2**30
NONE = "none"
"""The checksum of a file that is to be written again."""
BLOCK = 1 << 20
MARGIN = GIB // 4
"""Bytes of a disk that a run leaves free."""

Rows = dict[str, np.ndarray]
"""Columns by name, each [rows]."""
States = dict[str, torch.Tensor]
"""States by site, each [rows, width], in the target's dtype."""

AGAIN = "delete this file and run the command that made the store again; only this shard is made anew"


class StoreError(Exception):
    """A store that cannot be read, written or continued. The message says what to do."""


def write_json(file: Path, value: object) -> None:
    """Write beside and rename: a reader never sees half a file."""
    scratch = file.with_name(file.name + ".tmp")
    scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, file)


def checksum(file: Path, method: str) -> str:
    """`method:digest` of a file; the methods are xxh3_128 and, in stores of format version 1, sha256."""
    digest = hashlib.sha256() if method == "sha256" else xxhash.xxh3_128()
    with file.open("rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return f"{method}:{digest.hexdigest()}"


def checksums(shard: Mapping[str, Any]) -> dict[str, str]:
    """The checksums in a shard's entry of the manifest, as `method:digest`."""
    found: dict[str, str] = (
        shard["checksums"]
        if "checksums" in shard
        else {name: f"sha256:{digest}" for name, digest in shard["sha256"].items()}
    )
    return found


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` is or will be on."""
    return shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free


def check_space(folder: Path, needed: int, less: str) -> None:
    """Refuse (StoreError) what the disk cannot hold; `less` says how it could take less."""
    free = free_bytes(folder)
    if needed + MARGIN > free:
        raise StoreError(
            f"{folder} may still take {needed / GIB:.2f} GiB, and its disk has {free / GIB:.2f} GiB free, of which "
            f"{MARGIN / GIB:.2f} GiB stay free: free some space, choose another disk, or store less ({less})"
        )


def text_rows(document: int, ids: Sequence[int], written_from: int) -> Rows:
    """Rows of a whole text, one for each token but the last, which was never fed and has no state.

    document   the number given
    position   from 0
    token      ids[position]
    pending    ids[position + 1]
    loss_mask  True where the pending token is the target's own: those from ids[written_from] on
    """
    tokens = np.asarray(ids, dtype=np.int32)
    count = len(tokens) - 1
    return {
        "document": np.full(count, document, dtype=np.int64),
        "position": np.arange(count, dtype=np.int32),
        "token": tokens[:-1],
        "pending": tokens[1:],
        "loss_mask": np.arange(count) >= written_from - 1,
    }


class CaptureStore:
    """Reading side. `rows()` and `states(site)` are aligned."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> CaptureStore:
        """The store in a folder; only its manifest is read. Raises StoreError where there is none, or a damaged one."""
        root = Path(folder)
        file = root / "manifest.json"
        if not file.is_file():
            raise StoreError(
                f"{root} is no capture store (manifest.json is missing): make one with `switchsd capture` (for a "
                "probe) or `switchsd write` (for a head)"
            )
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["version"]
            if isinstance(version, int) and version > VERSION:  # its other entries may mean anything
                raise StoreError(
                    f"{file} has format version {version}, which a newer switchsd wrote; this one reads 1 to "
                    f"{VERSION}: update switchsd"
                )
            if version not in (1, VERSION):
                raise TypeError(f"no such format version: {version!r}")
            if not all(isinstance(manifest[k], list) for k in ("shards", "sites")):
                raise TypeError("'shards' and 'sites' must be lists")
            for name in TARGET:
                manifest["target"][name]
            for shard in manifest["shards"]:
                found = checksums(shard)
                shard["rows"], shard["documents"], found["rows"], found["states"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{file} is damaged ({error!r}): capture again into a new folder") from error
        return cls(root, manifest)

    @property
    def sites(self) -> list[str]:
        return list(self.manifest["sites"])

    @property
    def shards(self) -> list[dict[str, Any]]:
        return list(self.manifest["shards"])

    def __len__(self) -> int:
        return sum(int(s["rows"]) for s in self.shards)

    def shard_rows(self, shard: int, columns: Sequence[str] | None = None) -> Rows:
        """Columns of one shard; all of them by default. Raises StoreError if its file cannot be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = shard_files(self.folder, shard)["rows"]
        try:
            table = pq.read_table(file, columns=None if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"cannot read {file} ({error}): {AGAIN}") from error
        return {name: table[name].to_numpy() for name in table.column_names}

    def shard_states(self, shard: int, site: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """[rows, width] of one shard, or of its rows from `start` to before `stop`, in the stored dtype."""
        if site not in self.sites:
            raise StoreError(f"site {site!r} was not captured in {self.folder}; it has {', '.join(self.sites)}")
        file = shard_files(self.folder, shard)["states"]
        try:
            with safe_open(file, "pt") as handle:
                whole = (start, stop) == (0, None)
                tensor: torch.Tensor = handle.get_tensor(site) if whole else handle.get_slice(site)[start:stop]
        except (OSError, SafetensorError) as error:
            raise StoreError(f"cannot read {file} ({error}): {AGAIN}") from error
        return tensor

    def rows(self) -> Rows:
        """All columns, shards in order. Raises StoreError if no shard is complete, or one cannot be read."""
        parts = [self.shard_rows(i) for i in range(len(self.shards))]
        if not parts:
            raise StoreError(f"{self.folder} has no complete shard yet: finish the capture first")
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def states(self, site: str) -> torch.Tensor:
        """[rows, width], aligned with `rows()`."""
        return torch.cat([self.shard_states(i, site) for i in range(len(self.shards))])

    def dataset(self) -> Any:
        """The rows as a `datasets.Dataset`, memory-mapped."""
        from datasets import load_dataset

        files = [str(shard_files(self.folder, i)["rows"]) for i in range(len(self.shards))]
        return load_dataset("parquet", data_files=files, split="train")

    def document(self, number: int) -> tuple[Rows, States]:
        """Rows and states of one document (contiguous, ordered, in one shard). Raises StoreError if it is not there."""
        for shard, info in enumerate(self.shards):
            if number in info["documents"]:
                rows = self.shard_rows(shard)
                where = np.flatnonzero(rows["document"] == number)
                first, last = int(where[0]), int(where[-1])
                states = {s: self.shard_states(shard, s, first, last + 1) for s in self.sites}
                return {k: v[where] for k, v in rows.items()}, states
        raise StoreError(f"document {number} is not in {self.folder}")

    def damages(self) -> Iterator[str | None]:
        """For each shard, what is wrong with it: checksums, row counts, documents and sites; None if nothing is."""
        for shard, info in enumerate(self.shards):
            yield self._damage(shard, info)

    def _damage(self, shard: int, info: dict[str, Any]) -> str | None:
        files = shard_files(self.folder, shard)
        cut = cut_file(files, info) or next((f for name, f in files.items() if not intact(f, info, name)), None)
        if cut:
            return damaged(cut)
        numbers = self.shard_rows(shard, ["document"])["document"].tolist()
        found = {"rows": len(numbers), "documents": list(dict.fromkeys(numbers))}
        for name, value in found.items():
            if value != info[name]:
                return f"shard {shard} of {self.folder} has other {name} than its manifest says: {AGAIN}"
        with safe_open(shard_files(self.folder, shard)["states"], "pt") as handle:
            names = list(handle.keys())
            lengths = {name: handle.get_slice(name).get_shape()[0] for name in names}
        if lengths != dict.fromkeys(self.sites, len(numbers)):
            return f"shard {shard} of {self.folder} has other sites or rows than its manifest says: {AGAIN}"
        return None

    def verify(self) -> None:
        """Compare every shard's files with the manifest. Raises StoreError at the first difference."""
        for damage in self.damages():
            if damage:
                raise StoreError(damage)


class StoreWriter:
    """Writing side: `write` appends the next shard. Holds the folder's lock until it is closed."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], sites: list[str], max_nonfinite: float = 1.0) -> None:
        """`manifest` is what describes the run. A folder with another description is refused, the same one resumed.

        `max_nonfinite` is the largest share of a shard's rows whose states may be infinite or not a number.
        """
        self.folder = folder
        self.max_nonfinite = max_nonfinite
        self.manifest: dict[str, Any] = {"version": VERSION, **manifest, "sites": sites, "shards": []}
        for name in ("rows", "states"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder)
        try:
            self._resume()
        except BaseException:
            self.close()
            raise
        self.gaps = self._gaps()

    def _resume(self) -> None:
        """Take over what an earlier run of the same description left in the folder."""
        file = self.folder / "manifest.json"
        if not file.exists():
            return
        if not file.is_file():
            raise StoreError(f"{file} is there and is no file: choose a new folder")
        old = CaptureStore.open(self.folder).manifest
        changed = differences(old, self.manifest, DECIDES)
        if changed:
            raise StoreError(
                f"{self.folder} holds a capture with other settings than this run's: {', '.join(changed)} differ; "
                "choose a new folder"
            )
        self.manifest = {**old, "version": VERSION}

    def _gaps(self) -> list[int]:
        """Shards whose files were deleted or cut, to be written again first; those at the end are simply forgotten."""
        shards = self.manifest["shards"]
        lost = [n for n, info in enumerate(shards) if cut_file(shard_files(self.folder, n), info)]
        while lost and lost[-1] == len(shards) - 1:
            shards.pop()
            lost.pop()
        for n in lost:  # nothing of theirs counts until then
            shards[n] = {
                **{k: 0 for k, v in shards[n].items() if isinstance(v, int)},
                "documents": [],
                "checksums": dict.fromkeys(("rows", "states"), NONE),
            }
        return lost

    def close(self) -> None:
        """Let another run write the folder."""
        self._lock.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def complete_shards(self) -> int:
        return len(self.manifest["shards"])

    def write(
        self,
        rows: Mapping[str, np.ndarray],
        states: Mapping[str, torch.Tensor],
        names: Mapping[int, str] | None = None,
        **counts: int,
    ) -> None:
        """Write the first gap, or else the next shard; rows and states have equal length.

        `names` are what people call the documents, for messages; `counts` go into the shard's manifest entry.
        Raises StoreError, with nothing written, if too many rows have non-finite states.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = self.gaps[0] if self.gaps else self.complete_shards
        states = {name: state.detach().cpu().contiguous() for name, state in states.items()}
        documents = rows["document"]
        values, broken = nonfinite(documents, states)
        self._refuse(number, broken, len(documents), names or {})
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({name: pa.array(column) for name, column in rows.items()}), sink)
        content: dict[str, Iterable[Any]] = {"rows": [sink.getvalue()], "states": safetensors_parts(states)}
        digests, sizes, scratch = {}, {}, {}
        files = shard_files(self.folder, number)
        for name, file in files.items():
            scratch[name] = file.with_name(file.name + ".tmp")
            digests[name] = write_hashed(scratch[name], content[name])
            sizes[name] = scratch[name].stat().st_size
        for name, file in files.items():
            os.replace(scratch[name], file)
        self.manifest["shards"][number : number + 1] = [
            {
                "rows": len(documents),
                "documents": [int(d) for d in dict.fromkeys(documents.tolist())],
                "nonfinite": values,
                "nonfinite_rows": {str(document): count for document, count in broken.items()},
                "bytes": sizes,
                "checksums": digests,
                **counts,
            }
        ]
        del self.gaps[:1]
        write_json(self.folder / "manifest.json", self.manifest)

    def _refuse(self, shard: int, broken: Mapping[int, int], rows: int, names: Mapping[int, str]) -> None:
        total = sum(broken.values())
        if total <= self.max_nonfinite * rows:
            return
        listed = [f"{d} ({names[d]})" if d in names else str(d) for d in list(broken)[:5]]
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise StoreError(
            f"{total} of {rows} rows of shard {shard} have states that are infinite or not a number, in document "
            f"{', '.join(listed)}{more}; at most a share of {self.max_nonfinite:g} is accepted: leave these documents "
            "out, use a wider dtype, or accept more; whole shards are kept"
        )


def shard_files(folder: Path, shard: int) -> dict[str, Path]:
    """The two files of a shard."""
    return {
        "rows": folder / "rows" / f"{shard:05d}.parquet",
        "states": folder / "states" / f"{shard:05d}.safetensors",
    }


def lock(folder: Path) -> IO[str]:
    """Take the folder's lock, which the system gives back when the file is closed or the process ends, however.

    Raises StoreError if another process has it.
    """
    import fcntl  # there is none on Windows, where stores can be read

    handle = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise StoreError(
            f"{folder} is being written by another run (process {holder}): wait for it to end, or choose another folder"
        ) from error
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle


def nonfinite(documents: np.ndarray, states: Mapping[str, torch.Tensor]) -> tuple[int, dict[int, int]]:
    """How many values of states [rows, width] are infinite or not a number, and how many rows by document.

    The states are on the CPU.
    """
    values, broken = 0, np.zeros(len(documents), dtype=bool)
    for state in states.values():
        if _finite(state):
            continue
        bad = (~torch.isfinite(state)).sum(dim=1).numpy()
        values += int(bad.sum())
        broken |= bad > 0
    numbers, counts = np.unique(documents[broken], return_counts=True)
    return values, {int(n): int(c) for n, c in zip(numbers, counts, strict=True)}


def _finite(state: torch.Tensor) -> bool:
    """Whether all values are finite, by their bits: two passes of integers are ten times as fast as `isfinite`."""
    if not state.numel():
        return True
    kind, limit = EXPONENTS[state.dtype]
    bits = state.view(kind).numpy()
    sign = 1 << (8 * bits.itemsize - 1)
    # All bits of the exponent are set in infinities and NaNs; among negative numbers these are the largest unsigned.
    return int(bits.max()) < limit and int(bits.view(f"u{bits.itemsize}").max()) < sign | limit


def safetensors_parts(states: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file of tensors on the CPU, in parts: the head, then each tensor's own memory."""
    tensors = {name: states[name].contiguous() for name in sorted(states)}
    head, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        head[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.view(torch.uint8).reshape(-1).numpy().data


def write_hashed(file: Path, parts: Iterable[Any]) -> str:
    """Write bytes-like parts; their checksum, made of the memory that is being written and not of the file."""
    digest = xxhash.xxh3_128()
    with file.open("wb", buffering=0) as handle:
        for part in parts:
            whole = memoryview(part).cast("B")
            for start in range(0, len(whole), BLOCK):
                block = whole[start : start + BLOCK]
                digest.update(block)
                while block:  # a write may be cut short
                    block = block[handle.write(block) :]
    return f"xxh3_128:{digest.hexdigest()}"


def cut_file(files: Mapping[str, Path], info: Mapping[str, Any]) -> Path | None:
    """The first of a shard's files that is missing, is to be written again, or is not as long as it was.

    After a power cut it may not be.
    """
    sizes, expected = info.get("bytes", {}), checksums(info)
    for name, file in files.items():
        if expected[name] == NONE or not file.is_file() or file.stat().st_size != sizes.get(name, file.stat().st_size):
            return file
    return None


def intact(file: Path, info: Mapping[str, Any], name: str) -> bool:
    """Whether a file has the checksum of a shard's `rows` or `states`."""
    expected = checksums(info)[name]
    return checksum(file, expected.partition(":")[0]) == expected


def damaged(file: Path) -> str:
    """What to say of a shard's file that is not as it was written."""
    return f"{file} is missing, or not as it was written: {AGAIN}"
