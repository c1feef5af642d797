"""Particles instead of rejection: every drafted token is kept, and weighs what the target thinks of it.

A request's N particles are rows that all draft K tokens from the draft model's law q and are fed to the target
together. Each keeps all K, is weighed by p / q, and draws one more token exactly from the target's law p. Where too
few particles still count, they are resampled: bad ones go on from where good ones are. At the end one particle is
drawn by its weight. For finite N the text only nearly follows the target's law.

- p and q are both processed by the request's sampling. Under top-k or top-p a token that q excludes is never drafted,
  however likely p has it: the text then leans towards tokens that both keep, also for many particles. A token that p
  excludes takes a particle's whole weight. Plain temperature has neither effect.
- If no particle keeps any weight, the round's drafts are dropped: each particle takes one exact token of the target
  from where it was, with the weight that it had. The next drafts meet the draft model's noise of these positions
  again.
- A single particle is never corrected: it follows q, with an exact token after every K.
- A particle ends at a stop token or at the request's limit. Stop strings cut the request's text, not the particles.

Source: SMC-SD, arXiv 2604.15672.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from activations.sampling import Sampling, choose
from decoding.request import Request
from decoding.smc.lookahead import Lookahead
from decoding.smc.resampling import RESAMPLING, ancestors
from decoding.smc.weights import Weights, effective_size, log_mean, normalized
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict, Verifier

LOWEST_TEMPERATURE = 0.1
"""Below it nearly every weight is 0 or infinite."""
RESAMPLE, PICK = 1, 2
"""Streams of the group's own noise."""


@dataclass
class Cloud:
    """The weights of one request's particles."""

    log_weights: Weights
    """Since the latest resampling [N]."""
    log_evidence: float = 0.0
    """Log of the product of the mean weights that resamplings have divided out: with the mean of what is left, an
    estimate of the log of the sum of all weights of all texts, 0 where the target's law is no power."""
    rounds: int = 0
    resamplings: int = 0
    underflows: int = 0
    """Rounds whose drafts were dropped, because no particle kept any weight."""


class _Row(NamedTuple):
    """What is looked at in one row of a verification."""

    tokens: Sequence[int]
    """Drafted tokens that weigh: up to the first stop token, itself included, and inside the request's limit."""
    stops: bool
    """The last of them is a stop token."""


class ParticleVerifier(Verifier):
    """Weighs and resamples particles. Chains of one drafter only, with the law that each token was drawn from."""

    lossless = False
    keyed = False

    def __init__(
        self,
        particles: int,
        stop_ids: Collection[int],
        *,
        resampling: str = "systematic",
        threshold: float = 0.5,
        power: float = 1.0,
        lookahead: Lookahead | None = None,
    ) -> None:
        """`threshold`: resample where ESS / N is below it. `power`: the text follows the product of p(token)^power,
        p being the processed law. `lookahead` learns from the ratios p / q that are met."""
        if particles < 1:
            raise ValueError(f"particles is {particles}; it must be 1 or more")
        if resampling not in RESAMPLING:
            raise ValueError(f"unknown resampling {resampling!r}: use {' or '.join(RESAMPLING)}")
        if not 0 <= threshold <= 1:
            raise ValueError(f"the ESS threshold is {threshold}; it is a share of the particles, from 0 to 1")
        if not 0 < power < float("inf"):
            raise ValueError(f"power is {power}; it must be greater than 0")
        self.particles = particles
        self.threshold = threshold
        self.power = power
        self.resampling = resampling
        self.lookahead = lookahead
        self._stop_ids = frozenset(stop_ids)
        self.clouds: dict[Request, Cloud] = {}
        """By the request whose particles they are, until `close`."""

    def describe(self) -> dict[str, Any]:
        """Settings that the text depends on, for JSON."""
        return {
            "particles": self.particles,
            "resampling": self.resampling,
            "ess_threshold": self.threshold,
            "power": self.power,
            "lookahead": self.lookahead.share if self.lookahead is not None else None,
        }

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for a temperature that is too low."""
        if sampling.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"particles are weighed by p / q: at temperature {sampling.temperature} nearly every weight is 0 or "
                f"infinite: use a temperature of {LOWEST_TEMPERATURE} or more (0.7, say), or mode sd"
            )

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        """Judge `logits` [B, Q, V] of [pending token, drafted tokens, padding] in each row; a group's rows stand side
        by side in the order of its particles. Marks rows that have `ended`. No gate of this mode reads anything at
        the anchor: `intent` is left alone."""
        rows = [self._row(tree, request) for tree, request in zip(trees, requests, strict=True)]
        moving = [i for i, request in enumerate(requests) if not request.ended]
        drawing = [i for i in moving if not rows[i].stops]
        ratios, tokens, factors = self._judge(trees, logits, requests, rows, moving, drawing)
        bonus = dict(zip(drawing, tokens, strict=True))
        gains = np.zeros(len(requests))
        gains[drawing] = factors
        at = 0
        for i in moving:
            mine = ratios[at : at + len(rows[i].tokens)]
            at += len(mine)
            gains[i] += mine.sum()
            if self.lookahead is not None:
                self.lookahead.observe(requests[i].number, mine.tolist())
        verdicts = []
        start = 0
        while start < len(requests):
            group = requests[start].group
            end = start + 1
            while end < len(requests) and requests[end].group is group:
                end += 1
            verdicts += self._round(group, range(start, end), logits, requests, rows, bonus, gains)
            start = end
        return verdicts

    def pick(self, group: Request) -> Request | None:
        """Once all particles of a group have ended, one of them, drawn by its weight."""
        if not all(particle.ended for particle in group.rows):
            return None
        cloud = self._cloud(group)
        weights = normalized(cloud.log_weights)
        drawn = _noise(group, cloud.rounds, PICK).random()
        ends = np.cumsum(weights)
        place = int(np.searchsorted(ends / ends[-1], drawn, side="right"))
        return group.rows[min(place, int(np.flatnonzero(weights)[-1]))]

    def close(self, group: Request) -> None:
        """Forget a request. Safe to repeat."""
        self.clouds.pop(group, None)
        if self.lookahead is not None:
            self.lookahead.close(group.number)

    # -- inside -------------------------------------------------------------------------------------

    def _cloud(self, group: Request) -> Cloud:
        if group not in self.clouds:
            self.clouds[group] = Cloud(np.zeros(self.particles))
        return self.clouds[group]

    def _row(self, tree: DraftTree, request: Request) -> _Row:
        if not tree.is_chain:
            raise ValueError("particles are drafted in chains, and a tree was given: use a drafter that draws one path")
        tokens = tree.tokens[: max(request.room, 0)]
        for i, token in enumerate(tokens):
            if token in self._stop_ids:
                return _Row(tokens[: i + 1], True)
        return _Row(tokens, False)

    def _judge(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[_Row],
        moving: Sequence[int],
        drawing: Sequence[int],
    ) -> tuple[Weights, list[int], Weights]:
        """Log ratios power * log p - log q of the drafted tokens of the moving rows, one row after the other; the next
        token of each drawing row, and the log weight that it brings. One copy from the device."""
        device = logits.device
        weighed = [i for i in moving if rows[i].tokens]
        ratios = torch.zeros(0, dtype=torch.float64, device=device)
        if weighed:
            ratios = self._ratios(trees, logits, requests, rows, weighed)
        slots = [len(rows[i].tokens) for i in drawing]
        last = logits[_index(drawing, device), _index(slots, device)]
        positions = [len(requests[i].tokens) + slot for i, slot in zip(drawing, slots, strict=True)]
        tokens, factors = self._draw(last, [requests[i] for i in drawing], positions)
        packed = torch.cat([ratios, tokens.double(), factors]).cpu().numpy()
        m, n = len(ratios), len(drawing)
        logs = [np.where(np.isfinite(x), x, -np.inf) for x in (packed[:m], packed[m + n :])]
        return logs[0], packed[m : m + n].astype(np.int64).tolist(), logs[1]  # what a law cannot say weighs nothing

    def _ratios(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[_Row],
        weighed: Sequence[int],
    ) -> torch.Tensor:
        """Float64, on the device: one normalizer a slot and the drafted token's logit, of p and of q."""
        device = logits.device
        counts = [len(rows[i].tokens) for i in weighed]
        tokens = _index([t for i in weighed for t in rows[i].tokens], device)
        at_row = _index([i for i, n in zip(weighed, counts, strict=True) for _ in range(n)], device)
        at_slot = _index([slot for n in counts for slot in range(n)], device)
        samplings = [requests[i].sampling for i, n in zip(weighed, counts, strict=True) for _ in range(n)]
        if all(s == samplings[0] for s in samplings):
            target = _log_probability(samplings[0].process(logits[at_row, at_slot]), tokens)
        else:
            target = torch.empty(len(tokens), dtype=torch.float64, device=device)
            for sampling in dict.fromkeys(samplings):
                own = _index([j for j, s in enumerate(samplings) if s == sampling], device)
                law = sampling.process(logits[at_row[own], at_slot[own]])
                target[own] = _log_probability(law, tokens[own])
        laws = []
        for i, n in zip(weighed, counts, strict=True):
            law = trees[i].q_logits
            if law is None:
                raise ValueError("a draft came without the law that it was drawn from: particles cannot be weighed")
            laws.append(law[:n])
        draft = _log_probability(torch.cat(laws).to(device).float(), tokens)
        return self.power * target - draft

    def _draw(
        self, logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens [n] from p^power, normalized, for logits [n, V], and the logs [n] of what it was divided by."""
        factors = torch.zeros(len(requests), dtype=torch.float64, device=logits.device)
        if not requests:
            return torch.zeros(0, dtype=torch.long, device=logits.device), factors
        samplings, keys = [r.sampling for r in requests], [r.key for r in requests]
        places = _index(positions, logits.device)
        if self.power == 1:
            return choose(samplings, logits, keys, places), factors
        laws = torch.stack([s.process(row) for s, row in zip(samplings, logits, strict=True)])
        sharper = [replace(s, temperature=1 / self.power, top_k=0, top_p=1.0) for s in samplings]
        factors += (self.power * laws).logsumexp(-1) - self.power * laws.logsumexp(-1)
        return choose(sharper, laws, keys, places), factors

    def _round(
        self,
        group: Request,
        places: range,
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[_Row],
        bonus: dict[int, int],
        gains: Weights,
    ) -> list[Verdict]:
        """The verdicts of one group's rows: all of them, or at admission each by itself."""
        cloud = self._cloud(group)
        index = [requests[i].particle for i in places]
        before = cloud.log_weights.copy()
        cloud.log_weights[index] += gains[list(places)]
        verdicts: dict[int, Verdict] = {}
        if np.isneginf(cloud.log_weights).all():
            cloud.log_weights = before
            cloud.underflows += 1
            fallen = [i for i in places if not requests[i].ended]
            here = [requests[i] for i in fallen]
            last = logits[_index(fallen, logits.device), 0]
            tokens, factors = self._draw(last, here, [len(r.tokens) for r in here])
            cloud.log_weights[[r.particle for r in here]] += factors.cpu().numpy()
            verdicts = {i: Verdict([], token) for i, token in zip(fallen, tokens.tolist(), strict=True)}
        for i in places:
            request, row = requests[i], rows[i]
            if request.ended:
                verdicts[i] = Verdict([], request.tokens[-1], rests=True)
                continue
            if i not in verdicts:
                path = list(range(len(row.tokens) - row.stops))
                verdicts[i] = Verdict(path, row.tokens[-1] if row.stops else bonus[i])
            found = verdicts[i]
            full = len(request.generated) + len(found.path) + 1 >= request.max_new_tokens
            request.ended = full or found.pending in self._stop_ids
        if len(places) < self.particles:  # the first tokens, which weigh nothing
            return [verdicts[i] for i in places]
        size = effective_size(cloud.log_weights)
        cloud.rounds += 1
        told = cloud.log_weights[index].tolist()
        origin: list[int | None] = [None] * len(places)
        if size < self.threshold * self.particles:
            counts = RESAMPLING[self.resampling](normalized(cloud.log_weights), _noise(group, cloud.rounds, RESAMPLE))
            origin = [None if a == i else places[a] for i, a in enumerate(ancestors(counts))]
            cloud.log_evidence += log_mean(cloud.log_weights)
            cloud.log_weights[:] = 0.0
            cloud.resamplings += 1
        return [
            replace(verdicts[i], log_weight=weight, ess=size, ancestor=ancestor)
            for i, weight, ancestor in zip(places, told, origin, strict=True)
        ]


def _index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """On its way to the device, which nobody waits for."""
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)


def _log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Float64 log-probabilities [n] of tokens [n] under logits [n, V]."""
    return logits.gather(-1, tokens[:, None])[:, 0].double() - logits.logsumexp(-1).double()


def _noise(group: Request, round: int, stream: int) -> np.random.Generator:
    """Keyed by (seed, request, round): no other request's noise depends on it."""
    seed = int(group.sampling.seed) & (2**64 - 1)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, group.number, round, stream])))
