"""What stable-baselines3 trains: watched environments, a standardised actor with a critic; and the actor alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import Env, spaces
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper
from torch import nn

from decoding.policies.policy import LAYERS, Policy, PolicyError

if TYPE_CHECKING:
    from decoding.policies.training import PPOConfig

METRICS = "metrics"
"""Entry of a step's info whose numbers, by name, are averaged over an iteration and told with it."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch meanwhile; to change them takes less than a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Watched(VecEnvWrapper):
    """Environments whose rewards and observations are finite, or training stops there; counts what they gave.

    They run with as many threads of torch as there were when this was made, whatever the networks are trained with.
    """

    def __init__(self, environments: VecEnv) -> None:
        super().__init__(environments)
        self.iteration = 0
        self._threads = torch.get_num_threads()
        self.begin()

    def begin(self) -> None:
        """A new iteration: nothing is counted yet."""
        self._step = 0
        self._return, self._length = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=np.int64)
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._metrics: dict[str, list[float]] = {}

    def summary(self) -> dict[str, float | int | None]:
        """Of the episodes that ended in this iteration: their number, mean return (`reward`) and mean length; and the
        means of the environments' own metrics."""
        ended = len(self._returns)
        return {
            "reward": float(np.mean(self._returns)) if ended else None,
            "length": float(np.mean(self._lengths)) if ended else None,
            "episodes": ended,
            **{name: float(np.mean(values)) for name, values in self._metrics.items()},
        }

    def reset(self) -> Any:
        """Observations [environments, features]. Raises PolicyError if one is not finite."""
        with threads(self._threads):
            observations = self.venv.reset()
        self._check("observation", observations)
        self.begin()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step with actions [environments]."""
        with threads(self._threads):
            self.venv.step_async(actions)

    def step_wait(self) -> Any:
        """Observations [environments, features], rewards and ends [environments], and infos of the step.

        Raises PolicyError if an observation or a reward is not finite.
        """
        with threads(self._threads):
            observations, rewards, dones, infos = self.venv.step_wait()
        self._step += 1
        self._check("reward", rewards)
        self._check("observation", observations)
        self._return += rewards
        self._length += 1
        for number in np.flatnonzero(dones):
            last = infos[number].get("terminal_observation")
            if last is not None and infos[number].get("TimeLimit.truncated"):
                self._check("observation", np.asarray(last)[None], int(number))
            self._returns.append(float(self._return[number]))
            self._lengths.append(int(self._length[number]))
        self._return[dones], self._length[dones] = 0.0, 0
        for info in infos:
            for name, value in info.get(METRICS, {}).items():
                self._metrics.setdefault(name, []).append(float(value))
        return observations, rewards, dones, infos

    def _check(self, what: str, values: Any, first: int = 0) -> None:
        finite = np.isfinite(values)
        if finite.all():
            return
        number, *entry = (int(i) for i in np.argwhere(~finite)[0])
        where = f"{what} {values[(number, *entry)]}" + (f" at entry {entry[0]}" if entry else "")
        raise PolicyError(
            f"environment {first + number} gave the {where} in step {self._step} of iteration {self.iteration}: look "
            "at what it measures there; the state before that iteration is kept"
        )


class Standardised(BaseFeaturesExtractor):
    """(x - mean) / scale, for observations [environments, features]."""

    mean: torch.Tensor
    """[features]"""
    scale: torch.Tensor
    """[features]"""

    def __init__(self, observation_space: spaces.Box, mean: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(observation_space, len(mean))
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return (observations - self.mean) / self.scale


def vector(environment: Callable[[int], Env[Any, Any]] | VecEnv, count: int) -> VecEnv:
    """So many environments side by side: `environment(k)` of each number, or a ready VecEnv.

    Raises PolicyError for another number, or spaces that no policy has.
    """
    made = (
        environment if isinstance(environment, VecEnv) else DummyVecEnv([partial(environment, k) for k in range(count)])
    )
    if made.num_envs != count:
        raise PolicyError(
            f"there are {made.num_envs} environments, and {count} are asked for: set environments to that"
        )
    seen, actions = made.observation_space, made.action_space
    if not (isinstance(seen, spaces.Box) and len(seen.shape) == 1 and seen.dtype == np.float32 and seen.shape[0] > 0):
        raise PolicyError(f"the environments' observations are {seen}: they must be a Box of shape [features], float32")
    if not isinstance(actions, spaces.Discrete) or actions.start != 0:
        raise PolicyError(f"the environments' actions are {actions}: they must be Discrete, from 0 on")
    return made


def new_model(
    environments: Any,
    config: PPOConfig,
    rate: Callable[[float], float],
    initial: Policy | None,
    standard: tuple[torch.Tensor, torch.Tensor] | None,
) -> PPO:
    """PPO (arXiv 1707.06347) whose actor begins as `initial`; `rate` gives the learning rate.

    `standard`: a mean and a scale [features] of observations, where it begins anew. Raises PolicyError for an `initial`
    of another shape, and for numbers that do not standardise.
    """
    features, actions = environments.observation_space.shape[0], int(environments.action_space.n)
    if initial is not None:
        asked = {
            "features": features,
            "hidden": list(config.actor),
            "activation": config.activation,
            "actions": actions,
        }
        wrong = [
            f"{k} {v}, not {asked[k]}" for k, v in initial.describe().items() if v != asked[k] and _matters(k, asked)
        ]
        if wrong:
            raise PolicyError(f"the policy to begin from has {'; '.join(wrong)}: use one of that shape")
        mean, scale = initial.mean.cpu(), initial.scale.cpu()
    else:
        mean, scale = standard or (torch.zeros(features), torch.ones(features))
        if mean.shape != (features,) or scale.shape != (features,):
            raise PolicyError(
                f"observations are standardised by {list(mean.shape)} and {list(scale.shape)} values, and have "
                f"{features}: give a mean and a scale for each"
            )
        if not (torch.isfinite(mean).all() and torch.isfinite(scale).all() and (scale > 0).all()):
            raise PolicyError("observations are standardised by values that are not finite, or by a scale that is 0")
    model = PPO(
        "MlpPolicy",
        environments,
        learning_rate=rate,
        n_steps=config.steps,
        batch_size=config.batch,
        n_epochs=config.epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip,
        ent_coef=config.entropy,
        target_kl=config.target_kl,
        policy_kwargs={
            "net_arch": {"pi": list(config.actor), "vf": list(config.critic)},
            "activation_fn": {name: layer for layer, name in LAYERS.items()}[config.activation],
            "features_extractor_class": Standardised,
            "features_extractor_kwargs": {"mean": mean.float().clone(), "scale": scale.float().clone()},
        },
        seed=config.seed,
        device="cpu",
    )
    if initial is not None:
        with torch.no_grad():
            for layer, (weight, bias) in zip(_linear(model), initial.layers(), strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
    return model


def _matters(key: str, asked: Mapping[str, Any]) -> bool:
    """An activation stands between layers only."""
    return key != "activation" or bool(asked["hidden"])


def _linear(model: PPO) -> list[nn.Linear]:
    """The actor's layers."""
    return [m for m in (*model.policy.mlp_extractor.policy_net, model.policy.action_net) if isinstance(m, nn.Linear)]


def export(model: PPO) -> Policy:
    """The actor alone."""
    policy: Any = model.policy
    layers = (*policy.mlp_extractor.policy_net, policy.action_net)
    return Policy.of(layers, policy.features_extractor.mean, policy.features_extractor.scale)
