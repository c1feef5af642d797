"""The capture store: states, rows and labels in a folder that can be read without the model.

    manifest.json              what was captured, how, and per shard: rows, sha256, non-finite count
    rows/00000.parquet         one line a row (labels, surface features, token ids)
    states/00000.safetensors   one tensor [rows, width] a site, in the target's dtype

Rows and states are joined by (shard, row). A shard counts once the manifest lists it; the manifest is replaced
whole, so a run that is cut goes on at the first missing shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

VERSION = 1
DECIDES = ("target", "sites", "config", "prompts", "dtype", "attention")
"""Entries of a manifest that must be equal for a capture to be continued."""


AGAIN = "delete this file and run the command that made the store again; only this shard is made anew"


class StoreError(Exception):
    """A store that cannot be read or continued. The message says what to do."""


def write_json(file: Path, value: object) -> None:
    """Write beside and rename: a reader never sees half a file."""
    scratch = file.with_name(file.name + ".tmp")
    scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, file)


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class CaptureStore:
    """Reading side. `rows()` and `states(site)` are aligned."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> CaptureStore:
        root = Path(folder)
        file = root / "manifest.json"
        if not file.is_file():
            raise StoreError(f"{root} is no capture store (manifest.json is missing): make one with `switchsd capture`")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["version"]
            if not all(isinstance(manifest[k], list) for k in ("shards", "sites")):
                raise TypeError("'shards' and 'sites' must be lists")
            for shard in manifest["shards"]:
                shard["rows"], shard["documents"], shard["sha256"]["rows"], shard["sha256"]["states"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{file} is damaged ({error!r}): capture again into a new folder") from error
        if version != VERSION:
            raise StoreError(f"{file} has format version {version}; this switchsd reads {VERSION}")
        return cls(root, manifest)

    @property
    def sites(self) -> list[str]:
        return list(self.manifest["sites"])

    @property
    def shards(self) -> list[dict[str, Any]]:
        return list(self.manifest["shards"])

    def __len__(self) -> int:
        return sum(int(s["rows"]) for s in self.shards)

    def shard_rows(self, shard: int) -> dict[str, np.ndarray]:
        """Columns of one shard."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.folder / "rows" / f"{shard:05d}.parquet"
        try:
            table = pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"cannot read {file} ({error}): {AGAIN}") from error
        return {name: table[name].to_numpy() for name in table.column_names}

    def shard_states(self, shard: int, site: str) -> torch.Tensor:
        """[rows, width] of one shard, in the stored dtype."""
        if site not in self.sites:
            raise StoreError(f"site {site!r} was not captured in {self.folder}; it has {', '.join(self.sites)}")
        file = self.folder / "states" / f"{shard:05d}.safetensors"
        try:
            with safe_open(file, "pt") as handle:
                tensor: torch.Tensor = handle.get_tensor(site)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"cannot read {file} ({error}): {AGAIN}") from error
        return tensor

    def rows(self) -> dict[str, np.ndarray]:
        """All columns, shards in order."""
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

        files = [str(self.folder / "rows" / f"{i:05d}.parquet") for i in range(len(self.shards))]
        return load_dataset("parquet", data_files=files, split="train")

    def document(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
        """Rows and states of one document (contiguous, ordered, in one shard)."""
        for shard, info in enumerate(self.shards):
            if number in info["documents"]:
                rows = self.shard_rows(shard)
                where = np.flatnonzero(rows["document"] == number)
                states = {s: self.shard_states(shard, s)[torch.from_numpy(where)] for s in self.sites}
                return {k: v[where] for k, v in rows.items()}, states
        raise StoreError(f"document {number} is not in {self.folder}")

    def verify(self) -> None:
        """Compare every shard's files with the manifest; raises at the first difference."""
        for shard, info in enumerate(self.shards):
            for name in ("rows", "states"):
                suffix = "parquet" if name == "rows" else "safetensors"
                file = self.folder / name / f"{shard:05d}.{suffix}"
                if not file.is_file() or sha256(file) != info["sha256"][name]:
                    raise StoreError(f"{file} is missing, or not as it was written: {AGAIN}")


class StoreWriter:
    """Writing side: `write` appends the next shard."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], sites: list[str]) -> None:
        """`manifest` is what describes the run. A folder with another description is refused, the same one resumed."""
        self.folder = folder
        file = folder / "manifest.json"
        self.manifest: dict[str, Any] = {"version": VERSION, **manifest, "sites": sites, "shards": []}
        if file.is_file():
            old = CaptureStore.open(folder).manifest
            changed = [k for k in DECIDES if _plain(old.get(k)) != _plain(self.manifest.get(k))]
            if changed:
                raise StoreError(
                    f"{folder} holds a capture with other settings ({', '.join(changed)} differ): choose a new folder"
                )
            self.manifest = old
        self.gaps = self._gaps()
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        (folder / "states").mkdir(exist_ok=True)

    def _gaps(self) -> list[int]:
        """Shards whose files were deleted, to be written again first; those at the end are simply forgotten."""
        shards = self.manifest["shards"]
        lost = [n for n in range(len(shards)) if not all(file.is_file() for file in self._files(n).values())]
        while lost and lost[-1] == len(shards) - 1:
            shards.pop()
            lost.pop()
        for n in lost:  # nothing of theirs counts until then
            shards[n] = {"documents": [], "sha256": {}, **{k: 0 for k, v in shards[n].items() if isinstance(v, int)}}
        return lost

    def _files(self, shard: int) -> dict[str, Path]:
        return {
            "rows": self.folder / "rows" / f"{shard:05d}.parquet",
            "states": self.folder / "states" / f"{shard:05d}.safetensors",
        }

    @property
    def complete_shards(self) -> int:
        return len(self.manifest["shards"])

    def write(self, rows: Mapping[str, np.ndarray], states: Mapping[str, torch.Tensor], **counts: int) -> None:
        """Write the first gap, or else the next shard; rows and states have equal length. `counts` go into the
        shard's manifest entry."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = self.gaps[0] if self.gaps else self.complete_shards
        files = self._files(number)
        scratch = {name: file.with_name(file.name + ".tmp") for name, file in files.items()}
        pq.write_table(pa.table({name: pa.array(column) for name, column in rows.items()}), scratch["rows"])
        save_file({k: v.contiguous() for k, v in states.items()}, scratch["states"])
        digests = {name: sha256(file) for name, file in scratch.items()}
        for name, file in files.items():
            os.replace(scratch[name], file)
        documents = rows["document"]
        self.manifest["shards"][number : number + 1] = [
            {
                "rows": len(documents),
                "documents": [int(d) for d in dict.fromkeys(documents.tolist())],
                "nonfinite": int(sum((~torch.isfinite(v)).sum() for v in states.values())),
                "sha256": digests,
                **counts,
            }
        ]
        del self.gaps[:1]
        write_json(self.folder / "manifest.json", self.manifest)


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))
