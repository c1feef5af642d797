"""The store's files: what is written, what is read, and what is said about damage, locks, disks and versions."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from activations import store as store_module
from activations.store import (
    MARGIN,
    VERSION,
    CaptureStore,
    StoreError,
    StoreWriter,
    check_space,
    nonfinite,
    safetensors_parts,
    text_rows,
    write_hashed,
)

SITES = ["resid_post.0", "resid_post.1"]
SHARDS = 4
DESCRIBED: dict[str, Any] = {
    "target": {"architecture": "A", "width": 8, "blocks": 2, "vocabulary": "v", "revision": "r"}
}


def shard(number: int) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Two documents of three and two rows."""
    rows = {
        "document": np.repeat([2 * number, 2 * number + 1], [3, 2]),
        "position": np.array([4, 5, 6, 9, 10], dtype=np.int32),
    }
    generator = torch.Generator().manual_seed(number)
    return rows, {site: torch.randn(5, 8, generator=generator).bfloat16() for site in SITES}


def fill(folder: Path, **options: float) -> CaptureStore:
    """Write all shards that are missing."""
    with StoreWriter(folder, {**DESCRIBED, "config": {"seed": 0}}, SITES, **options) as writer:
        for number in [*writer.gaps, *range(writer.complete_shards, SHARDS)]:
            writer.write(*shard(number))
    return CaptureStore.open(folder)


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return fill(tmp_path / "store")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# -- files ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_a_states_file_is_the_one_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, widths: dict[str, int], dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("files")
    states = {name: torch.randn(3, width).to(dtype) for name, width in widths.items()}
    digest = write_hashed(folder / "own", safetensors_parts(states))
    save_file(states, folder / "theirs")
    assert (folder / "own").read_bytes() == (folder / "theirs").read_bytes()
    assert digest == f"xxh3_128:{xxhash.xxh3_128((folder / 'own').read_bytes()).hexdigest()}"


def test_transposed_and_empty_states_are_written_as_they_are(tmp_path: Path) -> None:
    states = {"a": torch.randn(4, 3).T, "b": torch.randn(6, 4, dtype=torch.float64)[::2], "c": torch.empty(0, 7)}
    write_hashed(tmp_path / "own", safetensors_parts(states))
    read = load_file(tmp_path / "own")
    assert all(torch.equal(read[name], state) and read[name].dtype == state.dtype for name, state in states.items())


def test_large_parts_are_written_whole(tmp_path: Path) -> None:
    data = os.urandom(2 * store_module.BLOCK + 17)
    digest = write_hashed(tmp_path / "f", [data[:5], memoryview(data)[5:]])
    assert (tmp_path / "f").read_bytes() == data
    assert digest == f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


FINITE = [0.0, -0.0, 1.5, -2.0, 1e-30]
BROKEN = [float("inf"), float("-inf"), float("nan"), -float("nan")]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), *[st.sampled_from([*FINITE, "max", "-max", *BROKEN])] * 4), min_size=0, max_size=8
    ),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_states_that_are_not_finite_are_counted_by_document(drawn: list[tuple[Any, ...]], dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    numbers: dict[Any, float] = {"max": largest, "-max": -largest}
    documents = np.array(sorted(row[0] for row in drawn), dtype=np.int64)
    values = torch.tensor([[numbers.get(v, v) for v in row[1:]] for row in drawn], dtype=torch.float64).reshape(-1, 4)
    states = {"a": values[:, :2].to(dtype).contiguous(), "b": values[:, 2:].to(dtype).contiguous()}
    bad = ~torch.isfinite(torch.cat(list(states.values()), dim=1))
    expected: dict[int, int] = {}
    for document, row in zip(documents.tolist(), bad.any(dim=1).tolist(), strict=True):
        if row:
            expected[document] = expected.get(document, 0) + 1
    assert nonfinite(documents, states) == (int(bad.sum()), expected)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_rows_of_a_whole_text(prompt: int, written: int, number: int) -> None:
    ids = list(range(100, 100 + prompt + written))
    rows = text_rows(number, ids, prompt)
    for row in range(len(ids) - 1):
        found = {name: column[row] for name, column in rows.items()}
        own = row + 1 >= prompt
        assert found == {"document": number, "position": row, "token": ids[row], "pending": ids[row + 1],
                         "loss_mask": own}  # fmt: skip
    assert {len(column) for column in rows.values()} == {len(ids) - 1}


def test_a_document_is_its_rows(store: CaptureStore) -> None:
    for number in range(2 * SHARDS):
        rows, states = store.document(number)
        where = np.flatnonzero(store.rows()["document"] == number)
        assert rows["position"].tolist() == ([9, 10] if number % 2 else [4, 5, 6])
        for site in SITES:
            assert torch.equal(states[site], store.states(site)[torch.from_numpy(where)])
    with pytest.raises(StoreError, match="document 99 is not in"):
        store.document(99)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts bytes in /proc")
def test_one_site_of_thirty_is_read_alone(tmp_path: Path) -> None:
    sites = [f"resid_post.{n}" for n in range(30)]
    states = {site: torch.randn(1000, 256) for site in sites}  # 1 MB each
    with StoreWriter(tmp_path / "s", DESCRIBED, sites) as writer:
        writer.write({"document": np.zeros(1000, np.int64)}, states)
    opened = CaptureStore.open(tmp_path / "s")
    file = (tmp_path / "s" / "states" / "00000.safetensors").resolve()

    def touched(names: list[str]) -> int:
        """Bytes read by calls, and those of the file's mapped pages that were looked at."""
        before = read_calls()
        found = [opened.shard_states(0, name) for name in names]
        sums = [float(state.sum()) for state in found]
        assert sums == pytest.approx([float(states[name].sum()) for name in names])
        return read_calls() - before + mapped(file)

    whole, one = touched(sites), touched(sites[7:8])
    size = states[sites[0]].nbytes
    assert whole >= 30 * size, "the measure sees what is read"
    assert size <= one < 1.5 * size


def read_calls() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def mapped(file: Path) -> int:
    """Resident bytes of this process's mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


# -- damage -----------------------------------------------------------------------------------------


def test_a_whole_store_has_no_damage(store: CaptureStore) -> None:
    assert list(store.damages()) == [None] * SHARDS
    store.verify()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shards: shards[1].update(rows=6), "shard 1 of .* has other rows"),
        (lambda shards: shards[2].update(documents=[4]), "shard 2 of .* has other documents"),
        (
            lambda shards: shards[0]["checksums"].update(states=shards[1]["checksums"]["states"]),
            "not as it was written",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_its_files(
    store: CaptureStore, change: Callable[[list[dict]], None], says: str
) -> None:
    change(store.manifest["shards"])
    with pytest.raises(StoreError, match=says):
        store.verify()


def test_a_site_that_its_file_lacks(store: CaptureStore) -> None:
    store.manifest["sites"] = [*SITES, "resid_post.2"]
    with pytest.raises(StoreError, match="other sites or rows"):
        store.verify()


def test_all_damages_are_found(store: CaptureStore) -> None:
    (store.folder / "rows" / "00001.parquet").unlink()
    (store.folder / "states" / "00003.safetensors").write_bytes(b"x")
    assert [bool(damage) for damage in store.damages()] == [False, True, False, True]


# -- versions ---------------------------------------------------------------------------------------


def test_a_store_of_a_newer_version_says_so(store: CaptureStore) -> None:
    file = store.folder / "manifest.json"
    manifest = {"version": VERSION + 1, "parts": {}}  # whatever it may then hold
    file.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=f"format version {VERSION + 1}, which a newer switchsd wrote.*update"):
        CaptureStore.open(store.folder)
    with pytest.raises(StoreError, match="newer"):
        fill(store.folder)
    file.write_text(json.dumps({**store.manifest, "version": "x"}))
    with pytest.raises(StoreError, match="no such format version: 'x'"):
        CaptureStore.open(store.folder)


def first_version(store: CaptureStore) -> CaptureStore:
    """The same store as format version 1 had it."""
    manifest = {**store.manifest, "version": 1}
    for number, entry in enumerate(manifest["shards"]):
        files = store_module.shard_files(store.folder, number)
        entry["sha256"] = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
        for name in ("checksums", "bytes", "nonfinite_rows"):
            del entry[name]
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    return CaptureStore.open(store.folder)


def test_a_store_of_the_first_version_is_read_and_continued(store: CaptureStore) -> None:
    rows, states = store.rows(), store.states(SITES[1])
    old = first_version(store)
    old.verify()
    assert np.array_equal(old.rows()["document"], rows["document"]) and torch.equal(old.states(SITES[1]), states)
    store_module.shard_files(store.folder, 3)["states"].unlink()
    again = fill(store.folder)
    again.verify()
    assert again.manifest["version"] == VERSION and torch.equal(again.states(SITES[1]), states)
    (store.folder / "rows" / "00000.parquet").write_bytes(b"x")
    with pytest.raises(StoreError, match="not as it was written"):
        again.verify()


# -- resuming ---------------------------------------------------------------------------------------


class Cut(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """cut(k): the k-th rename from now on does not happen, and ends the run."""
    replace, left = os.replace, [-1]

    def rename(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise Cut
        replace(source, target)

    def at(k: int | None) -> None:
        left[0] = -10 if k is None else k

    at(None)
    monkeypatch.setattr(store_module.os, "replace", rename)
    yield at


@pytest.mark.parametrize("lost", [(), (0, 2), (1, 3)], ids=str)
def test_a_run_that_is_cut_anywhere_goes_on(
    tmp_path: Path, cut: Callable[[int | None], None], lost: tuple[int, ...]
) -> None:
    """At each rename in turn: of a fresh store, and of one that lost shards (a file gone, or cut short)."""
    whole = content(fill(tmp_path / "whole").folder)
    renames = 3 * (len(lost) or SHARDS)
    for k in range(renames):
        folder = tmp_path / f"{k}"
        if lost:
            shutil.copytree(tmp_path / "whole", folder)
            for place, number in enumerate(lost):
                file = store_module.shard_files(folder, number)["states"]
                file.write_bytes(b"") if place else file.unlink()
        cut(k)
        with pytest.raises(Cut):
            fill(folder)
        cut(None)
        fill(folder)
        found = {name: data for name, data in content(folder).items() if not name.endswith(".tmp")}
        assert found == whole, k


# -- one run at a time ------------------------------------------------------------------------------


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, DESCRIBED, SITES) as first:
        first.write(*shard(0))
        with pytest.raises(StoreError, match=rf"written by another run \(process {os.getpid()}\)"):
            StoreWriter(tmp_path, DESCRIBED, SITES)
        assert len(CaptureStore.open(tmp_path)) == 5, "reading needs no lock"
    with StoreWriter(tmp_path, DESCRIBED, SITES) as second:
        assert second.complete_shards == 1
    with pytest.raises(StoreError, match=r"sites \(only the first has resid_post.1\) differ"):
        StoreWriter(tmp_path, DESCRIBED, SITES[:1])
    StoreWriter(tmp_path, DESCRIBED, SITES).close()  # the refused one keeps no lock


def test_a_manifest_that_is_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StoreError, match=r"manifest.json is there and is no file: choose a new folder"):
        StoreWriter(tmp_path, DESCRIBED, SITES)


@pytest.mark.parametrize("lost", ["target", *DESCRIBED["target"]])
def test_a_manifest_without_its_target_is_damaged(store: CaptureStore, lost: str) -> None:
    manifest = store.manifest
    del (manifest if lost == "target" else manifest["target"])[lost]
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=rf"manifest.json is damaged \(KeyError\('{lost}'\)\): capture again"):
        CaptureStore.open(store.folder)


def test_a_killed_run_gives_its_folder_back(tmp_path: Path) -> None:
    script = (
        "import fcntl, sys, time; handle = open(sys.argv[1], 'a+'); fcntl.flock(handle, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / ".lock"], stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match="written by another run"):
            StoreWriter(tmp_path, DESCRIBED, SITES)
        other.send_signal(signal.SIGKILL)
    StoreWriter(tmp_path, DESCRIBED, SITES).close()


# -- space and broken states ------------------------------------------------------------------------


def test_what_the_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=MARGIN + 1000)

    monkeypatch.setattr(store_module.shutil, "disk_usage", usage)
    check_space(tmp_path / "a" / "b", 1000, "less")
    assert asked == [tmp_path]
    with pytest.raises(StoreError, match=r"still take 0.00 GiB, and its disk has 0.25 GiB free.*less \(fewer sites"):
        check_space(tmp_path / "a" / "b", 1001, "fewer sites")


def test_broken_states_are_named_and_too_many_refused(tmp_path: Path) -> None:
    rows, states = shard(0)
    states[SITES[0]][1, 3] = float("nan")
    states[SITES[1]][1, :2] = float("inf")
    with StoreWriter(tmp_path, DESCRIBED, SITES, max_nonfinite=0.2) as writer:
        writer.write(rows, states)
        assert writer.manifest["shards"][0]["nonfinite"] == 3
        assert writer.manifest["shards"][0]["nonfinite_rows"] == {"0": 1}
        states[SITES[1]][4, 0] = float("nan")
        with pytest.raises(StoreError, match=r"2 of 5 rows of shard 1 .* in document 0 \(essay\), 1; at most .* 0.2"):
            writer.write(rows, states, {0: "essay"})
        writer.write(*shard(1))
    CaptureStore.open(tmp_path).verify()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_keeps_the_shards_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path, DESCRIBED, SITES) as writer:
        writer.write(*shard(0))

        def full(*parts: object) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(store_module, "write_hashed", full)
            writer.write(*shard(1))
        writer.write(*shard(1))
    opened = CaptureStore.open(tmp_path)
    opened.verify()
    assert len(opened.shards) == 2
