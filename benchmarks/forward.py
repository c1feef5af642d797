"""What a forward of the target costs, and what is around it.

    python -m benchmarks.forward widths      one forward by width and context: stock, packed, packed and fast
    python -m benchmarks.forward contexts    tokens/s of `ar` over Hugging Face `generate`, by context
    python -m benchmarks.forward step        where the milliseconds of a step go, by mode
    python -m benchmarks.forward memory      bytes of the cache over the bytes that its rows need

Everything is interleaved in one process; medians.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from statistics import median
from time import perf_counter

import numpy as np
import torch

from activations.cache import KVCache
from activations.corpus import load_corpus, spread
from activations.target import Target, load_target
from decoding.baselines import hugging_face
from decoding.decoder import Decoder
from switchsd.loading import load

WIDTHS, CONTEXTS = (1, 4, 8, 16, 32), (256, 768, 1536)


def widths(target: Target, rounds: int) -> list[dict[str, object]]:
    """The verifying forward, a chain of `width` tokens behind `context` ones."""
    table = []
    for context in CONTEXTS:
        cache = KVCache()
        ids = torch.randint(target.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
        target.forward(ids, cache, logits_to_keep=1)
        cache.commit([range(context)])
        for width in WIDTHS:
            found = [_once(target, width, cache) for _ in range(rounds)][1:]
            row = {name: round(median(one[name] for one in found), 2) for name in found[0]}
            table.append({"context": context, "width": width, **row})
            print(table[-1], flush=True)
    return table


def _once(target: Target, width: int, cache: KVCache) -> dict[str, float]:
    """Milliseconds of one forward: as transformers has it, with packed layers, and the fast one."""
    tokens, fast, spent = torch.arange(width)[None], target._fast, {}
    tree = (torch.ones(1, width, width, dtype=torch.bool).tril(), tokens) if width > 1 else (None, None)
    for name in ("stock", "packed", "fast"):
        with target.stock() if name == "stock" else nullcontext():
            target._fast = fast if name == "fast" else None
            began = perf_counter()
            target.forward(tokens, cache, *tree)
            spent[name] = (perf_counter() - began) * 1e3
    return spent


def contexts(target: Target, rounds: int, tokens: int = 48) -> list[dict[str, object]]:
    """Greedy decoding after prompts of a given length, made of embedded prompts one after the other."""
    decoder = Decoder(target)
    text = [t for p in load_corpus("validation") for t in target.encode_messages(p.messages)]
    table = []
    for context in CONTEXTS:
        ratios = []
        for number in range(rounds):
            ids = text[number * context :][:context]
            theirs = hugging_face(target, ids, tokens, "hf")
            mine = decoder.generate(ids, mode="ar", max_new_tokens=tokens)
            if len(mine.tokens) > 8 and len(theirs.tokens) > 8:
                ratios.append(mine.tokens_per_second * theirs.decode_seconds / sum(theirs.pieces[1:]))
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios))).mean(1)
        low, high = np.percentile(draws, [2.5, 97.5])
        table.append({"context": context, "ar_over_hf": float(np.mean(ratios)), "low": float(low), "high": float(high)})
        print(table[-1], flush=True)
    return table


def step(target: Target, rounds: int, tokens: int = 96) -> list[dict[str, object]]:
    """Shares of the decode time: forwards of the target and their choice, drafters, and all the rest."""
    decoder = load(target)
    table = []
    prompts = spread(load_corpus("validation"), rounds)
    for mode in ("ar", "copy", "eagle", "switchsd"):
        sums = np.zeros(4)
        for prompt in prompts:
            made = decoder.generate(target.encode_messages(prompt.messages), mode=mode, max_new_tokens=tokens)
            parts = [(r.verify_ms, r.draft_ms) for r in decoder.trace]
            sums += [made.decode_seconds * 1e3, *np.sum(parts, axis=0), made.steps]
        whole, verify, draft, steps = sums
        rest = whole - verify - draft
        table.append(
            {"mode": mode, "step_ms": whole / steps, "verify_ms": verify / steps, "draft_ms": draft / steps,
             "rest_ms": rest / steps, "rest_share": rest / whole}
        )  # fmt: skip
        print({k: v if isinstance(v, str) else round(float(v), 3) for k, v in table[-1].items()}, flush=True)
    return table


def memory(target: Target, rounds: int) -> list[dict[str, object]]:
    """Slots held and needed, as one sequence grows."""
    table = []
    for longest in (300, 1000, 2000):
        cache, worst = KVCache(), 0.0
        shape = (1, target.config.num_key_value_heads, 1, target.layers[0].self_attn.head_dim)
        for length in range(1, longest):
            cache.update(torch.zeros(shape), torch.zeros(shape), 0)
            cache.commit([[0]])
            if length > longest // 2:
                worst = max(worst, cache.keys[0].shape[2] / length)
        table.append({"length": longest, "held_over_needed_at_most": round(worst, 4)})
        print(table[-1], flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("widths", "contexts", "step", "memory"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", help="also write the table as JSON")
    given = parser.parse_args()
    table = globals()[given.what](load_target("smollm2"), given.rounds)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
