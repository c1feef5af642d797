"""The decisions of Learning to Draft as gymnasium environments.

An episode is one step of decoding: draft, verify, commit. `DepthEnv` is asked after each drafted level whether to draft
another, `SizeEnv` once how many nodes to verify; a budget decides the other half. The text goes on from one episode to
the next.

What is decoded is a source: `ReplaySource`, a log of whole trees with a cost table for a clock, or `LiveSource`, a
target, its EAGLE head and the wall clock.

Source: arXiv 2603.01639.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from decoding.budgets import Budget, Growth, Pace
from decoding.eagle.drafter import EagleDrafter, Question
from decoding.engine import Draft, Engine
from decoding.gates import Decision
from decoding.ltd.budget import GO_ON
from decoding.ltd.observations import Observation, Observer
from decoding.ltd.outcomes import Clock, Outcomes, nodes_at
from decoding.ltd.rewards import Reward, Step
from decoding.policies.policy import PolicyError
from decoding.request import Request
from decoding.tree import DraftTree

# -- sources ------------------------------------------------------------------------------------------


class Source(Protocol):
    """Something to decode, step by step: begin, deepen as often as wanted while it `grows`, finish."""

    depth: int
    """Most levels of a tree."""
    top_k: int

    def restart(self, rng: np.random.Generator) -> None:
        """Another text, chosen with `rng`, and what follows it too."""
        ...

    def begin(self) -> Growth:
        """Draft the first level of the next step; the newest level."""
        ...

    @property
    def grows(self) -> bool:
        """Whether there can be another level."""
        ...

    def deepen(self) -> Growth:
        """Draft another level; the newest level."""
        ...

    def whole(self) -> Growth:
        """No further level; all of them."""
        ...

    def finish(self, size: int) -> Step:
        """Verify the best nodes. Only after `whole`."""
        ...

    def reference(self) -> Step | None:
        """What the reference tree would have given at the last finished step; None where that cannot be known."""
        ...

    def close(self) -> None: ...


class ReplaySource:
    """Steps over logged texts, in an order of their own; the clock is a cost table."""

    def __init__(
        self, outcomes: Outcomes, clock: Clock, texts: Sequence[int], fixed: tuple[int, int], depth: int | None = None
    ) -> None:
        """texts: those to use, by number; fixed: (depth, nodes) of the reference tree."""
        if not len(texts):
            raise PolicyError("no texts to replay: log more of them")
        self.outcomes, self.clock = outcomes, clock
        self.top_k, self.depth = outcomes.top_k, outcomes.depth if depth is None else depth
        if not 1 <= self.depth <= outcomes.depth:
            raise PolicyError(f"the log's trees are {outcomes.depth} levels deep: depth {self.depth} is beyond them")
        self._texts = np.asarray(texts, np.int64)
        self._fixed = fixed
        self._scores = torch.from_numpy(outcomes.scores)
        self._rows = clock.rows(outcomes.context)
        self._nodes = [nodes_at(d, self.top_k) for d in range(self.depth + 1)]
        self._depth = self._last = 0
        self.restart(np.random.default_rng(0))

    def restart(self, rng: np.random.Generator) -> None:
        """Begins somewhere in a text, each place as likely as another, with the reference tree's pace."""
        starts = self.outcomes.starts
        order = rng.permutation(self._texts)
        lengths = starts[order + 1] - starts[order]
        place = int(rng.integers(int(lengths.sum())))
        first = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        self._order = np.roll(order, -first)
        self._text = 0
        self._begin_text()
        place = self._end - int(lengths[: first + 1].sum()) + place
        while self._at < place:
            self._last = self._at
            self._on(int(self.reference().tokens))

    def begin(self) -> Growth:
        if self._at >= self._end:
            self._text = (self._text + 1) % len(self._order)
            self._begin_text()
        self._depth = 0
        return self.deepen()

    def _begin_text(self) -> None:
        starts, text = self.outcomes.starts, self._order[self._text]
        self._at, self._end = int(starts[text]), int(starts[text + 1])
        self._pace = Pace()

    def _on(self, tokens: int) -> None:
        self._at += tokens
        self._pace = self._pace.after(tokens)

    @property
    def grows(self) -> bool:
        return self._depth < self.depth

    def deepen(self) -> Growth:
        start, end = self._nodes[self._depth : self._depth + 2]
        self._depth += 1
        return self._growth(start, end)

    def whole(self) -> Growth:
        return self._growth(0, self._nodes[self._depth])

    def _growth(self, start: int, end: int) -> Growth:
        at = self._at
        length = int(self.outcomes.context[at])
        return Growth(self._scores[at, start:end], self._depth, self.top_k, length, self._pace.value)

    def finish(self, size: int) -> Step:
        self._last = self._at
        step = self._step(self._depth, size)
        self._on(int(step.tokens))
        return step

    def reference(self) -> Step:
        depth, size = self._fixed
        return self._step(min(depth, self.depth), size)

    def _step(self, depth: int, size: int) -> Step:
        at = self._last
        accepted = int(np.count_nonzero(self.outcomes.ranks[at, depth - 1] < size))
        tokens = min(accepted + 1, int(self.outcomes.ahead[at]))
        return Step(tokens, float(self.clock.table[self._rows[at], depth - 1, min(size, self._nodes[depth])]))

    def close(self) -> None: ...


DECISION = Decision((), "training")


class LiveSource:
    """Steps of a real target with its EAGLE head, timed by the wall clock: greedy, one text at a time."""

    def __init__(
        self,
        engine: Engine,
        drafter: EagleDrafter,
        prompts: Sequence[Sequence[int]],
        depth: int,
        max_new_tokens: int = 256,
    ) -> None:
        """engine: of a plan whose drafter this is, of one row and one particle."""
        if not prompts:
            raise PolicyError("no prompts to decode: give some")
        self.top_k, self.depth = drafter.top_k, depth
        self._engine, self._drafter = engine, drafter
        self._prompts, self._limit = [list(p) for p in prompts], max_new_tokens
        self._order = np.arange(len(prompts))
        self._next = 0
        self._request: Request | None = None
        self._growing: Generator[Question, int | None, DraftTree] | None = None
        self._question: Question

    def restart(self, rng: np.random.Generator) -> None:
        self._leave()
        self._order = rng.permutation(len(self._prompts))
        self._next = 0

    def begin(self) -> Growth:
        if self._growing is not None:  # the step before was left: a head that has drafted must see it verified
            self.whole()
            self.finish(1)
        while self._request is None:
            number = int(self._order[self._next % len(self._order)])
            self._next += 1
            self._request = Request(number, self._prompts[number], max_new_tokens=self._limit)
            self._engine.admit(self._request)
            self._end_if_over()
        self._spent = 0.0
        began = perf_counter()
        self._growing = self._drafter.growing(self._request, self.depth)
        self._question = next(self._growing)
        self._waited(began)
        _, growth = self._question
        return growth

    @property
    def grows(self) -> bool:
        return self._question[0] == "go_on"

    def deepen(self) -> Growth:
        return self._ask(True)

    def whole(self) -> Growth:
        return self._ask(False) if self.grows else self._question[1]

    def _ask(self, answer: bool) -> Growth:
        assert self._growing is not None
        began = perf_counter()
        before = self._question[1]
        self._question = self._growing.send(answer)
        self._waited(began)
        question, growth = self._question
        if answer and question == "size":  # the deepest level there can be: of it alone, as for any other
            return growth._replace(scores=growth.scores[-before.beams * self.top_k :])
        return growth

    def finish(self, size: int) -> Step:
        assert self._growing is not None and self._request is not None
        began = perf_counter()
        try:
            self._growing.send(size)
        except StopIteration as end:
            tree: DraftTree = end.value
        self._growing = None
        [commit] = self._engine.verify([Draft(self._request, tree, DECISION, None, None, 0.0, 0.0)])
        self._waited(began)
        stops = self._engine.target.stop_ids
        tokens = next((i for i, t in enumerate(commit.tokens, 1) if t in stops), len(commit.tokens))
        self._end_if_over()
        return Step(tokens, self._spent)

    def reference(self) -> None:
        return None

    def close(self) -> None:
        self._leave()

    def _waited(self, began: float) -> None:
        if self._engine.target.device.type == "cuda":
            torch.cuda.synchronize()
        self._spent += (perf_counter() - began) * 1e3

    def _end_if_over(self) -> None:
        """A text ends at a stop token and where there is no room for a draft."""
        assert self._request is not None
        stops = self._engine.target.stop_ids
        if self._request.room <= 0 or any(t in stops for t in self._request.generated):
            self._leave()

    def _leave(self) -> None:
        if self._growing is not None:
            self._growing.close()
            self._growing = None
        if self._request is not None:
            self._engine.leave([self._request])
            self._request = None


# -- environments -------------------------------------------------------------------------------------


@dataclass
class RandomDepth:
    """A budget whose trees have any depth, each as likely as another; for training the size policy alone."""

    nodes: int
    depth: int
    rng: np.random.Generator | None = None
    """The environment's own, which sets it when it is seeded."""
    _wanted: int = 1

    def go_on(self, growth: Growth) -> bool:
        if growth.depth == 1:
            assert self.rng is not None
            self._wanted = int(self.rng.integers(1, self.depth + 1))
        return growth.depth < self._wanted

    def size(self, growth: Growth) -> int:
        return min(self.nodes, growth.scores.numel())


class _StepEnv(gymnasium.Env[Observation, np.int64]):
    """What both environments share: a source, the other half's budget, the reward."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, source: Source, observer: Observer, other: Budget, reward: Reward, centred: bool = True) -> None:
        """centred: from each reward that of the source's reference tree at the same place is taken, which changes no
        choice and lowers the noise; for sources that know it."""
        if (observer.top_k, observer.depth) != (source.top_k, source.depth):
            raise ValueError(
                f"the observer is for top_k {observer.top_k} and depth {observer.depth}, the source has "
                f"{source.top_k} and {source.depth}: make both alike"
            )
        self.source, self.observer, self.other, self.reward, self.centred = source, observer, other, reward, centred

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.source.restart(self.np_random)
            self.reward.begin()
        if isinstance(self.other, RandomDepth):
            self.other.rng = self.np_random
        return self._begin(), {}

    def _begin(self) -> Observation:
        raise NotImplementedError

    def _box(self, features: int) -> Any:
        return spaces.Box(-np.inf, np.inf, (features,), np.float32)

    def _finish(self, size: int) -> tuple[float, dict[str, Any]]:
        step = self.source.finish(size)
        value = self.reward(step)
        if self.centred and (reference := self.source.reference()) is not None:
            value -= self.reward(reference)
        self.reward.observe(step)
        return value, {"metrics": {"tokens": step.tokens, "milliseconds": step.milliseconds}}


class SizeEnv(_StepEnv):
    """How many nodes of a drafted tree to verify: one decision an episode."""

    def __init__(
        self,
        source: Source,
        observer: Observer,
        sizes: Sequence[int],
        other: Budget,
        reward: Reward,
        centred: bool = True,
    ) -> None:
        """other: decides the depth."""
        super().__init__(source, observer, other, reward, centred)
        self.sizes = tuple(sizes)
        self.action_space = spaces.Discrete(len(self.sizes))
        self.observation_space = self._box(observer.size_features)

    def _begin(self) -> Observation:
        growth = self.source.begin()
        while self.source.grows and self.other.go_on(growth):
            growth = self.source.deepen()
        row: Observation = self.observer.to_size(self.source.whole())[0].numpy()
        self._shown = row
        return row

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Verify so many nodes (an index into `sizes`): observation [features], reward, and the episode's end."""
        reward, info = self._finish(self.sizes[int(action)])
        return self._shown.copy(), reward, True, False, info


class DepthEnv(_StepEnv):
    """Whether to draft another level, after each; the first is always drafted."""

    def __init__(
        self,
        source: Source,
        observer: Observer,
        other: Budget,
        reward: Reward,
        centred: bool = True,
        every: int = 1,
    ) -> None:
        """other: decides the size. every: only each n-th level is asked about."""
        super().__init__(source, observer, other, reward, centred)
        self.every = every
        self.action_space = spaces.Discrete(2)
        self.observation_space = self._box(observer.depth_features)

    def _begin(self) -> Observation:
        growth = self._on(self.source.begin())
        while not self._asks(growth):  # a source too shallow to be asked about decides for itself
            self._finish(self.other.size(self.source.whole()))
            growth = self._on(self.source.begin())
        return self._show(growth)

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Draft another level, or verify what there is: observation [features], reward (0 until the episode ends), and
        whether it has ended."""
        if int(action) == GO_ON:
            growth = self._on(self.source.deepen())
            if self._asks(growth):
                return self._show(growth), 0.0, False, False, {}
            self._show(growth)
        reward, info = self._finish(self.other.size(self.source.whole()))
        return self._shown.copy(), reward, True, False, info

    def _asks(self, growth: Growth) -> bool:
        return self.source.grows and growth.depth % self.every == 0

    def _on(self, growth: Growth) -> Growth:
        """Through the levels that are not asked about."""
        while self.source.grows and growth.depth % self.every:
            growth = self.source.deepen()
        return growth

    def _show(self, growth: Growth) -> Observation:
        row: Observation = self.observer.to_depth(growth)[0].numpy()
        self._shown = row
        return row
