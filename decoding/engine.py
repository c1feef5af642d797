"""The two halves of a step, for requests that share a KV cache: draft, then verify.

    draft(requests)          matches -> gate -> drafters -> one merged tree a request
    verify(requests, drafts) one forward of [pending token, tree] -> accepted path + new pending token -> commit

A scheduler owns the requests and orders the halves; the engine owns rows of the cache and the drafters' states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from activations.cache import KVCache
from activations.matching.match import Matches
from activations.sites import Site
from activations.target import Target
from decoding.budgets import Budget
from decoding.drafters import CopyDrafter, Drafter
from decoding.gates import Decision, Situation
from decoding.modes import Plan
from decoding.packing import tree_forward
from decoding.readings import Summary, summary
from decoding.request import TARGET, Request
from decoding.trace import StepRecord, Trace
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict

EMPTY = DraftTree((), (), (), ())
NO_ROOM = Decision((), "no room")


@dataclass(frozen=True)
class Draft:
    """What the first half hands to the second, for one request."""

    tree: DraftTree
    decision: Decision
    matches: Matches | None
    intent: float | None
    draft_ms: float
    """Spent by the drafters, for all requests together."""
    gate_ms: float
    """Spent on the rest of the half: matches, gate, merging."""


@dataclass(frozen=True)
class Commit:
    """What a step added to one request. Who meets a stop in it may shorten the lists."""

    request: Request
    tokens: list[int]
    """Accepted tokens and the new pending one."""
    sources: list[str]
    copied: bool = False
    """The copy drafter was asked for its draft."""


class Engine:
    """Runs the halves for up to `rows` requests at a time; each holds the cache row of its index in `requests`."""

    def __init__(self, target: Target, plan: Plan, rows: int = 1, trace: Trace | None = None, mode: str = "") -> None:
        self.target = target
        self.plan = plan
        self.trace = trace if trace is not None else Trace()
        self.mode = mode
        self.requests: list[Request] = []
        self._rows = rows
        self._cache = KVCache(rows, capacity=512)
        self._drafters: dict[str, Drafter] = {d.name: d for d in plan.drafters}
        self._copy = next((d for d in plan.drafters if isinstance(d, CopyDrafter)), None)
        self._intents: dict[Request, float] = {}
        self._readings: dict[Request, tuple[float, ...]] = {}
        self._steps: dict[Request, int] = {}
        self._began = perf_counter()
        self._sites = {d.name: target.sites(d.sites) for d in plan.drafters}
        self._probe_sites: list[Site] = target.sites(plan.probe.config.sites) if plan.probe is not None else []
        self._length_sites: list[Site] = target.sites(plan.lengths.config.sites) if plan.lengths is not None else []
        wanted = [s for sites in self._sites.values() for s in sites] + self._probe_sites + self._length_sites
        self._reader = target.read(wanted) if wanted else None

    # -- requests come and go -----------------------------------------------------------------------

    def admit(self, request: Request) -> Commit:
        """Prefill a request into a row of its own; its first token is chosen."""
        prompt = request.prompt
        alone = self._rows == 1
        cache = self._cache if alone else KVCache(1, capacity=len(prompt))
        if alone:
            cache.crop_row(0, 0)
        logits = self.target.forward(torch.tensor([prompt], device=self.target.device), cache, logits_to_keep=1)
        cache.commit([range(len(prompt))])
        request.tokens = list(prompt)
        [verdict] = self.plan.verifier.accept([EMPTY], logits, [request], self._reading(logits, prompt=True))
        if not alone:
            self._cache.load_row(len(self.requests), cache)
        self.requests.append(request)
        request.tokens.append(verdict.pending)
        request.sources.append(TARGET)
        self._keep(request, verdict)
        self._steps[request] = 0
        for drafter in self.plan.drafters:
            drafter.start(request, self._features(drafter, 0, None))
        return Commit(request, [verdict.pending], [TARGET])

    def leave(self, requests: Sequence[Request]) -> None:
        """Requests that have ended give up their rows; the others close ranks."""
        if not requests:
            return
        gone = set(requests)
        keep = [i for i, r in enumerate(self.requests) if r not in gone]
        for request in requests:
            for drafter in self.plan.drafters:
                drafter.close(request)
            self._intents.pop(request, None)
            self._readings.pop(request, None)
            self._steps.pop(request, None)
        holes = [i for i in range(len(keep)) if i not in keep]
        for hole in holes:  # the last ones move into the gaps
            last = keep.pop()
            self._cache.move_row(last, hole)
            keep.insert(hole, last)
        self.requests = [self.requests[i] for i in keep]
        for row in range(len(keep), self._rows):
            self._cache.lengths[row] = 0

    def shrink(self) -> None:
        """Drop rows that no request holds: none will come."""
        if 0 < len(self.requests) < self._rows:
            self._rows = len(self.requests)
            self._cache.truncate(self._rows)

    def close(self) -> None:
        """Detach the hooks and forget the requests. Safe to repeat."""
        self.leave(list(self.requests))
        if self._reader is not None:
            self._reader.close()

    # -- the halves ---------------------------------------------------------------------------------

    def draft(self) -> list[Draft]:
        """A tree for each request, empty where the gate abstains."""
        requests = self.requests
        entered = perf_counter()
        matches = [self._copy.match(r) if self._copy else None for r in requests]
        intents = [self._intents.get(r) for r in requests]
        decisions = [
            self.plan.gate.choose(self._situation(r, m, i)) if r.room > 0 else NO_ROOM
            for r, m, i in zip(requests, matches, intents, strict=True)
        ]
        asked: dict[str, list[tuple[int, Budget]]] = {}
        for i, decision in enumerate(decisions):
            for name, budget in decision.drafts:
                asked.setdefault(name, []).append((i, budget))
        began = perf_counter()
        grown: list[dict[str, DraftTree]] = [{} for _ in requests]
        for name, jobs in asked.items():
            proposed = self._drafters[name].propose([requests[i] for i, _ in jobs], [b for _, b in jobs])
            for (i, _), tree in zip(jobs, proposed, strict=True):
                if tree is not None and len(tree):
                    grown[i][name] = tree
        ended = perf_counter()
        merged = []
        for request, decision, own in zip(requests, decisions, grown, strict=True):
            parts = [own[name] for name, _ in decision.drafts if name in own]
            tree = DraftTree.merge(parts).cut(request.room) if parts else EMPTY
            merged.append(decision.trim(tree) if decision.trim is not None and len(tree) else tree)
        draft_ms = (ended - began) * 1e3
        gate_ms = (perf_counter() - entered) * 1e3 - draft_ms
        return [Draft(*parts, draft_ms, gate_ms) for parts in zip(merged, decisions, matches, intents, strict=True)]

    def verify(self, drafts: Sequence[Draft]) -> list[Commit]:
        """One forward over all requests; every request grows by its accepted path and a new pending token."""
        requests = self.requests
        began = perf_counter()
        trees = [d.tree for d in drafts]
        logits = tree_forward(self.target, self._cache, [r.tokens[-1] for r in requests], trees)
        verdicts = self.plan.verifier.accept(trees, logits, requests, self._reading(logits))
        judged = perf_counter()
        slots = [[0, *(i + 1 for i in v.path)] for v in verdicts]
        self._cache.commit([*slots, *((),) * (self._rows - len(slots))])
        commits = []
        for row, (request, draft, verdict) in enumerate(zip(requests, drafts, verdicts, strict=True)):
            commits.append(self._take(request, draft, verdict))
            for drafter in self.plan.drafters:
                drafter.observe(request, self._features(drafter, row, slots[row]))
        verify_ms = (judged - began) * 1e3
        rest_ms = (perf_counter() - judged) * 1e3
        for request, draft, verdict in zip(requests, drafts, verdicts, strict=True):
            self._record(request, draft, verdict, began, verify_ms, rest_ms)
        return commits

    # -- inside -------------------------------------------------------------------------------------

    def _take(self, request: Request, draft: Draft, verdict: Verdict) -> Commit:
        tree = draft.tree
        tokens = [tree.tokens[i] for i in verdict.path] + [verdict.pending]
        sources = [tree.source[i] for i in verdict.path] + [TARGET]
        request.tokens += tokens
        request.sources += sources
        self._keep(request, verdict)
        return Commit(request, tokens, sources, draft.decision.copies)

    def _record(
        self, request: Request, draft: Draft, verdict: Verdict, verified: float, verify_ms: float, rest_ms: float
    ) -> None:
        tree, matches = draft.tree, draft.matches
        record = StepRecord(
            request=request.number,
            step=self._steps[request],
            start=verified - (draft.draft_ms + draft.gate_ms) / 1e3 - self._began,
            position=len(request.tokens) - len(verdict.path) - 2,
            mode=self.mode,
            drafters=tuple(name for name, _ in draft.decision.drafts),
            reason=draft.decision.reason,
            intent=draft.intent,
            match_length=matches.longest if matches else 0,
            match_start=matches.starts[0] if matches and matches.starts else -1,
            tokens=tuple(tree.tokens),
            parents=tuple(tree.parents),
            source=tuple(tree.source),
            logq=tuple(tree.logq),
            accepted=tuple(verdict.path),
            pending=verdict.pending,
            rows=len(self.requests),
            draft_ms=draft.draft_ms,
            verify_ms=verify_ms,
            overhead_ms=draft.gate_ms + rest_ms,
        )
        self._steps[request] += 1
        self.plan.gate.observe(record)
        self.trace.add(record)

    def _features(self, drafter: Drafter, row: int, slots: list[int] | None) -> torch.Tensor | None:
        """States [n, sites * width] of a row's chosen slots (None: all) from the latest forward."""
        sites = self._sites[drafter.name]
        if not sites:
            return None
        assert self._reader is not None
        states = [self._reader.states[s][row] for s in sites]
        if slots is not None:
            index = torch.tensor(slots, device=states[0].device)
            states = [s.index_select(0, index) for s in states]
        return torch.cat(states, dim=-1)

    def _intent(self, slots: torch.Tensor) -> torch.Tensor:
        """The probe's output [requests] at a slot of each row: the states of its sites stand side by side."""
        assert self._reader is not None and self.plan.probe is not None
        row = torch.arange(len(slots), device=slots.device)
        states = [self._reader.states[site][row, slots] for site in self._probe_sites]
        return self.plan.probe.score(states[0] if len(states) == 1 else torch.cat(states, dim=-1))

    def _reading(self, logits: torch.Tensor, prompt: bool = False) -> Intent | None:
        """Reads what the gate asks for at a slot of each row: the probe's output, and for a length head the summary of
        the logits and the head's projection. Of a prompt only the last position's logits are computed: slot 0 there
        is the prompt's end."""
        lengths = self.plan.lengths
        if lengths is None:
            if not self._probe_sites:
                return None
            return (lambda slots: self._intent(slots - 1)) if prompt else self._intent

        def read(slots: torch.Tensor) -> torch.Tensor:
            assert self._reader is not None
            row = torch.arange(len(slots), device=slots.device)
            places = slots - 1 if prompt else slots
            intent = self._intent(places) if self._probe_sites else torch.full_like(slots, math.nan, dtype=torch.float)
            states = [self._reader.states[site][row, places] for site in self._length_sites]
            state = torch.cat([logits[row, slots][:, :0], *states], dim=-1)  # a head may read none
            return torch.cat([intent[:, None], summary(logits[row, slots]), lengths.project(state)], dim=-1)

        return read

    def _keep(self, request: Request, verdict: Verdict) -> None:
        """What was read at the new anchor."""
        if verdict.intent is not None:
            self._intents[request] = verdict.intent
        if verdict.readings:
            self._readings[request] = verdict.readings

    def _situation(self, request: Request, matches: Matches | None, intent: float | None) -> Situation:
        if self.plan.lengths is None:  # no gate without a length head asks for more
            return Situation(len(request.tokens), request.room, matches.longest if matches else 0, intent)
        readings = self._readings[request]
        return Situation(
            length=len(request.tokens),
            room=request.room,
            match_length=matches.longest if matches else 0,
            intent=intent,
            request=request.number,
            prompt=len(request.prompt),
            matches=matches,
            candidates=self._copy.candidates(request) if self._copy is not None else (),
            summary=Summary(*readings[:3]),
            readings=readings[3:],
        )
