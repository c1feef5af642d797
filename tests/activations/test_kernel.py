"""The Triton kernels against the definition (through Triton's interpreter), and their compilation for GPUs.

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

from activations.matching import MatchConfig

# one reference for all back ends, found without a search path: this file is a script too
reference = runpy.run_path(str(Path(__file__).with_name("test_matching.py")))
check, configs, histories, feed = (reference[name] for name in ("check", "configs", "histories", "feed"))

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KERNELS = {"_append", "_scan", "_gather"}


def run_this_file(what: str, folder: Path, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": str(folder), **env}
    done = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_kernel_is_the_definition(tmp_path: Path) -> None:
    done = ["odd shapes", "chosen rows", "long", "appended"]
    assert json.loads(run_this_file("interpret", tmp_path, TRITON_INTERPRET="1")) == done


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu(tmp_path: Path, capability: int) -> None:
    built = json.loads(run_this_file(f"compile {capability}", tmp_path))
    assert {name.split()[0] for name in built} == KERNELS
    for name, (ptx, size) in built.items():
        assert f".target sm_{capability}" in ptx and ".entry" in ptx and size > 1000, name
    # places that are aligned in memory are read four at a time
    assert ".v4.b32" in built["_scan of many blocks"][0] and ".v4.b32" in built["_scan of chosen rows"][0]


# -- in processes of their own ----------------------------------------------------------------------


def interpret() -> list[str]:
    from activations.matching.kernel import Workspace, append_tokens, find_matches

    # the interpreter takes about 0.3 s an example: shrinking a failure would take minutes
    slow = settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate])

    @slow
    @given(st.data(), configs())
    def odd_shapes(data: st.DataObject, config: MatchConfig) -> None:
        rows, capacity = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 90))
        token = st.integers(0, data.draw(st.integers(1, 3)))
        line = st.lists(token, min_size=capacity, max_size=capacity)  # full: what lies behind the end is a trap
        buffer = torch.tensor([data.draw(line) for _ in range(rows)], dtype=torch.int32)
        length = st.lists(st.integers(0, capacity), min_size=rows, max_size=rows)
        lengths, prompts = data.draw(length), data.draw(length)
        dtype, block = data.draw(st.sampled_from([torch.int32, torch.int64])), data.draw(st.sampled_from([8, 16, 64]))
        space = Workspace.of(buffer, config, block)
        for _ in range(2):  # what an earlier call left in the workspace is no concern of the next
            matches = find_matches(
                buffer, torch.tensor(lengths, dtype=dtype), torch.tensor(prompts, dtype=dtype), config, space
            )
            texts = [row[:n] for row, n in zip(buffer.tolist(), lengths, strict=True)]
            check(matches, texts, prompts, config)
            assert matches.starts is space.matches.starts
            lengths = [n // 2 for n in lengths]

    @slow
    @given(st.data(), configs())
    def chosen_rows(data: st.DataObject, config: MatchConfig) -> None:
        """Contexts are found through a map, a row more than once too, in a workspace with room for more."""
        size, capacity = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 90))
        token = st.integers(0, data.draw(st.integers(1, 3)))
        line = st.lists(token, min_size=capacity, max_size=capacity)
        buffer = torch.tensor([data.draw(line) for _ in range(size)], dtype=torch.int32)
        length = st.lists(st.integers(0, capacity), min_size=size, max_size=size)
        lengths, prompts = data.draw(length), data.draw(length)
        rows = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
        space = data.draw(st.sampled_from([None, Workspace.of(buffer, config, 16, rows=4)]))
        matches = find_matches(
            buffer,
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(prompts),
            config,
            space,
            torch.tensor(rows, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))),
        )
        texts = [buffer[row, : lengths[row]].tolist() for row in rows]
        check(matches, texts, [prompts[row] for row in rows], config)

    def long() -> None:
        """Several blocks, more hits than candidates, matches across block borders and longer than is measured."""
        phrase = torch.randint(0, 50_000, (41,), generator=torch.Generator().manual_seed(1))
        buffer = torch.cat([phrase.repeat(40), torch.arange(60_000, 60_100), phrase]).to(torch.int32)[None]
        for config in (MatchConfig(), MatchConfig(max_length=20)):
            for n in (511, 513, 1030, buffer.shape[1]):
                found = find_matches(buffer, torch.tensor([n]), torch.tensor([20]), config)
                check(found, [buffer[0, :n].tolist()], [20], config)

    @slow
    @given(histories(), configs())
    def appended(history: list[list[list[int]]], config: MatchConfig) -> None:
        feed(history, config, "triton")

    odd_shapes()
    chosen_rows()
    long()
    appended()

    # more than one chunk, other integer types, and what does not fit is dropped: nothing is written beyond
    buffer, lengths = torch.zeros(2, 2048, dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)
    tokens = torch.arange(1, 3001, dtype=torch.int16).reshape(2, 1500)
    append_tokens(buffer, lengths, 1400, tokens, torch.tensor([1500, 3]))
    assert lengths.tolist() == [1400, 3]
    assert buffer[0].tolist() == [0] * 5 + list(range(1, 1396)) + [0] * 648
    assert buffer[1].tolist() == [1501, 1502, 1503] + [0] * 2045

    config, right, three = MatchConfig(), torch.zeros(1, 8, dtype=torch.int32), torch.tensor([3])
    with pytest.raises(ValueError, match=r"buffer is torch.int64 \[1, 8\]; it must be contiguous int32"):
        find_matches(right.long(), three, three, config)
    with pytest.raises(ValueError, match=r"rows is torch.float32 \[1\] on cpu; it must be integers \[B\] on cpu"):
        find_matches(right, three, three, config, rows=torch.zeros(1))
    with pytest.raises(ValueError, match="the workspace is for 1 contexts, and 2 were asked for"):
        find_matches(right, three, three, config, Workspace.of(right, config), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"lengths is \[2\] on cpu; it must be \[1\] on cpu"):
        find_matches(right, torch.tensor([3, 3]), three, config)
    with pytest.raises(ValueError, match=r"prompts is \[2\] on cpu; it must be \[1\] on cpu"):
        find_matches(right, three, torch.tensor([3, 3]), config)
    return ["odd shapes", "chosen rows", "long", "appended"]


def compile_for_a_gpu(capability: int) -> dict[str, tuple[str, int]]:
    """PTX, and the size of the machine code, of every kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from activations.matching import kernel

    def build(name: str, constants: dict[str, int | None], warps: int = 4) -> tuple[str, int]:
        function = getattr(kernel, name)
        numbers = ("stride", "blocks", "capacity", "width")
        signature = {n: "i32" if n in numbers else "*i32" for n in function.arg_names}
        signature |= {"ends": "*i64", "prompts": "*i64", "keys": "*i64"} if name != "_append" else {"ends": "*i64"}
        signature = {n: signature[n] for n in function.arg_names} | dict.fromkeys(constants, "constexpr")
        # as a launch finds them: pointers from the allocator, and a row length that is a multiple of 16
        aligned = [n for n, kind in signature.items() if kind.startswith("*") or n == "stride"]
        attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = ASTSource(function, signature, constants, attributes)
        built = kernel.triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})
        return built.asm["ptx"], len(built.asm["cubin"])

    scan = {"KAPPA": 5, "MAX_LENGTH": 32, "W": 10, "WIDE": 16}
    gather = {"W": 10, "D": 20, "WIDE": 16, "DEPTH": 32, "NODES": 256}
    all_rows = {"rows": None}
    return {
        "_append": build("_append", {"CHUNK": kernel.CHUNK}, warps=1),
        "_scan of many blocks": build("_scan", scan | all_rows | {"BLOCK": 2048}),
        "_gather of many blocks": build("_gather", gather | all_rows | {"BLOCKS": 128, "SLOTS": 2048}),
        # Triton makes a constant of an argument that is 1
        "_scan of one block": build("_scan", scan | all_rows | {"BLOCK": 512, "blocks": 1}),
        "_gather of one block": build("_gather", gather | all_rows | {"BLOCKS": 1, "SLOTS": 16, "blocks": 1}),
        "_scan of chosen rows": build("_scan", scan | {"BLOCK": 2048}),
        "_gather of chosen rows": build("_gather", gather | {"BLOCKS": 128, "SLOTS": 2048}),
    }


if __name__ == "__main__":
    what, *rest = sys.argv[1].split()
    print(json.dumps(interpret() if what == "interpret" else compile_for_a_gpu(*map(int, rest))))
