"""The switch's rule on the host, against a plain one, in an engine that is played here: prompts in chunks, cached
prefixes, rejected drafts, requests that are preempted and read again, end, move, or take another's name."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contexts import longest

from activations.matching import MatchConfig
from decoding.serving.vllm.host import HostCopies, HostSwitch, Step

K, TAU, VOCABULARY = 4, 0.5, 4
CONFIG = MatchConfig(kappa=2, candidates=1, depth=K)
PROBE: Any = SimpleNamespace(score=lambda states: states[:, 0])


class Recorder:
    """Counters that remember."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, bool]] = []
        self.outcomes: list[tuple[int, int]] = []
        self.scores: list[float] = []

    def decided(self, scores: list[float], copies: int, rows: int, skipped: bool) -> None:
        self.scores += scores
        self.steps.append((copies, rows, skipped))

    def settled(self, drafted: int, kept: int) -> None:
        self.outcomes.append((drafted, kept))


@dataclass
class Request:
    """What an engine knows of a request."""

    text: list[int]
    prompt: int
    computed: int = 0
    """Tokens whose states exist."""
    drafts: list[int] = field(default_factory=list)
    hidden: bool = False
    """The host does not know what was written (asynchronous scheduling)."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.text[: self.prompt]

    @property
    def output_token_ids(self) -> list[int]:
        return [] if self.hidden else self.text[self.prompt :]

    def get_token_id(self, idx: int) -> int:
        return self.text[idx] if idx < self.prompt or not self.hidden else -1


class Played:
    """An engine that writes random tokens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.order: list[str] = []

    def arrive(self) -> None:
        name = self.random.choice("abcd")
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.randrange(1, 15))]
        cached = self.random.randrange(len(prompt))
        self.requests[name] = Request(prompt, len(prompt), cached, hidden=self.random.random() < 0.5)
        self.order = [*(n for n in self.order if n != name), name]

    def change(self) -> None:
        r = self.random.random()
        if r < 0.3 or not self.requests:
            self.arrive()
        elif r < 0.4:
            name = self.random.choice(self.order)
            self.order.remove(name)
            del self.requests[name]
        elif r < 0.5:  # preempted: its states are gone; maybe its last token is drawn again
            request = self.requests[self.random.choice(self.order)]
            request.computed, request.drafts = 0, []
            if len(request.text) > request.prompt and self.random.random() < 0.5:
                request.text.pop()
        elif r < 0.6:
            self.random.shuffle(self.order)

    def step(self) -> tuple[Step, list[float]]:
        tokens: list[int] = []
        positions, starts, ends, pending, unused, scores = [], [0], [], [], [], []
        for name in self.order:
            request = self.requests[name]
            at, left = request.computed, len(request.text) - request.computed
            count = self.random.randrange(1, left + 1)
            reading = count < left  # only a part of its prompt
            here = request.text[at : at + count]
            drafts = [] if reading or left > 1 else request.drafts
            kept = self.random.randrange(len(drafts) + 1)
            written = [] if reading else [*drafts[:kept], self.random.randrange(VOCABULARY)]
            ends.append(len(tokens) + count - 1 + (kept if not reading else 0))
            tokens += [*here, *drafts]
            positions += range(at, at + count + len(drafts))
            starts.append(len(tokens))
            request.text += written
            request.computed = at + count + (kept if not reading else 0)
            pending.append(request.text[request.computed])
            unused.append(reading)
            scores.append(self.random.random())
            request.drafts = []
        states = torch.tensor([[s, 0.0] for s in scores]).reshape(-1, 2)
        integers = (torch.tensor(x, dtype=torch.int32) for x in (tokens, positions, starts, ends, pending))
        return Step(list(self.order), unused, *integers, states), scores


@settings(max_examples=200)
@given(st.integers(0, 10**9))
def test_decides_as_the_plain_rule(seed: int) -> None:
    engine, counters = Played(seed), Recorder()
    switch = HostSwitch(PROBE, CONFIG, TAU, counters=counters)  # type: ignore[arg-type]
    outcomes = []
    copied: dict[int, int] = {}
    for _ in range(12):
        engine.change()
        if not engine.order:
            continue
        step, scores = engine.step()
        names = step.names
        for row, name in enumerate(names):  # what became of the last copies
            drafted = int(step.starts[row + 1] - step.starts[row]) - 1
            request = engine.requests[name]
            before = copied.pop(id(request), 0)
            if before and drafted and int(step.positions[step.starts[row]]) >= request.prompt:
                outcomes.append((drafted, int(step.ends[row] - step.starts[row])))
        rows = switch.decide(step, engine.requests).rows
        for row, name in enumerate(names):
            request = engine.requests[name]
            if step.unused[row]:
                assert rows[row] == ()
                continue
            wanted = longest(request.text, K) if scores[row] >= TAU else []
            if rows[row] is None and wanted:
                assert request.hidden  # nothing but a text that the engine does not know is left out
            else:
                assert list(rows[row] or ()) == wanted
            request.drafts = list(rows[row] or [0] * K)
            if rows[row]:
                copied[id(request)] = len(rows[row] or ())
        assert len(switch.contexts) <= len(engine.requests)
    assert counters.outcomes == outcomes


def test_copies_stand_in_the_place_of_the_neural_drafts() -> None:
    neural = torch.arange(12).reshape(3, 4)
    copies = HostCopies([None, [7, 8, 9, 7], ()])
    assert copies.over(neural.clone()).tolist() == [[0, 1, 2, 3], [7, 8, 9, 7], [8, 9, 10, 11]]
    assert copies.over(neural[:, :2].clone()).tolist() == [[0, 1], [7, 8], [8, 9]]
    assert copies.over(neural[:, :0].clone()).shape == (3, 0)
    assert not copies.everywhere()
    assert HostCopies([[7], ()]).everywhere() and HostCopies([(), ()]).everywhere()


@pytest.mark.parametrize("world", [1, 2])
def test_scores_are_one_rank_s(world: int) -> None:
    engine = Played(1)
    engine.requests["a"] = Request([1, 2, 3, 1, 2], 5, 0)
    engine.order = ["a"]
    engine.random = random.Random(0)
    asked: list[torch.Tensor] = []

    def agree(scores: torch.Tensor) -> torch.Tensor:
        asked.append(scores)
        return torch.ones_like(scores)

    switch = HostSwitch(PROBE, MatchConfig(kappa=1, candidates=1, depth=K), 0.9, agree if world > 1 else None)
    integers = (torch.tensor(x) for x in ([1, 2, 3, 1], [0, 1, 2, 3], [0, 4], [3], [2]))
    rows = switch.decide(Step(["a"], [False], *integers, torch.zeros(1, 2)), engine.requests).rows
    assert len(asked) == world - 1
    assert rows == ([[3, 1, 2, 3]] if world > 1 else [None])
