"""The engine `ray`: the local engine's store, whatever happens to a worker, and an error instead of a wait."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.ray_engine import TRIES, Board, EngineError, Plan, RayConfig, RayEngine, decode, encode, pack, unpack
from activations.store import CaptureStore
from activations.target import Target, load_target

HAS_RAY = importlib.util.find_spec("ray") is not None
with_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install 'switchsd[ray]'")
CONFIG = CaptureConfig(sites=("resid_mid.1", "resid_post.2"), max_new_tokens=24, batch=2)
SMALL = RayConfig(actors=2, actor_cpus=0.4)
TEXTS = [
    Prompt(f"p{i}", "qa", f"g{i}", None if i % 3 else "train", None, ({"role": "user", "content": "ABCD" * 3 + c},))
    for i, c in enumerate("0123456789AB")
]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of shards, and each shard's entry of the manifest."""
    found = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.glob("*/*"))}
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    return {**found, **{f"shard {n}": json.dumps(shard).encode() for n, shard in enumerate(shards)}}


@pytest.fixture(scope="module")
def saved(small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of `load_target` for a small model in a folder."""
    folder = tmp_path_factory.mktemp("model")
    small_target("llama").model.save_pretrained(folder)
    small_target("llama").tokenizer.save_pretrained(folder)
    return {"name": str(folder), "dtype": "float32"}


@pytest.fixture(scope="module")
def target(saved: dict[str, Any]) -> Target:
    return load_target(**saved, device="cpu")


@pytest.fixture(scope="module")
def local(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("local") / "s"
    capture(target, TEXTS, folder, CONFIG)
    return content(folder)


def workers(doing: str = "") -> list[int]:
    """Process ids of this process's Ray workers that hold a target (children of its raylet), if they are doing that."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "cmdline").read_text()
            if not name.startswith("ray::") or "Reader" not in name or doing not in name:
                continue
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            grandparent = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if int(grandparent) == os.getpid():
            found.append(int(entry.name))
    return found


@with_ray
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found in /proc")
def test_workers_that_are_killed_lose_nothing_and_repeat_nothing(
    local: dict[str, bytes], saved: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """All are killed as soon as one is in the middle of a shard, so that only workers that were started again can
    end the run."""
    killed: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        while not killed and not ended.wait(0.01):
            if workers("submit"):
                killed.extend(workers())
                for worker in killed:
                    os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    seen: list[tuple[int, int]] = []
    try:
        made = capture(target, TEXTS, tmp_path / "s", CONFIG, lambda *at: seen.append(at), RayEngine(saved, SMALL))
    finally:
        ended.set()
        thread.join()
    assert killed
    assert seen == [(done, 12) for done in range(2, 13, 2)]
    assert content(tmp_path / "s") == local
    made.verify()


@with_ray
@pytest.mark.slow
def test_what_has_no_room_is_an_error_and_the_other_engine_goes_on(
    local: dict[str, bytes], saved: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    class Cut(Exception):
        pass

    def cut(done: int, total: int) -> None:
        if done == 4:
            raise Cut

    with pytest.raises(Cut):
        capture(target, TEXTS, tmp_path / "s", CONFIG, cut)
    hungry = replace(SMALL, actor_cpus=1000, patience=3)
    with pytest.raises(EngineError, match=r"no worker has run for 3 s: 2 workers of 1000 CPU and 0 GPU .* has \d+ CPU"):
        capture(target, TEXTS, tmp_path / "s", CONFIG, engine=RayEngine(saved, hungry))
    assert len(CaptureStore.open(tmp_path / "s").shards) == 1
    with pytest.raises(
        EngineError, match=r"^a worker failed: TargetError: no such folder: /no/such/place; whole shards"
    ):
        capture(target, TEXTS, tmp_path / "s", CONFIG, engine=RayEngine({"name": "/no/such/place"}, SMALL))
    capture(target, TEXTS, tmp_path / "s", CONFIG)
    assert content(tmp_path / "s") == local


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_it_is_said_how_to_get_it(saved: dict[str, Any], target: Target, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"needs Ray .* pip install 'switchsd\[ray\]'"):
        capture(target, TEXTS, tmp_path / "s", CONFIG, engine=RayEngine(saved, SMALL))


@settings(deadline=None)  # the first pass loads libraries
@given(
    count=st.integers(0, 5), width=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    texts=st.lists(st.none() | st.text(max_size=3), min_size=5, max_size=5), first=st.integers(0, 2**40),
)  # fmt: skip
def test_a_shard_survives_its_way_through_the_object_store(
    count: int, width: int, dtype: torch.dtype, texts: list[str | None], first: int
) -> None:
    rows = {
        "document": np.arange(count) + first,
        "score": np.full(count, np.nan, dtype=np.float32),
        "flag": np.arange(count) % 2 == 0,
        "family": np.full(count, "qa"),
        "split": np.array(texts[:count], dtype=object),
    }
    states = {site: torch.randn(2 * count, width).to(dtype)[::2] for site in ("resid_post.1", "embed")}
    table = pack(first, rows, states)
    assert table["first"].to_pylist() == [first]
    again, back = unpack(table, list(states), width, dtype)
    for name, column in rows.items():
        assert pa.array(again[name]).type == pa.array(column).type, name
        np.testing.assert_array_equal(again[name], column)
    assert all(torch.equal(back[site], states[site]) and back[site].dtype == dtype for site in states)


def test_prompts_survive_their_way_to_a_worker() -> None:
    odd = replace(TEXTS[0], messages=({"role": "system", "content": 'a"\n\\ é \U0001f600'},), decoy=True)
    assert decode(encode([*TEXTS, odd])) == [*TEXTS, odd]


@pytest.mark.parametrize(
    ("options", "machines", "expected"),
    [
        ({}, [{"CPU": 8.0}], (1, 1.0, 0.0)),
        ({}, [{"CPU": 8.0}, {"CPU": 4.0}, {}], (2, 1.0, 0.0)),
        ({}, [{"CPU": 64.0, "GPU": 8.0}], (8, 1.0, 1.0)),
        ({}, [{"CPU": 4.0, "GPU": 8.0}], (8, 0.5, 1.0)),
        ({}, [{"CPU": 64.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 4.0}], (6, 0.25, 1.0)),
        ({"actor_gpus": 0.25}, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], (8, 1.0, 0.25)),
        ({"actor_gpus": 0.4}, [{"CPU": 64.0, "GPU": 8.0}], (16, 1.0, 0.4)),
        ({"actor_gpus": 4.0}, [{"CPU": 64.0, "GPU": 7.0}], (1, 1.0, 4.0)),
        ({"actor_gpus": 0.0}, [{"CPU": 64.0, "GPU": 8.0}], (1, 1.0, 0.0)),
        ({"actors": 5}, [{"CPU": 2.0}], (5, 0.25, 0.0)),
        ({"actors": 3, "actor_cpus": 0.4}, [{"CPU": 1.0, "GPU": 1.0}], (3, 0.4, 1.0)),
        ({"actors": 100}, [{"CPU": 1.0}], (100, 0.0625, 0.0)),
    ],
)
def test_every_device_gets_a_worker(
    options: dict[str, Any], machines: list[dict[str, float]], expected: tuple[int, float, float]
) -> None:
    plan = Plan.of(RayConfig(**options), machines)
    assert (plan.actors, plan.cpus, plan.gpus) == expected


def test_what_kills_every_worker_is_named() -> None:
    board = Board()
    for _ in range(TRIES):
        board.start()
        board.begin(64)
        board.begin(96)
    board.begin(128)
    assert board.look(1)[1] is None
    board.begin(64)
    assert "the shard from document 64 on" in str(board.look(1)[1])


def test_workers_that_die_while_they_load_are_named() -> None:
    board = Board()
    for _ in range(2 * TRIES):
        board.start()
    assert board.look(2)[1] is None
    board.start()
    assert "while they loaded" in str(board.look(2)[1])
    board.begin(0)
    assert board.look(2)[1] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"actors": -1}, "actors is -1"),
        ({"actor_cpus": -0.5}, "actor_cpus is -0.5"),
        ({"actor_cpus": float("nan")}, "actor_cpus is nan"),
        ({"actor_gpus": 1.5}, "actor_gpus is 1.5"),
        ({"actor_gpus": -1.0}, "actor_gpus is -1"),
        ({"patience": 0}, "patience is 0"),
        ({"patience": float("inf")}, "patience is inf"),
    ],
)
def test_a_wrong_config_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayConfig(**options)
