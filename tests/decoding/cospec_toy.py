"""A toy of arbitration whose best rule is known: it writes answers as the real models do.

An answer meets up to three mismatches. Of the two tokens of each exactly one is right, and the draft's is with
probability sigmoid(4 x - 2), x being the state's first feature, uniform in [-1, 1], with two of noise beside it; the
answer is right if every choice was. So the best rule keeps a draft where x > 0.5, whatever was chosen before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from decoding.answers import Question
from decoding.cospec.branches import Job, Outcome, Place, Run, identity
from decoding.cospec.state import STATE
from decoding.cospec.verifier import Arbiter

BEST = 0.5
"""Of the first feature: where the draft's token becomes the likelier one."""


def toy_questions(count: int, seed: int = 0) -> list[Question]:
    return [
        Question(f"toy-{i}", "lookup", 1, ({"role": "user", "content": f"{seed} {i}"},), "right") for i in range(count)
    ]


class Seen:
    """A mismatch that is put to an arbiter."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = self.positions = states

    def __len__(self) -> int:
        return len(self.states)


class Toy:
    """Writes answers. `hopeless`: none of them is right; `agrees`: no draft is ever another than the target's."""

    def __init__(self, hopeless: bool = False, agrees: bool = False, fails_after: int | None = None) -> None:
        self.hopeless, self.agrees = hopeless, agrees
        self.written = 0
        self._left = fails_after

    def describe(self) -> dict[str, Any]:
        return {"toy": 1}

    def run(self, jobs: Sequence[Job], rest: Arbiter | None = None) -> list[Run]:
        if self._left is not None:
            self._left -= len(jobs)
            if self._left < 0:
                raise KeyboardInterrupt
        self.written += len(jobs)
        return [self._answer(job, rest) for job in jobs]

    def _answer(self, job: Job, rest: Arbiter | None) -> Run:
        key = identity(job.question)
        count = 0 if self.agrees else random.Random(f"{key} count").randint(1, 3)
        right, decisions, places = not self.hopeless, [], []
        for n in range(count):
            rng = random.Random(f"{key} {decisions}")
            state = torch.zeros(len(STATE))
            state[:3] = torch.tensor([rng.uniform(-1, 1) for _ in range(3)])
            if n < len(job.script):
                keep = job.script[n]
            else:
                keep = rest is not None and bool(rest.decide(Seen(state[None]))[0])  # type: ignore[arg-type]
            draft_right = rng.random() < float(torch.sigmoid(4 * state[0] - 2))
            right = right and keep == draft_right
            decisions.append(keep)
            places.append(Place(rng.randrange(50), rng.randrange(50), 5 + n, state))
        forwards = 1 + decisions.count(False)
        return Run(
            key, tuple(decisions), tuple(places), Outcome(right, 6, forwards), (1,) * 6, "right" if right else "x"
        )


def best_rule(states: torch.Tensor) -> torch.Tensor:
    return states[:, 0] > BEST
