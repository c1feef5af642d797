"""Training of a learned tree: it finds what is known to be best, resumes, and says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ltd_texts import COSTS, made_text
from test_eagle_head import random_head

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")

from activations.corpus import Prompt
from activations.target import Target
from decoding.budgets import Growth
from decoding.eagle.drafter import EagleDrafter
from decoding.ltd import training
from decoding.ltd.budget import LearnedBudget
from decoding.ltd.training import (
    Ground,
    LTDConfig,
    keyed,
    make_log,
    split,
    stages,
    train,
    train_on,
    useful_sizes,
)
from decoding.policies import training as ppo_training
from decoding.policies.policy import PolicyArtifact, PolicyError
from decoding.replay_log import LoggedText, read_log

NOBODY = {"architecture": "none", "width": 0, "blocks": 0, "vocabulary": "", "revision": None}
DEAR = replace(COSTS, draft_ms={"eagle": [1.0, 6.0, 11.0]})
"""Levels that do not pay where the head knows nothing."""
QUICK = LTDConfig(
    observation="history", depth=3, rounds=1, size_timesteps=3072, depth_timesteps=4096, environments=16, steps=32,
    batch=128, learning_rate=5e-3, hidden=(32,), overhead=0.0,
)  # fmt: skip
SHORT = replace(QUICK, size_timesteps=64, depth_timesteps=64, environments=2, steps=16, batch=16, hidden=(8,))


def texts_of(count: int = 24) -> list[LoggedText]:
    """Half of them the head knows by heart, and says so; of the others it knows nothing, and says so too."""
    return [
        made_text(i, 40, chance=0.97 if i % 2 else 0.03, source="easy" if i % 2 else "hard", vocabulary=9)
        for i in range(count)
    ]


def run(folder: Path, config: LTDConfig, texts: list[LoggedText]) -> tuple[list[dict[str, Any]], PolicyArtifact]:
    steps = train_on(texts, DEAR, folder, config, NOBODY, {"name": "eagle"})
    records = []
    while True:
        try:
            records.append(next(steps))
        except StopIteration as end:
            return records, end.value


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], PolicyArtifact, Path]:
    folder = tmp_path_factory.mktemp("learned")
    return *run(folder, QUICK, texts_of()), folder


@pytest.fixture(autouse=True, scope="module")
def quick_stages() -> Iterator[None]:
    """Few observations to standardise by, and no pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SAMPLES", 256)
        patch.setattr(ppo_training, "draw_curves", lambda *_: None)
        yield


# -- what is learned ------------------------------------------------------------------------------------


def test_ppo_finds_the_trees_that_are_best(learned: tuple[list[dict[str, Any]], PolicyArtifact, Path]) -> None:
    """Deep for the texts that the head knows, one level for the others; nearly what hindsight gives."""
    _, artifact, _ = learned
    record = artifact.record
    reached, most = record["stages"][-1]["over_fixed"], record["oracle"]["over_fixed"]
    assert most > 1.1 and reached - 1 > 0.75 * (most - 1)
    assert record["stages"][-1]["interval"][0] > 1
    assert record["sources"]["easy"] > 1 or record["sources"]["hard"] > 1
    budget = LearnedBudget.of(artifact)
    for sure, wanted in ((-0.1, True), (-2.0, False)):
        level = Growth(torch.tensor([sure, -4.0]), 1, 2, 30, 3.5 if wanted else 1.0)
        assert budget.go_on(level) == wanted


def test_rewards_pull_where_they_say(tmp_path: Path) -> None:
    """Time alone: as little as can be. Tokens alone: as much. So that a broken reward is seen."""
    found = {
        kind: run(tmp_path / kind, replace(QUICK, reward=kind, rounds=0), texts_of(12))[1].record  # type: ignore[arg-type]
        for kind in ("time", "tokens")
    }
    steps = {kind: {r["name"]: r["tokens_per_step"] for r in record["stages"]} for kind, record in found.items()}
    assert steps["time"]["depth only"] < 0.8 * steps["tokens"]["depth only"]


def test_an_artifact_holds_what_decoding_and_readers_need(
    learned: tuple[list[dict[str, Any]], PolicyArtifact, Path],
) -> None:
    records, artifact, folder = learned
    loaded = PolicyArtifact.load(folder)
    assert loaded.kind == "ltd" and set(loaded.networks) <= {"depth", "size"}
    assert LearnedBudget.of(loaded).sizes == tuple(artifact.settings["sizes"])
    assert set(artifact.settings) == {
        "sizes", "nodes", "depth", "top_k", "every", "observation", "reward", "fixed_nodes", "fixed_depth",
    }  # fmt: skip
    record = loaded.record
    assert record["texts"] == {"trained": 17, "selected": 2, "reported": 5}
    names = ["size only", "depth only", "independent", "depth-1", "size-1"]
    assert [row["name"] for row in record["stages"]] == names and record["chosen"] in names
    best = max(record["stages"], key=lambda row: row["selected"])
    assert record["chosen"] == best["name"] == records[-1]["name"]
    assert set(loaded.networks) == {"size only": {"size"}, "depth only": {"depth"}}.get(
        record["chosen"], {"depth", "size"}
    )
    assert record["config"]["reward"] == "dinkelbach" and record["provenance"]["seed"] == 0
    assert {r["stage"] for r in records} == {"grid", "size", "depth", "depth-1", "size-1", "replay", "done"}
    assert [s.name for s in stages(QUICK)] == ["size", "depth", "depth-1", "size-1"]
    assert all((folder / stage.name / "log.jsonl").is_file() for stage in stages(QUICK))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert len(run(folder, SHORT, texts_of(8))[0]) > 12
    return folder


@pytest.mark.parametrize("stop", [2, 11])
def test_an_interrupted_run_comes_to_the_same_policies(whole: Path, tmp_path: Path, stop: int) -> None:
    steps = train_on(texts_of(8), DEAR, tmp_path / "cut", SHORT, NOBODY, {"name": "eagle"})
    for _ in range(stop):
        next(steps)
    steps.close()
    assert not (tmp_path / "cut" / "policy.json").exists()
    run(tmp_path / "cut", SHORT, texts_of(8))
    one, two = ((folder / "policy.safetensors").read_bytes() for folder in (whole, tmp_path / "cut"))
    assert one == two
    with pytest.raises(PolicyError, match="begun otherwise"):
        run(tmp_path / "cut", replace(SHORT, reward="ratio"), texts_of(8))


# -- what it stands on ----------------------------------------------------------------------------------


def test_texts_are_split_by_their_keys_alone() -> None:
    keys = [f"a-{i}" for i in range(50)]
    trained, selected, reported = split(keys)
    assert (len(trained), len(selected), len(reported)) == (35, 5, 10)
    assert sorted([*trained, *selected, *reported]) == list(range(50))
    again = split(keys[::-1])
    assert {keys[::-1][i] for i in again[2]} == {keys[i] for i in reported}
    with pytest.raises(PolicyError, match="4 logged texts are too few"):
        split(keys[:4])


def test_useful_sizes_leave_out_what_is_hardly_ever_best() -> None:
    ground = Ground.of(texts_of(), COSTS, "eagle", QUICK)
    smallest, largest = useful_sizes(ground.outcomes, ground.clock, 10)
    assert 1 <= smallest < largest <= 10
    assert ground.sizes == tuple(range(smallest, largest + 1))
    assert 2 <= len(Ground.of(texts_of(), COSTS, "eagle", replace(QUICK, sizes=2)).sizes) == 2


def test_settings_that_make_no_sense_are_refused() -> None:
    for changed, told in (
        ({"depth": 1}, "depth is 1; a tree of one level"), ({"sizes": 1}, "sizes is 1"), ({"rounds": -1}, "is -1"),
        ({"overhead": -1.0}, "overhead is -1"), ({"observation": "x"}, "observation is 'x'; it is one of paper"),
        ({"reward": "x"}, "reward is 'x'; it is one of dinkelbach"), ({"every": 0}, "every is 0"),
        ({"batch": 100}, "batch is 100"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            LTDConfig(**changed)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="3 levels deep: 4 cannot be had"):
        run(Path("nowhere"), replace(QUICK, depth=4), texts_of(8))


# -- from prompts to policies ---------------------------------------------------------------------------


def prompts_of(count: int) -> dict[str, list[Prompt]]:
    made = [
        Prompt(f"p{i}", "qa", f"g{i}", "train", None, ({"role": "user", "content": "AB" * (i % 5 + 1) + chr(65 + i)},))
        for i in range(count)
    ]
    return {"one": made[::2], "two": made[1::2]}


def test_from_prompts_to_a_policy_that_fits(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), top_k=2, sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    config, prompts = replace(SHORT, max_new_tokens=12, rows=4, rounds=0), prompts_of(12)
    records = list(train(target, drafter, COSTS, prompts, tmp_path, config))
    logged = [r for r in records if r["stage"] == "log"]
    assert logged[0]["texts"] == 0 and logged[-1]["texts"] == logged[-1]["of"] == 12
    texts = read_log(tmp_path / "log")
    assert {t.key for t in texts} <= set(keyed(prompts)) and {t.source for t in texts} == {"one", "two"}
    artifact = PolicyArtifact.load(tmp_path)
    artifact.check("ltd", target, drafter)
    LearnedBudget.of(artifact)
    other = EagleDrafter(target, random_head(1), top_k=2, sites=drafter.sites)
    with pytest.raises(PolicyError, match="trained with another drafter"):
        artifact.check("ltd", target, other)
    # Nothing is logged twice, and another head's log is refused.
    times = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "log").glob("*.safetensors")}
    again = list(make_log(target, drafter, prompts, tmp_path / "log", config))
    assert [r["texts"] for r in again] == [12]
    assert times == {f.name: f.stat().st_mtime_ns for f in (tmp_path / "log").glob("*.safetensors")}
    with pytest.raises(PolicyError, match="a log of another drafter: choose another folder"):
        list(make_log(target, other, prompts, tmp_path / "log", config))


def test_a_log_goes_on_where_it_was_interrupted(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), top_k=2, sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    config, prompts = replace(SHORT, max_new_tokens=12, rows=2), prompts_of(12)
    list(make_log(target, drafter, prompts, tmp_path / "whole", config))
    logging = make_log(target, drafter, prompts, tmp_path / "cut", config)
    next(logging), next(logging)
    logging.close()
    kept = len(list((tmp_path / "cut").glob("*.safetensors")))
    assert 0 < kept < 12
    list(make_log(target, drafter, prompts, tmp_path / "cut", config))
    for one, two in zip(read_log(tmp_path / "whole"), read_log(tmp_path / "cut"), strict=True):
        assert (one.key, one.ids) == (two.key, two.ids) and torch.allclose(one.scores, two.scores, atol=1e-4)


def test_bad_logs_and_prompts_are_told_of(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), top_k=2, sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    with pytest.raises(PolicyError, match="no prompts"):
        list(make_log(target, drafter, {"none": []}, tmp_path, SHORT))
    (tmp_path / "log.json").write_text("{")
    with pytest.raises(PolicyError, match="nothing that can be read"):
        list(make_log(target, drafter, prompts_of(4), tmp_path, SHORT))
    (tmp_path / "log.json").unlink()
    config = replace(SHORT, max_new_tokens=12)
    with pytest.raises(PolicyError, match="too few to train on"):
        list(train(target, drafter, COSTS, prompts_of(4), tmp_path / "few", config))
    shutil.copytree(tmp_path / "few" / "log", tmp_path / "bad" / "log")
    file = next((tmp_path / "bad" / "log").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Exception, match=r"is no replay log of this version.*delete it and log again"):
        list(train(target, drafter, COSTS, prompts_of(4), tmp_path / "bad", config))


def test_a_prompt_has_one_name_in_a_log() -> None:
    made = prompts_of(6)["one"]
    assert list(keyed({"a": made})) == list(keyed({"a": [*made, made[0]]}))
    assert len(keyed({"a": made, "b": made})) == 2 * len(made)
    assert json.dumps(sorted(keyed({"a": made[::-1]}))) == json.dumps(sorted(keyed({"a": made})))
    assert np.unique([k.partition("-")[2] for k in keyed({"a": made})]).size == 3
