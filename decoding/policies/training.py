"""Training a policy with PPO: the algorithm is stable-baselines3's; here are a run's settings, its state on disk, what
is told of it, and what stops it.

An iteration is a rollout of every environment and the update from it. It begins with fresh episodes, and all of its
random draws, the environments' too, follow from the seed and its number. So environments need no state on disk, and a
run that was interrupted goes on to the same weights, bit by bit, as one that was not. In the folder of a run:

    state.json, state-<iteration>.safetensors   what it goes on from: counters; weights and moments
    log.jsonl, curves.png, tensorboard/         how it went: a record an iteration

Sources: PPO, arXiv 1707.06347; generalized advantage estimation, arXiv 1506.02438.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from activations.provenance import provenance
from activations.store import write_json
from decoding.policies.curves import draw_curves
from decoding.policies.policy import Policy, PolicyError, differences
from decoding.training import restore, tensors_of

if TYPE_CHECKING:
    from gymnasium import Env
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv

STATE, LOG, CURVES, BOARD = "state.json", "log.jsonl", "curves.png", "tensorboard"
WARM_UP = 0.01
"""Share of a run in which the learning rate rises to its peak; then it falls linearly to zero."""
NEVER = 2**62
"""Iterations between what stable-baselines3 tells by itself."""
LARGEST_SEED = 2**32 - 1
CHANGEABLE = ("timesteps", "checkpoint_seconds")
"""Settings that may be others when a run is continued."""
EXTRA = ("stable_baselines3", "gymnasium", "tensorboard")

Record = dict[str, Any]


@dataclass(frozen=True)
class PPOConfig:
    """How a policy is trained."""

    timesteps: int = 100_000
    """Decisions to train on, over all environments; rounded up to whole iterations."""
    environments: int = 8
    """Environments side by side."""
    steps: int = 128
    """Decisions in each environment between two updates; episodes that have not ended by then are cut there."""
    batch: int = 64
    """Decisions of a gradient step: a divisor of environments x steps."""
    epochs: int = 1
    """How often an update goes over its decisions."""
    learning_rate: float = 3e-4
    """Peak; warmed up over 1 % of the run, then linear to zero."""
    gamma: float = 0.99
    """Discount of later rewards, a decision."""
    gae_lambda: float = 0.95
    """Trade of bias (0) for variance (1) in advantages."""
    clip: float = 0.2
    """How far an update may move the probability of a decision, as a share of it."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    target_kl: float | None = None
    """Divergence in nats from the policy that decided at which an update ends early; by default none."""
    actor: tuple[int, ...] = (256,)
    """Hidden units of the policy's layers."""
    critic: tuple[int, ...] = (256, 256)
    """Hidden units of the value network's layers, which is needed in training only."""
    activation: Literal["tanh", "relu"] = "tanh"
    """What stands between layers."""
    checkpoint_seconds: float = 60.0
    """How often the state of the run is saved and the curves are drawn."""
    seed: int = 0
    """Seed of everything that is random in it."""

    def __post_init__(self) -> None:
        for name in ("timesteps", "environments", "steps", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        rollout = self.environments * self.steps
        if self.batch < 2 or rollout % self.batch:
            raise ValueError(
                f"batch is {self.batch}; it must be 2 or more and divide environments x steps = {self.environments} x "
                f"{self.steps} = {rollout}"
            )
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1]")
        for name in ("learning_rate", "clip", "checkpoint_seconds", "target_kl"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not 0 <= self.entropy < math.inf:
            raise ValueError(f"entropy is {self.entropy}; it must be 0 or more")
        for name in ("actor", "critic"):
            if any(units < 1 for units in getattr(self, name)):
                units = ",".join(map(str, getattr(self, name)))
                raise ValueError(f"{name} is {units}; every layer must have 1 unit or more")
        if self.activation not in ("tanh", "relu"):
            raise ValueError(f"activation is {self.activation!r}; it is tanh or relu")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"seed is {self.seed}; it must lie in [0, {LARGEST_SEED}]")

    @property
    def iterations(self) -> int:
        """Rollouts and updates of the whole run."""
        return -(-self.timesteps // (self.environments * self.steps))


def check_installed() -> None:
    """Raise PolicyError where what trains policies is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401

        import decoding.policies.ppo  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        raise PolicyError(f"training a policy needs {error.name}: pip install 'switchsd[rl]'") from error


def train_ppo(
    environment: Callable[[int], Env[Any, Any]] | VecEnv,
    config: PPOConfig,
    folder: Path,
    initial: Policy | None = None,
    standard: tuple[torch.Tensor, torch.Tensor] | None = None,
    subject: Mapping[str, Any] | None = None,
) -> Generator[Record, None, Policy]:
    """Train a policy; yields a record an iteration, and returns the actor as a policy:

        policy = yield from train_ppo(...)

    environment: makes environment k of `config.environments`, or is that many already. Observations are float32
        [features], actions Discrete. An environment draws from what `reset(seed=...)` seeds, or from the global states
        of numpy, torch and random, which are seeded at the start of every iteration. What is in the info of a step
        under "metrics", numbers by name, is averaged into the record. What a ready VecEnv keeps between iterations, a
        running mean say, it gives as JSON from `state_dict()` and takes back in `load_state_dict()`.
    folder: the run's own; a run that is there and was interrupted is continued.
    initial: what the actor begins as; of the config's shape.
    standard: mean and scale [features] of observations, by which the networks see them; `initial` has its own.
    subject: what is trained, as JSON; a run of another subject is not continued.

    A record holds `iteration`, `timesteps`, `seconds` of training, `reward` (mean return of the episodes that ended;
    None without one), `length` and number of `episodes`, the metrics, `entropy` and `approx_kl` in nats,
    `clip_fraction`, `loss`, `policy_loss`, `value_loss`, `explained_variance` and `learning_rate`. A run that is
    complete yields its last record again.

    Raises PolicyError for a reward or an observation that is not finite, for weights that no longer are, and where
    the folder holds another run. Whatever ends a run, the state after its last whole iteration is kept.
    """
    check_installed()
    from decoding.policies import ppo

    run = _Run(folder, config, initial, subject)
    watched = ppo.Watched(ppo.vector(environment, config.environments))
    try:
        rate = _Rate(config)
        model = ppo.new_model(watched, config, rate, initial, standard)
        run.begin(model, watched)
        if run.iteration >= config.iterations and run.log:
            yield run.log[-1]
        yield from _iterations(run, model, watched, rate)
        return ppo.export(model)
    finally:
        if watched.venv is not environment:
            watched.close()


def _iterations(run: _Run, model: PPO, watched: Any, rate: _Rate) -> Generator[Record, None, None]:
    from stable_baselines3.common.logger import configure

    config = run.config
    if run.iteration >= config.iterations:
        return
    logger = configure(str(run.folder / BOARD), ["tensorboard"])
    model.set_logger(logger)
    drawn = time.monotonic()
    try:
        while run.iteration < config.iterations:
            started = time.monotonic()
            rate.progress = (run.iteration + 0.5) / config.iterations
            _iterate(run, model, watched)
            record = _record(run, watched.summary(), logger.name_to_value, time.monotonic() - started)
            for name in record.keys() - {"timesteps"}:
                if record[name] is not None:
                    logger.record(name, record[name])
            logger.dump(record["timesteps"])
            run.ended(model, watched, record)
            if run.iteration == config.iterations or time.monotonic() - drawn > config.checkpoint_seconds:
                run.keep()
                draw_curves(run.log, run.folder / CURVES)
                drawn = time.monotonic()
            yield record
    finally:
        run.keep()
        logger.close()


def _iterate(run: _Run, model: PPO, watched: Any) -> None:
    """One rollout and the update from it, which nothing but the weights and the iteration's number decide."""
    from decoding.policies import ppo

    watched.iteration = run.iteration + 1
    seed = _seed(run.config.seed, run.iteration)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    watched.seed(seed)
    too_far = (
        f"the weights are not finite after iteration {run.iteration + 1}: use a learning_rate below "
        f"{run.config.learning_rate:g}, and look at the size of the rewards; the state before is kept in {run.folder}"
    )
    try:
        # The networks are small: with one thread they are the fastest, and the same on any machine.
        with ppo.threads(1):
            model.learn(run.config.environments * run.config.steps, log_interval=NEVER)
    except ValueError as error:  # torch refuses logits that are not finite
        if isinstance(error, PolicyError) or _finite(model):
            raise
        raise PolicyError(too_far) from error
    if not _finite(model):
        raise PolicyError(too_far)
    if run.iteration == 0 and not watched.summary()["episodes"]:
        raise PolicyError(
            f"no episode ended within {run.config.steps} steps of {run.config.environments} environments, so that none "
            "can be learned from: use more steps"
        )


def _finite(model: PPO) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.policy.parameters())


def _seed(seed: int, iteration: int) -> int:
    """Of an iteration: below 2 ** 31, so that a number of an environment can be added."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1)[0]) >> 1


def scaling(rows: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and scale [features] of observations [n, features], to standardise them by; what varies by less than `least`
    has scale 1."""
    scale = rows.std(0)
    return rows.mean(0), torch.where(scale > least, scale, torch.ones_like(scale))


class _Rate:
    """The learning rate; stable-baselines3 asks for it with its own idea of progress, that of one iteration."""

    def __init__(self, config: PPOConfig) -> None:
        self._peak = config.learning_rate
        self.progress = 0.0

    def __call__(self, remaining: float) -> float:
        return self._peak * min(self.progress / WARM_UP, (1 - self.progress) / (1 - WARM_UP))


def _record(run: _Run, found: Mapping[str, Any], values: Mapping[str, Any], seconds: float) -> Record:
    """What is told of an iteration: JSON, without numbers that are not finite."""
    losses = {
        "entropy": -values["train/entropy_loss"],
        "approx_kl": values["train/approx_kl"],
        "clip_fraction": values["train/clip_fraction"],
        "loss": values["train/loss"],
        "policy_loss": values["train/policy_gradient_loss"],
        "value_loss": values["train/value_loss"],
        "explained_variance": values["train/explained_variance"],
        "learning_rate": values["train/learning_rate"],
    }
    done = run.iteration + 1
    record: Record = {
        "iteration": done,
        "timesteps": done * run.config.environments * run.config.steps,
        "seconds": run.seconds + seconds,
        **found,
        **losses,
    }
    return {name: _rounded(value) for name, value in record.items()}


def _rounded(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


class _Run:
    """A run's folder: what it goes on from, and its log."""

    def __init__(
        self, folder: Path, config: PPOConfig, initial: Policy | None, subject: Mapping[str, Any] | None
    ) -> None:
        """Raises PolicyError where the folder holds the state of another run, or none that can be read."""
        self.folder, self.config = folder, config
        self.iteration = 0
        self.seconds = 0.0
        self.log: list[Record] = []
        self._identity = json.loads(
            json.dumps(
                {
                    "config": asdict(config),
                    "initial": None if initial is None else initial.digest,
                    "subject": dict(subject or {}),
                }
            )
        )
        self._begun: list[Any] = []
        self._kept = -1
        self._snapshot: tuple[dict[str, Any], dict[str, torch.Tensor]]
        self._found: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolicyError(f"cannot make the folder {folder} ({error}): choose another") from error
        if (folder / STATE).is_file():
            self._read()

    def begin(self, model: PPO, watched: Any) -> None:
        """Go on from the state that was found, or from nothing; and keep that much, so that a place where nothing can
        be written is told of before the work."""
        if self._found is not None:
            state, tensors = self._found
            extractor: Any = model.policy.features_extractor
            try:
                restore(tensors, dict(model.policy.named_parameters()), model.policy.optimizer)
                with torch.no_grad():
                    extractor.mean.copy_(tensors["mean"])
                    extractor.scale.copy_(tensors["scale"])
                if state["environments"] is not None:
                    watched.venv.load_state_dict(state["environments"])
            except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise PolicyError(f"the state in {self.folder} does not fit this run ({error}): {ANEW}") from error
            self._found = None
        self._begun.append({"iteration": self.iteration, "provenance": provenance(seed=self.config.seed)})
        self._take(model, watched)
        self.keep()
        self._read_log()

    def ended(self, model: PPO, watched: Any, record: Record) -> None:
        """An iteration is over."""
        self.iteration, self.seconds = record["iteration"], record["seconds"]
        self._take(model, watched)
        self.log.append(record)
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    def keep(self) -> None:
        """Write the state after the last whole iteration, if it is not there: first the tensors under a name of their
        own, then the file that counts."""
        if self._kept == self.iteration:
            return
        state, tensors = self._snapshot
        file = self._tensors(self.iteration)
        save_file(tensors, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)
        write_json(self.folder / STATE, state)
        self._kept = self.iteration
        for old in self.folder.glob("state-*.*"):
            if old != file:
                old.unlink(missing_ok=True)

    def _take(self, model: PPO, watched: Any) -> None:
        """Remember the state: an update that is interrupted leaves weights of no use."""
        extractor: Any = model.policy.features_extractor
        tensors = {
            **tensors_of(dict(model.policy.named_parameters()), model.policy.optimizer),
            "mean": extractor.mean,
            "scale": extractor.scale,
        }
        # Through JSON: the environments go on changing what they gave.
        kept = json.dumps(watched.venv.state_dict()) if hasattr(watched.venv, "state_dict") else "null"
        state = {
            "version": 1,
            "iteration": self.iteration,
            "seconds": self.seconds,
            **self._identity,
            "environments": json.loads(kept),
            "begun": self._begun,
        }
        self._snapshot = state, {name: x.clone() for name, x in tensors.items()}

    def _tensors(self, iteration: int) -> Path:
        return self.folder / f"state-{iteration}.safetensors"

    def _read(self) -> None:
        """The state in the folder, if it is one of this run."""
        file = self.folder / STATE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            if state["version"] != 1:
                raise ValueError(f"version {state['version']}")
            self.iteration, self.seconds = int(state["iteration"]), float(state["seconds"])
            self._begun = list(state["begun"])
            found = {name: state[name] for name in self._identity}
            different = [
                text
                for part in ("config", "subject")
                for text in differences(_fixed(part, found), _fixed(part, self._identity))
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PolicyError(f"{file} is damaged ({error!r}): {ANEW}") from error
        if found["initial"] != self._identity["initial"]:
            different.append("the policy to begin from")
        if different:
            raise PolicyError(
                f"the run in {self.folder} was begun otherwise ({'; '.join(different)}): give the same settings to go "
                "on with it, or choose another folder"
            )
        try:
            self._found = state, load_file(self._tensors(self.iteration))
        except (OSError, SafetensorError, ValueError) as error:
            raise PolicyError(f"cannot read {self._tensors(self.iteration)} ({error}): {ANEW}") from error
        self._kept = self.iteration

    def _read_log(self) -> None:
        """The records up to the state; what was told after it will be told again."""
        file = self.folder / LOG
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        for line in lines:
            try:
                record = json.loads(line)
                if record["iteration"] <= self.iteration:
                    self.log.append(record)
            except (ValueError, KeyError, TypeError):  # the line that was being written
                continue
        scratch = file.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in self.log), encoding="utf-8")
        os.replace(scratch, file)


ANEW = "delete that folder to begin anew"


def _fixed(part: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    return {name: value for name, value in identity[part].items() if part != "config" or name not in CHANGEABLE}
