"""Training an EAGLE-3 head: the unrolled steps against a chain computed one by one, and a whole small run."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_target
from safetensors.torch import load_file
from test_eagle_head import random_head, reference_outputs
from written import write_store

from activations.store import CaptureStore, StoreWriter
from activations.target import Target
from decoding.eagle.formats import load_head
from decoding.eagle.growth import grown
from decoding.eagle.head import EagleHead, HeadError
from decoding.eagle.training import (
    Batch,
    EagleTrainConfig,
    batches,
    documents,
    evaluate,
    initial_head,
    train,
    unroll,
)
from decoding.eagle.workers import Workers
from decoding.training import frequent_tokens

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
    return write_store(small_target(), tmp_path / "text")


def test_training_learns_resumes_and_saves(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    opened = CaptureStore.open(store)
    tokens, coverage = frequent_tokens([opened], 24)
    assert len(tokens) <= 24 and 0 < coverage <= 1
    assert [len(d["pending"]) for d in documents(opened, 0, opened.sites)] == [23] * 4
    config = EagleTrainConfig(
        draft_vocabulary=24, tokens=6000, batch_tokens=64, steps=3, validation_documents=2, checkpoint_seconds=1e-6,
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
    [
        ("tokens", 0),
        ("steps", -1),
        ("unrolled_share", 1.5),
        ("learning_rate", float("nan")),
        ("clip", 0.0),
        ("checkpoint_seconds", 0.0),
    ],
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


# -- from a head that is there, in pieces, and in several processes -----------------------------------------------

SMALL = EagleTrainConfig(
    draft_vocabulary=24, tokens=800, batch_tokens=32, steps=2, validation_documents=2, learning_rate=3e-3,
    unrolled_share=1.0, precision="float32",
)  # fmt: skip


def trained(target: Target, store: Path, folder: Path, config: EagleTrainConfig, **how: Any) -> dict[str, torch.Tensor]:
    """The weights after a run that begins from the same head as every other."""
    random_head().save(folder / "start")
    list(train(target, [store], folder / "made", config, folder / "start", **how))
    return load_file(folder / "made" / "model.safetensors")


def test_a_run_goes_on_from_a_head(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    made = trained(target, store, tmp_path, replace(SMALL, tokens=1))
    start = load_file(tmp_path / "start" / "model.safetensors")
    assert made.keys() == start.keys()
    assert torch.equal(made["d2t"], start["d2t"]), "fewer tokens are asked for than it has: it keeps all"
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):  # one small step away from the start
        assert torch.allclose(made[name].float(), start[name].float(), atol=0.02), name
    again = trained(target, store, tmp_path / "again", replace(SMALL, tokens=1))
    assert all(torch.equal(made[name], again[name]) for name in made)
    with pytest.raises(HeadError, match="began from another head"):
        next(train(target, [store], tmp_path / "made", SMALL))


def test_a_vocabulary_grows_and_the_old_tokens_stay(small_target: Callable[..., Target]) -> None:
    """Output rows that are a linear map of the target's: the new ones are then those of the whole map."""
    target, head = small_target(), random_head()
    through = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.head.weight[head.draft_tokens] @ through)
    tokens = torch.cat([head.draft_tokens, torch.tensor([1, 5, 63])]).sort().values
    made = grown(head, target, tokens)
    assert torch.equal(made.draft_tokens, tokens) and int(made.t2d.sum()) == len(tokens)
    old = torch.isin(tokens, head.draft_tokens)
    assert torch.equal(made.lm_head.weight[old], head.lm_head.weight)
    output = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made.logits(output)[:, old], head.logits(output)), "what was drafted is scored as before"
    wanted = target.head.weight[tokens[~old]] @ through
    assert (made.lm_head.weight[~old] - wanted).norm() < 0.1 * wanted.norm()
    with pytest.raises(HeadError, match="cannot lose tokens"):
        grown(head, target, tokens[1:])


def test_a_run_with_a_larger_vocabulary(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    made = trained(small_target(), store, tmp_path, replace(SMALL, tokens=1, draft_vocabulary=36))
    head = load_head(tmp_path / "made", 64)
    assert set(random_head().draft_tokens.tolist()) < set(head.draft_tokens.tolist())
    assert head.config.draft_vocab_size == len(made["lm_head.weight"]) == 36


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_hidden_layers": 2}, "has 2 blocks"), ({"layer_ids": (0, 1, 2)}, "reads resid_pre.0, .*holds no states")],
)
def test_heads_that_no_run_can_go_on_from(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], change: dict, message: str
) -> None:
    head = EagleHead(replace(random_head().config, **change))
    head.set_vocabulary(torch.arange(32))
    head.save(tmp_path / "start")
    with pytest.raises(HeadError, match=message):
        next(train(small_target(), [store], tmp_path / "made", SMALL, tmp_path / "start"))


def _process(rank: int, port: int, target: Target, store: Path, folder: Path) -> None:
    """One of two processes, as a launcher starts them."""
    import os

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1",
    }  # fmt: skip
    records = list(train(target, [store], folder / "two", SMALL, folder / "start", Workers()))
    assert bool(records) == (rank == 0)
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one_with_twice_the_batches(
    store: Path, tmp_path: Path, small_target: Callable[..., Target]
) -> None:
    one = trained(small_target(), store, tmp_path, replace(SMALL, accumulate=2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _process, (port, small_target(), store, tmp_path), nprocs=2, start_method="fork"
    )  # forked, so that nothing is imported again
    # Compared where they were kept in float32.
    alone, both = (load_file(tmp_path / made / "run" / "state.safetensors") for made in ("made", "two"))
    start = load_file(tmp_path / "start" / "model.safetensors")
    for name in one:
        if one[name].is_floating_point():
            assert torch.allclose(alone[f"head.{name}"], both[f"head.{name}"], atol=1e-4), name
    assert (alone["head.fc.weight"] - start["fc.weight"].float()).abs().max() > 1e-2, "something was learnt"
