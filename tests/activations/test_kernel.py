"""The Triton kernel against the definition (through Triton's interpreter), and its compilation for a GPU.

Triton decides at import whether to interpret, so each of the two runs in a process of its own: this file, as a script.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from activations.matching import DeviceMatcher, MatchConfig, TensorMatches

# one reference for both back ends, found without a search path: this file is a script too
reference = runpy.run_path(str(Path(__file__).with_name("test_matching.py")))
brute_force, configs = reference["brute_force"], reference["configs"]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_this_file(what: str, folder: Path, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": str(folder), **env}
    done = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_kernel_is_the_definition(tmp_path: Path) -> None:
    assert json.loads(run_this_file("interpret", tmp_path, TRITON_INTERPRET="1")) == ["odd shapes", "long", "appended"]


@needs_triton
def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    built = json.loads(run_this_file("compile", tmp_path))
    assert set(built) == {"_scan", "_gather", "_scan of one block", "_gather of one block"}
    for ptx in built.values():
        assert ".target sm_90a" in ptx and ".entry" in ptx


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[int]]]:
    """Tokens appended to each of some requests, in rounds."""
    rows = draw(st.integers(1, 3))
    piece = st.lists(st.integers(0, 2), max_size=12)
    return draw(st.lists(st.lists(piece, min_size=rows, max_size=rows), min_size=1, max_size=5))


def check(matches: TensorMatches, texts: list[list[int]], config: MatchConfig) -> None:
    expected = [brute_force(text, config) for text in texts]
    assert matches.host() == [found for found, _ in expected]
    assert matches.candidates() == [candidates for _, candidates in expected]
    w, d = config.candidates, config.depth
    assert (matches.starts.shape, matches.lengths.shape) == ((len(texts), w), (len(texts), w))
    assert (matches.count.shape, matches.tokens.shape) == ((len(texts),), (len(texts), w, d))
    tensors = (matches.starts, matches.lengths, matches.count, matches.tokens, matches.ends)
    assert {t.dtype for t in tensors} == {torch.int32}
    for row, (found, candidates) in enumerate(expected):
        n = len(found.starts)
        assert (matches.starts[row, n:] == -1).all() and (matches.lengths[row, n:] == 0).all()
        for i in range(w):
            assert (matches.tokens[row, i, len(candidates[i]) if i < n else 0 :] == -1).all()


def feed(history: list[list[list[int]]], config: MatchConfig, kernel: bool) -> None:
    rows = len(history[0])
    total = max(sum(len(round_[row]) for round_ in history) for row in range(rows))
    matcher = DeviceMatcher(rows, max(total, 1), config, kernel=kernel)
    texts: list[list[int]] = [[] for _ in range(rows)]
    for round_ in history:
        width = max(len(tokens) for tokens in round_) + 1  # padding that must not be read
        padded = torch.tensor([tokens + [1] * (width - len(tokens)) for tokens in round_])
        matcher.append(padded, torch.tensor([len(tokens) for tokens in round_]))
        for text, tokens in zip(texts, round_, strict=True):
            text.extend(tokens)
    check(matcher.find(), texts, config)
    matcher.reset(0)
    check(matcher.find(), [[], *texts[1:]], config)


@given(histories(), configs())
def test_matcher_on_the_cpu_is_the_definition(history: list[list[list[int]]], config: MatchConfig) -> None:
    feed(history, config, kernel=False)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_full_context_is_named(kernel: bool) -> None:
    matcher = DeviceMatcher(2, 4, kernel=kernel)
    matcher.append(torch.ones(2, 3, dtype=torch.int64), torch.tensor([1, 3]))
    matcher.append(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 1]))
    assert matcher.lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="a context would have 5 tokens and the matcher holds 4"):
        matcher.append(torch.ones(2, 1, dtype=torch.int64), torch.tensor([0, 1]))
    matcher.reset(1)
    matcher.append(torch.ones(2, 1, dtype=torch.int64), torch.tensor([0, 1]))
    assert matcher.lengths.tolist() == [4, 1]


def test_an_empty_matcher_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0 and capacity 8; both must be 1 or more"):
        DeviceMatcher(0, 8)


# -- in processes of their own ----------------------------------------------------------------------


def interpret() -> list[str]:
    from activations.matching.kernel import find_matches

    # the interpreter takes about 0.1 s an example: shrinking a failure would take minutes
    slow = settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate])

    @slow
    @given(st.data(), configs())
    def odd_shapes(data: st.DataObject, config: MatchConfig) -> None:
        rows, capacity = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 90))
        token = st.integers(0, data.draw(st.integers(1, 3)))
        line = st.lists(token, min_size=capacity, max_size=capacity)  # full: what lies behind the end is a trap
        buffer = torch.tensor([data.draw(line) for _ in range(rows)], dtype=torch.int32)
        lengths = data.draw(st.lists(st.integers(0, capacity), min_size=rows, max_size=rows))
        dtype, block = data.draw(st.sampled_from([torch.int32, torch.int64])), data.draw(st.sampled_from([8, 16, 64]))
        matches = find_matches(buffer, torch.tensor(lengths, dtype=dtype), config, block)
        check(matches, [row[:n] for row, n in zip(buffer.tolist(), lengths, strict=True)], config)

    def long() -> None:
        """Several blocks, more hits than candidates, matches across block borders and longer than is measured."""
        phrase = torch.randint(0, 50_000, (41,), generator=torch.Generator().manual_seed(1))
        buffer = torch.cat([phrase.repeat(40), torch.arange(60_000, 60_100), phrase]).to(torch.int32)[None]
        for config in (MatchConfig(), MatchConfig(max_length=20)):
            for n in (511, 512, 513, 1024, 1030, 1500, buffer.shape[1]):
                check(find_matches(buffer, torch.tensor([n]), config), [buffer[0, :n].tolist()], config)

    @slow
    @given(histories(), configs())
    def appended(history: list[list[list[int]]], config: MatchConfig) -> None:
        feed(history, config, kernel=True)

    odd_shapes()
    long()
    appended()

    config, right = MatchConfig(), torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"buffer is torch.int64 \[1, 8\]; it must be contiguous int32"):
        find_matches(right.long(), torch.tensor([3]), config)
    with pytest.raises(ValueError, match=r"lengths is \[2\] on cpu; it must be \[1\] on cpu"):
        find_matches(right, torch.tensor([3, 3]), config)
    return ["odd shapes", "long", "appended"]


def compile_for_a_gpu() -> dict[str, str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from activations.matching import kernel

    def ptx(function: triton.JITFunction, **constants: int) -> str:
        signature = {name: "i32" if name in ("capacity", "blocks") else "*i32" for name in function.arg_names}
        signature |= {"ends": "*i64"} | dict.fromkeys(constants, "constexpr")
        return triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    scan = {"KAPPA": 5, "W": 10, "BLOCK": 512}
    gather = {"W": 10, "D": 20, "MAX_LENGTH": 32, "DEPTH": 32, "LENGTH": 32}
    return {
        "_scan": ptx(kernel._scan, **scan),
        "_gather": ptx(kernel._gather, **gather, BLOCKS=64),
        # Triton makes a constant of an argument that is 1
        "_scan of one block": ptx(kernel._scan, **scan, blocks=1),
        "_gather of one block": ptx(kernel._gather, **gather, BLOCKS=1, blocks=1),
    }


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "compile": compile_for_a_gpu}[sys.argv[1]]()))
