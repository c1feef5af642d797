"""Replays gates over logged texts: the engine's own step, with a text where the target was and a cost table for a
clock.

A walk drives a real gate and the real copy drafter; the head's trees come from the log. What it counts is tokens per
millisecond of the cost table. Two upper bounds stand beside it:

    step oracle   at each step the option with the most tokens per millisecond, in hindsight
    path oracle   the cheapest way through the text over the same options (shortest path)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from activations.matching.match import MatchConfig
from decoding.budgets import Budget, FixedBudget, Growth
from decoding.costs import CostTable
from decoding.drafters import CopyDrafter
from decoding.gates import COPY, Decision, Gate, Situation
from decoding.loops import in_loops
from decoding.modes import SiteProbe
from decoding.readings import Summary
from decoding.replay_log import LoggedText
from decoding.request import Request
from decoding.trace import StepRecord, Trace
from decoding.tree import DraftTree
from probes.evaluation import Interval
from probes.length_head import LengthHead

EAGLE = "eagle"
NO_ROOM = Decision((), "no room")
EMPTY = DraftTree((), (), (), ())


@dataclass
class LoggedDrafter:
    """The head's drafts, read from the log of one text instead of computed."""

    text: LoggedText
    name: str = EAGLE
    sites: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "logged": True}

    def start(self, request: Request, features: torch.Tensor | None) -> None: ...

    def observe(self, request: Request, features: torch.Tensor | None) -> None: ...

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        raise NotImplementedError("a logged text has one row")

    def close(self, request: Request) -> None: ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [
            self.grow(len(r.tokens) - self.text.prompt - 1, b, r.room)[0]
            for r, b in zip(requests, budgets, strict=True)
        ]

    @cached_property
    def _depths(self) -> NDArray[np.integer]:
        parents = self.text.parents[0].tolist()  # all whole trees have one shape of levels
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths)

    def grow(self, position: int, budget: Budget, room: int) -> tuple[DraftTree | None, int]:
        """The tree that a budget makes of the whole one, and the levels that were drafted for it."""
        if room <= 0:
            return None, 0
        scores, k, length = self.text.scores[position], self.text.top_k, self.text.context(position)
        deepest = min(budget.depth, room, int(self._depths[-1]))
        depth = 1
        while depth < deepest:
            start, end = np.searchsorted(self._depths, [depth, depth + 1])
            level = scores[start:end]
            if not budget.go_on(Growth(level, depth, k, length)):
                break
            depth += 1
        count = int(np.searchsorted(self._depths, depth + 1))
        size = budget.size(Growth(scores[:count], depth, k, length))
        best = scores[:count].sort(descending=True, stable=True).indices[:size].sort().values
        place = {old: new for new, old in enumerate(best.tolist())}
        tokens, parents = self.text.tokens[position], self.text.parents[position]
        above = parents[best].tolist()
        total = scores.tolist()
        tree = DraftTree(
            tokens[best].tolist(),
            [place.get(p, -1) for p in above],
            [self.name] * len(place),
            [total[i] - (total[p] if p >= 0 else 0.0) for i, p in zip(best.tolist(), above, strict=True)],
        )
        return tree, depth


def follow(tree: DraftTree, ahead: Sequence[int]) -> list[int]:
    """Nodes of the path that a text takes through a tree."""
    node, path = -1, []
    for token in ahead:
        child = tree.children.get((node, token)) if len(tree) else None
        if child is None:
            break
        path.append(child)
        node = child
    return path


@dataclass
class Walk:
    """What a gate did over texts, by text."""

    tokens: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    steady_tokens: list[int] = field(default_factory=list)
    """The same of steps that did not begin inside a loop."""
    steady_milliseconds: list[float] = field(default_factory=list)
    steps: int = 0
    copies: int = 0
    """Steps that copied, alone or beside the head."""
    merged: int = 0
    """Steps at which both drafted."""
    plain: int = 0
    """Steps without a draft."""
    copied: int = 0
    """Tokens accepted from copies."""
    empty: int = 0
    """Steps that copied alone and had nothing accepted."""
    wasted: float = 0.0
    """Milliseconds of those."""

    @property
    def rate(self) -> float:
        """Tokens per second of the cost table."""
        return 1e3 * sum(self.tokens) / max(sum(self.milliseconds), 1e-9)

    @property
    def steady(self) -> float:
        """`rate` of the steps outside loops."""
        return 1e3 * sum(self.steady_tokens) / max(sum(self.steady_milliseconds), 1e-9)

    def add(self, tokens: Sequence[int], milliseconds: Sequence[float], loop: Sequence[bool]) -> None:
        """Another text, step by step."""
        self.tokens.append(sum(tokens))
        self.milliseconds.append(sum(milliseconds))
        self.steady_tokens.append(sum(t for t, inside in zip(tokens, loop, strict=True) if not inside))
        self.steady_milliseconds.append(sum(m for m, inside in zip(milliseconds, loop, strict=True) if not inside))
        self.steps += len(tokens)


def walk(
    text: LoggedText,
    gate: Gate,
    costs: CostTable,
    match: MatchConfig,
    head: LengthHead | None = None,
    probe: SiteProbe | None = None,
    into: Walk | None = None,
    trace: Trace | None = None,
) -> Walk:
    """One text from its first generated token to its last, step by step as the engine does it."""
    out = into if into is not None else Walk()
    ids = text.ids[: text.prompt + text.steps + 1]
    copy, neural = CopyDrafter(match), LoggedDrafter(text)
    request = Request(0, ids[: text.prompt], max_new_tokens=text.steps + 1, tokens=ids[: text.prompt + 1])
    copy.start(request, None)
    readings = _readings(text, head)
    intents = _intents(text, probe)
    inside = in_loops(ids)
    tokens: list[int] = []
    spent: list[float] = []
    begun: list[bool] = []
    while len(request.tokens) < len(ids):
        at = len(request.tokens)
        position = at - text.prompt - 1
        matches = copy.match(request)
        situation = Situation(
            length=at, room=request.room, match_length=matches.longest, intent=intents[position], prompt=text.prompt,
            matches=matches,
            candidates=tuple(copy.candidates(request)), summary=Summary(*text.summary[position].tolist()),
            readings=readings[position],
        )  # fmt: skip
        decision = gate.choose(situation) if request.room > 0 else NO_ROOM
        trees, time = [], 0.0
        for name, budget in decision.drafts:
            if name == COPY:
                [tree] = copy.propose([request], [budget])
            else:
                tree, levels = neural.grow(position, budget, request.room)
                time += costs.draft(name, levels)
            if tree is not None:
                trees.append(tree)
        tree = DraftTree.merge(trees).cut(request.room) if trees else EMPTY
        if decision.trim is not None and len(tree):
            tree = decision.trim(tree)
        path = follow(tree, ids[at:-1])
        time += costs.verify(1 + len(tree), at)
        gained = len(path) + 1
        sources = {tree.source[i] for i in path}
        copies = [name for name, _ in decision.drafts].count(COPY)
        out.copies += copies
        out.merged += len(decision.drafts) > 1
        out.plain += not len(tree)
        out.copied += sum(tree.source[i] == COPY for i in path)
        if copies and len(decision.drafts) == 1 and not sources:
            out.empty, out.wasted = out.empty + 1, out.wasted + time
        record = StepRecord(
            request=0, step=len(tokens), start=sum(spent) / 1e3, position=at - 1, mode="replay",
            drafters=tuple(name for name, _ in decision.drafts), reason=decision.reason, intent=intents[position],
            match_length=matches.longest, match_start=matches.starts[0] if matches.starts else -1,
            tokens=tuple(tree.tokens), parents=tuple(tree.parents), source=tuple(tree.source), logq=tuple(tree.logq),
            accepted=tuple(path), pending=ids[at + len(path)], rows=1, draft_ms=0.0, verify_ms=time, overhead_ms=0.0,
        )  # fmt: skip
        if trace is not None:
            trace.add(record)
        tokens.append(gained)
        spent.append(time)
        begun.append(bool(inside[at - 1]))
        request.tokens += ids[at : at + gained]
        copy.observe(request, None)
        gate.observe(record)
    out.add(tokens, spent, begun)
    return out


def _readings(text: LoggedText, head: LengthHead | None) -> list[tuple[float, ...]]:
    if head is None:
        return [()] * text.steps
    states = torch.cat([text.scores[:, :0], *(text.states[s] for s in head.config.sites)], dim=-1)
    return [tuple(row) for row in head.project(states).tolist()]


def _intents(text: LoggedText, probe: SiteProbe | None) -> list[float | None]:
    if probe is None:
        return [None] * text.steps
    states = torch.cat([text.states[s] for s in probe.config.sites], dim=-1)
    return [float(x) for x in probe.score(states)]


def replay(
    texts: Sequence[LoggedText],
    gate: Callable[[], Gate],
    costs: CostTable,
    match: MatchConfig,
    head: LengthHead | None = None,
    probe: SiteProbe | None = None,
) -> Walk:
    """A fresh gate over every text, as each generation has its own."""
    out = Walk()
    for text in texts:
        walk(text, gate(), costs, match, head, probe, out)
    return out


def speedup(walked: Walk, base: Walk, seed: int = 0, resamples: int = 1000) -> Interval:
    """Rate of a walk over that of another over the same texts, and its 95 % interval from a bootstrap over texts.

    Raises ValueError where the texts differ.
    """
    if walked.tokens != base.tokens:
        raise ValueError("a speedup needs two walks over the same texts")
    ours, theirs = np.array(walked.milliseconds), np.array(base.milliseconds)
    if len(ours) < 2:  # one text has no spread
        return Interval(walked.rate / base.rate, float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(ours), size=(resamples, len(ours)))
    low, high = np.quantile(theirs[drawn].sum(1) / ours[drawn].sum(1), [0.025, 0.975])
    return Interval(walked.rate / base.rate, float(low), float(high))


# -- oracles ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What each option would have given at every position of a text."""

    accepted: NDArray[np.integer]
    """[steps, options]"""
    nodes: NDArray[np.integer]
    """[steps, options]"""
    levels: NDArray[np.integer]
    """[steps, options], of the head."""


def options(text: LoggedText, match: MatchConfig, copies: Sequence[FixedBudget], neural: Sequence[Budget]) -> Options:
    """Option 0 drafts nothing; then the copies, then the head's budgets."""
    ids = text.ids[: text.prompt + text.steps + 1]
    copy, logged = CopyDrafter(match), LoggedDrafter(text)
    request = Request(0, ids[: text.prompt], max_new_tokens=text.steps + 1, tokens=ids[: text.prompt + 1])
    copy.start(request, None)
    shape = (text.steps, 1 + len(copies) + len(neural))
    accepted, nodes, levels = (np.zeros(shape, np.int32) for _ in range(3))
    for position in range(text.steps):
        at = len(request.tokens)
        if request.room > 0:
            grown: list[tuple[DraftTree | None, int]] = [(copy.propose([request], [b])[0], 0) for b in copies]
            grown += [logged.grow(position, b, request.room) for b in neural]
            for i, (tree, depth) in enumerate(grown, 1):
                if tree is not None:
                    accepted[position, i] = len(follow(tree, ids[at:-1]))
                    nodes[position, i], levels[position, i] = len(tree), depth
        request.tokens.append(ids[at])
        copy.observe(request, None)
    return Options(accepted, nodes, levels)


def oracle(texts: Sequence[LoggedText], found: Sequence[Options], costs: CostTable, path: bool = False) -> Walk:
    """The step oracle over the options, or the path oracle."""
    out = Walk()
    for text, option in zip(texts, found, strict=True):
        steps = text.steps
        time = np.array(
            [
                [
                    costs.draft(EAGLE, int(d)) * (d > 0) + costs.verify(1 + int(n), text.context(i))
                    for n, d in zip(option.nodes[i], option.levels[i], strict=True)
                ]
                for i in range(steps)
            ]
        )
        gained = np.minimum(1 + option.accepted, steps - np.arange(steps)[:, None])
        chosen = (gained / time).argmax(1)
        if path:
            left = np.zeros(steps + 1)
            for i in range(steps - 1, -1, -1):
                total = time[i] + left[i + gained[i]]
                chosen[i] = total.argmin()
                left[i] = total[chosen[i]]
        inside = in_loops(text.ids[: text.prompt + steps + 1])
        tokens, spent, begun = [], [], []
        at = 0
        while at < steps:
            tokens.append(int(gained[at, chosen[at]]))
            spent.append(float(time[at, chosen[at]]))
            begun.append(bool(inside[text.prompt + at]))
            at += tokens[-1]
        out.add(tokens, spent, begun)
    return out
