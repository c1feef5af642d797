"""The verifier of mode cospec: where the target would write another token than the draft, an arbiter chooses.

A kept draft lets the scan go on in the same block: what the target says after it was computed with it in place. Taking
the target's token ends the block, as it always does. After a block's last token the target's own follows.

Unlike other modes, this one lets the draft compete for the first token of an answer too.

Source: CoSpec, arXiv 2605.24793. The paper's policy, states and training are not public: these are this project's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from activations.sampling import uniform
from activations.target import Target
from decoding.cospec.state import STATE, STOP, Mismatches, states, token_classes
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict, Verifier, _choose, columns, split

TAKE, KEEP = 0, 1
"""The policy's actions: the target's token, the draft's."""
ARBITER = "arbiter"
"""Stream of a random arbiter's noise."""


class Asked:
    """Mismatches that are put to an arbiter; what it does not look at is not computed."""

    def __init__(
        self, requests: Sequence[Request], positions: torch.Tensor, ordinals: torch.Tensor,
        mismatches: Callable[[], Mismatches], classes: torch.Tensor,
    ) -> None:  # fmt: skip
        self.requests = requests
        self.positions = positions  # [m], in the text
        self.ordinals = ordinals  # [m], of the answer's mismatches, from 0 on
        self._mismatches = mismatches
        self._classes = classes

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def mismatches(self) -> Mismatches:
        return self._mismatches()

    @cached_property
    def states(self) -> torch.Tensor:
        """Float32 [m, features]."""
        return states(self.mismatches, self._classes)


class Arbiter(Protocol):
    """Chooses between the draft's token and the target's."""

    def decide(self, asked: Asked) -> torch.Tensor:
        """Bool [m]: where the draft's token is kept. Each row is decided by itself, whatever the others are."""
        ...

    def describe(self) -> dict[str, Any]:
        """What its choices depend on, for JSON."""
        ...


@dataclass(frozen=True)
class PolicyArbiter:
    """Keeps a draft where the policy's probability that it should reaches the threshold; never at threshold 1, which is
    exact speculative decoding."""

    policy: Policy
    threshold: float = 0.5

    def __post_init__(self) -> None:
        _share("threshold", self.threshold)
        if (self.policy.features, self.policy.actions) != (len(STATE), 2):
            raise PolicyError(
                f"an arbitration policy has {len(STATE)} inputs and 2 actions, and this one {self.policy.features} and "
                f"{self.policy.actions}: train one with `switchsd train-policy cospec`"
            )

    @classmethod
    def of(cls, artifact: PolicyArtifact, threshold: float | None = None) -> PolicyArbiter:
        """The artifact's policy, by default with its own threshold. Raises PolicyError where it was trained on other
        states than these."""
        if artifact.settings.get("state") != list(STATE):
            raise PolicyError("the arbitration policy was trained on other states than this switchsd's: train it again")
        chosen = artifact.settings.get("threshold") if threshold is None else threshold
        if not isinstance(chosen, (int, float)) or isinstance(chosen, bool) or not 0 <= chosen <= 1:
            raise PolicyError(
                f"the threshold of the arbitration policy is {chosen!r}; it must lie in [0, 1]: train the policy again "
                f"with `switchsd train-policy cospec` {f'({artifact.origin})' if artifact.origin else ''}".rstrip()
            )
        return cls(artifact.networks["arbitration"], float(chosen))

    def decide(self, asked: Asked) -> torch.Tensor:
        if self.threshold == 1:  # no states are needed
            return torch.zeros(len(asked), dtype=torch.bool, device=asked.positions.device)
        return self.choose(asked.states)

    def choose(self, states: torch.Tensor) -> torch.Tensor:
        """Bool [m], for states [m, features]."""
        return (keep_probability(self.policy, states) >= self.threshold) & (self.threshold < 1)

    def describe(self) -> dict[str, Any]:
        return {"name": "policy", "threshold": self.threshold, "policy": self.policy.digest[:16]}


def keep_probability(policy: Policy, states: torch.Tensor) -> torch.Tensor:
    """[m], of states [m, features]: that the draft's token should be kept."""
    logits = policy(states)
    return (logits[:, KEEP] - logits[:, TAKE]).sigmoid()


@dataclass(frozen=True)
class RandomArbiter:
    """Keeps drafts at this rate; which ones is a function of seed, request and position."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _share("rate", self.rate)

    def decide(self, asked: Asked) -> torch.Tensor:
        keys = torch.tensor([r.key for r in asked.requests], device=asked.positions.device)
        return uniform(self.seed, keys, asked.positions, ARBITER) < self.rate

    def describe(self) -> dict[str, Any]:
        return {"name": "random", "rate": self.rate, "seed": self.seed}


@dataclass(frozen=True)
class AlwaysDraft:
    """Keeps every draft."""

    def decide(self, asked: Asked) -> torch.Tensor:
        return torch.ones(len(asked), dtype=torch.bool, device=asked.positions.device)

    def describe(self) -> dict[str, Any]:
        return {"name": "draft"}


@dataclass(frozen=True)
class RatioArbiter:
    """Keeps a draft that the target finds nearly as likely as its own token: p(draft) / p(target) reaches the ratio."""

    ratio: float

    def __post_init__(self) -> None:
        if not self.ratio > 0:
            raise ValueError(f"ratio is {self.ratio}; it must be above 0")

    def decide(self, asked: Asked) -> torch.Tensor:
        m = asked.mismatches
        logits = m.target_logits.float()
        ratio = (logits.gather(1, m.draft[:, None]) - logits.gather(1, m.target[:, None]))[:, 0].exp()
        return ratio >= self.ratio

    def describe(self) -> dict[str, Any]:
        return {"name": "ratio", "ratio": self.ratio}


@dataclass
class ScriptedArbiter:
    """Follows a script: decisions by request number, for its answer's first mismatches; `rest` decides the others."""

    scripts: Mapping[int, Sequence[bool]]
    rest: Arbiter | None = None
    """None: the target's token."""

    def decide(self, asked: Asked) -> torch.Tensor:
        told = [self.scripts.get(r.number, ()) for r in asked.requests]
        ordinals = asked.ordinals.tolist()
        open_rows = [i for i, (script, at) in enumerate(zip(told, ordinals, strict=True)) if at >= len(script)]
        rest = [False] * len(asked)
        if open_rows and self.rest is not None:
            rest = self.rest.decide(asked).tolist()
        chosen = [
            script[at] if at < len(script) else free for script, at, free in zip(told, ordinals, rest, strict=True)
        ]
        return torch.tensor(chosen, dtype=torch.bool, device=asked.positions.device)

    def describe(self) -> dict[str, Any]:
        return {"name": "script", "rest": None if self.rest is None else self.rest.describe()}


class Decision(NamedTuple):
    """A mismatch, and what became of it."""

    target: int
    """The target's token."""
    draft: int
    position: int
    """In the text."""
    kept: bool
    state: torch.Tensor
    """Float32 [features], on the host."""


@dataclass
class Running:
    """What a request's answer has met."""

    asked: int = 0
    kept: int = 0
    drafted: int = 0
    """Drafted tokens that were looked at."""
    matched: int = 0
    """Of these, the target's own."""
    last: int = 0
    """Whether the latest mismatch's draft was kept: 1 or -1; 0 for none."""
    decisions: list[Decision] = field(default_factory=list)
    """Where they are recorded."""

    def after(self, asked: int, kept: int, drafted: int, matched: int) -> tuple[int, int, int, int, int]:
        """The counts once a block has added these, and the latest decision: (asked, kept, last, drafted, matched). A
        block goes on only where drafts are kept."""
        last = 1 if asked else self.last
        return self.asked + asked, self.kept + kept, last, self.drafted + drafted, self.matched + matched


class ArbitrationVerifier(Verifier):
    """Follows the target, but where its token differs from the drafted one an arbiter says which stands. For chains
    whose drafter tells what it thinks (`q_logits`).

    A draft's stop token may stand where the target would go on; not so without `stops`. Behind a stop token nothing is
    asked.
    """

    lossless = False
    keyed = False
    opens = True

    def __init__(self, target: Target, arbiter: Arbiter, stops: bool = True, records: bool = False) -> None:
        """`stops`: the arbiter may end a text by the draft's stop token. `records`: keep every decision, with its
        state, until the request is closed."""
        self.arbiter = arbiter
        self.stops = stops
        self.records = records
        self._target = target
        self._running: dict[Request, Running] = {}

    @classmethod
    def of(cls, target: Target, artifact: PolicyArtifact, threshold: float | None = None) -> ArbitrationVerifier:
        """With the artifact's policy and rules, and by default its threshold. Raises PolicyError where the artifact
        lacks any of them, or was trained on other states than these."""
        settings = artifact.settings
        stops, tokens = settings.get("stops"), settings.get("draft_tokens")
        if not isinstance(stops, bool) or type(tokens) is not int or tokens < 1:
            raise PolicyError(
                f"the arbitration policy has stops={stops!r} and draft_tokens={tokens!r}; they must be true or false, "
                "and a count: train it again with `switchsd train-policy cospec`"
            )
        return cls(target, PolicyArbiter.of(artifact, threshold), stops)

    def describe(self) -> dict[str, Any]:
        """Settings that the text depends on, for JSON."""
        return {"arbiter": self.arbiter.describe(), "stops": self.stops}

    def close(self, group: Request) -> None:
        """Forget a request. Safe to repeat."""
        self._running.pop(group, None)

    def running(self, request: Request) -> Running:
        """What the request's answer has met so far."""
        return self._running.setdefault(request, Running())

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        """Judge `logits` [B, Q, V] of [pending token, nodes of the chain, padding] in each row. Raises ValueError for
        a tree that branches."""
        for tree in trees:
            if not tree.is_chain:
                raise ValueError("arbitration judges chains, and a draft branches: use a draft model")
        return super().accept(trees, logits, requests, intent)

    def _accept_lazily(
        self, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request], intent: Intent | None
    ) -> list[Verdict]:
        """Only the nodes on the path are looked at, and the states of the mismatches on it."""
        walks = [_Walk() for _ in requests]
        stops = self._target.stop_ids
        pending = [0] * len(requests)
        walking = list(range(len(requests)))
        while walking:  # all rows take a step down together
            slots = [walks[row].path for row in walking]
            here = [requests[row] for row in walking]
            positions = [len(requests[row].tokens) + walks[row].path for row in walking]
            chosen = _choose(logits[walking, slots], here, positions).tolist()
            further, doubtful = [], []
            for row, slot, token in zip(walking, slots, chosen, strict=True):
                walk, tree = walks[row], trees[row]
                pending[row] = token
                if slot == len(tree):
                    continue
                draft = tree.tokens[slot]
                walk.drafted += not walk.stopped
                if draft == token:
                    walk.matched += not walk.stopped
                    walk.path += 1
                    walk.stopped |= token in stops
                    further.append(row)
                elif not walk.stopped and (self.stops or draft not in stops or token in stops):
                    doubtful.append(row)
            if doubtful:
                asked = self._asked(trees, logits, requests, doubtful, [walks[r] for r in doubtful], pending)
                for i, (row, keep) in enumerate(zip(doubtful, self.arbiter.decide(asked).tolist(), strict=True)):
                    walk, tree = walks[row], trees[row]
                    if self.records:
                        position = len(requests[row].tokens) + walk.path
                        state = asked.states[i].cpu()
                        decision = Decision(pending[row], tree.tokens[walk.path], position, keep, state)
                        self.running(requests[row]).decisions.append(decision)
                    walk.asked += 1
                    if keep:
                        walk.kept.append(walk.path)
                        walk.stopped |= tree.tokens[walk.path] in stops
                        walk.path += 1
                        further.append(row)
            walking = sorted(further)
        scores: list[list[float]] = [[] for _ in requests]
        if intent is not None:
            scores = columns(intent(torch.tensor([walk.path for walk in walks]))).tolist()
        return [
            self._verdict(request, walk, token, score)
            for request, walk, token, score in zip(requests, walks, pending, scores, strict=True)
        ]

    def _asked(
        self, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request], rows: Sequence[int],
        walks: Sequence[_Walk], chosen: Sequence[int],
    ) -> Asked:  # fmt: skip
        """The mismatches at which some rows stand."""
        device = logits.device
        mine = [requests[row] for row in rows]
        slots = [walk.path for walk in walks]
        running = [self.running(request) for request in mine]
        here = list(zip(running, walks, strict=True))

        def mismatches() -> Mismatches:
            drafted = [trees[row] for row in rows]
            columns = [
                [chosen[row] for row in rows],
                [tree.tokens[slot] for tree, slot in zip(drafted, slots, strict=True)],
                [t.tokens[s - 1] if s else r.tokens[-1] for t, s, r in zip(drafted, slots, mine, strict=True)],
                slots,
                [len(r.generated) + s for r, s in zip(mine, slots, strict=True)],
                *zip(*(r.after(w.asked, len(w.kept), w.drafted - 1, w.matched) for r, w in here), strict=True),
            ]
            told = torch.stack([_told(tree)[slot] for tree, slot in zip(drafted, slots, strict=True)])
            return Mismatches(
                logits[list(rows), slots], told, *torch.tensor(columns, device=device)
            )  # fmt: skip

        positions = torch.tensor([len(r.tokens) + s for r, s in zip(mine, slots, strict=True)], device=device)
        ordinals = torch.tensor([r.asked + w.asked for r, w in zip(running, walks, strict=True)], device=device)
        return Asked(mine, positions, ordinals, mismatches, token_classes(self._target))

    def _accept_at_once(
        self, trees: Sequence[DraftTree], logits: torch.Tensor, requests: Sequence[Request], intent: Intent | None
    ) -> list[Verdict]:
        """All nodes are judged on the device; one packed copy brings the outcome to the host."""
        b, device = len(requests), logits.device
        n = max(map(len, trees))
        running = [self.running(request) for request in requests]
        whole = torch.full((b, n + 1), -1, dtype=torch.long)  # drafted tokens by the slot that judges them
        for row, tree in enumerate(trees):
            whole[row, : len(tree)] = torch.tensor(tree.tokens, dtype=torch.long)
        numbers = [
            [len(r.tokens), len(r.prompt), r.tokens[-1], *run.after(0, 0, 0, 0)]
            for r, run in zip(requests, running, strict=True)
        ]
        packed = torch.cat([whole, torch.tensor(numbers)], 1).to(device, non_blocking=True)
        drafted, before = packed[:, : n + 1], packed[:, n + 4 :]
        starts, prompts, last = packed[:, n + 1 : n + 4].unbind(1)
        slot = torch.arange(n + 1, device=device)
        positions = starts[:, None] + slot
        repeated = [request for request in requests for _ in range(n + 1)]
        chosen = _choose(logits[:, : n + 1].flatten(0, 1), repeated, positions.flatten()).view(b, n + 1)
        there = drafted >= 0
        token = drafted.clamp(min=0)
        classes = token_classes(self._target)
        stops = classes[:, STOP]
        behind = (there & stops[token]).long().cumsum(1) - (there & stops[token]).long() > 0  # a stop token
        matches = there & (chosen == drafted)
        asked = there & ~matches & ~behind
        if not self.stops:
            asked &= ~stops[token] | stops[chosen]
        keep = torch.zeros_like(asked)
        put = None
        # What a slot is met with: a block comes to it only where all drafts before it were kept.
        asked_before, drafted_before, matched_before = (
            run + x.long().cumsum(1) - x.long()
            for run, x in (
                (before[:, :1], asked),
                (before[:, 3:4], there & ~behind),
                (before[:, 4:], matches & ~behind),
            )
        )
        kept_before = before[:, 1:2] + asked_before - before[:, :1]
        last_before = torch.where(asked_before > before[:, :1], 1, before[:, 2:3])
        if n:

            def mismatches() -> Mismatches:
                width = logits.shape[-1]
                told = logits.new_zeros(
                    b, n, max([width, *(_told(t).shape[1] for t in trees if len(t))]), dtype=torch.float32
                )
                for row, tree in enumerate(trees):
                    if len(tree):
                        told[row, : len(tree)] = _told(tree).to(device)
                previous = torch.cat([last[:, None], token[:, :n]], 1)
                before_it = [asked_before, kept_before, last_before, drafted_before, matched_before]
                fields = [chosen, token, previous, slot.expand(b, -1), positions - prompts[:, None], *before_it]
                logits_told = logits[:, :n].flatten(0, 1), told.flatten(0, 1)
                return Mismatches(*logits_told, *(column[:, :n].flatten() for column in fields))

            each = [request for request in requests for _ in range(n)]
            put = Asked(each, positions[:, :n].flatten(), asked_before[:, :n].flatten(), mismatches, classes)
            keep[:, :n] = self.arbiter.decide(put).view(b, n) & asked[:, :n]
        path = (matches | keep).long().cumprod(1).sum(1)
        outcome = [path[:, None], chosen.gather(1, path[:, None]), matches & ~behind, asked, keep, there & ~behind]
        if self.records:
            outcome.append(chosen)
        if intent is not None:
            outcome.append(columns(intent(path)))
        found = torch.cat([part.double() for part in outcome], 1).tolist()
        seen = put.states.view(b, n, -1).cpu() if self.records and put is not None else None
        verdicts = []
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            length, pending, *rest = found[row]
            q = n + 1
            hit, doubt, kept, look = (rest[i * q : (i + 1) * q] for i in range(4))
            upto = int(length) + 1
            walk = _Walk(
                int(length), drafted=int(sum(look[:upto])), matched=int(sum(hit[:upto])), asked=int(sum(doubt[:upto])),
                kept=[i for i in range(int(length)) if kept[i]],
            )  # fmt: skip
            rest = rest[4 * q :]
            if seen is not None:
                for i in range(upto):
                    if doubt[i]:
                        decision = Decision(
                            int(rest[i]), tree.tokens[i], len(request.tokens) + i, bool(kept[i]), seen[row, i].clone()
                        )
                        running[row].decisions.append(decision)
            if self.records:
                rest = rest[q:]
            verdicts.append(self._verdict(request, walk, int(pending), rest))
        return verdicts

    def _verdict(self, request: Request, walk: _Walk, pending: int, score: Sequence[float]) -> Verdict:
        """What a row's walk found, which the request's rates take in."""
        run = self.running(request)
        run.asked += walk.asked
        run.kept += len(walk.kept)
        run.drafted += walk.drafted
        run.matched += walk.matched
        if walk.asked:
            run.last = 1 if len(walk.kept) == walk.asked else -1
        path = list(range(walk.path))
        return Verdict(path, pending, *split(score), asked=walk.asked, kept=tuple(walk.kept))


@dataclass
class _Walk:
    """A row's way down its chain."""

    path: int = 0
    """Tokens that stand: the next one is judged in this slot."""
    drafted: int = 0
    matched: int = 0
    asked: int = 0
    kept: list[int] = field(default_factory=list)
    stopped: bool = False
    """A stop token stands."""


def _told(tree: DraftTree) -> torch.Tensor:
    """[nodes, V]"""
    if tree.q_logits is None:
        raise ValueError(
            "an arbiter wants to know what the draft model thinks, and a draft does not tell it (q_logits)"
        )
    told: torch.Tensor = tree.q_logits
    return told


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")
