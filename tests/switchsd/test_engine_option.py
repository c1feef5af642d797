"""`switchsd capture --engine`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from activations.store import CaptureStore
from switchsd.cli import FAILURE, OK, USAGE, main

HAS_RAY = importlib.util.find_spec("ray") is not None
OPTIONS = ["--limit", "3", "--max-new-tokens", "8", "--sites", "resid_post.2", "--batch", "2", "--dtype", "float32"]


def test_options_of_a_cluster_are_refused_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", str(tmp_path / "s"), "--actors", "2"]) == USAGE
    assert "--engine ray" in capsys.readouterr().err
    assert main(["capture", str(tmp_path / "s"), "--engine", "ray", "--actor-cpus", "1.5"]) == USAGE
    assert "actor_cpus is 1.5" in capsys.readouterr().err


def test_without_ray_it_is_said_how_to_get_it_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = ["capture", str(tmp_path / "s"), "--target", "nowhere", "--engine", "ray", *OPTIONS]
    assert main(asked) == FAILURE
    error = capsys.readouterr().err
    assert "pip install 'switchsd[ray]'" in error and "SWITCHSD_DEBUG" not in error


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install 'switchsd[ray]'")
def test_both_engines_write_the_same_store(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_folder.parent)  # the workers, which stand elsewhere, must find the folder all the same
    for engine in ("local", "ray"):
        asked = ["capture", str(tmp_path / engine), "--target", tiny_folder.name, "--engine", engine, *OPTIONS]
        assert main([*asked, "--json"]) == OK
        assert json.loads(capsys.readouterr().out)["documents"] == 3
    stores = [CaptureStore.open(tmp_path / engine) for engine in ("local", "ray")]
    assert stores[0].shards == stores[1].shards and len(stores[0].shards) == 2
    assert stores[0].manifest["target_name"] == stores[1].manifest["target_name"]
