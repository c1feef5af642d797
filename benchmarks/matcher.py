"""What a step of the suffix matcher costs, on the CPU and, where there is one, on a GPU.

    python -m benchmarks.matcher cpu            # the index at 1k to 1M tokens, beside the torch reference
    python -m benchmarks.matcher shared         # the shared store: adding and finding
    python -m benchmarks.matcher gpu            # the kernels at 1k to 128k tokens, batch 1 to 64

Each line is one JSON object. A step appends three tokens (two accepted ones and the pending one), finds the matches
and hands out the candidates. `gpu` compares with an n-gram matcher written with torch's unfold and with one read of
the buffer, all captured in CUDA graphs; `gpu_rows` needs torch and Triton alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch

from activations.matching import MatchConfig, SharedConfig, SharedStore, SuffixIndex, reference
from activations.matching.device import ALIGNED

VOCABULARY = 50_000
STEP = 3
"""Tokens a step appends."""


def random_text(size: int, draw: random.Random) -> list[int]:
    """No repeats."""
    return [draw.randrange(VOCABULARY) for _ in range(size)]


def repeating_text(size: int, draw: random.Random) -> list[int]:
    """Frequent and rare tokens, and every fourth stretch a copy of 5 to 200 earlier ones."""
    out: list[int] = []
    while len(out) < size:
        if out and draw.random() < 0.25:
            start = draw.randrange(len(out))
            out += out[start : start + draw.randint(5, 200)]
        else:
            out += [min(int(draw.paretovariate(0.6)), VOCABULARY - 1) for _ in range(draw.randint(5, 100))]
    return out[:size]


def same_text(size: int, draw: random.Random) -> list[int]:
    """One token, over and over."""
    return [7] * size


def binary_text(size: int, draw: random.Random) -> list[int]:
    """Two tokens at random: everything recurs, and branches everywhere. The worst case for the index."""
    return [draw.randrange(2) for _ in range(size)]


TEXTS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "random": random_text,
    "repeating": repeating_text,
    "same": same_text,
    "binary": binary_text,
}


# -- on the CPU ----------------------------------------------------------------------------------------


def cpu_rows(sizes: list[int], steps: int = 1000) -> Iterator[dict[str, Any]]:
    """Microseconds a step of the index; building it; bytes a token, the text itself included."""
    for name, make in TEXTS.items():
        for size in sizes:
            if name == "binary" and size > 200_000:
                continue  # takes minutes to build
            text = make(size + STEP * steps, random.Random(0))
            began = thread_time()
            index = SuffixIndex(None, text[:size])
            built = thread_time() - began
            times = []
            for at in range(size, size + STEP * steps, STEP):
                piece = text[at : at + STEP]
                began = perf_counter()
                index.extend(piece)
                index.candidates(index.find())
                times.append((perf_counter() - began) * 1e6)
            times.sort()
            yield {
                "text": name,
                "tokens": size,
                "step_us": round(statistics.median(times), 1),
                "step_us_90": round(times[len(times) * 9 // 10], 1),
                "build_us_a_token": round(built / size * 1e6, 2),
                "bytes_a_token": _bytes(text[:size]) if size == 32_000 else None,
            }


def _bytes(text: list[int]) -> int:
    gc.collect()
    tracemalloc.start()
    index = SuffixIndex(None, text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(held / len(index))


def reference_rows(sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Milliseconds of the torch reference, one request."""
    config = MatchConfig()
    for size in sizes:
        buffer = torch.tensor([repeating_text(size, random.Random(0))], dtype=torch.int32)
        lengths, prompts = torch.tensor([size]), torch.tensor([size])
        times = []
        for _ in range(5):
            began = perf_counter()
            reference.find_matches(buffer, lengths, prompts, config)
            times.append((perf_counter() - began) * 1e3)
        yield {"torch_reference": size, "ms": round(statistics.median(times), 3)}


def shared_rows() -> Iterator[dict[str, Any]]:
    """Microseconds of the shared store's calls when it is full, on texts of 500 tokens."""
    for name, make in TEXTS.items():
        text = make(300_000, random.Random(0))
        store = SharedStore(SharedConfig(max_tokens=200_000))
        adding = []
        for at in range(0, len(text), 500):
            began = perf_counter()
            store.add(text[at : at + 500])
            adding.append(perf_counter() - began)
        finding, found = [], 0
        draw = random.Random(1)
        for _ in range(2000):
            at = draw.randrange(150_000, len(text) - 40)
            context = text[at : at + 32]
            began = perf_counter()
            found += store.find(context).count > 0
            finding.append((perf_counter() - began) * 1e6)
        yield {
            "shared": name,
            "add_us_a_token": round(statistics.median(adding[-100:]) / 500 * 1e6, 2),
            "find_us": round(statistics.median(finding), 1),
            "find_us_99": round(sorted(finding)[1980], 1),
            "found": found / 2000,
        }


# -- on a GPU ------------------------------------------------------------------------------------------


def graph_us(call: Callable[[], object], replays: int = 200) -> float:
    """Microseconds of a call on the current GPU, captured in a CUDA graph: nothing of the host's time is in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills caches
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays * 1e3)
    return round(statistics.median(times), 2)


def unfold_ngram(buffer: torch.Tensor, size: int, config: MatchConfig) -> torch.Tensor:
    """The most recent occurrence of the last kappa tokens by torch's unfold: the candidate's tokens [B, D]. No match
    lengths, one candidate, no tree, and every context is `size` tokens long."""
    text = buffer[:, :size]
    windows = text[:, :-1].unfold(1, config.kappa, 1)
    same = (windows == text[:, None, -config.kappa :]).all(-1)
    place = torch.arange(config.kappa, config.kappa + same.shape[1], device=text.device)
    start = torch.where(same, place, 0).amax(1)
    at = start[:, None] + torch.arange(config.depth, device=text.device)
    return text.gather(1, at.clamp(max=size - 1))


def gpu_rows(
    sizes: tuple[int, ...] = (1024, 4096, 8192, 32_768, 131_072),
    batches: tuple[int, ...] = (1, 8, 64),
    where: str = "cuda",
) -> Iterator[dict[str, Any]]:
    """The kernels' results against the index on the host, then microseconds of: appending, the whole of finding, its
    first launch alone, the unfold matcher, one read of the buffer (a sum). One row for each text, size and batch."""
    from activations.matching import kernel

    config, device = MatchConfig(), torch.device(where)
    for name, size, batch in ((n, s, b) for n in ("repeating", "same") for s in sizes for b in batches):
        texts = [TEXTS[name](size, random.Random(row)) for row in range(min(batch, 4))]
        columns = -(-size // ALIGNED) * ALIGNED
        buffer = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        lengths, prompts = torch.zeros(2, batch, dtype=torch.int64, device=device).unbind()
        tokens = torch.tensor([texts[row % len(texts)] for row in range(batch)], device=device)
        kernel.append_tokens(buffer, lengths, size, tokens, torch.full((batch,), size, device=device))
        space = kernel.Workspace.of(buffer, config)
        result = kernel.find_matches(buffer, lengths, prompts, config, space)
        indexes = [SuffixIndex(config, text, prompt=0) for text in texts]
        expected = [(found, index.candidates(found)) for index in indexes for found in [index.find()]]
        host = list(zip(result.host(), result.candidates(), strict=True))
        right = all(host[row] == expected[row % len(texts)] for row in range(batch))
        if batch == 1:
            plain = reference.find_matches(buffer, lengths, prompts, config)
            right &= all(torch.equal(getattr(plain, f.name), getattr(result, f.name)) for f in fields(plain))
        few, none = tokens[:, :STEP].contiguous(), torch.zeros_like(lengths)
        find = partial(kernel.find_matches, buffer, lengths, prompts, config, space)
        yield {
            "text": name,
            "tokens": size,
            "batch": batch,
            "right": right,
            "append_us": graph_us(partial(kernel.append_tokens, buffer, lengths, size, few, none)),
            "find_us": graph_us(find),
            "scan_us": graph_us(partial(kernel.scan, buffer, lengths, config, space)),
            "unfold_us": graph_us(partial(unfold_ngram, buffer, size, config)),
            "read_us": graph_us(partial(torch.sum, buffer, dtype=torch.int32)),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "shared", "gpu"))
    parser.add_argument("--sizes", default="1000,32000,128000,1000000", help="context lengths on the CPU")
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.sizes.split(",")]
    ok = True
    if chosen.what == "gpu":
        if not torch.cuda.is_available():
            print("no GPU here", file=sys.stderr)
            return 2
        for row in gpu_rows():
            ok = ok and row["right"]
            print(json.dumps(row), flush=True)
        return 0 if ok else 1
    rows = shared_rows() if chosen.what == "shared" else cpu_rows(sizes)
    for row in rows:
        print(json.dumps(row), flush=True)
    if chosen.what == "cpu":
        for row in reference_rows([size for size in sizes if size <= 128_000]):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
