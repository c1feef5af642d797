"""Training the two policies of Learning to Draft.

    log      the target's greedy answers to the prompts, and the head's whole tree at each of their positions
    grid     the best fixed tree, on the texts that are trained on
    size     PPO on the size policy alone, trees of random depth
    depth    PPO on the depth policy alone, trees of the grid's size
    round    each in turn, with the other frozen, as often as asked
    chosen   of what stood after each stage, the pair that is fastest on texts kept for that choice

All of it replays the log, with a cost table for a clock: no model runs after the first stage. In the folder of a run:
`log/`, a folder for each stage, and in the end the policies themselves. A run that was interrupted goes on in the stage
in which it was. Needs the extra `rl`; what comes of it needs torch alone.

Source: arXiv 2603.01639, which trains with the models running and not on a log.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from activations.corpus import Prompt
from activations.generation import Request as Answer
from activations.generation import complete
from activations.provenance import provenance
from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.costs import CostTable
from decoding.eagle.drafter import EagleDrafter
from decoding.ltd.budget import LearnedBudget
from decoding.ltd.grid import Fixed, Rate, grid, oracle, replay
from decoding.ltd.observations import OBSERVATIONS, Observer
from decoding.ltd.outcomes import Clock, Outcomes, nodes_at
from decoding.ltd.rewards import REWARDS, Reward, Step
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError
from decoding.policies.training import PPOConfig, check_installed, scaling, train_ppo
from decoding.replay_log import LogError, LoggedText, log_text, read_log

KIND = "ltd"
FEWEST = 8
"""Texts to learn from and to judge by."""
SHORTEST = 4
"""Answers of fewer tokens are not logged."""
AHEAD = 2
"""Tokens that are written beyond a logged text and a tree's depth."""
WIDEST = 64
"""Nodes of the largest fixed tree that the grid tries."""
SAMPLES = 4096
"""Observations that are standardised by."""
SELECTED, REPORTED = 0.1, 0.2
"""Shares of the texts that the pair is chosen on, and that results are told of; the others are trained on."""

Record = dict[str, Any]


@dataclass(frozen=True)
class LTDConfig:
    """How the policies of a learned tree are trained."""

    observation: Literal["paper", "ranked", "history"] = "history"
    """What the policies see: paper (scores, length, depth), ranked (the same, sorted), history (and the pace)."""
    reward: Literal["dinkelbach", "ratio", "tokens", "time"] = "dinkelbach"
    """dinkelbach (tokens less the time at the usual rate), ratio (tokens over time: the paper's), tokens, or time."""
    centred: bool = True
    """Rewards are told over what the best fixed tree gives at the same place."""
    depth: int = 6
    """Most levels of a tree."""
    sizes: int = 24
    """Sizes that the size policy chooses from."""
    every: int = 1
    """The depth policy is asked at each n-th level only."""
    rounds: int = 1
    """How often each is trained again, with the other frozen."""
    max_new_tokens: int = 128
    """Tokens of an answer that is logged."""
    rows: int = 24
    """Answers written at a time."""
    overhead: float = 0.7
    """Milliseconds of a step besides drafting and verifying."""
    size_timesteps: int = 100_000
    """Decisions that the size policy learns from in a stage."""
    depth_timesteps: int = 160_000
    """Decisions that the depth policy learns from in a stage."""
    environments: int = 64
    """Texts that are replayed side by side."""
    steps: int = 32
    """Decisions in each between two updates."""
    batch: int = 256
    """Decisions of a gradient step."""
    epochs: int = 4
    """How often an update goes over its decisions."""
    learning_rate: float = 1e-3
    """Peak of PPO's in a policy's first stage; half of it in later ones."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    hidden: tuple[int, ...] = (128,)
    """Units of the policies' hidden layers."""
    seed: int = 0
    """Seed of everything that is random in it."""

    def __post_init__(self) -> None:
        for name in ("depth", "every", "rows", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.depth < 2:
            raise ValueError(f"depth is {self.depth}; a tree of one level leaves no depth to decide: use 2 or more")
        if self.sizes < 2:
            raise ValueError(f"sizes is {self.sizes}; it must be 2 or more")
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}; it must be 0 or more")
        if not 0 <= self.overhead < 1e6:
            raise ValueError(f"overhead is {self.overhead}; it is milliseconds, 0 or more")
        if self.observation not in OBSERVATIONS:
            raise ValueError(f"observation is {self.observation!r}; it is one of {', '.join(OBSERVATIONS)}")
        if self.reward not in REWARDS:
            raise ValueError(f"reward is {self.reward!r}; it is one of {', '.join(REWARDS)}")
        self.ppo("size"), self.ppo("depth")  # which check the rest

    def ppo(self, network: str, first: bool = True) -> PPOConfig:
        """Of a stage. The size policy decides once an episode, so that nothing is discounted."""
        return PPOConfig(
            timesteps=self.size_timesteps if network == "size" else self.depth_timesteps,
            environments=self.environments,
            steps=self.steps,
            batch=self.batch,
            epochs=self.epochs,
            learning_rate=self.learning_rate if first else self.learning_rate / 2,
            gamma=0.9 if network == "size" else 0.999,
            entropy=self.entropy,
            actor=self.hidden,
            critic=self.hidden,
            seed=self.seed,
        )


# -- the log ------------------------------------------------------------------------------------------


def make_log(
    target: Target,
    drafter: EagleDrafter,
    prompts: Mapping[str, Sequence[Prompt]],
    folder: Path,
    config: LTDConfig,
) -> Generator[Record, None, None]:
    """Log answers to prompts, by source; those that are there are kept. Yields a record every few texts.

    Raises PolicyError where the folder holds the log of another target or drafter.
    """
    began = time.monotonic()
    wanted = keyed(prompts)
    if not wanted:
        raise PolicyError("no prompts: give some to learn from")
    folder.mkdir(parents=True, exist_ok=True)
    _claim(
        folder,
        {
            "target": target.fingerprint.to_dict(),
            "drafter": drafter.describe(),
            "depth": config.depth,
            "max_new_tokens": config.max_new_tokens,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
    )
    passed = folder / "too-short.json"  # they would be written again at each resumption
    short = set(json.loads(passed.read_text())) if passed.is_file() else set()
    todo = [key for key in wanted if key not in short and not (folder / f"{key}.safetensors").is_file()]
    todo.sort(key=_digest)  # so that a log in the making has something of every source
    limit = config.max_new_tokens
    total, done = len(wanted), len(wanted) - len(todo)
    yield {"stage": "log", "texts": done, "of": total, "seconds": 0.0}
    requests = (
        Answer(i, target.encode_messages(wanted[key][1].messages), limit + config.depth + AHEAD)
        for i, key in enumerate(todo)
    )
    for answer in complete(target, requests, rows=config.rows):
        key, prompt = todo[answer.request.number], answer.request.prompt
        done += 1
        if len(answer.tokens) < SHORTEST:
            short.add(key)
            passed.write_text(json.dumps(sorted(short)))
        else:
            log_text(
                target, drafter, [*prompt, *answer.tokens], len(prompt), key=key, source=wanted[key][0],
                stopped=answer.stopped, limit=limit, depth=config.depth,
            ).save(folder / f"{key}.safetensors")  # fmt: skip
        if done % 8 == 0 or done == total:
            yield {"stage": "log", "texts": done, "of": total, "seconds": time.monotonic() - began}


def keyed(prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, tuple[str, Prompt]]:
    """Prompts with their sources, by the names that they have in a log: the same prompt always has the same."""
    found = {}
    for source, each in prompts.items():
        for prompt in each:
            said = json.dumps([dict(message) for message in prompt.messages])
            found[f"{source}-{_digest(said)[:12]}"] = (source, prompt)
    return found


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Note whose log this is; PolicyError where it is another's."""
    file = folder / "log.json"
    mine = json.loads(json.dumps(dict(identity)))
    if not file.is_file():
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(mine, indent=1))
        scratch.replace(file)
        return
    try:
        theirs = json.loads(file.read_text())
        different = [k for k in mine if theirs.get(k) != mine[k]]
    except (ValueError, AttributeError):
        different = ["nothing that can be read"]
    if different:
        raise PolicyError(
            f"{folder} holds a log of another {' and '.join(different)}: choose another folder, or delete this one"
        )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


# -- texts, sizes, the grid -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """What the stages stand on."""

    outcomes: Outcomes
    clock: Clock
    trained: list[int]
    selected: list[int]
    reported: list[int]
    fixed: Fixed
    """The best fixed tree of the texts that are trained on."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[LoggedText], costs: CostTable, drafter: str, config: LTDConfig) -> Ground:
        """Raises PolicyError where there are too few texts."""
        try:
            outcomes = Outcomes.of(texts, config.depth)
        except LogError as error:
            raise PolicyError(str(error)) from error
        clock = Clock.of(costs, drafter, outcomes, config.overhead)
        trained, selected, reported = split(outcomes.keys)
        largest = min(WIDEST, nodes_at(config.depth, outcomes.top_k))
        fixed = max(
            grid(outcomes, clock, range(1, largest + 1)), key=lambda f: f.rate.of(trained).per_second
        )  # of equals the smaller
        chosen = useful_sizes(outcomes, clock, largest)
        sizes = spaced_sizes(costs, config.sizes, *chosen)
        return cls(outcomes, clock, trained, selected, reported, fixed, sizes)

    def settings(self, config: LTDConfig) -> dict[str, Any]:
        """What an artifact keeps."""
        return {
            "sizes": list(self.sizes), "nodes": max(*self.sizes, self.fixed.nodes), "depth": config.depth,
            "top_k": self.outcomes.top_k, "every": config.every, "observation": config.observation,
            "reward": config.reward, "fixed_nodes": self.fixed.nodes, "fixed_depth": self.fixed.depth,
        }  # fmt: skip


def split(keys: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
    """Numbers of the texts to train on, to choose on and to report on: the same ones whatever their order, and most of
    them whatever is added. Raises PolicyError where there are too few."""
    ranked = sorted(range(len(keys)), key=lambda i: _digest(keys[i]))
    chosen, told = round(SELECTED * len(keys)), round(REPORTED * len(keys))
    if not chosen or len(keys) < FEWEST:
        raise PolicyError(
            f"{len(keys)} logged texts are too few to train on some and to judge by others: log {FEWEST} or more"
        )
    return sorted(ranked[chosen + told :]), sorted(ranked[:chosen]), sorted(ranked[chosen : chosen + told])


def useful_sizes(outcomes: Outcomes, clock: Clock, largest: int) -> tuple[int, int]:
    """Smallest and largest size that is the best one, in hindsight, at a hundredth of the positions or more."""
    sizes = list(range(1, largest + 1))
    tokens, milliseconds = outcomes.tokens(sizes), outcomes.milliseconds(clock, sizes)
    usual = oracle(outcomes, clock, sizes).per_second / 1e3
    best = (tokens - usual * milliseconds).reshape(len(outcomes), -1).argmax(1) % len(sizes)
    low, high = np.quantile(best, [0.01, 0.99], method="nearest")
    return sizes[int(low)], sizes[int(high)]


def spaced_sizes(costs: CostTable, count: int, smallest: int, largest: int, context: int = 256) -> tuple[int, ...]:
    """Up to `count` sizes from the smallest to the largest, as many milliseconds of verifying from each to the next as
    whole numbers allow. Where there are no more than `count` at all, all of them."""
    every = np.arange(smallest, largest + 1)
    if len(every) <= count:
        return tuple(every.tolist())
    # A wider verification that was measured to be faster costs no less than the narrower one.
    curve = np.maximum.accumulate([costs.verify(1 + int(v), context) for v in every])
    curve = curve + 1e-6 * (every - smallest)  # of sizes that cost the same, evenly spaced ones
    wanted = np.linspace(curve[0], curve[-1], count)
    places = np.abs(curve[None] - wanted[:, None]).argmin(1)
    for i in range(1, count):  # two steps of cost may lie within one node
        places[i] = max(places[i], places[i - 1] + 1)
    for i in range(count - 1, -1, -1):
        places[i] = min(places[i], len(every) - count + i)
    return tuple(every[places].tolist())


# -- the stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One policy's training."""

    name: str
    network: str
    first: bool
    """Nothing was learnt before, and the other half is no policy."""


def stages(config: LTDConfig) -> list[Stage]:
    """In their order."""
    found = [Stage("size", "size", True), Stage("depth", "depth", True)]
    for k in range(1, config.rounds + 1):
        found += [Stage(f"depth-{k}", "depth", False), Stage(f"size-{k}", "size", False)]
    return found


def train(
    target: Target,
    drafter: EagleDrafter,
    costs: CostTable,
    prompts: Mapping[str, Sequence[Prompt]],
    folder: Path,
    config: LTDConfig,
) -> Generator[Record, None, PolicyArtifact]:
    """Log the prompts, train on them and save the policies in `folder`; yields records, whose `stage` says what they
    tell of, and returns the artifact. Give prompts, by source, on which nothing will be tested.

    Raises PolicyError where the prompts teach nothing, or the folder holds another run.
    """
    check_installed()
    yield from make_log(target, drafter, prompts, folder / "log", config)
    texts = read_log(folder / "log", states=False)
    asked = keyed(prompts)
    texts = [text for text in texts if text.key in asked]
    return (
        yield from train_on(
            texts, costs, folder, config, target.fingerprint.to_dict(), drafter.describe()
        )
    )  # fmt: skip


def train_on(
    texts: Sequence[LoggedText],
    costs: CostTable,
    folder: Path,
    config: LTDConfig,
    target: Mapping[str, Any],
    drafter: Mapping[str, Any],
) -> Generator[Record, None, PolicyArtifact]:
    """Like `train`, from a log."""
    began = time.monotonic()
    ground = Ground.of(texts, costs, drafter["name"], config)
    settings = ground.settings(config)
    yield {"stage": "grid", **_told(ground, "fixed", ground.fixed.rate), "depth": ground.fixed.depth,
           "nodes": ground.fixed.nodes, "texts": len(texts), "positions": len(ground.outcomes)}  # fmt: skip
    networks: dict[str, Policy] = {}
    rates: dict[str, Rate] = {}
    results: list[Record] = []
    pairs: list[dict[str, Policy]] = []

    def judge(name: str, pair: dict[str, Policy]) -> Record:
        budget = LearnedBudget.made(pair.get("depth"), pair.get("size"), settings)
        rates[name] = replay(ground.outcomes, ground.clock, budget)
        pairs.append(dict(pair))
        results.append(_told(ground, name, rates[name]))
        return results[-1]

    for stage in stages(config):
        other = {} if stage.first else {n: p for n, p in networks.items() if n != stage.network}
        steps = _stage(ground, config, stage, networks.get(stage.network), other, folder)
        while True:
            try:
                yield {"stage": stage.name, **next(steps)}
            except StopIteration as end:
                networks[stage.network] = end.value
                break
        alone = {stage.network: networks[stage.network]} if stage.first else networks
        yield {"stage": "replay", **judge(f"{stage.network} only" if stage.first else stage.name, alone)}
        if stage.name == "depth":
            yield {"stage": "replay", **judge("independent", networks)}
    best = max(range(len(results)), key=lambda i: results[i]["selected"])
    every = list(range(1, max(settings["sizes"]) + 1))
    record = {
        "config": asdict(config),
        "texts": {name: len(getattr(ground, name)) for name in ("trained", "selected", "reported")},
        "grid": _told(ground, "fixed", ground.fixed.rate),
        "oracle": _told(ground, "oracle", oracle(ground.outcomes, ground.clock, every)),
        "stages": results,
        "chosen": results[best]["name"],
        "sources": _by_source(ground, rates[results[best]["name"]]),
        "costs": {"key": costs.key, "overhead": config.overhead},
        "seconds": round(time.monotonic() - began, 1),
        "provenance": provenance(seed=config.seed),
    }
    artifact = PolicyArtifact(
        KIND, dict(target), dict(drafter), pairs[best], settings=settings, record=json.loads(json.dumps(record))
    )
    artifact.save(folder)
    yield {"stage": "done", **results[best]}
    return artifact


def _stage(
    ground: Ground,
    config: LTDConfig,
    stage: Stage,
    initial: Policy | None,
    other: Mapping[str, Policy],
    folder: Path,
) -> Generator[Record, None, Policy]:
    from decoding.ltd.environments import DepthEnv, RandomDepth, ReplaySource, SizeEnv

    fixed, rate = ground.fixed, ground.fixed.rate.of(ground.trained)
    settings = ground.settings(config)
    observer = Observer(config.observation, ground.outcomes.top_k, config.depth)
    steps = rate.steps.sum()
    typical = Step(float(rate.tokens.sum() / steps), float(rate.milliseconds.sum() / steps))

    def make(number: int) -> Any:
        source = ReplaySource(
            ground.outcomes, ground.clock, ground.trained, (fixed.depth, fixed.nodes), config.depth
        )  # fmt: skip
        reward = Reward(config.reward, typical)
        if stage.network == "size":
            budget = RandomDepth(fixed.nodes, config.depth) if stage.first else _frozen(other, settings)
            return SizeEnv(source, observer, ground.sizes, budget, reward, config.centred)
        half = FixedBudget(fixed.nodes, config.depth) if stage.first else _frozen(other, settings)
        return DepthEnv(source, observer, half, reward, config.centred, config.every)

    subject = {
        "what": KIND, "stage": stage.name, "settings": settings, "centred": config.centred,
        "log": _digest("\n".join(sorted(ground.outcomes.keys))), "overhead": config.overhead,
        "other": {name: p.digest for name, p in other.items()},
    }  # fmt: skip
    seen = None if initial is not None else standard(make(0), config.seed)
    ppo = config.ppo(stage.network, stage.first)
    return (yield from train_ppo(make, ppo, folder / stage.name, initial, seen, subject))


def _frozen(other: Mapping[str, Policy], settings: Mapping[str, Any]) -> LearnedBudget:
    return LearnedBudget.made(other.get("depth"), other.get("size"), settings)


def standard(environment: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and scale [features] of what is seen while actions are random; what never changes has scale 1."""
    rng = np.random.default_rng(seed)
    seen = [environment.reset(seed=seed)[0]]
    while len(seen) < SAMPLES:
        row, _, terminated, _, _ = environment.step(rng.integers(environment.action_space.n))
        seen.append(environment.reset()[0] if terminated else row)
    return scaling(torch.from_numpy(np.stack(seen)), least=1e-3)


def _told(ground: Ground, name: str, rate: Rate) -> Record:
    """Tokens a second on all three parts, and how much faster than the best fixed tree the reported one is."""
    reported = rate.of(ground.reported)
    ratio, low, high = reported.over(ground.fixed.rate.of(ground.reported))
    return {
        "name": name,
        "trained": round(rate.of(ground.trained).per_second, 3),
        "selected": round(rate.of(ground.selected).per_second, 3),
        "reported": round(reported.per_second, 3),
        "over_fixed": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "tokens_per_step": round(reported.per_step, 3),
    }


def _by_source(ground: Ground, rate: Rate) -> dict[str, float]:
    """How much faster than the best fixed tree, on the reported texts of each source."""
    found = {}
    for source in sorted(set(ground.outcomes.sources)):
        mine = [i for i in ground.reported if ground.outcomes.sources[i] == source]
        if mine:
            found[source] = round(rate.of(mine).per_second / ground.fixed.rate.of(mine).per_second, 4)
    return found
