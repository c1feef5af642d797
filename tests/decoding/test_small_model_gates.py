"""The whole way on the shipped small model: capture, probe, gate. What is true of it holds in seconds."""

from __future__ import annotations

import random

import pytest
from small import ROOT, maker

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.labels import LabelConfig
from activations.store import CaptureStore
from activations.target import Target, load_target
from decoding.decoder import Decoder
from decoding.modes import ModeSettings
from probes.result import TrainResult
from probes.train import TrainConfig, train

KAPPA = 3
KINDS = ("repeat", "set", "two")
"""Copying is right, wrong behind every key, and right for one of two lines."""
SETTINGS = ModeSettings(kappa=KAPPA, neural="none")


def tasks(count: int, seed: int) -> list[Prompt]:
    """Of each kind `count`, a third of them for validation."""
    writer, rng = maker("small_tasks").TaskWriter((ROOT / "README.md").read_text()), random.Random(seed)
    return [
        Prompt(
            id=f"{kind}-{i}",
            family=kind,
            group=f"{kind}-{i}",
            split="validation" if i % 3 == 0 else "train",
            repetition=None,
            messages=({"role": "user", "content": writer.task(rng, kind).prompt},),
        )
        for i in range(count)
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("small-qwen3", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def store(target: Target, tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    config = CaptureConfig(
        sites=("resid_post.*",), selection="matches", max_new_tokens=128, labels=LabelConfig(kappa=KAPPA)
    )
    return capture(target, tasks(48, 0), tmp_path_factory.mktemp("small") / "store", config)


@pytest.fixture(scope="module")
def trained(store: CaptureStore) -> TrainResult:
    return train(store, TrainConfig(label="follow", match=KAPPA, l2=(1e-4, 1e-3, 1e-2), resamples=200))


def test_the_probe_knows_what_the_match_does_not(trained: TrainResult) -> None:
    best = trained.evaluations["best"]["match"]
    assert best.rows > 300 and 0.02 < 1 - best.base_rate.estimate < 0.6
    assert best.roc_auc.estimate > 0.85
    for baseline in ("match length", "surface, logistic"):
        assert trained.behind[baseline]["match"].lower > 0.05, baseline


def test_the_gate_avoids_empty_copies_and_keeps_the_others(target: Target, trained: TrainResult) -> None:
    prompts = [p.messages for p in tasks(12, 1)]
    decoder = Decoder(target, probe=trained.probes["best"], settings=SETTINGS)
    alone = decoder.generate(prompts, mode="ar", max_new_tokens=128)
    empty, kept = {}, {}
    for gate in ("match", "probe"):
        found = decoder.generate(prompts, mode="switchsd", gate=gate, max_new_tokens=128)
        assert [g.tokens for g in found] == [g.tokens for g in alone]
        copies = [r for r in decoder.trace if r.copies]
        empty[gate] = sum(not r.accepted for r in copies)
        kept[gate] = sum(len(r.accepted) for r in copies)
    assert empty["match"] >= 30
    assert empty["probe"] < 0.6 * empty["match"]
    assert kept["probe"] > 0.85 * kept["match"]
    assert sum(g.steps for g in found) < 0.5 * sum(len(g.tokens) for g in alone)
