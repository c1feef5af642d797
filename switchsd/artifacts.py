"""Where probes and drafters are kept: shipped inside the packages, or made by the user and cached.

<package>/weights/<target>/...        shipped for an embedded target
<cache>/artifacts/<target>/...        made by `switchsd train`, and found first
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Literal

from activations.packaged import cache_dir

Kind = Literal["probe", "eagle", "draft", "lengths", "ltd", "cospec"]
PACKAGE = {"probe": "probes", "lengths": "probes"}
"""Of kinds that `decoding` does not keep."""
CONFIGS = {
    "probe": "config.json", "eagle": "config.json", "draft": "draft.json", "lengths": "lengths.json",
    "ltd": "policy.json", "cospec": "policy.json",
}  # fmt: skip
FOLDERS = {"eagle": "eagle3", "draft": "draft", "lengths": "lengths", "ltd": "ltd", "cospec": "cospec"}


def slug(target: str) -> str:
    """A target's name as a folder name: a folder's own name, or a hub id with its organisation."""
    name = Path(target).name if Path(target).is_absolute() or Path(target).is_dir() else target.replace("/", "--")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "target"


def cached(kind: Kind, target: str, name: str = "") -> Path:
    """Where an artifact made on this machine belongs."""
    folder = cache_dir() / "artifacts" / slug(target)
    return folder / "probes" / name if kind == "probe" else folder / FOLDERS[kind]


def shipped(kind: Kind, target: str) -> Path:
    """Where the packages keep what they ship for a target."""
    folder = Path(str(resources.files(PACKAGE.get(kind, "decoding")))) / "weights" / slug(target)
    return folder if kind == "probe" else folder / FOLDERS[kind]


def candidates(kind: Kind, target: str) -> Iterator[Path]:
    """Artifact folders for a target: the user's own first; of several probes `best` before the others."""
    for root in (cached(kind, target), shipped(kind, target)):
        if kind != "probe":
            found = [root]
        else:
            found = sorted(root.iterdir(), key=lambda p: (p.name != "best", p.name)) if root.is_dir() else []
        yield from (folder for folder in found if (folder / CONFIGS[kind]).is_file())
