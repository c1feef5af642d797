"""Exported samples, read back as the other trainers read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from activations import store as store_module
from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.export import export, needed_sites
from activations.store import CaptureStore, StoreError
from activations.target import Target

TEXTS = ("ABCDABCDABCD", "list:0;1;2;", "aaaa")
CONFIG = CaptureConfig(sites=("eagle",), selection="all", max_new_tokens=16, batch=2)


def prompts() -> list[Prompt]:
    return [Prompt(t, "qa", t, "train", None, ({"role": "user", "content": t},)) for t in TEXTS]


@pytest.fixture(scope="module")
def store(small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    return capture(small_target(), prompts(), tmp_path_factory.mktemp("store") / "s", CONFIG)


def expected(target: Target, store: CaptureStore, number: int) -> dict[str, torch.Tensor]:
    """A sample from the model itself: ids, mask by token, block inputs, last block's output, normed last state."""
    rows, _ = store.document(number)
    ids = torch.from_numpy(rows["token"]).long()
    prompt = len(target.encode_messages(prompts()[number].messages))
    found = target.model(ids[None], output_hidden_states=True)
    leaving: dict[str, torch.Tensor] = {}
    hook = target.layers[-1].register_forward_hook(
        lambda module, args, out: leaving.update(last=out[0] if isinstance(out, tuple) else out)
    )
    target.model(ids[None])
    hook.remove()
    return {
        "ids": ids,
        "mask": (torch.arange(len(ids)) >= prompt).long(),
        "features": torch.stack([found.hidden_states[k][0] for k in (1, 2, 3)], dim=1),
        "last": leaving["last"][0],
        "normed": found.hidden_states[-1][0],
    }


def test_speculators_reads_an_arrow_folder_and_a_file_a_sample(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path
) -> None:
    from datasets import load_from_disk

    told: list[tuple[int, int]] = []
    counts = export(store, tmp_path / "x", "speculators", progress=lambda *done: told.append(done))
    assert counts == {"documents": 3, "left_out": 0, "tokens": len(store)} and told == [(1, 2), (2, 2)]
    table = load_from_disk(str(tmp_path / "x"))
    lengths = [len(store.document(n)[0]["token"]) for n in range(3)]
    assert table.with_format(None)["seq_len"][:] == lengths
    written: Counter[int] = Counter()
    for index in range(3):
        sample = load_file(tmp_path / "x" / "hidden_states" / f"hs_{index}.safetensors")
        wanted = expected(small_target(), store, index)
        assert torch.equal(sample["token_ids"], wanted["ids"])
        assert torch.equal(table[index]["input_ids"], wanted["ids"])  # tensors: its format is kept
        assert torch.equal(table[index]["loss_mask"], wanted["mask"]) and 0 < wanted["mask"].sum() < len(wanted["ids"])
        assert sample["hidden_states"].shape == (len(wanted["ids"]), 4, 32)
        assert sample["hidden_states"].dtype == torch.float32
        assert torch.allclose(sample["hidden_states"][:, :3], wanted["features"], atol=1e-5)
        assert torch.allclose(sample["hidden_states"][:, 3], wanted["last"], atol=1e-5)
        written.update(wanted["ids"][wanted["mask"].bool()].tolist())
    assert torch.load(tmp_path / "x" / "token_freq.pt", weights_only=True) == dict(written)
    assert not (tmp_path / "x" / ".scratch").exists()


def test_specforge_reads_a_torch_file_a_sample(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = small_target()
    export(store, tmp_path / "x", "specforge", target.final_norm)
    files = sorted((tmp_path / "x").rglob("*.ckpt"))
    assert [str(f.relative_to(tmp_path / "x")) for f in files] == [f"rows_0-2000/data_{n}.ckpt" for n in range(3)]
    for index, file in enumerate(files):
        sample = torch.load(file, weights_only=True, mmap=True)
        wanted = expected(target, store, index)
        length = len(wanted["ids"])
        assert set(sample) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert torch.equal(sample["input_ids"], wanted["ids"]) and torch.equal(sample["loss_mask"], wanted["mask"])
        assert sample["aux_hidden_state"].shape == (1, length, 3 * 32)
        assert torch.allclose(sample["aux_hidden_state"][0], wanted["features"].flatten(1), atol=1e-5)
        assert torch.allclose(sample["hidden_state"], wanted["normed"][None], atol=1e-5)
        assert file.stat().st_size < 1.2 * 4 * length * 4 * 32 + 8192, "a view would have brought its whole shard along"


def test_samples_with_broken_states_are_left_out(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = CaptureStore.shard_states
    last = store.sites[-1]

    def broken(self: CaptureStore, shard: int, site: str, *span: int) -> torch.Tensor:
        states = read(self, shard, site, *span).clone()
        if (shard, site) == (0, last):
            states[0, 0] = float("nan")
        return states

    monkeypatch.setattr(CaptureStore, "shard_states", broken)
    assert export(store, tmp_path / "x", "speculators")["left_out"] == 1
    first = load_file(tmp_path / "x" / "hidden_states" / "hs_0.safetensors")["token_ids"]
    assert first.tolist() == store.document(1)[0]["token"].tolist()
    from datasets import load_from_disk

    assert load_from_disk(str(tmp_path / "x"))[0]["input_ids"].tolist() == first.tolist()


def test_what_cannot_be_exported(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CaptureConfig(sites=("eagle",), max_new_tokens=4)
    anchors = capture(small_target(), prompts(), tmp_path / "a", config)
    with pytest.raises(StoreError, match=r"does not hold whole texts.*--selection all --sites eagle"):
        export(anchors, tmp_path / "x", "speculators")
    some = CaptureStore(store.folder, {**store.manifest, "sites": store.sites[:3]})
    with pytest.raises(StoreError, match=r"has no resid_post\.3"):
        export(some, tmp_path / "x", "speculators")
    with pytest.raises(ValueError, match="final norm"):
        export(store, tmp_path / "x", "specforge")
    with pytest.raises(StoreError, match="is not empty"):
        export(store, tmp_path / "a", "speculators")
    monkeypatch.setattr(store_module, "free_bytes", lambda folder: store_module.MARGIN)
    with pytest.raises(StoreError, match="GiB free"):
        export(store, tmp_path / "x", "speculators")
    assert not (tmp_path / "x").exists()


def test_of_all_that_is_missing_whole_texts_come_first(store: CaptureStore) -> None:
    manifest = {**store.manifest, "selection": "anchors", "target": {**store.manifest["target"], "blocks": 2}}
    with pytest.raises(StoreError, match="does not hold whole texts: make a store with"):
        needed_sites(CaptureStore(store.folder, manifest))
