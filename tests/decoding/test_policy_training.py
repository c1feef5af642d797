"""Training with PPO: it finds a known optimum, goes on exactly where it was interrupted, and stops at what is wrong."""

# ruff: noqa: E402 - skipped where what trains is not installed

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")
gymnasium = pytest.importorskip("gymnasium")

from stable_baselines3.common.vec_env import DummyVecEnv

from decoding.policies import ppo, training
from decoding.policies.curves import draw_curves
from decoding.policies.policy import Policy, PolicyError
from decoding.policies.training import CURVES, LOG, STATE, PPOConfig, check_installed, train_ppo
from switchsd.commands.train import terminable

LEARNING = PPOConfig(
    timesteps=6144, environments=8, steps=32, batch=64, epochs=4, learning_rate=5e-3, actor=(16,), critic=(16,)
)
SHORT = PPOConfig(timesteps=96, environments=2, steps=8, batch=8, epochs=2, actor=(5, 4), critic=(6,), seed=3)


class Bandit(gymnasium.Env[Any, Any]):
    """Which of three arms pays is seen, in other units and shifted; one pull an episode."""

    metadata: ClassVar[dict[str, Any]] = {}
    MEAN, SCALE = torch.full((3,), 50.0), torch.full((3,), 20.0)

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)

    @classmethod
    def seen(cls, arm: int) -> np.ndarray:
        return np.float32([50 + 20 * (k == arm) for k in range(3)])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.arm = int(self.np_random.integers(3))
        return self.seen(self.arm), {}

    def reward(self, action: int) -> float:
        return float(action == self.arm)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self.reward(int(action))
        metrics = {"metrics": {"hit": 100.0 * (action == self.arm)}}
        self.arm = int(self.np_random.integers(3))
        return self.seen(self.arm), reward, True, False, metrics


class Blind(Bandit):
    """What pays is not the arm that is seen."""

    def reward(self, action: int) -> float:
        return float(self.np_random.integers(3) == action)


class Corridor(gymnasium.Env[Any, Any]):
    """Going on three times pays 1 and stopping earlier 0.2: later rewards must count."""

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, number: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return np.float32([self.place]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place += 1
        ended = action == 0 or self.place == 3
        reward = 0.0 if not ended else 0.2 if action == 0 else 1.0
        return np.float32([self.place]), reward, ended, False, {}


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were drawn each time; pictures take longer than these trainings."""
    lengths: list[int] = []
    monkeypatch.setattr(training, "draw_curves", lambda records, file: lengths.append(len(records)))
    return lengths


def trained(*arguments: Any, **more: Any) -> tuple[list[dict[str, Any]], Policy]:
    """All records, and the policy."""
    records: list[dict[str, Any]] = []

    def collect() -> Iterator[Any]:
        policy = yield from train_ppo(*arguments, **more)
        yield policy

    *records, policy = collect()
    return records, policy


def same(one: Policy, other: Policy) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


# -- what is learned -------------------------------------------------------------------------------------


def test_the_known_optimum_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "draw_curves", draw_curves)
    records, policy = trained(Bandit, LEARNING, tmp_path, standard=(Bandit.MEAN, Bandit.SCALE))
    seen = torch.from_numpy(np.stack([Bandit.seen(k) for k in range(3)]))
    assert policy(seen).argmax(-1).tolist() == [0, 1, 2]
    assert records[0]["reward"] < 0.6 and records[-1]["reward"] > 0.95
    assert records[-1]["hit"] == pytest.approx(100 * records[-1]["reward"], abs=1e-3)
    assert records[-1]["entropy"] < 0.5 < 1.0 < records[0]["entropy"] < np.log(3) + 1e-6
    assert [r["timesteps"] for r in records] == [256 * k for k in range(1, 25)]
    assert records[-1]["episodes"] == 256 and records[-1]["length"] == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        CURVES, LOG, "state-24.safetensors", STATE, "tensorboard"
    ]  # fmt: skip


def test_a_reward_that_says_nothing_teaches_nothing(tmp_path: Path) -> None:
    records, _ = trained(Blind, LEARNING, tmp_path, standard=(Bandit.MEAN, Bandit.SCALE))
    assert max(r["reward"] for r in records[-5:]) < 0.5


def test_later_rewards_count_if_they_are_not_discounted(tmp_path: Path) -> None:
    _, patient = trained(Corridor, replace(LEARNING, gamma=1.0), tmp_path / "a")
    _, hasty = trained(Corridor, replace(LEARNING, gamma=0.0), tmp_path / "b")
    assert patient(torch.tensor([[0.0], [1.0]])).argmax(-1).tolist() == [1, 1]
    assert int(hasty(torch.tensor([0.0])).argmax()) == 0


def test_the_exported_policy_is_the_actor(tmp_path: Path) -> None:
    models: list[Any] = []
    make = ppo.new_model

    def remember(*arguments: Any) -> Any:
        models.append(make(*arguments))
        return models[-1]

    for activation in ("tanh", "relu"):
        config = replace(SHORT, activation=activation, learning_rate=0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo, "new_model", remember)
            _, policy = trained(Bandit, config, tmp_path / activation, standard=(Bandit.MEAN, Bandit.SCALE))
        observations = 50 + 20 * torch.randn(64, 3)
        with torch.no_grad():
            wanted = models[-1].policy.get_distribution(observations).distribution.logits
        torch.testing.assert_close(policy(observations).log_softmax(-1), wanted, atol=1e-6, rtol=0)
        assert policy.activation == activation and policy.hidden == (5, 4)


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    config = replace(SHORT, timesteps=4 * 200, steps=2, actor=(2,), critic=(2,), epochs=1, batch=4)
    rates = [r["learning_rate"] for r in trained(Bandit, config, tmp_path)[0]]
    assert rates[0] == pytest.approx(config.learning_rate / 4, rel=1e-4)
    assert rates[1] == pytest.approx(config.learning_rate * 3 / 4, rel=1e-4)
    assert max(rates) == rates[2] > 0.99 * config.learning_rate
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))
    assert 0 < rates[-1] < 0.01 * config.learning_rate


# -- interruptions ---------------------------------------------------------------------------------------


class Interrupting(Bandit):
    """Ctrl-C at some step of some iteration."""

    at: int | None = None
    steps = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.number == 1:
            Interrupting.steps += 1
            if Interrupting.steps == Interrupting.at:
                raise KeyboardInterrupt
        return super().step(action)


def test_a_run_interrupted_twice_is_the_run_that_was_not(tmp_path: Path) -> None:
    whole, wanted = trained(Bandit, SHORT, tmp_path / "whole")
    again, repeated = trained(Bandit, SHORT, tmp_path / "again")
    assert same(wanted, repeated) and untimed(whole) == untimed(again)
    folder = tmp_path / "interrupted"
    told: list[dict[str, Any]] = []
    for at in (20, 3, None):  # in the third iteration of 8 steps, and in the first after that
        Interrupting.at, Interrupting.steps = at, 0
        training_ = train_ppo(Interrupting, SHORT, folder)
        try:
            told += iter(training_)
        except KeyboardInterrupt:
            assert json.loads((folder / STATE).read_text())["iteration"] == 2
            assert [p.name for p in folder.glob("state-*")] == ["state-2.safetensors"]
    records, policy = trained(Bandit, SHORT, folder)
    assert same(policy, wanted) and untimed(told) == untimed(whole)
    assert untimed(records) == untimed(whole[-1:])  # complete: nothing more is done
    assert untimed([json.loads(line) for line in (folder / LOG).read_text().splitlines()]) == untimed(whole)
    assert [b["iteration"] for b in json.loads((folder / STATE).read_text())["begun"]] == [0, 2]
    _, other = trained(Bandit, replace(SHORT, seed=4), tmp_path / "other")
    assert not same(other, wanted)


def test_an_update_that_is_interrupted_leaves_the_weights_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wanted = trained(Bandit, SHORT, tmp_path / "whole")
    step, steps = torch.optim.Adam.step, 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 11:  # of four an update
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(Bandit, SHORT, tmp_path / "b")
    monkeypatch.undo()
    assert json.loads((tmp_path / "b" / STATE).read_text())["iteration"] == 2
    assert same(trained(Bandit, SHORT, tmp_path / "b")[1], wanted)


def test_who_stops_listening_keeps_what_was_done(tmp_path: Path) -> None:
    for record in train_ppo(Bandit, SHORT, tmp_path):
        if record["iteration"] == 4:
            break
    assert json.loads((tmp_path / STATE).read_text())["iteration"] == 4


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole, wanted = trained(Bandit, SHORT, tmp_path / "whole")
    folder = tmp_path / "killed"
    running = train_ppo(Bandit, SHORT, folder)
    next(running), next(running)
    running.close()
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    for record in train_ppo(Bandit, SHORT, folder):
        if record["iteration"] == 4:
            break
    log = (folder / LOG).read_bytes()
    for name, content in before.items():
        (folder / name).write_bytes(content)
    (folder / LOG).write_bytes(log + b'{"iteration": 5, "timest')  # told, and killed before the state was kept
    (folder / "state-9.tmp").write_bytes(b"half")
    records, policy = trained(Bandit, SHORT, folder)
    assert same(policy, wanted) and untimed(records) == untimed(whole[2:])
    assert untimed([json.loads(line) for line in (folder / LOG).read_text().splitlines()]) == untimed(whole)
    assert not list(folder.glob("*.tmp"))


def test_a_longer_run_goes_on_and_is_drawn_at_checkpoints(tmp_path: Path, drawn: list[int]) -> None:
    trained(Bandit, replace(SHORT, checkpoint_seconds=1000), tmp_path)
    assert drawn == [6]
    records, _ = trained(Bandit, replace(SHORT, timesteps=140, checkpoint_seconds=1e-9), tmp_path)
    assert [r["iteration"] for r in records] == [7, 8, 9]
    assert drawn == [6, 7, 8, 9]


class Counting(DummyVecEnv):
    """Environments whose reward depends on how often they were asked, iterations together."""

    count = 0

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        self.count += 1
        return observations, rewards / self.count, dones, infos

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_what_environments_keep_is_kept(tmp_path: Path) -> None:
    def environments() -> Counting:
        return Counting([Bandit, Bandit])

    whole, wanted = trained(environments(), SHORT, tmp_path / "whole")
    for record in train_ppo(environments(), SHORT, tmp_path / "b"):
        if record["iteration"] == 3:
            break
    records, policy = trained(environments(), SHORT, tmp_path / "b")
    assert same(policy, wanted) and untimed(records) == untimed(whole[3:])
    assert json.loads((tmp_path / "b" / STATE).read_text())["environments"] == {"count": 6 * 8}


def test_term_keeps_the_state(tmp_path: Path) -> None:
    class Ended(Bandit):
        steps = 0

        def step(self, action: Any) -> Any:
            Ended.steps += 1
            if Ended.steps == 55:  # of 16 an iteration
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(action)

    with terminable(), pytest.raises(KeyboardInterrupt):
        trained(Ended, SHORT, tmp_path)
    assert json.loads((tmp_path / STATE).read_text())["iteration"] == 3


# -- what it begins from ---------------------------------------------------------------------------------


def test_a_warm_start_is_what_was_given(tmp_path: Path) -> None:
    _, first = trained(Bandit, LEARNING, tmp_path / "a", standard=(Bandit.MEAN, Bandit.SCALE))
    config = replace(LEARNING, timesteps=256, learning_rate=1e-12)
    records, second = trained(Bandit, config, tmp_path / "b", initial=first)
    assert records[0]["reward"] > 0.9  # without a step of learning
    seen = 50 + 20 * torch.randn(9, 3)
    torch.testing.assert_close(first(seen), second(seen), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"actor": (5,)}, r"the policy to begin from has hidden \[5, 4\], not \[5\]: use one of that shape"),
        ({"activation": "relu"}, "has activation tanh, not relu"),
    ],
)
def test_a_warm_start_of_another_shape(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    _, policy = trained(Bandit, replace(SHORT, timesteps=16), tmp_path / "a")
    with pytest.raises(PolicyError, match=told):
        trained(Bandit, replace(SHORT, **change), tmp_path / "b", initial=policy)
    with pytest.raises(PolicyError, match="has features 3, not 1; actions 3, not 2"):
        trained(Corridor, SHORT, tmp_path / "c", initial=policy)


@pytest.mark.parametrize(
    ("standard", "told"),
    [
        ((torch.zeros(2), torch.ones(2)), r"are standardised by \[2\] and \[2\] values, and have 3: give a mean"),
        ((torch.zeros(3), torch.zeros(3)), "by a scale that is 0"),
        ((torch.full((3,), torch.nan), torch.ones(3)), "by values that are not finite"),
    ],
)
def test_a_wrong_standardisation(tmp_path: Path, standard: Any, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        trained(Bandit, SHORT, tmp_path, standard=standard)


@pytest.mark.parametrize(
    ("change", "more", "told"),
    [
        ({"learning_rate": 0.5}, {}, r"was begun otherwise \(learning_rate: 0.0003 and 0.5\): give the same settings"),
        ({"seed": 9, "actor": (2,)}, {}, r"\(actor: \[5, 4\] and \[2\]; seed: 3 and 9\)"),
        ({}, {"subject": {"target": "b"}}, r"\(target: 'a' and 'b'\)"),
        ({}, {"initial": Policy([(torch.zeros(2, 2), torch.zeros(2))])}, r"\(the policy to begin from\)"),
    ],
)
def test_another_run_in_the_folder(tmp_path: Path, change: dict[str, Any], more: dict[str, Any], told: str) -> None:
    trained(Bandit, replace(SHORT, timesteps=16), tmp_path, subject={"target": "a"})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(PolicyError, match=told):
        trained(Bandit, replace(SHORT, **change), tmp_path, **{"subject": {"target": "a"}, **more})
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / STATE).write_text("{"), r"state.json is damaged .*: delete that folder to begin"),
        (lambda folder: (folder / STATE).write_text("[]"), "state.json is damaged"),
        (lambda folder: (folder / STATE).write_text('{"version": 2}'), "state.json is damaged .*version 2"),
        (lambda folder: (folder / "state-1.safetensors").unlink(), r"cannot read .*state-1.safetensors"),
        (lambda folder: (folder / "state-1.safetensors").write_bytes(b"x" * 30), r"cannot read .*state-1.safetensors"),
    ],
)
def test_a_damaged_state(tmp_path: Path, damage: Callable[[Path], Any], told: str) -> None:
    trained(Bandit, replace(SHORT, timesteps=16), tmp_path)
    damage(tmp_path)
    with pytest.raises(PolicyError, match=told):
        trained(Bandit, SHORT, tmp_path)


def test_a_state_without_a_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    trained(Bandit, replace(SHORT, timesteps=16), tmp_path)
    tensors = load_file(tmp_path / "state-1.safetensors")
    tensors.pop("action_net.weight")
    save_file(tensors, tmp_path / "state-1.safetensors")
    with pytest.raises(PolicyError, match=r"does not fit this run .*action_net.weight.*: delete that folder"):
        trained(Bandit, SHORT, tmp_path)


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match=r"cannot make the folder .*: choose another"):
        trained(Bandit, SHORT, tmp_path / "file")


# -- what stops it ---------------------------------------------------------------------------------------


class Wrong(Bandit):
    """Gives something that is not finite, in environment 1, at its 12th step: the fourth of the second iteration."""

    what = "reward"
    value = float("nan")

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.steps = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, reward, ended, _, info = super().step(action)
        if self.number == 1 and self.steps == 12:
            if self.what == "reward":
                reward = self.value
            else:
                observation[2] = self.value
        return observation, reward, ended, self.what == "last", info


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(Wrong, "value", value)
    with pytest.raises(PolicyError) as stopped:
        trained(Wrong, SHORT, tmp_path)
    assert str(stopped.value) == (
        f"environment 1 gave the reward {value} in step 4 of iteration 2: look at what it measures there; the state "
        "before that iteration is kept"
    )
    assert json.loads((tmp_path / STATE).read_text())["iteration"] == 1
    wanted = trained(Bandit, SHORT, tmp_path / "other")[1]
    assert same(trained(Bandit, SHORT, tmp_path)[1], wanted)  # nothing of it was learned


def test_observations_that_are_not_finite(tmp_path: Path) -> None:
    class First(Bandit):
        def reset(self, **more: Any) -> Any:
            _, info = super().reset(**more)
            return np.float32([1, np.inf, 0]), info

    with pytest.raises(PolicyError, match="environment 0 gave the observation inf at entry 1 in step 0 of iteration 1"):
        trained(First, SHORT, tmp_path / "a")

    class Later(Bandit):
        def step(self, action: Any) -> Any:
            return np.float32([0, 0, np.nan]), 0.0, False, False, {}

    with pytest.raises(PolicyError, match="environment 0 gave the observation nan at entry 2 in step 1"):
        trained(Later, SHORT, tmp_path / "b")

    class Cut(Bandit):
        def step(self, action: Any) -> Any:
            return np.float32([0, 0, np.nan if self.number else 0]), 0.0, False, True, {}

    with pytest.raises(PolicyError, match="environment 1 gave the observation nan at entry 2 in step 1"):
        trained(Cut, SHORT, tmp_path / "c")


def test_weights_that_leave_the_numbers(tmp_path: Path) -> None:
    config = replace(SHORT, learning_rate=1e36, epochs=6, timesteps=1600)
    with pytest.raises(
        PolicyError, match=r"weights are not finite after iteration \d+: use a learning_rate below 1e\+36"
    ):
        trained(Bandit, config, tmp_path)
    state = json.loads((tmp_path / STATE).read_text())
    tensors = training.load_file(tmp_path / f"state-{state['iteration']}.safetensors")
    assert all(torch.isfinite(x).all() for name, x in tensors.items() if not name.startswith("optimizer."))


def test_episodes_that_never_end(tmp_path: Path) -> None:
    class Endless(Bandit):
        def step(self, action: Any) -> Any:
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, False, info

    with pytest.raises(PolicyError, match=r"no episode ended within 8 steps of 2 environments, .*: use more steps"):
        trained(Endless, SHORT, tmp_path)


def test_environments_that_no_policy_has(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there are 3 environments, and 2 are asked for"):
        trained(DummyVecEnv([Bandit] * 3), SHORT, tmp_path)

    class Wide(Bandit):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.observation_space = gymnasium.spaces.Box(0, 1, (3, 3), np.float32)

    class Moving(Bandit):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.action_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)

    with pytest.raises(PolicyError, match=r"observations are Box.*: they must be a Box of shape \[features\], float32"):
        trained(Wide, SHORT, tmp_path)
    with pytest.raises(PolicyError, match=r"actions are Box.*: they must be Discrete, from 0 on"):
        trained(Moving, SHORT, tmp_path)


def test_the_environments_run_with_the_threads_that_there_were(tmp_path: Path) -> None:
    seen: set[int] = set()

    class Counted(Bandit):
        def step(self, action: Any) -> Any:
            seen.add(torch.get_num_threads())
            return super().step(action)

    with ppo.threads(2):
        trained(Counted, replace(SHORT, timesteps=16), tmp_path)
        assert torch.get_num_threads() == 2
    assert seen == {2}


# -- settings and pictures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"timesteps": 0}, "timesteps is 0; it must be 1 or more"),
        ({"environments": 0}, "environments is 0"),
        ({"batch": 1}, "batch is 1; it must be 2 or more and divide environments x steps = 8 x 128 = 1024"),
        ({"batch": 60}, "batch is 60"),
        ({"steps": 100}, r"batch is 64; .* 8 x 100 = 800"),
        ({"gamma": 1.1}, r"gamma is 1.1; it must lie in \[0, 1\]"),
        ({"gae_lambda": float("nan")}, "gae_lambda is nan"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"target_kl": -1.0}, "target_kl is -1.0"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds is 0"),
        ({"entropy": -0.1}, "entropy is -0.1; it must be 0 or more"),
        ({"actor": (4, 0)}, "actor is 4,0; every layer must have 1 unit or more"),
        ({"critic": (-1,)}, "critic is -1"),
        ({"activation": "gelu"}, "activation is 'gelu'; it is tanh or relu"),
        ({"seed": -1}, r"seed is -1; it must lie in \[0, 4294967295\]"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PPOConfig(**change)


def test_a_largest_seed_and_a_policy_without_hidden_layers(tmp_path: Path) -> None:
    config = replace(SHORT, seed=training.LARGEST_SEED, actor=(), critic=(), timesteps=16)
    _, policy = trained(Bandit, config, tmp_path / "a")
    assert policy.hidden == ()
    trained(Bandit, config, tmp_path / "b", initial=policy)


@pytest.mark.parametrize("missing", ["stable_baselines3", "gymnasium", "torch.utils.tensorboard"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tensorboard" if missing.startswith("torch") else missing

    def absent(*arguments: Any, **more: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setitem(sys.modules, "decoding.policies.ppo", None)
    with pytest.raises(ModuleNotFoundError):  # what is missing is no part of the extra
        check_installed()
    monkeypatch.undo()
    monkeypatch.setattr("builtins.__import__", absent)
    with pytest.raises(PolicyError, match=rf"training a policy needs {name}: pip install 'switchsd\[rl\]'"):
        check_installed()


def test_only_training_needs_the_extra() -> None:
    script = (
        "import sys\nfor name in ('stable_baselines3', 'gymnasium', 'tensorboard'): sys.modules[name] = None\n"
        "import decoding.policies.policy, decoding.policies.training, decoding.policies.curves\n"
        "from decoding.policies.training import PPOConfig; PPOConfig()\n"
        "try: decoding.policies.training.check_installed()\n"
        "except ValueError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("pip install 'switchsd[rl]'"), done.stdout


def test_the_curves_are_a_picture(tmp_path: Path) -> None:
    record = {"timesteps": 10, "reward": None, "entropy": 1.0, "approx_kl": 0.1, "loss": None}
    for records in ([], [record], [record, {"timesteps": 20, "reward": 2.0}]):
        draw_curves(records, tmp_path / CURVES)
        assert (tmp_path / CURVES).read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == [CURVES]
