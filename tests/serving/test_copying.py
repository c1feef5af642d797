"""Copying alone in a real vLLM engine: the text is the one without speculation, whatever the scheduler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from activations.corpus import load_corpus
from activations.packaged import folder
settings = json.loads(sys.argv[1])
llm = LLM(
    model=str(folder("smollm2")), dtype="float32", max_model_len=1024, enforce_eager=True, disable_log_stats=False,
    enable_prefix_caching=True, **settings,
)
prompts = [[dict(m) for m in p.messages] for p in load_corpus("validation")[::9][:16]]
prompts += [[{"role": "user", "content": f"Repeat this list twice, one item a line: {items}"}] for items in (
    "apples, pears, plums, cherries, apricots, quinces", "one, two, three, four, five, six, seven, eight")]
texts = []
for round in range(2):
    sampling = [SamplingParams(temperature=0, max_tokens=24 + 8 * (k % 5), seed=0) for k in range(len(prompts))]
    texts.append([list(o.outputs[0].token_ids) for o in llm.chat(prompts, sampling, use_tqdm=False)])
counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
print("RESULT", json.dumps({"texts": texts, "counts": counts}))
"""
COPYING = {
    "method": "custom_class",
    "model": "decoding.serving.vllm.copying.CopyProposer",
    "num_speculative_tokens": 6,
}


def served(**settings: Any) -> dict[str, Any]:
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "NUMBA_NUM_THREADS": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", ENGINE, json.dumps(settings)], env=environment, capture_output=True, text=True
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    assert ran.returncode == 0 and lines, ran.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT"))
    return result


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return served(max_num_seqs=6)


@pytest.mark.parametrize(
    "settings",
    [
        # Prompts are read in pieces beside requests that draft; requests are stopped and computed again.
        {"max_num_seqs": 6, "max_num_batched_tokens": 48},
        {"max_num_seqs": 20, "block_size": 32, "num_gpu_blocks_override": 34},
    ],
)
def test_the_text_is_the_targets(alone: dict[str, Any], settings: dict[str, Any]) -> None:
    found = served(speculative_config=COPYING, additional_config={"switchsd": {"kappa": 2}}, **settings)
    assert found["texts"] == alone["texts"]
    counts = found["counts"]
    assert counts["vllm:spec_decode_num_accepted_tokens"] > 100
    if "num_gpu_blocks_override" in settings:
        assert counts["vllm:num_preemptions"] > 0
