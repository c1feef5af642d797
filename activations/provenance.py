"""Where an artifact came from: the record that stands beside every store, probe and drafter."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "switchsd")


def provenance(seed: int | None = None, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What is needed to make an artifact again: command line, versions, git commit, seed and UTC time.

    Nothing in it belongs to one machine: an absolute path in the command line is cut to its last part.
    `argv` is the command line with the program first; the running one by default.
    """
    return {
        "command": command_line(sys.argv if argv is None else argv),
        "versions": versions(),
        "commit": git_commit(Path(__file__).resolve().parent.parent),
        "seed": seed,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def command_line(argv: Sequence[str]) -> list[str]:
    """The arguments, with every absolute path replaced by its last part; `--name=/a/b` becomes `--name=b`."""
    out = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if equals and name.startswith("-"):
            out.append(f"{name}={_relative(value)}")
        else:
            out.append(_relative(argument))
    return out


def _relative(text: str) -> str:
    return Path(text).name if text.startswith(("~", "/")) or Path(text).is_absolute() else text


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(root: Path) -> str | None:
    """The commit checked out in `root`, with `-dirty` where tracked files were changed.

    None where `root` is not itself the top of a git checkout (an installed wheel inside another project, say).
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
