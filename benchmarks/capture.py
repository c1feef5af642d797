"""What capturing promises, measured: the first two on the embedded model, the others with a small random one.

    python benchmarks/capture.py forward        # reading 6 sites against the same forward passes without
    python benchmarks/capture.py batch          # tokens/s of completions at batch 16 against batch 1
    python benchmarks/capture.py kill           # kill -9 at 20 random moments: row-identical to an uninterrupted run
    python benchmarks/capture.py memory         # peak memory of 2,000 documents against that of 500
    python benchmarks/capture.py write          # speed against a plain safetensors write of the same bytes

Each prints one JSON object and exits 1 if the promise is broken. Captures run in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from activations.cache import KVCache
from activations.capture import CaptureConfig, capture, read_document, sites_of
from activations.corpus import Prompt, load_corpus, spread
from activations.generation import Completion, Request, complete
from activations.store import CaptureStore, StoreWriter
from activations.target import Target, load_target

ALPHABET = [chr(c) for c in range(48, 112)]


def small_target() -> Target:
    """A random Llama of 4 blocks, width 64, one character a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=63, pad_token_id=None,
        initializer_range=0.12,
    )  # fmt: skip
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    raw.decoder = decoders.Fuse()
    return Target(LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=raw), "small", None)


def prompts(count: int) -> list[Prompt]:
    """Texts of 8 to 40 characters, each with its own seed."""
    made = []
    for n in range(count):
        draw = random.Random(n)
        text = "".join(draw.choices(ALPHABET[:40], k=draw.randint(8, 40)))
        made.append(Prompt(f"p{n}", "user", f"p{n}", None, None, ({"role": "user", "content": text},)))
    return made


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a child; its process id. This process runs no model itself, and so has no threads to lose."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def finished(child: int) -> tuple[bool, int]:
    """Whether a child ended well, and its peak memory in bytes."""
    _, status, usage = os.wait4(child, 0)
    return status == 0, usage.ru_maxrss * 1024


def shards_in(folder: Path) -> int:
    """Shards that count in a folder, which may hold no store yet."""
    return len(CaptureStore.open(folder).shards) if (folder / "manifest.json").exists() else 0


def difference(one: Path, other: Path) -> str | None:
    """The first thing in which two stores differ in rows, states or order."""
    a, b = CaptureStore.open(one), CaptureStore.open(other)
    b.verify()
    if [s["documents"] for s in a.shards] != [s["documents"] for s in b.shards]:
        return "documents of the shards"
    for shard in range(len(a.shards)):
        rows, found = a.shard_rows(shard), b.shard_rows(shard)
        for name in rows:
            if not np.array_equal(rows[name], found[name], equal_nan=rows[name].dtype.kind == "f"):
                return f"column {name} of shard {shard}"
        for site in a.sites:
            if not torch.equal(a.shard_states(shard, site), b.shard_states(shard, site)):
                return f"states of {site} in shard {shard}"
    return None


def kill(kills: int, documents: int, seed: int) -> dict[str, object]:
    """Capture with `kills` kill -9 at random moments, and compare with a capture that was let alone."""
    target, asked = small_target(), prompts(documents)
    config = CaptureConfig(sites=("resid_mid.*", "resid_post.*"), max_new_tokens=32, batch=4)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, cut = Path(scratch) / "whole", Path(scratch) / "cut"
        began = time.monotonic()
        if not finished(forked(lambda: capture(target, asked, whole, config)))[0]:
            raise SystemExit("the uninterrupted capture failed")
        shards = shards_in(whole)
        seconds = (time.monotonic() - began) / shards
        reached = []
        for _ in range(kills):
            # Let the run finish none, one or a few shards, and then kill it anywhere within the next one.
            goal = shards_in(cut) + draw.randint(0, 2 * shards // kills)
            child = forked(lambda: capture(target, asked, cut, config))
            deadline = time.monotonic() + 20 * seconds + 5
            while shards_in(cut) < min(goal, shards - 1) and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reached.append(shards_in(cut))
        if not finished(forked(lambda: capture(target, asked, cut, config)))[0]:
            raise SystemExit("the capture could not be resumed")
        found = difference(whole, cut)
    return {"kills": kills, "shards": shards, "shards_after_each_kill": reached, "difference": found,
            "kept": found is None}  # fmt: skip


def memory(few: int, many: int) -> dict[str, object]:
    """Peak memory of captures of `few` and of `many` documents, each in a process of its own."""
    target = small_target()
    config = CaptureConfig(sites=("resid_mid.*", "resid_post.*"), max_new_tokens=16, batch=32)
    peaks = {}
    with tempfile.TemporaryDirectory() as scratch:
        for count in (few, many):
            folder = Path(scratch) / str(count)
            fine, peaks[count] = finished(forked(partial(capture, target, prompts(count), folder, config)))
            if not fine:
                raise SystemExit(f"the capture of {count} documents failed")
    ratio = peaks[many] / peaks[few]
    return {"documents": [few, many], "peak_mib": [round(p / 2**20) for p in peaks.values()],
            "ratio": round(ratio, 4), "kept": ratio <= 1.1}  # fmt: skip


def paired(
    measure: Callable[[str], float], names: tuple[str, str], rounds: int
) -> tuple[dict[str, float], list[float]]:
    """Medians of what `measure` says of both, and the ratios second / first of interleaved rounds, in order of size."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round warms up
        for name in names if number % 2 else names[::-1]:
            value = measure(name)
            if number >= 0:
                found[name].append(value)
    ratios = sorted(b / a for a, b in zip(*found.values(), strict=True))
    return {name: statistics.median(values) for name, values in found.items()}, ratios


def answered(target: Target, count: int, most: int) -> list[tuple[Prompt, Completion]]:
    """Embedded validation prompts, evenly spread, and what the target answers."""
    chosen = spread(load_corpus("validation"), count)
    requests = [Request(i, target.encode_messages(p.messages), most) for i, p in enumerate(chosen)]
    done = {c.request.number: c for c in complete(target, requests, rows=16)}
    return [(prompt, done[i]) for i, prompt in enumerate(chosen)]


def forward(documents: int, rounds: int, sites: str) -> dict[str, object]:
    """Seconds to read documents, labels and surface features included, against their bare forward passes."""
    target = load_target("smollm2", device="cpu")
    config = CaptureConfig(sites=tuple(sites.split(",")))
    names = sites_of(target, config)
    texts = answered(target, documents, 192)

    def measure(name: str) -> float:
        began = time.perf_counter()
        for prompt, completion in texts:
            ids = completion.request.prompt + completion.tokens
            if name == "forward":
                target.hidden(torch.tensor([ids[:-1]]), KVCache(1, capacity=len(ids)))
            elif name == "sites":
                with target.read(names) as reader:
                    target.hidden(torch.tensor([ids[:-1]]), KVCache(1, capacity=len(ids)))
                    kept = {s: v[0, len(completion.request.prompt) - 1 :].clone() for s, v in reader.states.items()}
                    del kept
            else:
                read_document(target, prompt, completion, names, config)
        return time.perf_counter() - began

    medians, ratios = paired(measure, ("forward", "sites"), rounds)
    whole, more = paired(measure, ("forward", "rows and sites"), rounds)
    tokens = sum(len(c.request.prompt) + len(c.tokens) for _, c in texts)
    ratio = statistics.median(ratios)
    return {"documents": documents, "tokens": tokens, "sites": names, "seconds": medians | whole,
            "ratio": round(ratio, 3), "ratios": [round(ratios[0], 3), round(ratios[-1], 3)],
            "ratio_with_labels_and_logits": round(statistics.median(more), 3), "kept": ratio <= 1.1}  # fmt: skip


def batch(requests: int, tokens: int, rounds: int) -> dict[str, object]:
    """Tokens/s of `complete` on the same requests, 16 rows at once against one."""
    target = load_target("smollm2", device="cpu")
    prompts = [target.encode_messages(p.messages) for p in spread(load_corpus("validation"), requests)]

    def measure(name: str) -> float:
        asked = [Request(i, prompt, tokens) for i, prompt in enumerate(prompts)]
        began = time.perf_counter()
        made = sum(len(done.tokens) for done in complete(target, asked, rows=int(name)))
        return made / (time.perf_counter() - began)

    medians, ratios = paired(measure, ("1", "16"), rounds)
    ratio = statistics.median(ratios)
    return {"requests": requests, "tokens_per_s": {k: round(v, 1) for k, v in medians.items()},
            "ratio": round(ratio, 2), "ratios": [round(r, 2) for r in ratios], "kept": ratio >= 4}  # fmt: skip


def write(mib: int, sites: int, rounds: int) -> dict[str, object]:
    """Writing a shard against `safetensors.torch.save_file` of the same states; medians of interleaved rounds."""
    rows = mib * 2**20 // (sites * 576 * 2)
    states = {f"resid_post.{n}": torch.randn(rows, 576).bfloat16() for n in range(sites)}
    columns = {"document": np.repeat(np.arange(rows // 100 + 1), 100)[:rows], "position": np.arange(rows)}
    seconds: dict[str, list[float]] = {"plain": [], "store": []}
    with tempfile.TemporaryDirectory() as scratch, StoreWriter(Path(scratch) / "s", {}, list(states)) as writer:
        for number in range(rounds):
            for name in ("plain", "store"):
                began = time.perf_counter()
                if name == "plain":
                    save_file(states, Path(scratch) / f"{number}.safetensors")
                else:
                    writer.write(columns, states)
                seconds[name].append(time.perf_counter() - began)
    size = sum(state.nbytes for state in states.values())
    speed = {name: size / statistics.median(found) / 1e6 for name, found in seconds.items()}
    ratio = speed["store"] / speed["plain"]
    return {"mb": round(size / 1e6), "mb_per_s": {k: round(v) for k, v in speed.items()}, "ratio": round(ratio, 3),
            "kept": ratio >= 0.5}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("forward")
    one.add_argument("--documents", type=int, default=8)
    one.add_argument("--rounds", type=int, default=7)
    one.add_argument("--sites", default="attn_out.12,resid_mid.12,resid_post.12,attn_out.24,resid_mid.24,resid_post.24")
    one = what.add_parser("batch")
    one.add_argument("--requests", type=int, default=32)
    one.add_argument("--tokens", type=int, default=64)
    one.add_argument("--rounds", type=int, default=3)
    one = what.add_parser("kill")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--documents", type=int, default=120)
    one.add_argument("--seed", type=int, default=0)
    one = what.add_parser("memory")
    one.add_argument("--few", type=int, default=500)
    one.add_argument("--many", type=int, default=2000)
    one = what.add_parser("write")
    one.add_argument("--mib", type=int, default=128)
    one.add_argument("--sites", type=int, default=30)
    one.add_argument("--rounds", type=int, default=7)
    values = vars(parser.parse_args())
    if values["what"] not in ("forward", "batch"):
        torch.set_num_threads(1)
    measures: dict[str, Callable[..., dict[str, object]]] = {
        "forward": forward, "batch": batch, "kill": kill, "memory": memory, "write": write,
    }  # fmt: skip
    found = measures[values.pop("what")](**values)
    print(json.dumps(found))
    sys.exit(0 if found["kept"] else 1)


if __name__ == "__main__":
    main()
