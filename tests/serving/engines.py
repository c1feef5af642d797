"""vLLM engines for the tests: each in a process of its own, asked through `decoding.peers`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from activations import packaged
from activations.chat_template import ChatTemplate
from activations.corpus import load_corpus
from decoding.peers.process import Peer
from decoding.peers.start import VLLM, vllm_command
from switchsd.artifacts import shipped

TOKENS = 40
"""Generated for a prompt, where its answer does not end before."""
BUDGET = 96
"""Tokens a forward: prompts that do not fit are read in pieces, beside the steps of others."""
HEAD = shipped("eagle", "smollm2")
PROBE = shipped("probe", "smollm2") / "serving"
K = 8


@cache
def model() -> str:
    """The embedded target's folder, made on first use."""
    return str(packaged.folder("smollm2"))


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model())


@cache
def prompts(heavy: int, light: int) -> list[list[int]]:
    """So many embedded validation prompts whose answers repeat much, and others; always the same ones."""
    held_out = load_corpus("validation")
    template = ChatTemplate(tokenizer())
    found = []
    for count, wanted in ((heavy, True), (light, False)):
        some = [p for p in held_out if (p.repetition == "heavy") is wanted]
        found += [some[i * len(some) // count] for i in range(count)]
    return [tokenizer()(template.render(p.messages), add_special_tokens=False)["input_ids"] for p in found]


def settings(column: str, k: int = K, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for none, ngram, suffix, eagle3 or switchsd; `more` replaces some."""
    speculative: dict[str, Any] | None = {"method": column, "num_speculative_tokens": k}
    if column == "none":
        speculative = None
    elif column in ("eagle3", "switchsd"):
        speculative = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": k}
    return {
        "model": model(), "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16,
        "block_size": 32, "max_num_batched_tokens": BUDGET, "enable_prefix_caching": True, "enforce_eager": True,
        "disable_log_stats": False, "speculative_config": speculative,
        "additional_config": {"switchsd": {"probe": str(PROBE)}} if column == "switchsd" else {}, **more,
    }  # fmt: skip


def engine(name: str, settings: dict[str, Any], folder: Path, before: Sequence[str] = (), **environment: str) -> Peer:
    """An engine that starts at its first question, and logs to a file of its name. `before`: lines of Python that
    its process runs first."""
    command = vllm_command(sys.executable, settings)
    if before:
        then = ["sys.argv = sys.argv[1:]", "runpy.run_path(sys.argv[0], run_name='__main__')"]
        command = [sys.executable, "-c", "\n".join(["import runpy, sys", *before, *then]), *command[1:]]
    return Peer(name, command, settings, {**VLLM, **environment}, folder / f"{name}.log")
