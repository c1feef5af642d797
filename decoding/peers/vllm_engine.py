"""vLLM as a peer (see `process.py`): a script for the Python of its environment, which imports nothing of this project.

One engine in this process, stepped by hand, so that every forward's tokens and time are seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

SPECULATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--speculation", choices=SPECULATION, default="none")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        import vllm

        engine = vllm.LLM(
            model=arguments.model, dtype=arguments.dtype, max_model_len=arguments.context, max_num_seqs=1,
            speculative_config=SPECULATION[arguments.speculation], enable_prefix_caching=False,
        ).llm_engine  # fmt: skip
    except Exception as error:  # whatever it is, the other side must be told
        reply({"error": f"vllm cannot be started: {type(error).__name__}: {error}"})
        return
    what = f"vllm {vllm.__version__}"
    settings = SPECULATION[arguments.speculation]
    differs = "its own kernels for the same weights" + (f"; {json.dumps(settings)}" if settings else "")
    reply({"ready": what, "differs": differs})
    for number, line in enumerate(sys.stdin):
        try:
            reply(ask(engine, json.loads(line), str(number)))
        except Exception as error:
            reply({"error": f"vllm gave no answer: {type(error).__name__}: {error}"})


def ask(engine: Any, question: dict[str, Any], number: str) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=question["max_new_tokens"], stop_token_ids=question["stop"], detokenize=False
    )
    began = time.perf_counter()
    engine.add_request(number, {"prompt_token_ids": question["prompt"]}, sampling)
    tokens: list[int] = []
    times: list[float] = []
    pieces: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
            if len(found) > len(tokens):
                times.append(time.perf_counter())
                pieces.append(len(found) - len(tokens))
                tokens = found
    return {
        "tokens": tokens,
        "decoded": sum(pieces[1:]),
        "steps": len(pieces) - 1,
        "first_token_seconds": times[0] - began,
        "decode_seconds": times[-1] - times[0],
    }


if __name__ == "__main__":
    main()
