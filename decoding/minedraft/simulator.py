"""What overlapping two batches would bring: plain and overlapped speculative decoding, event by event.

Both systems hold the same requests at a time, 2m. `sequential` drafts for all of them and then verifies all of them;
`overlapped` drives the real `BatchManager`, with m in each batch. Times come from measured tables, from a cost table,
or from a roofline of published figures. Requests accept the same lengths, step by step, in both.

Source: MineDraft, arXiv 2603.18016.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from decoding.costs import CostTable
from decoding.minedraft.batches import BatchManager

GOLDEN = (math.sqrt(5) - 1) / 2
EVEN = 0.005
"""A gain is told from 1 where it is further away than this."""
RAREST = 1e-6
"""Arrivals a second: beyond, the milliseconds of a step are lost in the time that has passed."""


class Times(Protocol):
    """Milliseconds of the halves of a step, for `rows` requests and chains of `k` drafted tokens."""

    def draft(self, rows: int, k: int) -> float:
        """To draft k tokens for each of the rows."""
        ...

    def verify(self, rows: int, k: int) -> float:
        """To verify them, k + 1 tokens a row."""
        ...

    def together(self, drafted: int, verified: int, k: int) -> float:
        """Drafting for so many rows while verifying so many others."""
        ...

    def extrapolated(self, rows: Iterable[int], ks: Iterable[int]) -> list[str]:
        """In words, what these rows and lengths need beyond the measured times; empty where nothing is."""
        ...


def together(t: float, v: float, rho: float, shared: bool) -> float:
    """An overlapped half-step: the longer half, or both in turn where they share a device, and contention."""
    return (t + v if shared else max(t, v)) * (1 + rho)


@dataclass(frozen=True)
class Measured:
    """Times from tables {rows: {k: ms}}: linear between the measured points and beyond them, but nowhere falling
    beyond them."""

    draft_ms: Mapping[int, Mapping[int, float]]
    verify_ms: Mapping[int, Mapping[int, float]]
    rho: float = 0.0
    """Contention: an overlapped half-step takes 1 + rho times as long."""
    shared: bool = False
    """Both halves are on one device and take turns."""

    def draft(self, rows: int, k: int) -> float:
        return _surface(self.draft_ms, rows, k)

    def verify(self, rows: int, k: int) -> float:
        return _surface(self.verify_ms, rows, k)

    def together(self, drafted: int, verified: int, k: int) -> float:
        return together(self.draft(drafted, k), self.verify(verified, k), self.rho, self.shared)

    def extrapolated(self, rows: Iterable[int], ks: Iterable[int]) -> list[str]:
        found = []
        for word, times in (("drafting", self.draft_ms), ("verifying", self.verify_ms)):
            found += _outside(f"{word} for {{}} requests", rows, times)
            shortest = max(min(by_k) for by_k in times.values())
            longest = min(max(by_k) for by_k in times.values())
            found += _outside(f"{word} {{}} tokens of a request", ks, (shortest, longest))
        return found


@dataclass(frozen=True)
class Curves:
    """Times from curves: to verify by the number of tokens in the forward, to draft one level by rows."""

    draft_ms: Mapping[int, float]
    """Rows -> milliseconds a level."""
    verify_ms: Mapping[int, float]
    """Tokens, rows * (k + 1) -> milliseconds."""
    rho: float = 0.0
    shared: bool = False

    def draft(self, rows: int, k: int) -> float:
        return k * _line(self.draft_ms, rows)

    def verify(self, rows: int, k: int) -> float:
        return _line(self.verify_ms, rows * (k + 1))

    def together(self, drafted: int, verified: int, k: int) -> float:
        return together(self.draft(drafted, k), self.verify(verified, k), self.rho, self.shared)

    def extrapolated(self, rows: Iterable[int], ks: Iterable[int]) -> list[str]:
        tokens = [r * (k + 1) for r in rows for k in ks]
        return [
            *_outside("drafting for {} requests", rows, self.draft_ms),
            *_outside("verifying {} tokens", tokens, self.verify_ms),
        ]


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
    shared: bool = False

    def draft(self, rows: int, k: int) -> float:
        one = _line(dict(enumerate(self.costs.draft_ms[self.drafter], 1)), k)
        if self.drafter != "draft":
            return rows * one
        return one * self._forward(rows) / self._forward(1)

    def verify(self, rows: int, k: int) -> float:
        return self._forward(rows * (k + 1))

    def together(self, drafted: int, verified: int, k: int) -> float:
        return together(self.draft(drafted, k), self.verify(verified, k), self.rho, self.shared)

    def extrapolated(self, rows: Iterable[int], ks: Iterable[int]) -> list[str]:
        tokens = [r * (k + 1) for r in rows for k in ks]
        return [
            *_outside("drafting {} tokens", ks, range(1, len(self.costs.draft_ms[self.drafter]) + 1)),
            *_outside("verifying {} tokens", tokens, self.costs.widths),
            *_outside("{} tokens in the cache", [self.context], self.costs.contexts),
        ]

    def _forward(self, width: int) -> float:
        """As the table has it; beyond it, as the other sources."""
        context = max(self.context, min(self.costs.contexts))
        by_context = zip(self.costs.contexts, self.costs.verify_ms, strict=True)
        by_width = {c: dict(zip(self.costs.widths, times, strict=True)) for c, times in by_context}
        return _surface(by_width, context, max(width, min(self.costs.widths)))


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
        if 0 < self.arrivals < RAREST:
            raise ValueError(
                f"arrivals is {self.arrivals}; requests so rare never meet, so that nothing overlaps: "
                f"give {RAREST} a second or more, or 0 (all at once)"
            )

    def make(self) -> list[SimulatedRequest]:
        """The requests, in order of arrival; the same ones for the same seed."""
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
        while accepted < min(k, self.left) and self.draw.random() < self.acceptance:
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
    rows: int = 0
    """Requests verified, over all steps."""
    both_ms: float = 0.0
    """Half-steps in which one batch was drafted for and the other verified,"""
    apart_ms: float = 0.0
    """and how long these would have taken one after the other."""
    latencies: list[float] = field(default_factory=list)
    """Of each request in milliseconds, from its arrival to its last token."""

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
        self.run.rows += len(requests)
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
    work: Workload

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
    def filled(self) -> float:
        """Share of the places, 2m and m, that were taken on average, in the system in which it is less."""
        return min(self.sd.rows / self.sd.steps / 2, self.psd.rows / self.psd.steps) / self.m

    @property
    def outcome(self) -> str:
        """`gains`, `gains nothing` or `loses`: as simulated."""
        return _outcome(self.gain)

    @property
    def parts(self) -> bool:
        """The simulation does not come near the steady state of full batches, which the closed form is of."""
        return self.outcome != _outcome(self.closed_form) or abs(self.gain / self.closed_form - 1) > 0.1

    @property
    def why(self) -> str:
        """The reason of the outcome, in words that are the same for all m and k."""
        if self.outcome != _outcome(self.closed_form):  # not because of the times
            return self._unfilled()
        if self.outcome == "gains":
            reason = f"{'drafting' if self.draft_ms > self.verify_ms else 'verifying'} sets the pace"
        else:
            reason = self._lost()
        return f"{reason}; {self._unfilled()}" if self.parts else reason

    @property
    def verdict(self) -> str:
        """In words, what overlapping does here and why."""
        percent = abs(self.gain - 1) * 100
        if self.outcome == "gains":
            told = f"gains {percent:.3g} %"
        else:
            apart = self.draft_all_ms + self.verify_all_ms
            told = "gains nothing" if self.outcome == "gains nothing" else f"loses {percent:.0f} %"
            told += f": one batch of {2 * self.m} takes {apart:.3g} ms, two half-steps {2 * self.step_ms:.3g} ms"
        said = f" (with full batches all the time: gain {self.closed_form:.3f})" if self.parts else ""
        return f"{told}{said}; {self.why}"

    def _unfilled(self) -> str:
        """Why the simulation is not in the steady state, and what to change."""
        if self.work.requests == 1:
            return "--requests 1: a single request has nothing to overlap: raise it to several times 2m"
        if self.work.requests < 2 * self.m:
            told, least = f"--requests {self.work.requests} do not fill the 2m places", ": raise it to several times 2m"
        elif self.work.arrivals and self.filled < 0.95:
            told, least = f"--arrivals {self.work.arrivals:g} a second are too few to fill the 2m places", ": raise it"
        else:
            told = f"--requests {self.work.requests} are so few for 2m places that the first and last steps weigh"
            least = ": raise it to several times 2m"
        return f"{told}{least}, or take a smaller --batch"

    def _lost(self) -> str:
        """Why two half-steps take no less than one step of all, from the times."""
        t, v, step = self.draft_ms, self.verify_ms, self.step_ms
        longer, apart = max(t, v), self.draft_all_ms + self.verify_all_ms
        if abs(step / (t + v) - 1) < 0.01 and min(t, v) > 0.02 * longer:
            return "nothing overlaps: a half-step takes as long as drafting and verifying in turn"
        if step > (1 + EVEN) * longer and _outcome(apart / 2 / longer) == "gains":
            return "the halves slow each other down"
        name, other = ("drafting", "verifying") if t > v else ("verifying", "drafting")
        if min(t, v) < 0.02 * longer and apart > 1.98 * longer:
            return f"{other} takes so little time that there is hardly anything to hide"
        all_ms, one_ms = (self.draft_all_ms, t) if t > v else (self.verify_all_ms, v)
        dear = "costs hardly more than m, and is done once instead of twice"
        if all_ms >= 1.5 * one_ms:
            dear = f"is cheaper than twice m, by as much as the {other} that is hidden, or more"
        waits = "drafting sets the pace and the target waits; " if t > v else ""
        return f"{waits}{name} 2m {dear}".replace("drafting 2m", "drafting for 2m")


def _outcome(gain: float) -> str:
    if gain >= 1 + EVEN:
        return "gains"
    return "gains nothing" if gain >= 1 - EVEN else "loses"


def compare(times: Times, work: Workload, m: int, k: int) -> Comparison:
    """Both systems, 2m requests at a time, on the same work."""
    return Comparison(
        m, k, times.draft(m, k), times.verify(m, k), times.draft(2 * m, k), times.verify(2 * m, k),
        times.together(m, m, k), sequential(times, work, k, 2 * m), overlapped(times, work, k, 2 * m), work,
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
    """Minimised numerically for alpha V > 0; ValueError for others."""
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
    """Linear between the points of a curve and beyond them.

    Beyond them a step is taken to cost no less for more work, and no less than in proportion for less: so that times
    above 0 never lead to times of 0 or below.
    """
    points = sorted(curve)
    first, last = points[0], points[-1]
    if first == last:
        return curve[first]
    above = next((i for i, p in enumerate(points) if p >= x), len(points) - 1)
    low, high = points[max(above - 1, 0)], points[max(above, 1)]
    value = curve[low] + (curve[high] - curve[low]) * (x - low) / (high - low)
    if x > last:
        return max(value, curve[last])
    return max(value, curve[first] * x / first) if x < first else value


def _surface(table: Mapping[int, Mapping[int, float]], rows: int, k: int) -> float:
    return _line({m: _line(by_k, k) for m, by_k in table.items()}, rows)


def _outside(what: str, wanted: Iterable[int], measured: Iterable[int]) -> list[str]:
    """`what`, its range filled in, where the wanted range is not inside the measured one."""
    (low, high), (least, most) = ((min(v), max(v)) for v in (list(wanted), list(measured)))
    if least <= low and high <= most:
        return []
    return [f"{what.format(_span(low, high))} (measured: {_span(least, most)})"]


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
