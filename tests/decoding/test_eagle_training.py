"""Training an EAGLE-3 head: the unrolled steps against a chain computed one by one, and a whole small run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, family_target
from test_eagle_head import random_head, reference_outputs

from activations.sites import eagle_sites, last_site
from activations.store import CaptureStore, StoreWriter
from activations.target import Target
from decoding.eagle.formats import load_head
from decoding.eagle.training import (
    Batch,
    EagleTrainConfig,
    batches,
    documents,
    draft_vocabulary,
    evaluate,
    initial_head,
    train,
    unroll,
)

T, STEPS = 9, 4


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    torch.manual_seed(seed)
    written = torch.zeros(len(lengths), T, dtype=torch.bool)
    for row, length in enumerate(lengths):
        written[row, 1:length] = True
    b = len(lengths)
    return Batch(torch.randn(b, T, 96), torch.randint(0, 64, (b, T)), torch.randn(b, T, 32), written)


def test_unrolled_steps_are_chains_fed_one_by_one(small_target: Callable[..., Target]) -> None:
    """With every position a root, step k's logits are those of the reference fed k true tokens as a draft."""
    target, head = small_target(), random_head()
    batch = batch_of([T, 6])
    results = unroll(head, target, batch, STEPS, 1.0, torch.Generator().manual_seed(0))
    for step in range(STEPS):
        draft, wanted, known = results[step]
        row = 0
        for b in range(2):
            for root in range(T):
                at = root + 1 + step
                if at >= T or not batch.written[b, at]:
                    continue
                tokens = [0, *batch.pending[b, : root + 1].tolist()]
                chain = batch.pending[b, root + 1 : root + 1 + step].tolist()
                output = reference_outputs(head, target.embed, batch.features[b, : root + 1], tokens, chain)
                assert torch.allclose(draft[row], head.logits(output), atol=2e-4), (step, b, root)
                normed = target.backbone.norm(batch.last[b, at])
                assert torch.allclose(wanted[row], target.head.weight[head.draft_tokens] @ normed, atol=2e-4)
                assert bool(known[row]) == bool(head.t2d[batch.pending[b, at]])
                row += 1
        assert row == len(draft)


def test_batches_keep_every_document_whole() -> None:
    docs = [
        {"features": torch.full((n, 6), float(n)), "pending": torch.full((n,), n), "last": torch.zeros(n, 2),
         "written": torch.ones(n, dtype=torch.bool)}
        for n in (3, 9, 4, 30, 5)
    ]  # fmt: skip
    seen = []
    for batch in batches(docs, budget=20):
        assert batch.pending.numel() <= 20 or len(batch.pending) == 1
        for row in range(len(batch.pending)):
            length = int(batch.written[row].sum())
            seen.append(length)
            assert (batch.pending[row, :length] == length).all() and not batch.pending[row, length:].any()
            assert (batch.features[row, :length] == length).all()
    assert sorted(seen) == [3, 4, 5, 9, 30]


@pytest.fixture
def store(tmp_path: Path, small_target: Callable[..., Target]) -> Path:
    """Two shards of the small target's own greedy text, with its states."""
    target = small_target()
    sites = [*eagle_sites(target.blocks), last_site(target.blocks)]
    writer = StoreWriter(tmp_path / "text", {"target": target.fingerprint.to_dict(), "config": {}}, sites)
    rng = np.random.default_rng(0)
    from activations.cache import KVCache

    for shard in range(2):
        rows: dict[str, list] = {k: [] for k in ("document", "position", "token", "pending", "loss_mask")}
        states: dict[str, list] = {s: [] for s in sites}
        for document in range(4):
            ids = rng.integers(0, 62, 4).tolist()
            cache = KVCache(1)
            with target.read(sites) as reader:
                logits = target.forward(torch.tensor([ids]), cache)
                cache.commit([range(4)])
                parts = {s: [v[0]] for s, v in reader.states.items()}
                for _ in range(20):
                    ids.append(int(logits[0, -1].argmax()))
                    logits = target.forward(torch.tensor([ids[-1:]]), cache)
                    cache.commit([[0]])
                    for site, state in reader.states.items():
                        parts[site].append(state[0])
            n = len(ids) - 1
            rows["document"] += [shard * 4 + document] * n
            rows["position"] += range(n)
            rows["token"] += ids[:-1]
            rows["pending"] += ids[1:]
            rows["loss_mask"] += [i >= 3 for i in range(n)]
            for site, states_of in parts.items():
                states[str(site)].append(torch.cat(states_of)[:n])
        writer.write(
            {k: np.array(v) for k, v in rows.items()},
            {s: torch.cat(v) for s, v in states.items()},
            written=80, contaminated=0,
        )  # fmt: skip
    return tmp_path / "text"


def test_training_learns_resumes_and_saves(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    opened = CaptureStore.open(store)
    tokens, coverage = draft_vocabulary([opened], 24)
    assert len(tokens) <= 24 and 0 < coverage <= 1
    assert [len(d["pending"]) for d in documents(opened, 0, opened.sites)] == [23] * 4
    config = EagleTrainConfig(
        draft_vocabulary=24, tokens=6000, batch_tokens=64, steps=3, validation_documents=2, checkpoint_seconds=0.0,
        learning_rate=3e-3,
    )  # fmt: skip
    run = train(target, [store], tmp_path / "head", config)
    assert next(run)["rows"] == 0
    half = next(r for r in run if r["rows"] > 2000)
    run.close()  # interrupted: the next call goes on from the last checkpoint
    records = list(train(target, [store], tmp_path / "head", config))
    assert records[0]["rows"] == half["rows"]
    training = json.loads((tmp_path / "head" / "training.json").read_text())
    assert training["written_tokens"] == 160 and training["dropped_as_contaminated"] == 0
    head = load_head(tmp_path / "head", 64)
    assert head.config.draft_vocab_size == len(tokens)
    trained_on = documents(opened, 1, opened.sites)
    before = evaluate(initial_head(target, tokens), target, trained_on, config)["agreement"]
    after = evaluate(head, target, trained_on, config)["agreement"]
    assert all(b > a + 0.1 for a, b in zip(before, after, strict=True)), (before, after)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 0), ("steps", -1), ("unrolled_share", 1.5), ("learning_rate", float("nan")), ("clip", 0.0)],
)
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        EagleTrainConfig(**{name: value})  # type: ignore[arg-type]


def test_text_that_is_all_held_out_is_an_error_and_no_endless_run(
    store: Path, tmp_path: Path, small_target: Callable[..., Target]
) -> None:
    config = EagleTrainConfig(draft_vocabulary=24, tokens=100, steps=2, validation_documents=4)
    one = CaptureStore.open(store)
    with StoreWriter(tmp_path / "one", one.manifest | {"shards": []}, one.sites) as writer:
        rows = one.shard_rows(0)
        writer.write(rows, {site: one.shard_states(0, site) for site in one.sites}, written=80, contaminated=0)
    with pytest.raises(ValueError, match="no text to train on beside the 4 documents that are held out"):
        list(train(small_target(), [tmp_path / "one"], tmp_path / "head", config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_can_be_begun_for_every_family(family: str) -> None:
    target = family_target(family)
    head = initial_head(target, torch.arange(5, 69))
    assert all(torch.isfinite(p).all() for p in head.parameters())
    assert torch.equal(head.lm_head.weight, target.head.weight[5:69])
    torch.manual_seed(0)
    written = torch.ones(2, T, dtype=torch.bool)
    batch = Batch(torch.randn(2, T, 96), torch.randint(5, 69, (2, T)), torch.randn(2, T, 32), written)
    for draft, wanted, _ in unroll(head, target, batch, 3, 0.5, torch.Generator().manual_seed(0)):
        assert draft.shape == wanted.shape and torch.isfinite(draft).all()


def test_a_head_is_begun_from_the_targets_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, gemma = family_target("llama"), family_target("gemma3")
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    head, block = initial_head(llama, torch.arange(64)), llama.layers[-1]
    assert torch.equal(head.midlayer.mlp.down_proj.weight, block.mlp.down_proj.weight)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], block.self_attn.q_proj.weight)
    assert torch.allclose(head.midlayer.hidden_norm(x), block.input_layernorm(x), atol=1e-5)
    assert torch.allclose(head.norm(x), llama.final_norm(x), atol=1e-5)

    monkeypatch.setitem(gemma.config.rope_parameters["sliding_attention"], "rope_theta", 777.0)  # its last block slides
    head, block = initial_head(gemma, torch.arange(64)), gemma.layers[-1]
    assert head.config.rope_theta == 777.0 and head.config.per_head == 8
    assert torch.allclose(head.norm(x), gemma.final_norm(x), atol=1e-5), "its norms hold one less"
    assert torch.allclose(head.midlayer.post_attention_layernorm(x), block.pre_feedforward_layernorm(x), atol=1e-5)
    assert not head.midlayer.self_attn.o_proj.weight.any() and not head.midlayer.mlp.down_proj.weight.any()
