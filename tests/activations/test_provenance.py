from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from activations.provenance import command_line, git_commit, provenance


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_record_is_json_and_holds_no_absolute_path(tmp_path: Path) -> None:
    record = provenance(seed=7, argv=["/usr/bin/switchsd", "train", str(tmp_path), f"--out={tmp_path}/probe", "a/b"])
    assert record["command"] == ["switchsd", "train", tmp_path.name, "--out=probe", "a/b"]
    assert record["seed"] == 7
    assert {"python", "torch", "transformers"} <= set(record["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created"])
    assert str(tmp_path) not in json.dumps(record)


def test_arguments_that_are_no_paths_stay() -> None:
    assert command_line(["switchsd", "--sites=resid_mid.*", "x=/y", "~/store"]) == [
        "switchsd", "--sites=resid_mid.*", "x=/y", "store",
    ]  # fmt: skip


def test_commit_follows_the_checkout(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_commit(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{head}-dirty"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_commit(inside) is None  # an installed package inside someone else's repository
