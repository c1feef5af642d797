"""What overlapping two batches would bring: plain and overlapped speculative decoding, event by event.

Both systems hold the same requests at a time, 2m. `sequential` drafts for all of them and then verifies all of them;
`overlapped` drives the real `BatchManager`, with m in each batch. Times come from measured tables, from a cost table,
or from a roofline of published figures. Requests accept the same lengths, step by step, in both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from decoding.costs import CostTable
from decoding.minedraft.batches import BatchManager

GOLDEN = (math.sqrt(5) - 1) / 2


class Times(Protocol):
    """Milliseconds of the halves of a step, for `rows` requests and chains of `k` drafted tokens."""

    def draft(self, rows: int, k: int) -> float: ...

    def verify(self, rows: int, k: int) -> float: ...

    def together(self, drafted: int, verified: int, k: int) -> float:
        """Drafting for so many rows while verifying so many others."""
        ...


@dataclass(frozen=True)
class Measured:
    """Times from tables {rows: {k: ms}}: linear between the measured points and beyond them."""

    draft_ms: Mapping[int, Mapping[int, float]]
    verify_ms: Mapping[int, Mapping[int, float]]
    rho: float = 0.0
    """Contention: an overlapped half-step takes max(t, V) times 1 + rho."""

    def draft(self, rows: int, k: int) -> float:
        return _surface(self.draft_ms, rows, k)

    def verify(self, rows: int, k: int) -> float:
        return _surface(self.verify_ms, rows, k)

    def together(self, drafted: int, verified: int, k: int) -> float:
        return max(self.draft(drafted, k), self.verify(verified, k)) * (1 + self.rho)


@dataclass(frozen=True)
class Curves:
    """Times from curves: to verify by the number of tokens in the forward, to draft one level by rows."""

    draft_ms: Mapping[int, float]
    """Rows -> milliseconds a level."""
    verify_ms: Mapping[int, float]
    """Tokens, rows * (k + 1) -> milliseconds."""
    rho: float = 0.0

    def draft(self, rows: int, k: int) -> float:
        return k * _line(self.draft_ms, rows)

    def verify(self, rows: int, k: int) -> float:
        return _line(self.verify_ms, rows * (k + 1))

    def together(self, drafted: int, verified: int, k: int) -> float:
        return max(self.draft(drafted, k), self.verify(verified, k)) * (1 + self.rho)


@dataclass(frozen=True)
class FromCosts:
    """Times from a cost table, which was measured with one request: the tokens of several verify as those of one.

    An EAGLE head drafts for one request after the other; a draft model for all together, its forward growing with
    rows as the target's does.
    """

    costs: CostTable
    drafter: str
    context: int = 256
    rho: float = 0.0

    def draft(self, rows: int, k: int) -> float:
        one = self.costs.draft(self.drafter, k)
        if self.drafter != "draft":
            return rows * one
        return one * self.costs.verify(rows, self.context) / self.costs.verify(1, self.context)

    def verify(self, rows: int, k: int) -> float:
        return self.costs.verify(rows * (k + 1), self.context)

    def together(self, drafted: int, verified: int, k: int) -> float:
        return max(self.draft(drafted, k), self.verify(verified, k)) * (1 + self.rho)


@dataclass(frozen=True)
class Workload:
    """What is to be written."""

    requests: int = 64
    tokens: int = 256
    """Of a request on average; half of it to one and a half, evenly."""
    acceptance: float = 0.7
    """How likely a drafted token is accepted where the one before it was."""
    arrivals: float = 0.0
    """Requests a second, at random; 0 = all are there from the start."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1:
            raise ValueError(f"{self.requests} requests of {self.tokens} tokens: there must be 1 or more of both")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance is {self.acceptance}; it is a probability, in [0, 1]")
        if not 0 <= self.arrivals < math.inf:
            raise ValueError(f"arrivals is {self.arrivals}; it must be 0 (all at once) or a rate above it")

    def make(self) -> list[SimulatedRequest]:
        draw, at, made = random.Random(self.seed), 0.0, []
        for number in range(self.requests):
            at += draw.expovariate(self.arrivals) * 1e3 if self.arrivals else 0.0
            length = draw.randint(max(1, self.tokens // 2), max(1, (3 * self.tokens + 1) // 2))
            made.append(SimulatedRequest(at, length, self.acceptance, random.Random(f"{self.seed} {number}")))
        return made

    def per_step(self, k: int) -> float:
        """Tokens per step to be expected: accepted length + 1."""
        a = self.acceptance
        return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(eq=False)
class SimulatedRequest:
    """How far a request has come."""

    arrival: float
    """Milliseconds."""
    left: int
    """Tokens still to be written."""
    acceptance: float
    draw: random.Random
    """Gives the accepted lengths, which so depend on nothing but the request."""
    ended: float = 0.0

    def verified(self, k: int) -> int:
        """How many tokens a step adds."""
        accepted = 0
        while accepted < k and self.draw.random() < self.acceptance:
            accepted += 1
        added = min(accepted + 1, self.left)
        self.left -= added
        return added


@dataclass
class Run:
    """What one system did."""

    tokens: int = 0
    ms: float = 0.0
    """From the first arrival to the last token."""
    waiting_ms: float = 0.0
    """Of these: nobody was there."""
    target_ms: float = 0.0
    """The target verified."""
    drafter_ms: float = 0.0
    steps: int = 0
    """Verifications; of half the requests each where batches overlap."""
    both_ms: float = 0.0
    """Half-steps in which one batch was drafted for and the other verified,"""
    apart_ms: float = 0.0
    """and how long these would have taken one after the other."""
    latencies: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.ms if self.ms else 0.0

    @property
    def target_idle(self) -> float:
        """Share of the time, while somebody was there, in which the target did not verify."""
        return 1 - self.target_ms / (self.ms - self.waiting_ms)

    @property
    def drafter_idle(self) -> float:
        return 1 - self.drafter_ms / (self.ms - self.waiting_ms)

    @property
    def efficiency(self) -> float | None:
        """(t + V) / step, over the half-steps that overlapped; None where none did."""
        return self.apart_ms / self.both_ms if self.both_ms else None

    @property
    def latency_ms(self) -> float:
        """From arrival to the last token, on average."""
        return fmean(self.latencies)


class _Clock:
    """Requests arrive while time passes."""

    def __init__(self, work: Workload, capacity: int) -> None:
        self.run = Run()
        self.now = 0.0
        self._coming = sorted(work.make(), key=lambda r: r.arrival)
        self._began = self._coming[0].arrival
        self.now = self._began
        self._capacity = capacity

    def admitted(self, running: int) -> Iterator[SimulatedRequest]:
        """Who has arrived and finds room; where nobody runs, time passes until somebody arrives."""
        if not running and self._coming and self._coming[0].arrival > self.now:
            self.run.waiting_ms += self._coming[0].arrival - self.now
            self.now = self._coming[0].arrival
        while self._coming and self._coming[0].arrival <= self.now and running < self._capacity:
            running += 1
            yield self._coming.pop(0)

    def verified(self, requests: list[SimulatedRequest], k: int) -> list[SimulatedRequest]:
        """Requests grow; those that have ended."""
        self.run.steps += 1
        self.run.tokens += sum(r.verified(k) for r in requests)
        over = [r for r in requests if not r.left]
        self.run.latencies += [self.now - r.arrival for r in over]
        self.run.ms = self.now - self._began
        return over


def sequential(times: Times, work: Workload, k: int, capacity: int) -> Run:
    """Plain speculative decoding: up to `capacity` requests in one batch."""
    clock = _Clock(work, capacity)
    running: list[SimulatedRequest] = []
    while True:
        running += clock.admitted(len(running))
        if not running:
            return clock.run
        t, v = times.draft(len(running), k), times.verify(len(running), k)
        clock.now += t + v
        clock.run.drafter_ms += t
        clock.run.target_ms += v
        over = set(clock.verified(running, k))
        running = [r for r in running if r not in over]


def overlapped(times: Times, work: Workload, k: int, capacity: int) -> Run:
    """MineDraft: up to `capacity` requests in two batches."""
    clock = _Clock(work, capacity)
    run = clock.run
    manager: BatchManager[SimulatedRequest] = BatchManager()
    while True:
        for request in clock.admitted(len(manager)):
            manager.admit(request)
        if not len(manager):
            return run
        now = manager.half_step()
        t = times.draft(len(now.draft), k) if now.draft else 0.0
        v = times.verify(len(now.verify), k) if now.verify else 0.0
        step = times.together(len(now.draft), len(now.verify), k) if now.draft and now.verify else t + v
        clock.now += step
        run.drafter_ms += t
        run.target_ms += v
        if now.draft and now.verify:
            run.both_ms += step
            run.apart_ms += t + v
        over = clock.verified(now.verify, k) if now.verify else []
        manager.drafted(now.draft)
        manager.verified(now.verify)
        manager.flip()
        manager.leave(over)


@dataclass(frozen=True)
class Comparison:
    """Both systems with the same 2m requests at a time."""

    m: int
    k: int
    draft_ms: float
    """t(m), of one batch."""
    verify_ms: float
    """V(m)"""
    draft_all_ms: float
    """t(2m), of all requests together."""
    verify_all_ms: float
    """V(2m)"""
    step_ms: float
    """Of an overlapped half-step of full batches."""
    sd: Run
    psd: Run

    @property
    def gain(self) -> float:
        """Overlapped throughput over the plain one's, as simulated."""
        return self.psd.tokens_per_second / self.sd.tokens_per_second

    @property
    def closed_form(self) -> float:
        """The same in the steady state: (t(2m) + V(2m)) / (2 step), the step being max(t(m), V(m)) and contention."""
        return (self.draft_all_ms + self.verify_all_ms) / (2 * self.step_ms)

    @property
    def ideal_efficiency(self) -> float:
        """(t + V) / max(t, V): what overlapping halves of these times can give at best."""
        return (self.draft_ms + self.verify_ms) / max(self.draft_ms, self.verify_ms)

    @property
    def verdict(self) -> str:
        """In words, what overlapping does here and why."""
        slower = "drafting" if self.draft_ms > self.verify_ms else "verifying"
        if self.closed_form >= 1.005:
            return f"gains {100 * (self.closed_form - 1):.0f} %; {slower} sets the pace"
        apart = self.draft_all_ms + self.verify_all_ms
        reason = f"one batch of {2 * self.m} takes {apart:.3g} ms, two half-steps {2 * self.step_ms:.3g} ms"
        if self.verify_all_ms < 1.5 * self.verify_ms:
            reason += f": verifying {2 * self.m} costs hardly more than {self.m}, and is done once instead of twice"
        elif self.step_ms > 1.05 * max(self.draft_ms, self.verify_ms):
            reason += ": the halves slow each other down"
        word = "loses" if self.closed_form < 0.995 else "gains nothing"
        return f"{word}: {reason}"


def compare(times: Times, work: Workload, m: int, k: int) -> Comparison:
    """Both systems, 2m requests at a time, on the same work."""
    return Comparison(
        m, k, times.draft(m, k), times.verify(m, k), times.draft(2 * m, k), times.verify(2 * m, k),
        times.together(m, m, k), sequential(times, work, k, 2 * m), overlapped(times, work, k, 2 * m),
    )  # fmt: skip


@dataclass(frozen=True)
class Frontier:
    """The best that either system reaches where a longer draft is accepted further, with diminishing returns:
    f(t) = 1 - exp(-alpha t). Times are in units of V, and of the required work.

    The theorem of the paper, a gain of more than 1.59 wherever alpha V is about 1.68 or more, holds only up to about
    5.1: a drafter so good that it needs hardly any time leaves nothing to overlap.
    """

    alpha_v: float
    sd: float
    """min over t of (t + V) / f(t)"""
    psd: float
    """min over t of max(t, V) / f(t)"""

    @property
    def ratio(self) -> float:
        return self.sd / self.psd


def frontier(alpha_v: float) -> Frontier:
    """Minimised numerically for alpha V > 0."""
    if not 0 < alpha_v < math.inf:
        raise ValueError(f"alpha V is {alpha_v}; it must be above 0")

    def least(cost: Callable[[float], float]) -> float:
        return _least(lambda x: cost(math.exp(x)) / -math.expm1(-alpha_v * math.exp(x)), -20.0, 20.0)

    return Frontier(alpha_v, least(lambda t: t + 1), least(lambda t: max(t, 1)))


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a function with one valley, by golden section."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    for _ in range(100):
        if value(a) < value(b):
            b, high = a, b
            a = high - GOLDEN * (high - low)
        else:
            a, low = b, a
            b = low + GOLDEN * (high - low)
    return value((low + high) / 2)


def _line(curve: Mapping[int, float], x: float) -> float:
    """Linear between the points of a curve and beyond them, and nowhere below 0."""
    points = sorted(curve)
    if len(points) == 1:
        return curve[points[0]]
    above = next((i for i, p in enumerate(points) if p >= x), len(points) - 1)
    low, high = points[max(above - 1, 0)], points[max(above, 1)]
    return max(curve[low] + (curve[high] - curve[low]) * (x - low) / (high - low), 0.0)


def _surface(table: Mapping[int, Mapping[int, float]], rows: int, k: int) -> float:
    return _line({m: _line(by_k, k) for m, by_k in table.items()}, rows)
