"""The V2 model runner, for real, on the CPU: vLLM's kernels run through Triton's interpreter.

vLLM takes that runner where Triton has a CPU backend; a stand-in for one lets the interpreter do its work. What this
leaves out is a GPU: its compiled kernels, CUDA graphs, pinned memory, and work that the host runs ahead of. The matcher
is the torch reference, to which its kernel is held by tests of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import engine, prompts, settings

LONGEST = 451
"""No multiple of 16: the rows of the runner's own token table are read as they lie."""
INTERPRETED = [
    "import triton.backends as known",
    "driver = type('Driver', (), {'is_active': staticmethod(lambda: True)})",
    "known.backends.clear()",
    "known.backends['cpu'] = known.Backend(object, driver)",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_greedy_text_is_the_targets_own(folder: Path, written: Callable[..., list[list[int]]]) -> None:
    """Mixed batches, prompts in pieces, steps without the head."""
    asked = prompts(4, 2)
    limits = {"max_model_len": LONGEST}
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    peer = engine("v2", settings("switchsd", **limits), folder, INTERPRETED, **environment)
    try:
        found = peer.ask_all(asked, 24)
    finally:
        peer.close()
    assert [a.tokens for a in found.answers] == written(asked, 24)
    assert "Using V2 Model Runner" in (folder / "v2.log").read_text()
    counted = found.counters
    assert sum(a.prompt_forwards > 1 for a in found.answers) > 1
    assert counted["switchsd:neural_skipped"] > 0
    assert counted["switchsd:row_steps"] > counted["switchsd:copy_steps"] > 5
    assert counted["switchsd:copied_tokens"] > counted["switchsd:copied_tokens_kept"] > 10
    assert counted["switchsd:false_copies"] > 0
