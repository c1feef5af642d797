"""From which copy intent on a served copy replaces the head's draft, by a replay inside vLLM.

    python -m benchmarks.serving_gate --suite gsm8k.jsonl --suite humaneval.jsonl      (the Python has vllm)

The engine drafts with the head alone. At every step the copy and its score are noted beside the head's draft; the text
that follows says how much of either the target would have kept. Prompts: half of the embedded validation ones, and
30 of each suite named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DEPTHS = (3, 5, 8)
TAUS = tuple(round(0.05 * k, 2) for k in range(2, 17))
KAPPAS = (1, 2, 3, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", default=[], help="JSONL with prompts")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", required=True, help="folder of the EAGLE-3 head")
    parser.add_argument("--probe", default="smollm2/serving")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", default="", help="JSON file for the table")
    options = parser.parse_args()
    steps, texts = watch(options)
    table = summary(rows(steps, texts))
    print(json.dumps(table, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n")


def watch(options: Any) -> tuple[list[dict[str, Any]], dict[str, tuple[str, list[int], int]]]:
    """Every step's copy, score and neural draft; and request -> (suite, its whole text, tokens of the prompt)."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    from activations import packaged
    from activations.corpus import load_corpus, read_prompts
    from decoding.serving.vllm import v1
    from decoding.serving.vllm.host import HostCopies, Step

    steps: list[dict[str, Any]] = []

    class Watching(v1.SwitchProposer):  # type: ignore[misc]
        def propose(self, *args: Any, **kwargs: Any) -> Any:
            self.noted: list[dict[str, Any]] = []
            decide, scores = self.switch.decide, self.switch._scores
            asked: list[float] = []

            def every(step: Step, requests: Any) -> HostCopies:
                found = decide(step, requests).rows
                matched = iter(asked)
                for row, copy in enumerate(found):
                    if copy == ():
                        continue
                    context = self.switch.contexts.of(step.names[row], requests[step.names[row]])
                    note = {
                        "request": step.names[row],
                        "pending": len(context) - 1,
                        "row": row,
                        "copy": list(copy or []),
                    }
                    note |= {"score": next(matched), "match": context.index.find().longest} if copy else {}
                    self.noted.append(note)
                return HostCopies([() if copy == () else None for copy in found])

            self.switch.tau = -1.0
            self.switch.decide = every
            self.switch._scores = lambda states: asked.extend(scores(states)) or asked
            try:
                drafts = super().propose(*args, **kwargs)
            finally:
                del self.switch.decide, self.switch._scores
            for note in self.noted:
                note["neural"] = drafts[note.pop("row")].tolist()
            steps.extend(self.noted)
            return drafts

    v1.SwitchProposer = Watching
    engine = LLM(
        model=str(packaged.folder(options.target) if options.target in packaged.ALIASES else options.target),
        dtype="bfloat16", max_model_len=4096, max_num_seqs=16, enforce_eager=True,
        speculative_config={"method": "eagle3", "model": options.head, "num_speculative_tokens": max(DEPTHS)},
        additional_config={"switchsd": {"probe": options.probe}},
    )  # fmt: skip
    tokenizer = engine.get_tokenizer()
    prompts = [("validation", prompt.messages) for prompt in load_corpus("validation")[::2]]
    for file in options.suite:
        found = read_prompts(file)
        prompts += [(Path(file).stem, p.messages) for p in found[:: max(1, len(found) // 30)][:30]]
    ids = [
        tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, return_dict=False)
        for _, messages in prompts
    ]
    outputs = engine.generate(
        [{"prompt_token_ids": list(one)} for one in ids], SamplingParams(temperature=0, max_tokens=options.tokens)
    )
    texts = {
        output.request_id: (suite, [*one, *output.outputs[0].token_ids], len(one))
        for (suite, _), one, output in zip(prompts, ids, outputs, strict=True)
    }
    return steps, texts


def rows(steps: Sequence[dict[str, Any]], texts: dict[str, tuple[str, list[int], int]]) -> dict[str, np.ndarray]:
    """Columns over the steps whose next tokens are all known: suite, score (-1 without a match), match length, kept
    tokens of the copy and of the head's draft."""
    found = []
    depth = max(DEPTHS)
    for step in steps:
        name = step["request"] if step["request"] in texts else step["request"].rpartition("-")[0]
        suite, text, _ = texts[name]
        after = text[step["pending"] + 1 :][:depth]
        if len(after) == depth:
            kept = (kept_of(step["copy"], after), kept_of(step["neural"], after))
            found.append((suite, step.get("score", -1.0), step.get("match", 0), *kept))
    names = ("suite", "score", "match", "copy", "neural")
    return {name: np.array(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}


def kept_of(draft: Sequence[int], after: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(draft, after, strict=False)) if a != b), min(len(draft), len(after)))


def summary(steps: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tokens per step by depth and suite: of the head, of the best in hindsight, of match lengths, of (kappa, tau)."""
    table: dict[str, Any] = {}
    suites = {"all": np.ones(len(steps["suite"]), bool)}
    suites |= {name: steps["suite"] == name for name in dict.fromkeys(steps["suite"].tolist())}
    for depth in DEPTHS:
        copy, neural = np.minimum(steps["copy"], depth), np.minimum(steps["neural"], depth)
        for name, these in suites.items():

            def mean(use: np.ndarray, these: np.ndarray = these, copy: Any = copy, neural: Any = neural) -> float:
                return round(float(1 + np.where(use, copy, neural)[these].mean()), 3)

            has = steps["match"] > 0
            gates = {(k, t): mean(has & (steps["match"] >= k) & (steps["score"] >= t)) for k in KAPPAS for t in TAUS}
            best = sorted(gates, key=gates.__getitem__, reverse=True)[:5]
            table[f"K = {depth}, {name}"] = {
                "steps": int(these.sum()),
                "head": mean(np.zeros_like(has)),
                "in hindsight": mean(copy > neural),
                "match length": {str(k): mean(has & (steps["match"] >= k)) for k in (1, 2, 3, 4, 5, 8)},
                "kappa 1, by tau": {str(t): gates[1, t] for t in TAUS},
                "best": {f"kappa {k}, tau {t}": gates[k, t] for k, t in best},
            }
    return table


if __name__ == "__main__":
    sys.exit(main())
