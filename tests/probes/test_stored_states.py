"""Reading a store's states in blocks: the same rows as reading all at once, and clear words where they cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probes.rows
from activations.store import CaptureStore
from probes.artifact import ChoiceError, ProbeError
from probes.rows import HeldStates, StoredStates, list_rows


def two_sites(count: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    return {site: torch.randn(count, 3, generator=draw).to(dtype) for site in ("embed", "resid_mid.1", "resid_post.1")}


class InMemory:
    """A sharded store of tensors, that counts what is read."""

    manifest: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, states: dict[str, torch.Tensor], counts: list[int]) -> None:
        self._states, self.counts = states, counts
        self.shards = [{"rows": count} for count in counts]
        self.sites = list(states)
        self.most = 0

    def rows(self) -> dict[str, np.ndarray]:
        return {}

    def states(self, site: str) -> torch.Tensor:
        return self._states[site]

    def shard_states(self, shard: int, site: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        first = sum(self.counts[:shard])
        part = self._states[site][first : first + self.counts[shard]][start:stop]
        self.most = max(self.most, len(part))
        return part


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 30),
    st.sampled_from([("resid_mid.1",), ("resid_post.1", "embed")]), st.data(),
)  # fmt: skip
def test_blocks_and_shards_are_the_chosen_rows_in_order(
    counts: list[int], block: int, sites: tuple[str, ...], data: st.DataObject
) -> None:
    total = sum(counts)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=bool)
    if not mask.any():
        return
    states = two_sites(total)
    store = InMemory(states, counts)
    whole = torch.cat([states[site] for site in sites], dim=1)[torch.from_numpy(mask)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes.rows, "BLOCK_BYTES", block * 3 * len(sites) * 4)
        source = StoredStates(store, sites, mask)
        parts = list(source.blocks())
        assert store.most <= block
        inner = data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)))
        if any(inner):
            chosen = torch.cat([b for _, b in source.select(np.array(inner)).blocks()])
            assert torch.equal(chosen, whole[torch.tensor(inner)])
            held = torch.cat([b for _, b in HeldStates(whole).select(np.array(inner)).blocks()])
            assert torch.equal(held, chosen)
    assert len(source) == len(whole) and source.width == whole.shape[1]
    assert all(torch.equal(whole[rows], states) and len(states) for rows, states in parts)
    assert sum(len(b) for _, b in parts) == len(whole)
    shards = [source.shard(number) for number in range(source.shards)]
    assert torch.equal(torch.cat([b for _, b in shards]), whole)
    assert all(torch.equal(whole[rows], states) for rows, states in shards)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_store_on_disk(stored: Any, dtype: torch.dtype) -> None:
    states = two_sites(120, dtype)
    source = StoredStates(stored(states), ("embed", "resid_post.1"))
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.cat([states["embed"], states["resid_post.1"]], dim=1).to(kind)
    assert source.dtype == kind and source.shards == 3
    assert torch.equal(torch.cat([b for _, b in source.blocks()]), expected)


def test_rows_that_are_not_finite_are_named_and_others_can_be_fitted(stored: Any) -> None:
    states = two_sites(120)
    states["embed"][[3, 77, 78], 1] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    store = stored(states)
    with pytest.raises(ProbeError, match=r"1 rows have states at embed in shard 0 that are NaN or infinite \(row 3\)"):
        list(StoredStates(store, "embed").blocks())
    first = np.arange(120) > 10
    with pytest.raises(ProbeError, match=r"at resid_mid.1 \+ embed in shard 1 .*\(rows 77, 78\)"):
        list(StoredStates(store, ["resid_mid.1", "embed"], first).blocks())
    good = np.isfinite(states["embed"].sum(1).numpy())
    assert sum(len(b) for _, b in StoredStates(store, "embed", good).blocks()) == 117
    assert len(list(StoredStates(store, "resid_mid.1").blocks())) == 3


def test_huge_states_are_finite() -> None:
    """Their sum is not."""
    states = {"embed": torch.full((4, 3), 3e38)}
    assert len(next(StoredStates(InMemory(states, [4]), "embed").blocks())[1]) == 4


def test_widths_that_differ_between_sites(stored: Any) -> None:
    states = two_sites(60)
    states["embed"] = states["embed"][:, :2].clone()
    with pytest.raises(ProbeError, match=r"one width, and these differ \(2 at embed, 3 at resid_mid.1\)"):
        StoredStates(stored(states), ["embed", "resid_mid.1"])


def test_widths_that_differ_between_shards() -> None:
    class Odd(InMemory):
        def shard_states(self, shard: int, site: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
            return super().shard_states(shard, site, start, stop)[:, : 3 - shard]

    source = StoredStates(Odd(two_sites(10), [5, 5]), "embed")
    with pytest.raises(ProbeError, match=r"shard 1 has states of shape \[5, 2\] at embed .* width 3: capture"):
        list(source.blocks())


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        ("resid_mid.9", "site 'resid_mid.9' was not captured; the store has embed"),
        ([], "name at least one"),
        (["embed", "embed"], "each once"),
    ],
)
def test_sites_that_cannot_be_meant(sites: Any, says: str) -> None:
    with pytest.raises(ChoiceError, match=says):
        StoredStates(InMemory(two_sites(4), [4]), sites)


@pytest.mark.parametrize("rows", [np.zeros(4, bool), np.ones(3, bool), np.array([0, 1, 2, 3])])
def test_masks_that_cannot_be_meant(rows: np.ndarray) -> None:
    with pytest.raises(ProbeError, match=r"none of the store's 4 rows|4 booleans, one for each row"):
        StoredStates(InMemory(two_sites(4), [4]), "embed", rows)


def test_a_store_without_a_shard(stored: Any) -> None:
    store = stored({"embed": torch.zeros(10, 3)})
    empty = CaptureStore(store.folder, {**store.manifest, "shards": []})
    with pytest.raises(ProbeError, match="none of the store's 0 rows"):
        StoredStates(empty, "embed")


def test_lists_of_rows_are_short() -> None:
    assert list_rows(np.array([3])) == "row 3"
    assert list_rows(np.arange(5)) == "rows 0, 1, 2, 3, 4"
    assert list_rows(np.arange(9)) == "rows 0, 1, 2, 3, 4 and 4 more"
