"""A request of several rows: what the engine does with a verifier's ancestors, whatever the verifier's reason."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from activations.matching.match import MatchConfig
from activations.sampling import Sampling, choose
from decoding.budgets import FixedBudget
from decoding.drafters import CopyDrafter
from decoding.engine import Engine
from decoding.gates import COPY, Always, Choice
from decoding.modes import Plan
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict, Verifier


class Shuffling(Verifier):
    """Exact, but every particle goes on from a random one of its group; the first to have ended is picked last."""

    lossless = False

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.closed: list[Request] = []
        self.ancestors: list[int] = []

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        found = super().accept(trees, logits, requests, intent)
        for i, (request, verdict) in enumerate(zip(requests, found, strict=True)):
            if request.ended:
                found[i] = replace(verdict, path=[], rests=True)
                continue
            request.ended = len(request.generated) + len(verdict.path) + 1 >= request.max_new_tokens
            mates = [j for j, other in enumerate(requests) if other.group is request.group]
            found[i] = replace(verdict, ancestor=self.rng.choice(mates) if len(requests) > 1 else None)
        self.ancestors = [i if v.ancestor is None else v.ancestor for i, v in enumerate(found)]
        return found

    def pick(self, group: Request) -> Request | None:
        return group.particles[-1] if all(p.ended for p in group.particles) else None

    def close(self, group: Request) -> None:
        self.closed.append(group)


@pytest.mark.parametrize("seed", range(6))
def test_particles_go_on_from_their_ancestors_as_if_they_had_always_been_there(seed: int, small_target) -> None:  # type: ignore[no-untyped-def]
    """Each particle's next tokens are those of the target after its own text, read afresh."""
    target = small_target("llama")
    copy = CopyDrafter(MatchConfig(kappa=1))
    verifier = Shuffling(seed)
    plan = Plan(Always(Choice(COPY, FixedBudget(3, 3))), (copy,), verifier=verifier, particles=3)
    engine = Engine(target, plan, rows=2)
    sampling = Sampling(temperature=1.0, seed=seed)
    groups = [Request(n, p, max_new_tokens=14, sampling=sampling) for n, p in enumerate([[1, 5, 9, 5, 9], [2, 7, 2]])]

    def chosen(text: list[int], key: int) -> int:
        """The target's own choice after a text, read afresh."""
        logits = target.model(torch.tensor([text])).logits[:, -1]
        return int(choose([sampling], logits, [key], [len(text)]))

    for group in groups:
        commit = engine.admit(group)
        assert [p.tokens for p in group.particles] == [
            [*group.prompt, chosen(group.prompt, p.key)] for p in group.particles
        ]
        assert len({p.key for p in group.particles}) == 3 and commit.tokens == group.generated
    while engine.requests:
        before = {p: (list(p.tokens), p.ended) for g in engine.requests for p in g.particles}
        drafts = engine.draft()
        commits = engine.verify(drafts)
        assert [c.request for c in commits] == engine.requests
        for draft, ancestor in zip(drafts, verifier.ancestors, strict=True):
            particle, source = draft.request, drafts[ancestor].request
            text, had_ended = before[source]
            assert particle.tokens[: len(text)] == text
            for at in range(len(text), len(particle.tokens)):
                assert particle.tokens[at] == chosen(particle.tokens[:at], source.key)
            assert particle.ended == source.ended or ancestor != drafts.index(draft)
            assert (len(particle.tokens) > len(text)) != had_ended
            assert len(particle.sources) == len(particle.generated)
            assert list(copy._indices[particle].tokens) == particle.tokens
        for commit in commits:
            group, done = commit.request, verifier.pick(commit.request)
            assert group.tokens == done.tokens if done else all(_starts(p, group) for p in group.particles)
            assert len(group.sources) == len(group.generated)
        engine.leave([c.request for c in commits if verifier.pick(c.request) is not None])
    assert set(verifier.closed) == set(groups) and all(len(g.generated) == 14 for g in groups)
    assert not copy._indices
    engine.close()


def _starts(particle: Request, group: Request) -> bool:
    return particle.tokens[: len(group.tokens)] == group.tokens
