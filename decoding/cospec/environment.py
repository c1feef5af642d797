"""Arbitration as an environment: an episode is a question's answer, a step one of its mismatches.

The observation is the mismatch's state, the action keeps the draft's token or takes the target's, and the reward comes
at the end: 1 for a right answer, and a little for its speed. It is centred within a group: the answers that one
environment writes to a question, one after the other, each compared with the mean of those before it and of the
target's own. So what is learned from is what decisions change, and not how hard a question is; and since no answer
takes part in what it is compared with, the policy's gradient stays unbiased.

What an answer's decisions lead to is looked up where it is known (microseconds), and written by the real models where
it is not, for all environments together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from decoding.cospec.branches import Decisions, Outcome, Place
from decoding.cospec.state import STATE
from decoding.policies.policy import PolicyError

MIXED = 0.75
"""Share of the questions that are drawn from those known to have right and wrong answers, if there are any."""


class Answers(Protocol):
    """Questions by number, and what decisions at their mismatches lead to."""

    def __len__(self) -> int: ...

    def at(self, question: int, decisions: Decisions) -> Place | Outcome | None:
        """The next mismatch, or the end; None where nobody has been."""
        ...

    def visit(self, wanted: Sequence[tuple[int, Decisions]]) -> None:
        """Go there: afterwards `at` knows each of these."""
        ...

    def mixed(self, question: int) -> bool:
        """Whether some of its answers are known to be right and some to be wrong."""
        ...


@dataclass
class _Slot:
    """What one environment is at."""

    question: int = 0
    decisions: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of the group: the target's own answer, then those that were written."""
    rng: np.random.Generator = field(default_factory=np.random.default_rng)


class ArbitrationEnvironment(VecEnv):
    """`environments` of them; what one does changes nothing for the others."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's

    def __init__(
        self,
        answers: Answers,
        environments: int = 8,
        group: int = 8,
        speed: float = 0.05,
        reference: float = 1.0,
    ) -> None:
        """`group`: answers to a question, one after the other. `speed`: what tokens per forward of the target count,
        in units of `reference`, beside a right answer's 1.

        Raises PolicyError where no answer is right, or no question has a mismatch.
        """
        self.answers, self.group, self.speed, self.reference = answers, group, speed, reference
        self.render_mode = None
        super().__init__(environments, spaces.Box(-np.inf, np.inf, (len(STATE),), np.float32), spaces.Discrete(2))
        answers.visit([(q, ()) for q in range(len(answers)) if answers.at(q, ()) is None])
        self._asked = [q for q in range(len(answers)) if isinstance(answers.at(q, ()), Place)]
        self._mixed = [q for q in self._asked if answers.mixed(q)]
        if not self._asked:
            raise PolicyError(
                f"the draft agrees with the target in all of the {len(answers)} answers: there is nothing to decide; "
                "use a draft that was trained otherwise, or other questions"
            )
        self._slots = [_Slot() for _ in range(environments)]
        self._actions = np.zeros(environments, dtype=np.int64)

    # -- stable-baselines3's ------------------------------------------------------------------------

    def reset(self) -> np.ndarray:
        """First mismatches, float32 [environments, STATE]; questions are drawn from what `seed` has set."""
        for number, slot in enumerate(self._slots):
            slot.rng = np.random.default_rng([self._seeds[number] or 0, number])
        self._reset_seeds()
        self._reset_options()
        self._draw(self._slots)
        return np.stack([self._observation(slot) for slot in self._slots])

    def step_async(self, actions: np.ndarray) -> None:
        """Decisions [environments]: 1 keeps the draft's token."""
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Next mismatches [environments, STATE], rewards [environments], which answers ended [environments], and
        metrics of those that did."""
        for slot, action in zip(self._slots, self._actions, strict=True):
            slot.decisions.append(bool(action))
        self._visit(self._slots)
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        ends = [self._found(slot) for slot in self._slots]
        dones = np.array([isinstance(end, Outcome) for end in ends])
        infos: list[dict[str, Any]] = [{} for _ in ends]
        over = []
        for number, (slot, end) in enumerate(zip(self._slots, ends, strict=True)):
            if not isinstance(end, Outcome):
                continue
            own = self._reward(end)
            rewards[number] = own - np.mean(slot.rewards)
            infos[number] = {
                "terminal_observation": np.zeros(len(STATE), np.float32),
                "TimeLimit.truncated": False,
                "metrics": {
                    "right": float(end.right),
                    "uncentred_reward": own,
                    "kept": float(np.mean(slot.decisions)),
                    "tokens_per_forward": end.speed,
                },
            }  # fmt: skip
            slot.rewards.append(own)
            slot.decisions = []
            if len(slot.rewards) > self.group:
                over.append(slot)
        self._draw(over)
        return np.stack([self._observation(slot) for slot in self._slots]), rewards, dones, infos

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on must not find anew: the branches have become more."""
        return {"mixed": self._mixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mixed = [int(question) for question in state["mixed"]]

    def close(self) -> None:
        """Nothing is held."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the environments share their settings")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise NotImplementedError("the environments are no objects of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    # -- inside -------------------------------------------------------------------------------------

    def _draw(self, slots: Sequence[_Slot]) -> None:
        """New questions, with the target's own answers to compare with."""
        for slot in slots:
            among = self._mixed if self._mixed and slot.rng.random() < MIXED else self._asked
            slot.question = among[int(slot.rng.integers(len(among)))]
            slot.decisions, slot.rewards = [], []
        going = list(slots)
        while going:  # the target's own answer, which is one of known branches where they were explored
            self._visit(going)
            ends = [self._found(slot) for slot in going]
            for slot, end in zip(going, ends, strict=True):
                if isinstance(end, Outcome):
                    slot.rewards, slot.decisions = [self._reward(end)], []
                else:
                    slot.decisions.append(False)
            going = [slot for slot, end in zip(going, ends, strict=True) if not isinstance(end, Outcome)]

    def _reward(self, outcome: Outcome) -> float:
        return float(outcome.right) + self.speed * outcome.speed / self.reference

    def _found(self, slot: _Slot) -> Place | Outcome | None:
        return self.answers.at(slot.question, tuple(slot.decisions))

    def _visit(self, slots: Sequence[_Slot]) -> None:
        wanted = dict.fromkeys((slot.question, tuple(slot.decisions)) for slot in slots if self._found(slot) is None)
        if wanted:
            self.answers.visit(list(wanted))

    def _observation(self, slot: _Slot) -> np.ndarray:
        found = self._found(slot)
        assert isinstance(found, Place)  # an episode that has ended has begun anew
        return np.asarray(found.state, dtype=np.float32)


class Result(NamedTuple):
    """What a rule gets, over all questions."""

    reward: float
    """Mean, not centred."""
    right: float
    """Share of right answers."""
    kept: float
    """Share of the mismatches that it was asked about whose drafts it kept."""
    tokens_per_forward: float
    """Of all answers together."""


def result_of(
    answers: Answers, decide: Callable[[torch.Tensor], torch.Tensor], speed: float = 0.0, reference: float = 1.0
) -> Result:
    """`decide`: from states [m, features] to where the draft's token is kept, bool [m]."""
    ends: list[Outcome] = []
    asked = kept = 0
    going: list[tuple[int, Decisions]] = [(q, ()) for q in range(len(answers))]
    while going:
        unknown = [one for one in going if answers.at(*one) is None]
        if unknown:
            answers.visit(unknown)
        found = [answers.at(*one) for one in going]
        ends += [end for end in found if isinstance(end, Outcome)]
        at = [(one, place) for one, place in zip(going, found, strict=True) if isinstance(place, Place)]
        if not at:
            break
        chosen = decide(torch.stack([place.state for _, place in at])).tolist()
        going = [(question, (*decisions, keep)) for ((question, decisions), _), keep in zip(at, chosen, strict=True)]
        asked += len(at)
        kept += sum(chosen)
    rewards = [end.right + speed * end.speed / reference for end in ends]
    rate = sum(end.tokens for end in ends) / max(sum(end.forwards for end in ends), 1)
    right = sum(end.right for end in ends) / len(ends)
    return Result(sum(rewards) / len(ends), right, kept / max(asked, 1), rate)
