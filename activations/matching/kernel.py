"""The suffix matcher for a GPU, in Triton: fixed shapes, and no host sync of its own.

Two launches. The first compares every place of the context with its last kappa tokens, one program a block of
places; where a block has hits, it measures their match lengths and keeps the best. The second, one program a
request, takes the best of all blocks, gathers their tokens and merges them into a tree.

The floor is one read of the context: 4 n bytes a request, 128 KiB at n = 32,768, which is 0.03 microseconds on a GPU
that reads 4.8 TB/s, and 7 microseconds for 64 requests of 131,072 tokens. The kappa - 1 shifted reads hit the cache
and are made only where all before them agreed; hits are rare but in a text that repeats itself throughout, where
the first launch reads each place up to `max_length` times, from the cache. What remains at short contexts is the two
launches, a few microseconds; both have fixed shapes, so a CUDA graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from activations.matching.match import MatchConfig
from activations.matching.tensors import TensorMatches

BLOCKS = 64
"""Blocks that a context is cut into, as far as `SMALLEST` and `LARGEST` allow."""
SMALLEST, LARGEST = 512, 8192
"""Places of a block."""
CHUNK = 1024
"""Tokens appended at a time."""


@triton.jit
def _append(
    buffer: tl.tensor,
    ends: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    stride: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Program b: tokens[b, :counts[b]] go behind the end of request b. One warp, so that all have read the end
    before it is moved."""
    b = tl.program_id(0)
    end = tl.load(ends + b)
    count = tl.minimum(tl.load(counts + b).to(tl.int32), capacity - end.to(tl.int32))
    first, at = 0, tl.arange(0, CHUNK)
    while first < width:
        inside = first + at < count
        token = tl.load(tokens + b.to(tl.int64) * width + first + at, mask=inside, other=0)
        tl.store(buffer + b.to(tl.int64) * stride + end + first + at, token.to(tl.int32), mask=inside)
        first += CHUNK
    tl.store(ends + b, end + count)


@triton.jit
def _row(rows: tl.tensor | None, b: tl.tensor) -> tl.tensor:
    """int64: the row of the buffer that request b's context is in."""
    row = b if rows is None else tl.load(rows + b)
    return row.to(tl.int64)


@triton.jit
def _scan(
    buffer: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor | None,
    keys: tl.tensor,
    counts: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    KAPPA: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (b, i): the best hits whose last token is among places [i * BLOCK, (i + 1) * BLOCK) of request b.

    A key holds a match length above a start, so that the largest is the best; -1 = none. WIDE is W rounded up to a
    power of two.
    """
    b, i = tl.program_id(0), tl.program_id(1)
    row = _row(rows, b)
    end = tl.load(ends + row).to(tl.int32)
    text = buffer + row * stride
    last = i * BLOCK + tl.arange(0, BLOCK)
    # a mask that is the same for all of an aligned group of places lets them be read together
    first = tl.full((BLOCK,), i * BLOCK, tl.int32)
    here = tl.load(text + last, mask=(last < stride) & (first < end), other=0)
    hit = (last >= KAPPA - 1) & (last < end - 1) & (here == tl.load(text + end - 1, mask=end >= 1, other=0))
    for j in tl.static_range(2, KAPPA + 1):
        wanted = tl.load(text + end - j, mask=end >= j, other=0)
        hit = hit & (tl.load(text + last + 1 - j, mask=hit, other=0) == wanted)
    count = tl.sum(hit.to(tl.int32), axis=0)
    best = tl.full((WIDE,), -1, tl.int64)
    if count > 0:  # few blocks have any
        length = tl.where(hit, KAPPA, 0)
        going, some, back = hit, count, KAPPA + 1
        while (some > 0) & (back <= MAX_LENGTH):
            going = going & (last + 1 >= back)
            wanted = tl.load(text + end - back, mask=end >= back, other=0)
            going = going & (tl.load(text + last + 1 - back, mask=going, other=0) == wanted)
            length += going.to(tl.int32)
            some = tl.max(going.to(tl.int32), axis=0)
            back += 1
        key = tl.where(hit, (length.to(tl.int64) << 32) + last + 1, -1)
        best = _best(key, W, WIDE)
    slot = b.to(tl.int64) * blocks + i
    rank = tl.arange(0, WIDE)
    tl.store(counts + slot, count)
    tl.store(keys + slot * W + rank, best, mask=rank < W)


@triton.jit
def _best(key: tl.tensor, W: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """The W largest of some different keys, in order, in the first of WIDE places; -1 behind them."""
    rank = tl.arange(0, WIDE)
    best = tl.full((WIDE,), -1, tl.int64)
    largest, w = tl.max(key, axis=0), 0
    while (largest >= 0) & (w < W):
        best = tl.where(rank == w, largest, best)
        largest = tl.max(tl.where(key < largest, key, -1), axis=0)
        w += 1
    return best


@triton.jit
def _gather(
    buffer: tl.tensor,
    ends: tl.tensor,
    prompts: tl.tensor,
    rows: tl.tensor | None,
    keys: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    tree_tokens: tl.tensor,
    tree_parents: tl.tensor,
    summary: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    W: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    """Program b: the candidates of request b and their tree. The last five are sizes rounded up to powers of two:
    of W, D, the blocks, the keys of all blocks and W * D."""
    b = tl.program_id(0).to(tl.int64)
    row = _row(rows, b)
    end = tl.load(ends + row).to(tl.int32)
    text = buffer + row * stride
    slot, block = tl.arange(0, SLOTS), tl.arange(0, BLOCKS)
    key = tl.load(keys + b * blocks * W + slot, mask=slot < blocks * W, other=-1)
    count = tl.sum(tl.load(counts + b * blocks + block, mask=block < blocks, other=0), axis=0)
    best = _best(key, W, WIDE)
    found = best >= 0
    start = tl.where(found, best & 0xFFFFFFFF, -1).to(tl.int32)
    length = tl.where(found, best >> 32, 0).to(tl.int32)
    w, d = tl.arange(0, WIDE), tl.arange(0, DEPTH)
    tl.store(starts + b * W + w, start, mask=w < W)
    tl.store(lengths + b * W + w, length, mask=w < W)

    # tokens: one that reaches the context's end goes on with period `end - start`
    inside = found[:, None] & (d < D)[None, :]
    at = start[:, None] + d[None, :] % tl.where(found, end - start, 1)[:, None]
    copied = tl.load(text + at, mask=inside, other=-1)
    tl.store(tokens + (b * W + w[:, None]) * D + d[None, :], copied, mask=(w < W)[:, None] & (d < D)[None, :])

    first = tl.max(tl.where(w == 0, start, -1), axis=0)
    token = tl.load(text + first, mask=first >= 0, other=-1)
    agreeing = tl.sum((found & (tl.load(text + start, mask=found, other=-1) == token)).to(tl.int32), axis=0)
    some = first >= 0
    out = summary + b * 6
    tl.store(out, end)
    tl.store(out + 1, count)
    tl.store(out + 2, tl.max(length, axis=0))
    tl.store(out + 3, tl.where(some, end - first, 0))
    tl.store(out + 4, agreeing)
    tl.store(out + 5, (some & (first < tl.load(prompts + row).to(tl.int32))).to(tl.int32))

    # tree: a node (w, d) belongs to the first candidate with its prefix, a node above it to the first with that
    owner = tl.full((WIDE, DEPTH), 0, tl.int32)
    above = tl.full((WIDE, DEPTH), 0, tl.int32)
    for back in range(W):
        v = W - 1 - back
        other = tl.sum(tl.where((w == v)[:, None], copied, 0), axis=0)
        common = tl.min(tl.where((copied != other[None, :]) & (d < D)[None, :], d[None, :], DEPTH), axis=1)[:, None]
        owner = tl.where(common > d[None, :], v, owner)
        above = tl.where(common >= d[None, :], v, above)
    # numbers: the first chain (always D long), then level by level; the same one level higher for the parents
    new = inside & (owner == w[:, None])
    own = _number(new, w, d, D)
    higher = _number(inside & (d > 0)[None, :] & (above == w[:, None]), w, d - 1, D)
    parent = tl.full((WIDE, DEPTH), -1, tl.int32)
    for v in range(W):
        numbers = tl.sum(tl.where((w == v)[:, None], higher, 0), axis=0)
        parent = tl.where((above == v) & (d > 0)[None, :], numbers[None, :], parent)
    tl.store(tree_tokens + b * W * D + own, copied, mask=new)
    tl.store(tree_parents + b * W * D + own, parent, mask=new)
    node = tl.arange(0, NODES)
    unused = (node >= tl.sum(tl.sum(new.to(tl.int32), axis=1), axis=0)) & (node < W * D)
    tl.store(tree_tokens + b * W * D + node, -1, mask=unused)
    tl.store(tree_parents + b * W * D + node, -2, mask=unused)


@triton.jit
def _number(new: tl.tensor, w: tl.tensor, d: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """int32 [WIDE, DEPTH]: the number of each new node (w, d)."""
    later = (new & (w > 0)[:, None]).to(tl.int32)
    level = tl.sum(later, axis=0)
    before = tl.cumsum(level, axis=0) - level
    beside = tl.cumsum(later, axis=0) - later
    return tl.where((w == 0)[:, None], d[None, :], D + before[None, :] + beside)


@dataclass(frozen=True)
class Workspace:
    """Tensors that `find_matches` writes to, made once: what it returns is overwritten by the next call."""

    block: int
    """Places that one program of the first launch compares; a power of two."""
    keys: torch.Tensor
    """int64 [B, blocks, W]: best hits of each block."""
    counts: torch.Tensor
    """int32 [B, blocks]: hits of each block."""
    matches: TensorMatches

    @classmethod
    def of(
        cls, buffer: torch.Tensor, config: MatchConfig, block: int | None = None, rows: int | None = None
    ) -> Workspace:
        """Tensors for at most `rows` contexts at a time in `buffer` [R, capacity], by default R."""
        rows, capacity = len(buffer) if rows is None else rows, buffer.shape[1]
        if block is None:
            block = min(max(triton.next_power_of_2(triton.cdiv(capacity, BLOCKS)), SMALLEST), LARGEST)
        blocks = triton.cdiv(capacity, block)
        return cls(
            block,
            torch.empty(rows, blocks, config.candidates, dtype=torch.int64, device=buffer.device),
            torch.empty(rows, blocks, dtype=torch.int32, device=buffer.device),
            TensorMatches.empty(rows, config, buffer.device),
        )


def append_tokens(
    buffer: torch.Tensor, lengths: torch.Tensor, capacity: int, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Append tokens[b, :counts[b]] to the contexts buffer[b, :lengths[b]], in one launch; `lengths` grow.

    `buffer` int32 [B, >= capacity], `lengths` integers [B], `tokens` integers [B, K], `counts` integers [B], all
    contiguous. What does not fit `capacity` is dropped.
    """
    with torch.cuda.device_of(buffer):
        _append[(len(buffer),)](
            buffer, lengths, tokens, counts, buffer.shape[1], capacity, tokens.shape[1], CHUNK=CHUNK, num_warps=1
        )


def find_matches(
    buffer: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    config: MatchConfig,
    workspace: Workspace | None = None,
    rows: torch.Tensor | None = None,
) -> TensorMatches:
    """Suffix matches of the contexts buffer[r, :lengths[r]], for each r of `rows`; by default for all.

    `buffer` int32 [R, capacity], contiguous, fastest if capacity is a multiple of 16; `lengths` and `prompts`
    (tokens of the prompt) int32 or int64 [R], at most capacity; `rows` int32 or int64 [B], at least 0 and less than
    R; all on one device. With a workspace nothing is allocated, and the result is overwritten by the next call.
    Raises ValueError for tensors of other shapes, dtypes or devices, and for more contexts than the workspace is for.
    """
    if buffer.dtype != torch.int32 or buffer.dim() != 2 or not buffer.is_contiguous():
        raise ValueError(f"buffer is {buffer.dtype} {list(buffer.shape)}; it must be contiguous int32 [R, capacity]")
    for name, value in (("lengths", lengths), ("prompts", prompts)):
        if value.shape != buffer.shape[:1] or value.device != buffer.device:
            raise ValueError(
                f"{name} is {list(value.shape)} on {value.device}; it must be {list(buffer.shape[:1])} "
                f"on {buffer.device}"
            )
    if rows is not None and (rows.dim() != 1 or rows.is_floating_point() or rows.device != buffer.device):
        found_rows = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
        raise ValueError(f"rows is {found_rows}; it must be integers [B] on {buffer.device}")
    requests, capacity = len(buffer if rows is None else rows), buffer.shape[1]
    w, d = config.candidates, config.depth
    space = workspace or Workspace.of(buffer, config, rows=requests)
    if requests > len(space.keys):
        raise ValueError(f"the workspace is for {len(space.keys)} contexts, and {requests} were asked for")
    blocks, found = space.counts.shape[1], space.matches
    scan(buffer, lengths, config, space, rows)
    with torch.cuda.device_of(buffer):
        _gather[(requests,)](
            buffer,
            lengths,
            prompts,
            rows,
            space.keys,
            space.counts,
            found.starts,
            found.lengths,
            found.tokens,
            found.tree_tokens,
            found.tree_parents,
            found.summary,
            capacity,
            blocks,
            W=w,
            D=d,
            WIDE=triton.next_power_of_2(w),
            DEPTH=triton.next_power_of_2(d),
            BLOCKS=triton.next_power_of_2(blocks),
            SLOTS=triton.next_power_of_2(blocks * w),
            NODES=triton.next_power_of_2(w * d),
        )
    return found.first(requests)


def scan(
    buffer: torch.Tensor,
    lengths: torch.Tensor,
    config: MatchConfig,
    space: Workspace,
    rows: torch.Tensor | None = None,
) -> None:
    """The first launch of `find_matches`: the best hits of each block, into the workspace.

    Arguments as there: `buffer` int32 [R, capacity], `lengths` [R], `rows` [B].
    """
    blocks = space.counts.shape[1]
    with torch.cuda.device_of(buffer):
        _scan[(len(buffer if rows is None else rows), blocks)](
            buffer,
            lengths,
            rows,
            space.keys,
            space.counts,
            buffer.shape[1],
            blocks,
            KAPPA=config.kappa,
            MAX_LENGTH=config.max_length,
            W=config.candidates,
            WIDE=triton.next_power_of_2(config.candidates),
            BLOCK=space.block,
            num_warps=4 if space.block <= 2048 else 8,
        )
