"""What the capture store promises, measured with a small random model.

    python benchmarks/store.py kill             # kill -9 at 20 random moments: row-identical to an uninterrupted run
    python benchmarks/store.py memory           # peak memory of 2,000 documents against that of 500
    python benchmarks/store.py write            # speed against a plain safetensors write of the same bytes

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

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.store import CaptureStore, StoreWriter
from activations.target import Target

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
    torch.set_num_threads(1)
    measures: dict[str, Callable[..., dict[str, object]]] = {"kill": kill, "memory": memory, "write": write}
    found = measures[values.pop("what")](**values)
    print(json.dumps(found))
    sys.exit(0 if found["kept"] else 1)


if __name__ == "__main__":
    main()
