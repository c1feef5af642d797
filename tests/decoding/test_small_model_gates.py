"""The whole way on the shipped small model: capture, probe, gate. What is true of it holds in seconds."""

from __future__ import annotations

import random
from dataclasses import replace

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

KAPPA = 2
KINDS = ("repeat", "set", "two")
"""Asked to repeat a text, a table with other values, and one of two lines that begin alike. It copies whatever it is
asked; but not always from the place where its last words stood last."""
SETTINGS = ModeSettings(kappa=KAPPA, neural="none")


def tasks(count: int, seed: int) -> list[Prompt]:
    """Of each kind `count`, a third of them for validation."""
    text = (ROOT / "benchmarks" / "corpus" / "articles.txt").read_text(encoding="utf-8")
    writer, rng = maker("small_tasks").TaskWriter(text), random.Random(seed)
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
    return train(store, TrainConfig(label="follow", match=KAPPA, l2=(1e-3, 1e-2), resamples=200))


def test_the_probe_knows_what_the_match_does_not(trained: TrainResult) -> None:
    best = trained.evaluations["best"]["match"]
    assert best.rows > 1000 and 0.01 < 1 - best.base_rate.estimate < 0.2
    assert best.roc_auc.lower > 0.7
    assert trained.evaluations["match length"]["match"].roc_auc.estimate < 0.65
    for baseline in ("match length", "surface, logistic"):
        behind = trained.report.findings.differences[baseline]["match"]["roc_auc"]
        assert behind.lower > 0.05, baseline


def test_the_gate_copies_where_the_probe_is_sure_enough(target: Target, trained: TrainResult) -> None:
    prompts = [p.messages for p in tasks(12, 1)]
    always = Decoder(target, probe=trained.probes["best"], settings=replace(SETTINGS, tau=0.0))
    alone = always.generate(prompts, mode="ar", max_new_tokens=96)
    found = always.generate(prompts, mode="switchsd", max_new_tokens=96)
    assert [g.tokens for g in found] == [g.tokens for g in alone]
    assert sum(g.steps for g in found) < 0.3 * sum(len(g.tokens) for g in alone)
    intents = sorted(r.intent for r in always.trace if r.copies and r.intent is not None)
    assert len(intents) > 100

    tau = intents[len(intents) // 2]
    gated = Decoder(target, probe=trained.probes["best"], settings=replace(SETTINGS, tau=tau))
    again = gated.generate(prompts, mode="switchsd", max_new_tokens=96)
    assert [g.tokens for g in again] == [g.tokens for g in alone]
    asked = [r for r in gated.trace if r.match_length >= KAPPA and r.intent is not None and r.reason != "no room"]
    assert all(bool(r.copies) == (r.intent >= tau) for r in asked)
    assert 0.2 < sum(bool(r.copies) for r in asked) / len(asked) < 0.8
