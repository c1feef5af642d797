"""The two halves of a step, for requests that share a KV cache: draft, then verify.

    draft(requests)          matches -> gate -> drafters -> one merged tree a request
    verify(requests, drafts) one forward of [pending token, tree] -> accepted path + new pending token -> commit

A scheduler owns the requests and orders the halves; the engine owns rows of the cache and the drafters' states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from activations.cache import KVCache
from activations.matching.match import Matches
from activations.sites import Site
from activations.target import Target
from decoding.budgets import Budget
from decoding.drafters import CopyDrafter, Drafter
from decoding.gates import COPY, Decision, Situation
from decoding.modes import Plan
from decoding.packing import tree_forward
from decoding.readings import Summary, summary
from decoding.request import TARGET, Request
from decoding.trace import StepRecord, Trace
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict

LOG = logging.getLogger("switchsd")
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
    cut: str = ""
    """Why the request ends here, where it is not for its text."""


class Engine:
    """Runs the halves for up to `rows` requests at a time; each holds the cache row of its index in `requests`."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        rows: int = 1,
        trace: Trace | None = None,
        mode: str = "",
        keeps: bool = False,
    ) -> None:
        """`keeps`: with a single row, what was computed for the latest request stays, and the next one starts from
        what both have in common (the turns of a chat)."""
        if keeps and rows != 1:
            raise ValueError(f"an engine that keeps its latest request has one row, not {rows}")
        self.target = target
        self.plan = plan
        self.trace = trace if trace is not None else Trace()
        self.mode = mode
        self.requests: list[Request] = []
        self.reused = 0
        """Prompt tokens of the latest request that were not computed again."""
        self._rows = rows
        self._keeps = keeps
        self._kept: Request | None = None
        self._cache = KVCache(rows)
        self._drafters: dict[str, Drafter] = {d.name: d for d in plan.drafters}
        self._intents: dict[Request, float] = {}
        self._readings: dict[Request, tuple[float, ...]] = {}
        self._steps: dict[Request, int] = {}
        self._began = perf_counter()
        self._sites: dict[str, list[Site]] = {}
        for drafter in plan.drafters:
            found = self._guarded(drafter, lambda d=drafter: target.sites(d.sites))  # type: ignore[misc]
            self._sites[drafter.name] = found or []
        self._probe_sites: list[Site] = target.sites(plan.probe.config.sites) if plan.probe is not None else []
        self._length_sites: list[Site] = target.sites(plan.lengths.config.sites) if plan.lengths is not None else []
        wanted = [s for sites in self._sites.values() for s in sites] + self._probe_sites + self._length_sites
        self._reader = target.read(wanted) if wanted else None

    # -- requests come and go -----------------------------------------------------------------------

    def admit(self, request: Request) -> Commit:
        """Prefill a request into a row of its own; its first token is chosen."""
        prompt = request.prompt
        alone = self._rows == 1
        cache = self._cache if alone else KVCache(1)
        start = self.reused = self._common(prompt)
        if alone:
            cache.crop_row(0, start)
        logits = self.target.forward(torch.tensor([prompt[start:]], device=self.target.device), cache, logits_to_keep=1)
        cache.commit([range(len(prompt) - start)])
        request.tokens = list(prompt)
        [verdict] = self.plan.verifier.accept([EMPTY], logits, [request], self._reading(logits, prompt=True))
        if not alone:
            self._cache.load_row(len(self.requests), cache)
        self.requests.append(request)
        request.tokens.append(verdict.pending)
        request.sources.append(TARGET)
        self._keep(request, verdict)
        self._steps[request] = 0
        for drafter in list(self._drafters.values()):
            features = self._features(drafter, 0, None)
            if start and self._kept is not None:
                self._guarded(
                    drafter,
                    lambda d=drafter, f=features, old=self._kept: d.resume(request, f, old, start),  # type: ignore[misc]
                )
            else:
                self._guarded(drafter, lambda d=drafter, f=features: d.start(request, f))  # type: ignore[misc]
        self._forget()
        return Commit(request, [verdict.pending], [TARGET])

    def leave(self, requests: Sequence[Request]) -> None:
        """Requests that have ended give up their rows; the others close ranks."""
        if not requests:
            return
        if self._keeps:
            [self._kept], self.requests = requests, []
            return
        gone = set(requests)
        keep = [i for i, r in enumerate(self.requests) if r not in gone]
        for request in requests:
            self._close(request)
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

    @property
    def rows(self) -> int:
        """Most requests at a time."""
        return self._rows

    def _common(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the kept request has in its row, for the target and for every drafter.

        One less than both have in common: the last token's logits are wanted, and a drafter may have paired the state
        of a position with the token after it.
        """
        if self._kept is None:
            return 0
        have = self._kept.tokens[: self._cache.lengths[0]]
        same = next(
            (i for i, (a, b) in enumerate(zip(have, prompt, strict=False)) if a != b), min(len(have), len(prompt))
        )
        return max(same - 1, 0)

    def _forget(self) -> None:
        """The kept request has served."""
        if self._kept is not None:
            self._close(self._kept)
            self._kept = None

    def _close(self, request: Request) -> None:
        for drafter in self.plan.drafters:
            drafter.close(request)
        self._intents.pop(request, None)
        self._readings.pop(request, None)
        self._steps.pop(request, None)

    def close(self) -> None:
        """Detach the hooks and forget the requests. Safe to repeat."""
        self.leave(list(self.requests))
        self._forget()
        if self._reader is not None:
            self._reader.close()

    # -- the halves ---------------------------------------------------------------------------------

    def draft(self) -> list[Draft]:
        """A tree for each request, empty where the gate abstains."""
        requests = self.requests
        entered = perf_counter()
        matches = self._matches()
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
            for (i, _), tree in zip(jobs, self._proposed(name, requests, jobs), strict=True):
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
            for drafter in list(self._drafters.values()):
                features = self._features(drafter, row, slots[row])
                self._guarded(drafter, lambda d=drafter, r=request, f=features: d.observe(r, f))  # type: ignore[misc]
        verify_ms = (judged - began) * 1e3
        rest_ms = (perf_counter() - judged) * 1e3
        for request, draft, verdict in zip(requests, drafts, verdicts, strict=True):
            self._record(request, draft, verdict, began, verify_ms, rest_ms)
        return commits

    # -- drafters fail, the text goes on --------------------------------------------------------------

    def _guarded(self, drafter: Drafter, call: Callable[[], Any]) -> Any:
        """What the call gives; None, and the drafter is left out from now on, if it raises. A draft is a guess, and
        whatever happens to it, the target's text must not suffer."""
        try:
            return call()
        except Exception as error:
            if self._drafters.pop(drafter.name, None) is not None:
                told = " ".join(str(error).split())[:300] or type(error).__name__
                LOG.warning("The %s drafter failed (%s): the target goes on without it.", drafter.name, told)
            return None

    def _matches(self) -> list[Matches | None]:
        copy = self._drafters.get(COPY)
        if not isinstance(copy, CopyDrafter):
            return [None] * len(self.requests)
        found = self._guarded(copy, lambda: [copy.match(request) for request in self.requests])
        return found if found is not None else [None] * len(self.requests)

    def _candidates(self, request: Request) -> Sequence[Sequence[int]]:
        copy = self._drafters.get(COPY)
        found = self._guarded(copy, lambda: copy.candidates(request)) if isinstance(copy, CopyDrafter) else None
        return found or ()

    def _proposed(
        self, name: str, requests: Sequence[Request], jobs: Sequence[tuple[int, Budget]]
    ) -> Sequence[DraftTree | None]:
        """A drafter's trees for its jobs (row and budget), checked; none of them if it fails."""
        drafter = self._drafters.get(name)
        if drafter is None:
            return [None] * len(jobs)

        def propose() -> list[DraftTree | None]:
            trees = drafter.propose([requests[i] for i, _ in jobs], [budget for _, budget in jobs])
            if len(trees) != len(jobs):
                raise ValueError(f"{len(trees)} trees for {len(jobs)} requests")
            for tree in trees:
                if tree is not None:
                    tree.check(self.target.vocab_size)
            return trees

        found: list[DraftTree | None] | None = self._guarded(drafter, propose)
        return found if found is not None else [None] * len(jobs)

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
            candidates=self._candidates(request),
            summary=Summary(*readings[:3]),
            readings=readings[3:],
        )
