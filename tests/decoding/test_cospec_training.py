"""Training an arbitration policy, on a toy whose best rule is known."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cospec_toy import Toy, best_rule, toy_questions

from decoding.cospec.branches import BranchStore, Examples, Explored, Job, Outcome, identity
from decoding.cospec.environment import ArbitrationEnvironment, result_of
from decoding.cospec.state import STATE
from decoding.cospec.training import FIRST_KEEP, NETWORK, CoSpecConfig, agreement, fit, split, train_on
from decoding.cospec.verifier import keep_probability
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError

FINGERPRINT = {"architecture": "Toy", "width": 1, "blocks": 1, "vocabulary": "x", "revision": "y"}
CONFIG = CoSpecConfig(hidden=(16,), timesteps=6_000, environments=16, steps=64, batch=256, warm_epochs=60, speed=0.0)


def run(toy: Toy, folder: Path, config: CoSpecConfig, count: int = 700) -> tuple[list[dict[str, Any]], PolicyArtifact]:
    steps: Generator[dict[str, Any], None, PolicyArtifact] = train_on(
        toy, toy_questions(count), folder, config, FINGERPRINT, {"name": "toy"}
    )
    records = []
    while True:
        try:
            records.append(next(steps))
        except StopIteration as end:
            return records, end.value


def unseen(tmp_path: Path, count: int = 3000) -> Explored:
    toy = Toy()
    return Explored(BranchStore(tmp_path / "unseen", toy.describe()), toy, toy_questions(count, seed=9))


def test_the_best_rule_of_the_toy_is_found(tmp_path: Path) -> None:
    """Warm start and PPO get 98 % of what the best rule gets; chance and the ends of the scale do not."""
    _, artifact = run(Toy(), tmp_path / "run", CONFIG)
    answers = unseen(tmp_path)
    best = result_of(answers, best_rule).right
    policy, threshold = artifact.networks[NETWORK], artifact.settings["threshold"]
    found = result_of(answers, lambda states: keep_probability(policy, states) >= threshold).right
    torch.manual_seed(0)
    others = [
        result_of(answers, lambda states: torch.rand(len(states)) < 0.25).right,
        result_of(answers, lambda states: torch.zeros(len(states), dtype=torch.bool)).right,
        result_of(answers, lambda states: torch.ones(len(states), dtype=torch.bool)).right,
    ]
    assert found >= 0.98 * best
    assert max(others) < 0.9 * best


def test_ppo_alone_finds_it_too(tmp_path: Path) -> None:
    """From a start that keeps a draft in twenty, and knows nothing."""
    from decoding.policies.training import train_ppo

    config = replace(CONFIG, timesteps=20_480, learning_rate=1e-2, epochs=8, batch=128)
    answers = Explored(BranchStore(tmp_path / "b", {}), Toy(), toy_questions(600))
    nothing = Examples(
        torch.randn(8, len(STATE)).sign(), *torch.zeros(2, 8, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    )
    _, start = next(fit(nothing, config))
    steps = train_ppo(ArbitrationEnvironment(answers, 16, 8, 0.0), config.ppo, tmp_path / "ppo", initial=start)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            policy: Policy = end.value
            break
    fresh = unseen(tmp_path)
    best = result_of(fresh, best_rule).right
    assert result_of(fresh, lambda states: keep_probability(start, states) >= 0.5).right < 0.9 * best
    assert result_of(fresh, lambda states: keep_probability(policy, states) >= 0.5).right >= 0.98 * best


# -- the environment ------------------------------------------------------------------------------------


def environment(tmp_path: Path, **options: Any) -> ArbitrationEnvironment:
    toy = Toy()
    answers = Explored(BranchStore(tmp_path / "b", toy.describe()), toy, toy_questions(60))
    return ArbitrationEnvironment(answers, **options)


def test_rewards_are_centred_on_the_answers_before(tmp_path: Path) -> None:
    env = environment(tmp_path, environments=3, group=4, speed=0.1, reference=2.0)
    env.seed(5)
    seen = env.reset()
    rng = np.random.default_rng(0)
    groups: list[list[float]] = [[] for _ in range(3)]
    raw: list[list[float]] = [[] for _ in range(3)]
    checked = 0
    for _ in range(300):
        assert seen.shape == (3, len(STATE)) and seen.dtype == np.float32
        questions = [slot.question for slot in env._slots]
        seen, rewards, dones, infos = env.step(rng.integers(0, 2, 3))
        for k in range(3):
            if not dones[k]:
                assert rewards[k] == 0
                continue
            metrics = infos[k]["metrics"]
            own = metrics["right"] + 0.1 * metrics["tokens_per_forward"] / 2.0
            assert metrics["uncentred_reward"] == pytest.approx(own)
            if not raw[k]:
                decisions: tuple[bool, ...] = ()
                while not isinstance(end := env.answers.at(questions[k], decisions), Outcome):
                    decisions = (*decisions, False)
                raw[k] = [end.right + 0.1 * end.speed / 2.0]
            assert rewards[k] == pytest.approx(own - np.mean(raw[k]), abs=1e-6)
            raw[k].append(own)
            checked += 1
            if len(raw[k]) > 4:  # the group is whole
                groups[k], raw[k] = raw[k], []
            else:
                assert env._slots[k].question == questions[k]
    assert checked > 100


def test_episodes_follow_from_the_seed(tmp_path: Path) -> None:
    env = environment(tmp_path, environments=4)
    found = []
    for seed in (3, 3, 4):
        env.seed(seed)
        steps = [env.reset()]
        rng = np.random.default_rng(1)
        steps += [np.concatenate([s.flatten(), r]) for s, r, *_ in (env.step(rng.integers(0, 2, 4)) for _ in range(30))]
        found.append(np.concatenate([s.flatten() for s in steps]))
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def test_a_rule_is_judged_by_what_it_would_write(tmp_path: Path) -> None:
    env = environment(tmp_path)
    toy = Toy()
    for script, keep in (((), False), ((True,) * 9, True)):
        found = result_of(
            env.answers, lambda states, keep=keep: torch.full((len(states),), keep), speed=0.5, reference=3.0
        )
        runs = toy.run([Job(question, script) for question in env.answers.questions])  # type: ignore[attr-defined]
        assert found.right == pytest.approx(np.mean([run.outcome.right for run in runs]))
        assert found.kept == float(keep)
        assert found.reward == pytest.approx(np.mean([r.outcome.right + 0.5 * r.outcome.speed / 3 for r in runs]))
        assert found.tokens_per_forward == pytest.approx(
            sum(r.outcome.tokens for r in runs) / sum(r.outcome.forwards for r in runs)
        )


# -- what cannot be trained on, and what goes on ------------------------------------------------------------

QUICK = replace(CONFIG, timesteps=2048, warm_epochs=5)


def test_questions_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PolicyError, match=r"no answer is right: of 30 questions the target answers 0.0% right, the draft 0.0%"
    ):
        run(Toy(hopeless=True), tmp_path / "a", QUICK, 40)
    with pytest.raises(PolicyError, match="no decision changes whether an answer is right: of 30 questions"):
        run(Toy(agrees=True), tmp_path / "b", QUICK, 40)
    with pytest.raises(PolicyError, match="1 different questions cannot be divided into 75% to train"):
        run(Toy(), tmp_path / "c", QUICK, 1)


def test_an_interrupted_run_goes_on_to_the_same_policy(tmp_path: Path) -> None:
    """Interrupted while it explores, and between two updates."""
    _, whole = run(Toy(), tmp_path / "whole", QUICK, 100)
    with pytest.raises(KeyboardInterrupt):
        run(Toy(fails_after=200), tmp_path / "cut", QUICK, 100)
    steps = train_on(Toy(), toy_questions(100), tmp_path / "cut", QUICK, FINGERPRINT, {"name": "toy"})
    for record in steps:
        if record["stage"] == "ppo":
            steps.close()
            break
    _, again = run(Toy(), tmp_path / "cut", QUICK, 100)
    for name, tensor in whole.networks[NETWORK].tensors().items():
        assert tensor.equal(again.networks[NETWORK].tensors()[name])
    assert whole.settings == again.settings
    with pytest.raises(PolicyError):
        run(Toy(), tmp_path / "cut", replace(QUICK, seed=5), 100)


def test_the_artifact_says_all_that_is_needed(tmp_path: Path) -> None:
    records, _ = run(Toy(), tmp_path, QUICK, 100)
    loaded = PolicyArtifact.load(tmp_path)
    assert (loaded.kind, dict(loaded.target), loaded.drafter) == ("cospec", FINGERPRINT, {"name": "toy"})
    assert loaded.settings["state"] == list(STATE) and loaded.settings["draft_tokens"] == QUICK.draft_tokens
    assert 0 < loaded.settings["threshold"] <= 1
    assert loaded.record["chosen"]["right"] == max(r["right"] for r in loaded.record["thresholds"])
    for oracle in loaded.record["oracle"].values():
        assert oracle["agreement"] >= oracle["agreement_without_ties"] * oracle["clear"] / oracle["mismatches"]
        assert oracle["take_without_ties"] + oracle["keep_without_ties"] == pytest.approx(1, abs=1e-3)
    assert {r["stage"] for r in records} == {"branches", "shares", "warm start", "ppo", "threshold", "done"}
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".zip", ".pkl", ".pt", ".pth")]


def test_no_question_is_on_both_sides() -> None:
    questions = toy_questions(50) + toy_questions(50)
    trained, validated = split(questions, CoSpecConfig())
    keys = [identity(q) for q in [*trained, *validated]]
    assert len(keys) == len(set(keys)) == 50
    assert len(validated) == 12
    assert split(questions, CoSpecConfig(seed=1))[1] != validated


def test_a_policy_begins_by_keeping_few() -> None:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(400, len(STATE), generator=g)
    none = torch.zeros(400, dtype=torch.bool)
    _, start = next(fit(Examples(states, none, none, torch.zeros(400, dtype=torch.long)), CoSpecConfig()))
    kept = keep_probability(start, states)
    assert abs(float(kept.mean()) - FIRST_KEEP) < 0.01 and float(kept.std()) < 0.02


def test_ties_teach_what_they_are_told_to() -> None:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(500, len(STATE), generator=g)
    keep, take = states[:, 0] > 1, states[:, 0] < -1  # between them neither is right
    found = Examples(states, keep, take, torch.arange(500))
    kept = {}
    for ties in ("drop", "keep", "take"):
        *_, (_, policy) = fit(found, CoSpecConfig(ties=ties, warm_epochs=40))  # type: ignore[arg-type]
        kept[ties] = keep_probability(policy, states)
        assert (kept[ties][keep] > 0.5).float().mean() > 0.8 and (kept[ties][take] < 0.5).float().mean() > 0.8
    between = found.ties
    assert kept["take"][between].mean() < kept["drop"][between].mean() < kept["keep"][between].mean()
    told = agreement(policy, found, 0.5)
    assert told["agreement"] > 0.95 and told["clear"] == int((~between).sum())
    assert agreement(policy, found, 1.0)["agreement_without_ties"] == told["take_without_ties"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("draft_tokens", 0, "draft_tokens is 0; it must be 1 or more"),
        ("validation", 1.0, "validation is 1.0; it must be a share between 0 and 1"),
        ("ties", "both", "ties is 'both'; it is drop, keep or take"),
        ("speed", -1.0, "speed is -1.0; it must be 0 or more"),
        ("batch", 7, "batch is 7; it must be 2 or more and divide"),
    ],
)
def test_settings_are_checked(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoSpecConfig(**{option: value})
