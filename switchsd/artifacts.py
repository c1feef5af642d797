"""Where probes and drafters are kept: shipped inside the packages, or made by the user and cached.

<package>/weights/<target>/...        shipped for an embedded target
<cache>/artifacts/<target>/...        made by `switchsd train`, and found first
<cache>/artifacts/<target>~<hash>/... the same of another target that has the same name
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

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


def cached(kind: Kind, target: str, name: str = "", beside: str = "") -> Path:
    """Where artifacts made on this machine are, for the first target of a name; `beside`: for another one."""
    folder = cache_dir() / "artifacts" / f"{slug(target)}{beside}"
    return folder / "probes" / name if kind == "probe" else folder / FOLDERS[kind]


def own(kind: Kind, target: str, fingerprint: Mapping[str, Any]) -> Path:
    """Where an artifact of exactly this target belongs: under the target's name, unless another target of that name
    has one there (two folders called alike, or one whose weights have changed), which must not be lost."""
    first = cached(kind, target)
    owners = [made_for(folder, CONFIGS[kind]) for folder in (first.glob("*") if kind == "probe" else [first])]
    if all(owner in (None, fingerprint) for owner in owners):
        return first
    digest = hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()
    return cached(kind, target, beside=f"~{digest[:8]}")


def made_for(folder: Path, config_file: str = "config.json") -> Any:
    """The fingerprint of the target that an artifact says it was made for; None if it does not say."""
    try:
        config = json.loads((folder / config_file).read_text(encoding="utf-8"))
        return config.get("switchsd", config).get("target")
    except (OSError, ValueError, AttributeError):
        return None


def shipped(kind: Kind, target: str) -> Path:
    """Where the packages keep what they ship for a target."""
    folder = Path(str(resources.files(PACKAGE.get(kind, "decoding")))) / "weights" / slug(target)
    return folder if kind == "probe" else folder / FOLDERS[kind]


def candidates(kind: Kind, target: str) -> Iterator[Path]:
    """Artifact folders for a target: the user's own first; of several probes `best` before the others."""
    others = sorted(p.name for p in (cache_dir() / "artifacts").glob(f"{slug(target)}~*"))
    beside = [cached(kind, target, beside=name.removeprefix(slug(target))) for name in others]
    for root in (cached(kind, target), *beside, shipped(kind, target)):
        if kind != "probe":
            found = [root]
        else:
            found = sorted(root.iterdir(), key=lambda p: (p.name != "best", p.name)) if root.is_dir() else []
        yield from (folder for folder in found if (folder / CONFIGS[kind]).is_file())
