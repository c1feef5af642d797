"""What a step costs on this computer: measured once, cached, read by gates and tree sizes."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from activations import packaged
from activations.cache import KVCache
from activations.matching.index import SuffixIndex
from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.drafters import Drafter
from decoding.packing import tree_forward
from decoding.request import Request
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.modes import SiteProbe

VERSION = 1
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
"""Widths (pending token + nodes) that are measured."""
CONTEXTS = (64, 256, 768, 1536)
"""Context lengths that are measured, as far as the target takes them."""
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
ADDED_SECONDS = 3.0
"""Time to measure a drafter that a table lacks."""


class CostError(Exception):
    """A cost table that cannot be read or does not fit. The message says what to do."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds."""

    key: dict[str, Any]
    """Target, dtype, threads and machine that it holds for, and the sizes of the drafters."""
    widths: list[int]
    contexts: list[int]
    verify_ms: list[list[float]]
    """A list for each context, an entry for each width: one forward of that many tokens behind that many committed
    ones, and its choice."""
    draft_ms: dict[str, list[float]]
    """Drafter -> milliseconds to draft by depth 1, 2, ..."""
    probe_ms: float
    match_ms: float

    def verify(self, width: float, context: int) -> float:
        """Milliseconds to verify, between the measured points and beyond them linear."""
        i, s = _between(self.contexts, context)
        low = _line(self.widths, self.verify_ms[i], width)
        high = _line(self.widths, self.verify_ms[min(i + 1, len(self.contexts) - 1)], width)
        return low + s * (high - low)

    def draft(self, drafter: str, depth: float) -> float:
        """Milliseconds to draft a tree of that depth; 0 for a drafter that was not measured."""
        times = self.draft_ms.get(drafter)
        return _line(list(range(1, len(times) + 1)), times, depth) if times else 0.0

    def knows(self, drafter: Drafter) -> bool:
        """Whether this drafter was measured, and not another one of its name."""
        sizes = self.key.get("drafters", {})
        return drafter.name in self.draft_ms and sizes.get(drafter.name) == _size(drafter)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write costs.json, whole or not at all."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1))
            scratch.replace(file)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read a costs.json. Raises CostError, which says how to make it again, where that cannot be."""
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("version") != VERSION:
                raise ValueError("another version")
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            again = "make it again with `switchsd profile`"
            raise CostError(f"cannot read the cost table {os.fspath(path)}: {error}; {again}") from error


def _between(points: Sequence[int], x: float) -> tuple[int, float]:
    """Index of the lower neighbour and the share of the way to the upper one; clamped below, open above."""
    if len(points) == 1 or x <= points[0]:
        return 0, 0.0
    i = min(bisect.bisect_right(points, x) - 1, len(points) - 2)
    return i, (x - points[i]) / (points[i + 1] - points[i])


def _line(points: Sequence[int], values: Sequence[float], x: float) -> float:
    i, s = _between(points, x)
    return values[i] if s == 0 else values[i] + s * (values[i + 1] - values[i])


def machine() -> str:
    """The computer, as far as costs depend on it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cpus"


def key_of(target: Target) -> dict[str, Any]:
    """What a cost table depends on, the drafters aside: target, dtype, threads, machine and version of torch."""
    return {
        "target": target.name,
        "fingerprint": target.fingerprint.to_dict(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "forward": target.forward_kind,
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "torch": torch.__version__,
    }


def _size(drafter: Drafter) -> Any:
    """What a drafter's speed depends on; None where it does not say."""
    return getattr(drafter, "size", None)


def measure(
    target: Target, drafters: Sequence[Drafter] = (), probe: SiteProbe | None = None, budget_seconds: float = 12.0
) -> CostTable:
    """Measure a cost table within the given time: every point once, then again and again, and their medians."""
    deadline = perf_counter() + budget_seconds
    generator = torch.Generator().manual_seed(0)
    contexts = [c for c in CONTEXTS if c + max(WIDTHS) <= target.max_length] or [max(target.max_length // 2, 1)]
    widths = [w for w in WIDTHS if w + contexts[-1] <= target.max_length]
    ids = torch.randint(target.vocab_size, (1, contexts[-1]), generator=generator)
    cache = KVCache(1, capacity=contexts[-1] + max(widths))
    target.forward(ids.to(target.device), cache, logits_to_keep=1)
    cache.commit([range(contexts[-1])])
    points = [(c, w) for c in reversed(contexts) for w in widths]
    times: dict[tuple[int, int], list[float]] = {p: [] for p in points}
    share = deadline - 0.25 * budget_seconds if drafters else deadline
    rounds = 0
    while rounds < 9 and (rounds < 2 or perf_counter() < share):
        for point in points:
            if rounds >= 2 and perf_counter() >= share:
                break
            times[point].append(_verify_ms(target, cache, *point))
        cache.lengths[0] = contexts[-1]  # what a crop forgot is still written there
        rounds += 1
    table = CostTable(
        key=key_of(target),
        widths=widths,
        contexts=contexts,
        verify_ms=[[_best(times[c, w]) for w in widths] for c in contexts],
        draft_ms={},
        probe_ms=_probe_ms(target, probe) if probe is not None else 0.0,
        match_ms=_match_ms(ids[0].tolist()),
    )
    return with_drafters(table, target, drafters, deadline - perf_counter())


def with_drafters(table: CostTable, target: Target, drafters: Sequence[Drafter], budget_seconds: float) -> CostTable:
    """The table with the times of these drafters, measured now within the given time."""
    times, sizes = dict(table.draft_ms), dict(table.key.get("drafters", {}))
    deadline = perf_counter() + budget_seconds
    for i, drafter in enumerate(drafters):
        share = (deadline - perf_counter()) / (len(drafters) - i)
        times[drafter.name] = _draft_ms(target, drafter, perf_counter() + share)
        sizes[drafter.name] = _size(drafter)
    return replace(table, key={**table.key, "drafters": sizes}, draft_ms=times) if drafters else table


def _best(times: list[float]) -> float:
    """The median of the runs behind the first, which also pays for warming up."""
    return round(median(times[1:] or times), 4)


def _verify_ms(target: Target, cache: KVCache, context: int, width: int) -> float:
    cache.lengths[0] = context
    tree = DraftTree.chain([i % target.vocab_size for i in range(width - 1)], "costs")
    began = perf_counter()
    logits = tree_forward(target, cache, [0], [tree])
    int(logits[0, 0].argmax())  # waits for the device
    return (perf_counter() - began) * 1e3


def _draft_ms(target: Target, drafter: Drafter, deadline: float) -> list[float]:
    """By depth, with a full tree of 15 nodes and one new token to catch up with, after a prompt of 256 tokens."""
    length = min(256, target.max_length // 2)
    request = Request(0, [i % target.vocab_size for i in range(length)], max_new_tokens=64)
    request.tokens = [*request.prompt, 0]
    wide = target.width * len(drafter.sites)
    features = torch.randn(length, wide, dtype=target.dtype, device=target.device) if wide else None
    drafter.start(request, features)
    try:
        drafter.propose([request], [FixedBudget(15, 1)])
        out = []
        for depth in DEPTHS:
            times = []
            for _ in range(5):
                request.tokens.append(0)
                drafter.observe(request, None if features is None else features[:1])
                began = perf_counter()
                drafter.propose([request], [FixedBudget(15, depth)])
                if target.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append((perf_counter() - began) * 1e3)
                if len(times) >= 2 and perf_counter() > deadline:
                    break
            out.append(round(median(times), 4))
        return out
    finally:
        drafter.close(request)


def _probe_ms(target: Target, probe: SiteProbe) -> float:
    state = torch.randn(1, target.width * len(probe.config.sites), dtype=target.dtype, device=target.device)
    times = []
    for _ in range(20):
        began = perf_counter()
        float(probe.score(state))
        times.append((perf_counter() - began) * 1e3)
    return round(median(times), 4)


def _match_ms(ids: list[int]) -> float:
    index = SuffixIndex(None, ids)
    times = []
    for i in range(20):
        began = perf_counter()
        index.extend(ids[i : i + 4])
        index.candidates(index.find())
        times.append((perf_counter() - began) * 1e3)
    return round(median(times), 4)


def costs_file(target: Target) -> Path:
    """Where the table of this target and computer is cached."""
    key = json.dumps(key_of(target), sort_keys=True)
    return packaged.cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def cached_costs(target: Target, drafters: Sequence[Drafter] = ()) -> CostTable | None:
    """The cached table, if there is one that has these drafters."""
    file = costs_file(target)
    if file.is_file():
        with suppress(CostError):  # made again
            table = CostTable.load(file)
            return table if all(map(table.knows, drafters)) else None
    return None


def get_costs(target: Target, drafters: Sequence[Drafter] = (), probe: SiteProbe | None = None) -> CostTable:
    """The cached table, or one measured now (about 12 s) and cached; drafters that it lacks are added (3 s)."""
    table = cached_costs(target)
    if table is None:
        table = measure(target, drafters, probe)
    elif missing := [d for d in drafters if not table.knows(d)]:
        table = with_drafters(table, target, missing, ADDED_SECONDS)
    else:
        return table
    with suppress(OSError):  # a full or read-only disk costs the next run the same measurement, nothing else
        table.save(costs_file(target))
    return table
