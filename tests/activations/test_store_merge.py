"""Merging stores: what the new store holds, and which stores are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from activations import merge as merge_module
from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.merge import merge
from activations.store import NONE, TARGET, CaptureStore, StoreError, shard_files
from activations.target import Target

CONFIG = CaptureConfig(sites=("resid_post.2",), max_new_tokens=12, batch=2)
TEXTS = (("ABCDABCD", "list:0;1", "aaaa"), ("0101", "XYZXYZ"))


def prompts(texts: tuple[str, ...]) -> list[Prompt]:
    return [Prompt(t, "qa", f"g{t[0]}", "train", None, ({"role": "user", "content": t},)) for t in texts]


@pytest.fixture(scope="module")
def parts(small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> list[CaptureStore]:
    """Two captures, three and two documents."""
    root = tmp_path_factory.mktemp("parts")
    configs = (CONFIG, replace(CONFIG, batch=1, seed=3))
    pairs = zip(TEXTS, configs, strict=True)
    return [capture(small_target(), prompts(t), root / str(n), c) for n, (t, c) in enumerate(pairs)]


def edited(store: CaptureStore, folder: Path, **values: object) -> Path:
    folder.mkdir()
    for name in ("rows", "states"):
        os.symlink(store.folder.resolve() / name, folder / name)
    (folder / "manifest.json").write_text(json.dumps({**store.manifest, **values}))
    return folder


def test_a_merged_store_is_one_after_the_other(parts: list[CaptureStore], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    made = merge([p.folder for p in parts], tmp_path / "m", lambda *done: told.append(done))
    made.verify()
    assert told == [(n, 4) for n in range(1, 5)]
    rows, old = made.rows(), [p.rows() for p in parts]
    assert np.array_equal(rows["document"], np.concatenate([old[0]["document"], old[1]["document"] + 3]))
    for name in old[0]:
        if name != "document":
            together = np.concatenate([o[name] for o in old])
            assert np.array_equal(rows[name], together, equal_nan=together.dtype.kind == "f"), name
    assert torch.equal(made.states("resid_post.2"), torch.cat([p.states("resid_post.2") for p in parts]))
    assert made.document(4)[0]["group"][0] == "gX"
    assert [s["documents"] for s in made.shards] == [[0, 1], [2], [3], [4]]
    assert made.manifest["documents"] == 5 and [m["first_document"] for m in made.manifest["merged"]] == [0, 3]
    linked = shard_files(made.folder, 2)["states"].stat().st_ino
    assert linked == shard_files(parts[1].folder, 0)["states"].stat().st_ino


def test_states_are_copied_where_they_cannot_be_linked(
    parts: list[CaptureStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*files: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(merge_module.os, "link", refused)
    merge([p.folder for p in parts], tmp_path / "m").verify()


def test_broken_states_keep_their_documents(parts: list[CaptureStore], tmp_path: Path) -> None:
    shards = [{**s, "nonfinite": 1, "nonfinite_rows": {"1": 7}} for s in parts[1].shards]
    other = edited(parts[1], tmp_path / "b", shards=shards)
    made = merge([parts[0].folder, other], tmp_path / "m")
    assert [s["nonfinite_rows"] for s in made.shards] == [{}, {}, {"4": 7}, {"4": 7}]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": "float16"}, 'differ in dtype \\("float32" and "float16"\\)'),
        ({"sites": ["resid_post.1"]}, r"sites \(only the first has resid_post.2, only the second has resid_post.1\)"),
        ({"target": {**dict.fromkeys(TARGET, 1)}}, r'differ in target.architecture \("\w+" and 1\), target.width'),
        ({"config": {"labels": {}}}, r"differ in config.sites \(.* and none\)"),
        ({"selection": "all"}, "differ in selection"),
    ],
)
def test_stores_that_do_not_belong_together(
    parts: list[CaptureStore], tmp_path: Path, values: dict[str, object], says: str
) -> None:
    with pytest.raises(StoreError, match=says):
        merge([parts[0].folder, edited(parts[1], tmp_path / "b", **values)], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_merged(parts: list[CaptureStore], tmp_path: Path, small_target: Callable[..., Target]) -> None:
    one, two = (p.folder for p in parts)
    with pytest.raises(StoreError, match="at least two"):
        merge([one], tmp_path / "m")
    with pytest.raises(StoreError, match="same prompts, answered with the same seed"):
        merge([one, two, one], tmp_path / "m")
    with pytest.raises(StoreError, match="holds a store already"):
        merge([one, two], one)
    made = merge([one, two], tmp_path / "m")
    with pytest.raises(StoreError, match="prompts differ"):  # a merged store is no capture's
        capture(small_target(), prompts(TEXTS[0]), made.folder, CONFIG)


@pytest.mark.parametrize("nested", [False, True])
def test_a_merged_store_and_one_of_its_parts_are_not_merged(
    parts: list[CaptureStore], tmp_path: Path, small_target: Callable[..., Target], nested: bool
) -> None:
    """Found by the prompts and the seed, even where the part was captured again in other shards."""
    folders = [p.folder for p in parts]
    made = merge(folders, tmp_path / "m").folder
    if nested:
        other = capture(small_target(), prompts(("EFGEFG",)), tmp_path / "other", CONFIG).folder
        made = merge([other, made], tmp_path / "mm").folder
        merged = CaptureStore.open(made).manifest["merged"]
        assert [(m["first_document"], m["documents"]) for m in merged] == [(0, 1), (1, 3), (4, 2)]
    again = capture(small_target(), prompts(TEXTS[0]), tmp_path / "again", replace(CONFIG, batch=3)).folder
    for part in (*folders, again):
        for pair in ([made, part], [part, made]):
            with pytest.raises(StoreError, match="hold the same prompts"):
                merge(pair, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_stores_that_do_not_say_their_prompts_are_told_by_their_shards(
    parts: list[CaptureStore], tmp_path: Path
) -> None:
    quiet = [edited(p, tmp_path / f"{n}", prompts=None) for n, p in enumerate(parts)]
    made = merge(quiet, tmp_path / "m").folder
    with pytest.raises(StoreError, match="hold the same prompts"):
        merge([made, quiet[1]], tmp_path / "x")


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("name", "damage", "linked"),
    [
        ("rows", spoil, True),
        ("rows", Path.unlink, True),
        ("states", Path.unlink, True),
        ("states", lambda file: os.truncate(file, 100), True),
        ("states", spoil, False),
    ],
)
def test_damage_is_named_and_not_covered_up(
    parts: list[CaptureStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], object],
    linked: bool,
    number: int,
) -> None:
    copied = Path(shutil.copytree(parts[1].folder, tmp_path / "copied"))
    file = shard_files(copied, number)[name]
    damage(file)
    if not linked:
        monkeypatch.setattr(merge_module.os, "link", lambda *files: os.unlink("/dev/null/none"))
    with pytest.raises(StoreError, match=rf"{file} is missing, or not as it was written: delete this file"):
        merge([parts[0].folder, copied], tmp_path / "m")
    assert not (tmp_path / "m" / "manifest.json").exists()


def test_a_shard_that_is_to_be_written_again_is_not_merged(parts: list[CaptureStore], tmp_path: Path) -> None:
    shards = [
        {**s, "rows": 0, "documents": [], "checksums": dict.fromkeys(s["checksums"], NONE)} for s in parts[1].shards
    ]
    other = edited(parts[1], tmp_path / "b", shards=[shards[0], parts[1].shards[1]])
    with pytest.raises(StoreError, match=r"00000.parquet is missing, or not as it was written"):
        merge([parts[0].folder, other], tmp_path / "m")


def test_a_merge_that_was_cut_can_be_made_again(
    parts: list[CaptureStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [p.folder for p in parts]

    def cut(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(folders, tmp_path / "m", cut)
    with pytest.raises(StoreError, match="no capture store"):
        CaptureStore.open(tmp_path / "m")
    merge(folders, tmp_path / "m").verify()
    for store in parts:
        store.verify()  # the linked files are as they were
