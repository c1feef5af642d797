"""Training an arbitration policy.

    branches    what single decisions at an answer's mismatches lead to, written by the real models
    warm start  a classifier learns from them which of two tokens leads to a right answer
    PPO         the classifier is improved on whole answers: right ones, and a little for their speed
    threshold   from which probability on a draft is kept: chosen on questions that nothing was trained on

In the folder of a run: `branches/`, `warm/`, `ppo/`, and in the end the policy itself. A run that was interrupted goes
on in the stage in which it was. Needs the extra `rl`; what comes of it needs torch alone.

Source: CoSpec, arXiv 2605.24793, for what is decided; how it is learned is this project's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from activations.provenance import provenance
from activations.target import Target
from decoding.answers import Question
from decoding.cospec.branches import (
    BranchStore,
    Examples,
    Explored,
    Runner,
    Writer,
    examples,
    explore,
    identity,
    shares,
)
from decoding.cospec.state import STATE
from decoding.cospec.verifier import KEEP, TAKE, PolicyArbiter
from decoding.draft.drafter import DraftModelDrafter
from decoding.policies.policy import CONFIG as POLICY
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError, differences
from decoding.policies.training import PPOConfig, check_installed, scaling, train_ppo

KIND, NETWORK = "cospec", "arbitration"
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of which one is chosen; 1 never keeps a draft."""
FIRST_KEEP = 0.05
"""Probability of keeping a draft before anything is learned."""

Record = dict[str, Any]


@dataclass(frozen=True)
class CoSpecConfig:
    """How an arbitration policy is trained."""

    draft_tokens: int = 4
    """Tokens that the draft model drafts at a step."""
    max_new_tokens: int = 32
    """Longest answer."""
    stops: bool = True
    """Whether a draft's stop token may stand where the target would go on."""
    first: int = 2
    """Of how many of an answer's first mismatches both branches are followed."""
    validation: float = 0.25
    """Share of the questions that nothing is trained on, and the threshold is chosen on."""
    rows: int = 32
    """Answers that are written at a time."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of the policy's hidden layers."""
    ties: Literal["drop", "keep", "take"] = "drop"
    """What the warm start learns where both tokens lead to a right answer, or both to a wrong one: nothing, to keep the
    draft's (ties are free speed), or to take the target's."""
    warm_epochs: int = 300
    """How often the warm start goes over its mismatches, at most."""
    warm_rate: float = 3e-3
    """Its learning rate."""
    speed: float = 0.05
    """What tokens per forward of the target count, in units of the target's own answers', beside a right answer's 1."""
    group: int = 8
    """Answers to a question that are compared with one another."""
    timesteps: int = 40_960
    """Decisions that PPO learns from."""
    environments: int = 64
    """Answers that it writes side by side."""
    steps: int = 32
    """Decisions in each between two updates."""
    batch: int = 256
    """Decisions of a gradient step."""
    epochs: int = 4
    """How often an update goes over its decisions."""
    learning_rate: float = 1e-3
    """Peak of PPO's."""
    clip: float = 0.2
    """How far an update may move a decision's probability, as a share of it."""
    entropy: float = 0.003
    """Weight of the entropy bonus."""
    seed: int = 0
    """Seed of everything that is random in it."""

    def __post_init__(self) -> None:
        for name in ("draft_tokens", "max_new_tokens", "first", "rows", "warm_epochs", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation is {self.validation}; it must be a share between 0 and 1")
        if self.ties not in ("drop", "keep", "take"):
            raise ValueError(f"ties is {self.ties!r}; it is drop, keep or take")
        if not 0 <= self.speed < math.inf:
            raise ValueError(f"speed is {self.speed}; it must be 0 or more")
        if not 0 < self.warm_rate < math.inf:
            raise ValueError(f"warm_rate is {self.warm_rate}; it must be above 0")
        self.ppo  # noqa: B018 - which checks the rest

    @property
    def ppo(self) -> PPOConfig:
        """Every reward comes at an answer's end and belongs to all of its decisions: nothing is discounted."""
        return PPOConfig(
            timesteps=self.timesteps,
            environments=self.environments,
            steps=self.steps,
            batch=self.batch,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            gamma=1.0,
            gae_lambda=1.0,
            clip=self.clip,
            entropy=self.entropy,
            actor=self.hidden,
            critic=self.hidden,
            seed=self.seed,
        )


def train(
    target: Target, drafter: DraftModelDrafter, questions: Sequence[Question], folder: Path, config: CoSpecConfig
) -> Generator[Record, None, PolicyArtifact]:
    """Train an arbitration policy and save it in `folder`; yields records, whose `stage` says what they tell of, and
    returns the artifact. Give questions on which nothing will be tested.

    Raises PolicyError where the questions teach nothing, or the folder holds another run.
    """
    check_installed()
    runner = Runner(target, drafter, config.draft_tokens, config.max_new_tokens, config.stops, config.rows)
    try:
        return (
            yield from train_on(runner, questions, folder, config, target.fingerprint.to_dict(), drafter.describe())
        )
    finally:
        runner.close()


def train_on(
    runner: Writer,
    questions: Sequence[Question],
    folder: Path,
    config: CoSpecConfig,
    target: dict[str, Any],
    drafter: dict[str, Any],
) -> Generator[Record, None, PolicyArtifact]:
    """Like `train`, with whatever writes the answers.

    Raises PolicyError for too few questions, for answers that leave nothing to learn, and for a folder that holds the
    policy of other settings.
    """
    began = time.monotonic()
    trained, validated = split(questions, config)
    store = BranchStore(folder / "branches", runner.describe())
    try:
        for done in explore(store, runner, [*trained, *validated], config.first, config.rows):
            yield {
                "stage": "branches", "questions": done, "of": len(trained) + len(validated),
                "seconds": time.monotonic() - began, "contradictions": store.contradictions,
            }  # fmt: skip
        found = {"training": shares(store, trained), "validation": shares(store, validated)}
        for name, share in found.items():
            yield {"stage": "shares", "of": name, **share}
        check(found["training"])
        reference = reference_speed(store, trained)
        warm = yield from _warm_start(store, trained, folder / "warm", config, target)
        yield {"stage": "warm start", **_agreements(warm, store, validated, 0.5, config.first)}
        from decoding.cospec.environment import ArbitrationEnvironment, result_of

        start = PolicyArbiter(warm, 0.5)
        answers = Explored(store, runner, trained, start)
        environment = ArbitrationEnvironment(answers, config.environments, config.group, config.speed, reference)
        own = result_of(answers, start.choose, config.speed, reference)  # which writes what PPO begins with
        store.flush()
        yield {"stage": "warm start", **_rounded(own._asdict())}
        subject = {"what": KIND, "questions": len(trained), "group": config.group, "speed": config.speed}
        steps = train_ppo(environment, config.ppo, folder / "ppo", initial=warm, subject=subject)
        while True:
            try:
                yield {"stage": "ppo", **next(steps)}
            except StopIteration as end:
                policy: Policy = end.value
                break
        store.flush()
        judged = Explored(store, runner, validated)
        results = yield from _thresholds({"ppo": policy, "warm": warm}, judged, config, reference)
    finally:
        store.flush()
    best = max(results, key=lambda r: (r["reward"], r["threshold"]))
    chosen = {"ppo": policy, "warm": warm}[best["policy"]]
    summary: Record = {
        "config": asdict(config),
        "shares": found,
        "thresholds": results,
        "chosen": best,
        "oracle": _agreements(chosen, store, validated, best["threshold"], config.first),
        "seconds": time.monotonic() - began,
        "provenance": provenance(seed=config.seed),
    }
    artifact = PolicyArtifact(
        KIND, target, drafter, {NETWORK: chosen},
        settings={
            "threshold": best["threshold"], "state": list(STATE), "draft_tokens": config.draft_tokens,
            "stops": config.stops,
        },
        record=json.loads(json.dumps(summary)),
    )  # fmt: skip
    artifact.save(folder)
    yield {"stage": "done", **best, **summary["oracle"]}
    return artifact


def split(questions: Sequence[Question], config: CoSpecConfig) -> tuple[list[Question], list[Question]]:
    """Questions to train and to validate on: no prompt is on both sides, or twice on one.

    Raises PolicyError if there are too few for both.
    """
    once = list({identity(q): q for q in questions}.values())
    random.Random(config.seed).shuffle(once)
    held = round(len(once) * config.validation)
    if not 0 < held < len(once):
        raise PolicyError(
            f"{len(once)} different questions cannot be divided into {1 - config.validation:.0%} to train and "
            f"{config.validation:.0%} to validate on: give more of them"
        )
    return once[held:], once[:held]


def check(found: dict[str, Any]) -> None:
    """Raise PolicyError where the questions teach nothing."""
    told = (
        f"of {found['questions']} questions the target answers {found['target']:.1%} right, the draft "
        f"{found['draft']:.1%}, and the best of what was tried {found['best']:.1%}"
    )
    if found["best"] == 0:
        raise PolicyError(
            f"no answer is right: {told}. Choose questions that one of the two can do (easier kinds or levels), or "
            "longer answers (max_new_tokens)"
        )
    if found["best"] == found["worst"]:
        raise PolicyError(
            f"no decision changes whether an answer is right: {told}. Choose other questions, or a draft that was "
            "trained for these"
        )


def reference_speed(store: BranchStore, questions: Sequence[Question]) -> float:
    """Tokens per forward of the target's own answers, on average."""
    ends = [store.follow(identity(q), ()) for q in questions]
    speeds = [end[1].speed for end in ends if end is not None]
    return sum(speeds) / len(speeds)


# -- the warm start -----------------------------------------------------------------------------------


def network(config: CoSpecConfig) -> nn.Sequential:
    """Of the policy's shape, from standardised states; keeps a draft with probability FIRST_KEEP."""
    sizes = [len(STATE), *config.hidden]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    last = nn.Linear(sizes[-1], 2)
    with torch.no_grad():
        last.weight.mul_(0.01)
        last.bias.zero_()
        last.bias[KEEP] = math.log(FIRST_KEEP / (1 - FIRST_KEEP))
    return nn.Sequential(*layers, last)


def fit(found: Examples, config: CoSpecConfig) -> Iterator[tuple[Record, Policy]]:
    """A classifier of mismatches; yields the best so far, by the loss over a fifth of the questions, now and then."""
    torch.manual_seed(config.seed)
    mean, scale = scaling(found.states, least=1e-4)
    model = network(config)
    yield {"epoch": 0}, Policy.of(model, mean, scale)
    counts = torch.ones_like(found.ties) if config.ties != "drop" else ~found.ties
    wanted = torch.where(found.ties, torch.tensor(config.ties == "keep"), found.keep).float()
    held = (found.question % 5 == 0) & counts
    used = (found.question % 5 != 0) & counts
    if not held.any() or not used.any():
        return
    inputs = (found.states - mean) / scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_rate, weight_decay=0.05)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits = model(inputs[rows])
        return nn.functional.binary_cross_entropy_with_logits(logits[:, KEEP] - logits[:, TAKE], wanted[rows])

    best, since = math.inf, 0
    for epoch in range(1, config.warm_epochs + 1):
        order = used.nonzero()[:, 0][torch.randperm(int(used.sum()))]
        for rows in order.split(128):
            optimizer.zero_grad()
            loss_of(rows).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(loss_of(held.nonzero()[:, 0]))
        since += 1
        if loss < best:
            best, since = loss, 0
            yield {"epoch": epoch, "loss": loss, "mismatches": int(used.sum())}, Policy.of(model, mean, scale)
        if since >= 30:
            return


def _warm_start(
    store: BranchStore, questions: Sequence[Question], folder: Path, config: CoSpecConfig, target: dict[str, Any]
) -> Generator[Record, None, Policy]:
    """The policy that the branches teach. It is kept: PPO adds branches, from which a run that goes on would learn
    another one."""
    settings = {
        "questions": _digest(questions),
        **{name: getattr(config, name) for name in ("first", "ties", "warm_epochs", "warm_rate", "seed")},
        "hidden": list(config.hidden),
    }
    if (folder / POLICY).is_file():
        kept = PolicyArtifact.load(folder)
        different = differences(kept.settings, settings)
        if different:
            raise PolicyError(
                f"the warm start in {folder} was made otherwise ({'; '.join(different)}): give the same settings to go "
                "on with that run, or choose another folder"
            )
        yield {"stage": "warm start", **kept.record}
        return kept.networks[NETWORK]
    found = examples(store, questions, True, config.first)
    record: Record = {}
    for record, policy in fit(found, config):  # noqa: B007
        pass
    record = {
        **record, "ties": round(float(found.ties.float().mean()), 4),
        "keep_better": int((found.keep & ~found.take).sum()), "take_better": int((found.take & ~found.keep).sum()),
    }  # fmt: skip
    PolicyArtifact(KIND, target, None, {NETWORK: policy}, settings, record).save(folder)
    yield {"stage": "warm start", **record}
    return policy


def _digest(questions: Sequence[Question]) -> str:
    return hashlib.sha256("\n".join(identity(question) for question in questions).encode()).hexdigest()


def agreement(policy: Policy, found: Examples, threshold: float) -> dict[str, float]:
    """With the oracle, which knows what either token leads to: the share of mismatches where the policy chooses as it
    does, ties counting as agreement; the same without the ties; and, for comparison, without the ties what always
    taking the target's token and always keeping the draft's get."""
    if not len(found.states):
        return {"mismatches": 0}
    kept = PolicyArbiter(policy, threshold).choose(found.states)
    same = (kept == found.keep) | found.ties
    clear = ~found.ties
    n = max(int(clear.sum()), 1)
    return {
        "mismatches": len(found.states),
        "clear": int(clear.sum()),
        "agreement": round(float(same.float().mean()), 4),
        "agreement_without_ties": round(float((same & clear).sum()) / n, 4),
        "take_without_ties": round(float((~found.keep & clear).sum()) / n, 4),
        "keep_without_ties": round(float((found.keep & clear).sum()) / n, 4),
    }


def _agreements(
    policy: Policy, store: BranchStore, questions: Sequence[Question], threshold: float, first: int
) -> Record:
    """With two oracles: the target's tokens follow after either token, or the draft's after its own."""
    return {
        "oracle": agreement(policy, examples(store, questions, False, first), threshold),
        "oracle_own": agreement(policy, examples(store, questions, True, first), threshold),
    }


# -- the threshold ------------------------------------------------------------------------------------


def _thresholds(
    policies: dict[str, Policy], answers: Explored, config: CoSpecConfig, reference: float
) -> Generator[Record, None, list[Record]]:
    """What each policy gets at each threshold on the validation questions."""
    from decoding.cospec.environment import result_of

    results: list[Record] = []
    for name, policy in policies.items():
        for threshold in THRESHOLDS:
            answers.rest = arbiter = PolicyArbiter(policy, threshold)
            found = result_of(answers, arbiter.choose, config.speed, reference)
            results.append({"policy": name, "threshold": threshold, **_rounded(found._asdict())})
            yield {"stage": "threshold", **results[-1]}
    return results


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}
