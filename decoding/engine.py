"""The two halves of a step, for requests that share a KV cache: draft, then verify.

    draft(requests)  matches -> gate -> drafters -> one merged tree a row
    verify(drafts)   one forward of [pending token, tree] -> accepted path + new pending token -> commit

A scheduler owns the requests and orders the halves, for all of them or for some; the engine owns the rows of the cache
and the drafters' states. A request has one row, or one for each of its particles, which the halves treat as requests
of their own.
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
from decoding.rows import Rows
from decoding.trace import StepRecord, Trace
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict

LOG = logging.getLogger("switchsd")
EMPTY = DraftTree((), (), (), ())
NO_ROOM = Decision((), "no room")


@dataclass(frozen=True)
class Asked:
    """A first half that has begun: the drafters have been asked."""

    rows: list[Request]
    decisions: list[Decision]
    matches: list[Matches | None]
    intents: list[float | None]
    answers: list[tuple[str, list[int], Callable[[], Sequence[DraftTree | None]]]]
    """A drafter, the rows that it was asked about, and what waits for its trees."""
    gate_ms: float


@dataclass(frozen=True)
class Draft:
    """What the first half hands to the second, for one row."""

    request: Request
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
        self.rows = rows
        """Most requests at a time."""
        self._keeps = keeps
        self._kept: Request | None = None
        self._rows = Rows(rows * plan.particles)
        self._drafters: dict[str, Drafter] = {d.name: d for d in plan.drafters}
        self._intents: dict[Request, float] = {}
        self._readings: dict[Request, tuple[float, ...]] = {}
        self._steps: dict[Request, int] = {}
        self._texts: dict[Request, int] = {}
        """Where each request's text stands in the trace."""
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
        """Prefill a request into its rows; its first token is chosen, by each particle for itself. Where drafts compete
        for that one too, the prompt's last token is left pending, and the commit is empty."""
        prompt, opens = request.prompt, self.plan.verifier.opens
        start = self.reused = self._common(prompt)
        fed = prompt[start : len(prompt) - opens]
        cache = self._rows.free(start)
        logits = self._prefill(fed, cache) if fed else torch.empty(0)
        rows = request.split(self.plan.particles)
        request.tokens = list(prompt)
        for row in rows:
            row.tokens = list(prompt)
        verdicts: list[Verdict] = []
        if not opens:
            reading = self._reading(logits, prompt=True)
            verdicts = [self.plan.verifier.accept([EMPTY], logits, [row], reading)[0] for row in rows]
        self._rows.hold(rows)
        self.requests.append(request)
        self._texts[request] = self.trace.begin(request)
        self._steps.update(dict.fromkeys(rows, 0))
        for row, verdict in zip(rows, verdicts, strict=False):
            row.tokens.append(verdict.pending)
            row.sources.append(TARGET)
            self._keep(row, verdict)
        for drafter in list(self._drafters.values()):
            features = self._features(drafter, 0, None)
            for row in rows:
                if start and self._kept is not None:
                    self._guarded(
                        drafter,
                        lambda d=drafter, r=row, f=features, old=self._kept: d.resume(r, f, old, start),  # type: ignore[misc]
                    )
                else:
                    self._guarded(drafter, lambda d=drafter, r=row, f=features: d.start(r, f))  # type: ignore[misc]
        self._forget()
        if request.particles:
            return self._together(request)
        return Commit(request, list(request.generated), list(request.sources))

    def _prefill(self, tokens: list[int], cache: KVCache) -> torch.Tensor:
        """The cache's only row comes to hold these tokens too; logits [1, 1, V] after the last one."""
        logits = self.target.forward(torch.tensor([tokens], device=self.target.device), cache, logits_to_keep=1)
        cache.commit([range(len(tokens))])
        return logits

    def leave(self, requests: Sequence[Request]) -> None:
        """Requests that have ended give up their rows; the others close ranks."""
        if not requests:
            return
        rows = [row for request in requests for row in request.rows]
        self._rows.leave(rows[::-1])  # the last first, so that a group moves nothing, and leaves its first row as it is
        gone = set(requests)
        self.requests = [r for r in self.requests if r not in gone]
        if self._keeps:
            [self._kept] = requests
            return
        for request in requests:
            self._close(request)

    def _common(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the kept request has in its row, for the target and for every drafter.

        One less than both have in common: the last token's logits are wanted, and a drafter may have paired the state
        of a position with the token after it.
        """
        if self._kept is None:
            return 0
        have = self._kept.rows[0].tokens[: self._rows.cache.lengths[0]]  # not of the particle that was chosen
        return max(_agreement([have, prompt]) - 1, 0)

    def _forget(self) -> None:
        """The kept request has served."""
        if self._kept is not None:
            self._close(self._kept)
            self._kept = None

    def _close(self, request: Request) -> None:
        for row in request.rows:
            for drafter in self.plan.drafters:
                drafter.close(row)
            self._intents.pop(row, None)
            self._readings.pop(row, None)
            self._steps.pop(row, None)
        self._texts.pop(request, None)
        self.plan.verifier.close(request)

    def close(self) -> None:
        """Detach the hooks and forget the requests. Safe to repeat."""
        self.leave(list(self.requests))
        self._forget()
        if self._reader is not None:
            self._reader.close()

    # -- the halves ---------------------------------------------------------------------------------

    def draft(self, requests: Sequence[Request] | None = None) -> list[Draft]:
        """A tree for each row of the requests (all of them by default), empty where the gate abstains."""
        return self.finish(self.begin(requests))

    def begin(self, requests: Sequence[Request] | None = None) -> Asked:
        """The first part of `draft`: the gate decides, and drafters that can be asked ahead are asked."""
        rows = [row for request in (self.requests if requests is None else requests) for row in request.rows]
        entered = perf_counter()
        matches = self._matches(rows)
        intents = [self._intents.get(r) for r in rows]
        decisions = [
            self.plan.gate.choose(self._situation(r, m, i)) if r.room > 0 and not r.ended else NO_ROOM
            for r, m, i in zip(rows, matches, intents, strict=True)
        ]
        jobs: dict[str, list[tuple[int, Budget]]] = {}
        for i, decision in enumerate(decisions):
            for name, budget in decision.drafts:
                jobs.setdefault(name, []).append((i, budget))
        answers = [
            (name, [i for i, _ in mine], self._ask(name, [rows[i] for i, _ in mine], [budget for _, budget in mine]))
            for name, mine in jobs.items()
        ]
        return Asked(rows, decisions, matches, intents, answers, (perf_counter() - entered) * 1e3)

    def finish(self, asked: Asked) -> list[Draft]:
        """The second part of `draft`: the trees, of the rows that are still there."""
        began = perf_counter()
        grown: list[dict[str, DraftTree]] = [{} for _ in asked.rows]
        for name, places, answer in asked.answers:
            for i, tree in zip(places, answer(), strict=True):
                if tree is not None and len(tree):
                    grown[i][name] = tree
        ended = perf_counter()
        merged = []
        for request, decision, own in zip(asked.rows, asked.decisions, grown, strict=True):
            parts = [own[name] for name, _ in decision.drafts if name in own]
            tree = DraftTree.merge(parts).cut(request.room) if parts else EMPTY
            merged.append(decision.trim(tree) if decision.trim is not None and len(tree) else tree)
        gate_ms = asked.gate_ms + (perf_counter() - ended) * 1e3
        drafts = zip(asked.rows, merged, asked.decisions, asked.matches, asked.intents, strict=True)
        return [Draft(*parts, (ended - began) * 1e3, gate_ms) for parts in drafts if parts[0] in self._rows]

    def verify(self, drafts: Sequence[Draft]) -> list[Commit]:
        """One forward over the rows that were drafted for; each grows by its accepted path and a new pending token.

        One commit a request. All rows of a request must be there, side by side, as `draft` gives them.
        """
        drafts = [d for d in drafts if d.request in self._rows]
        if not drafts:
            return []
        rows = [d.request for d in drafts]
        began = perf_counter()
        trees = [d.tree for d in drafts]
        cache = self._rows.take(rows)
        logits = tree_forward(self.target, cache, [r.tokens[-1] for r in rows], trees)
        verdicts = self.plan.verifier.accept(trees, logits, rows, self._reading(logits))
        judged = perf_counter()
        slots = [[] if v.rests else [0, *(i + 1 for i in v.path)] for v in verdicts]
        cache.commit(slots)
        commits = []
        for row, (request, draft, verdict) in enumerate(zip(rows, drafts, verdicts, strict=True)):
            if verdict.rests:
                continue
            commit = self._take(request, draft, verdict)
            if request is request.group:
                commits.append(commit)
            for drafter in list(self._drafters.values()):
                features = self._features(drafter, row, slots[row])
                self._guarded(drafter, lambda d=drafter, r=request, f=features: d.observe(r, f))  # type: ignore[misc]
        groups = dict.fromkeys(r.group for r in rows if r.particles or r.owner)
        for group in groups:
            at = rows.index(group.particles[0])
            ancestors = [v.ancestor for v in verdicts[at : at + len(group.particles)]]
            self._resample(group, [i if a is None else a - at for i, a in enumerate(ancestors)])
            commits.append(self._together(group))
        verify_ms = (judged - began) * 1e3
        rest_ms = (perf_counter() - judged) * 1e3
        for draft, verdict in zip(drafts, verdicts, strict=True):
            if not verdict.rests:
                self._record(draft, verdict, len(rows), began, verify_ms, rest_ms)
        return commits

    # -- particles ------------------------------------------------------------------------------------

    def _resample(self, group: Request, ancestors: Sequence[int]) -> None:
        """Particle i goes on from where particle ancestors[i] is."""
        if all(i == a for i, a in enumerate(ancestors)):
            return
        particles = group.particles
        texts = [p.tokens for p in particles]
        # The last token of a text is pending, and has no state yet.
        same = min(_agreement(texts, len(group.tokens)), min(map(len, texts)) - 1)
        self._rows.take(particles).select(ancestors, same)
        for drafter in list(self._drafters.values()):
            self._guarded(drafter, lambda d=drafter: d.select(particles, ancestors, same))  # type: ignore[misc]
        states = [(list(p.tokens), list(p.sources), p.ended) for p in particles]
        for particle, ancestor in zip(particles, ancestors, strict=True):
            tokens, sources, particle.ended = states[ancestor]
            particle.tokens, particle.sources = list(tokens), list(sources)

    def _together(self, group: Request) -> Commit:
        """What all particles newly agree on; at the end, the rest of the one that is chosen."""
        chosen = self.plan.verifier.pick(group)
        told, prompt = len(group.tokens), len(group.prompt)
        one = chosen or group.particles[0]
        until = len(one.tokens) if chosen else _agreement([p.tokens for p in group.particles], told)
        tokens, sources = one.tokens[told:until], one.sources[told - prompt : until - prompt]
        group.tokens += tokens
        group.sources += sources
        return Commit(group, tokens, sources)

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

    def _matches(self, rows: Sequence[Request]) -> list[Matches | None]:
        copy = self._drafters.get(COPY)
        if not isinstance(copy, CopyDrafter):
            return [None] * len(rows)
        found = self._guarded(copy, lambda: [copy.match(request) for request in rows])
        return found if found is not None else [None] * len(rows)

    def _candidates(self, request: Request) -> Sequence[Sequence[int]]:
        copy = self._drafters.get(COPY)
        found = self._guarded(copy, lambda: copy.candidates(request)) if isinstance(copy, CopyDrafter) else None
        return found or ()

    def _ask(
        self, name: str, requests: Sequence[Request], budgets: Sequence[Budget]
    ) -> Callable[[], Sequence[DraftTree | None]]:
        """Waits for a drafter's trees, checked; none of them if it fails. One that lives elsewhere begins at once."""
        drafter = self._drafters.get(name)
        nothing: list[DraftTree | None] = [None] * len(requests)
        if drafter is None:
            return lambda: nothing
        ask = getattr(drafter, "ask", None)
        answer = self._guarded(drafter, lambda: ask(requests, budgets)) if ask is not None else None

        def trees() -> list[DraftTree | None]:
            found: list[DraftTree | None] = answer() if answer is not None else drafter.propose(requests, budgets)
            if len(found) != len(requests):
                raise ValueError(f"{len(found)} trees for {len(requests)} requests")
            for tree in found:
                if tree is not None:
                    tree.check(self.target.vocab_size)
            return found

        def checked() -> list[DraftTree | None]:
            if drafter.name not in self._drafters:  # it has failed since
                return nothing
            found = self._guarded(drafter, trees)
            return nothing if found is None else found

        return checked

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
        self, draft: Draft, verdict: Verdict, rows: int, verified: float, verify_ms: float, rest_ms: float
    ) -> None:
        request, tree, matches = draft.request, draft.tree, draft.matches
        record = StepRecord(
            request=request.number,
            step=self._steps[request],
            start=verified - (draft.draft_ms + draft.gate_ms) / 1e3 - self.trace.began,
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
            rows=rows,
            particle=request.particle,
            log_weight=verdict.log_weight,
            ess=verdict.ess,
            asked=verdict.asked,
            kept=verdict.kept,
            text=self._texts[request.group],
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
            row = torch.arange(len(slots), device=slots.device)
            places = slots - 1 if prompt else slots
            intent = self._intent(places) if self._probe_sites else torch.full_like(slots, math.nan, dtype=torch.float)
            read_there = self._reader.states if self._reader is not None else {}
            states = [read_there[site][row, places] for site in self._length_sites]
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
            longest = matches.longest if matches else 0
            return Situation(len(request.tokens), request.room, longest, intent, request.number)
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


def _agreement(texts: Sequence[Sequence[int]], known: int = 0) -> int:
    """How many tokens all texts begin with, of which `known` are known to be equal."""
    rests = [text[known:] for text in texts]
    for same, tokens in enumerate(zip(*rests, strict=False)):
        if any(t != tokens[0] for t in tokens[1:]):
            return known + same
    return known + min(map(len, rests))
