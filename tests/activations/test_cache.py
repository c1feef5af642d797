"""The KV cache, its masks, and the tree forward that they make possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from activations.cache import WIDE, KVCache, attention_mask
from activations.target import TargetError


def states(rows: int, new: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 2, new, 4, generator=torch.Generator().manual_seed(seed))


# -- the cache alone --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_committed_paths_are_what_a_growing_cache_would_hold(data: st.DataObject) -> None:
    """Against transformers' DynamicCache, one per row, fed with the accepted states alone."""
    rows = data.draw(st.integers(1, 3))
    cache = KVCache(rows, capacity=4)
    plain = [DynamicCache() for _ in range(rows)]
    for step in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.integers(1, 5))
        paths = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in range(rows)]
        for layer in range(2):
            k, v = states(rows, new, 10 * step + layer), states(rows, new, 1000 + 10 * step + layer)
            cache.update(k, v, layer)
            for row, path in enumerate(paths):
                if path:
                    plain[row].update(k[row : row + 1, :, path], v[row : row + 1, :, path], layer)
        cache.commit(paths)
    for row in range(rows):
        length = plain[row].get_seq_length()
        assert cache.lengths[row] == length
        for layer in range(2 if length else 0):
            assert torch.equal(cache.keys[layer][row, :, :length], plain[row].layers[layer].keys[0])
            assert torch.equal(cache.values[layer][row, :, :length], plain[row].layers[layer].values[0])


def test_update_returns_committed_and_new_states() -> None:
    cache = KVCache(2, capacity=2)
    first, second = states(2, 3, 0), states(2, 2, 1)
    cache.update(first, first, 0)
    cache.commit([[0, 1, 2], [0]])
    keys, _ = cache.update(second, second, 0)
    assert torch.equal(keys[0, :, :5], torch.cat([first[0], second[0]], 1))
    assert torch.equal(keys[1, :, :3], torch.cat([first[1, :, :1], second[1]], 1))


def filled(rows: int, lengths: list[int]) -> KVCache:
    cache = KVCache(rows, capacity=2)
    k = states(rows, max(lengths), 7)
    cache.update(k, k + 1, 0)
    cache.commit([range(n) for n in lengths])
    return cache


def test_crop_select_move_and_swap_keep_the_named_rows() -> None:
    cache = filled(3, [4, 2, 3])
    before = [cache.keys[0][r, :, :n].clone() for r, n in enumerate(cache.lengths)]
    cache.select([2, 2, 0])
    assert cache.lengths == [3, 3, 4]
    assert torch.equal(cache.keys[0][1, :, :3], before[2])
    assert torch.equal(cache.keys[0][2, :, :4], before[0])
    cache.move_row(2, 0)
    assert cache.lengths == [4, 3, 0]
    assert torch.equal(cache.keys[0][0, :, :4], before[0])
    cache.swap_rows(0, 1)
    assert cache.lengths == [3, 4, 0]
    assert torch.equal(cache.keys[0][1, :, :4], before[0])
    assert torch.equal(cache.keys[0][0, :, :3], before[2])
    cache.swap_rows(0, 1)
    cache.crop_row(0, 1)
    assert cache.lengths == [1, 3, 0]
    with pytest.raises(ValueError, match="cannot crop row 0 of 1 tokens to 2"):
        cache.crop_row(0, 2)


def test_select_to_another_number_of_rows() -> None:
    cache = filled(2, [3, 1])
    kept = cache.keys[0][0, :, :3].clone()
    cache.select([0, 0, 0])
    assert cache.rows == 3 and cache.lengths == [3, 3, 3]
    assert torch.equal(cache.keys[0][2, :, :3], kept)


def test_load_row_replaces_one_row() -> None:
    cache, other = filled(2, [2, 3]), filled(1, [5])
    kept = cache.keys[0][0, :, :2].clone()
    cache.load_row(1, other)
    assert cache.lengths == [2, 5]
    assert torch.equal(cache.keys[0][1, :, :5], other.keys[0][0, :, :5])
    assert torch.equal(cache.keys[0][0, :, :2], kept)


# -- masks ------------------------------------------------------------------------------------------


def random_parents(draw: st.DrawFn, nodes: int) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(nodes)]


def lineage(parents: list[int]) -> list[list[int]]:
    """For the input [pending, nodes]: the slots each one descends from, itself included."""
    out = [[0]]
    for i, parent in enumerate(parents):
        out.append([*out[parent + 1], i + 1])
    return out


@st.composite
def trees(draw: st.DrawFn, most: int = 6) -> list[int]:
    return random_parents(draw, draw(st.integers(0, most)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mask_equals_brute_force(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    lengths = [data.draw(st.integers(0, 9)) for _ in range(rows)]
    nodes = data.draw(st.integers(0, 6))
    window = data.draw(st.none() | st.integers(1, 8))
    ancestors = torch.zeros(rows, 1 + nodes, 1 + nodes, dtype=torch.bool)
    depths = torch.zeros(rows, 1 + nodes, dtype=torch.long)
    for row in range(rows):
        for i, line in enumerate(lineage(random_parents(data.draw, nodes))):
            ancestors[row, i, line] = True
            depths[row, i] = len(line) - 1
    mask = attention_mask(lengths, ancestors, depths, window)
    assert mask.shape == (rows, 1, 1 + nodes, max(lengths) + 1 + nodes)
    for row in range(rows):
        for i in range(1 + nodes):
            at = lengths[row] + int(depths[row, i])
            for slot in range(mask.shape[-1]):
                j = slot - lengths[row]
                if j < 0:
                    seen, place = True, slot
                else:
                    seen = j <= nodes and bool(ancestors[row, i, j])
                    place = lengths[row] + (int(depths[row, j]) if j <= nodes else 0)
                wanted = seen and (window is None or at - place < window)
                assert bool(mask[row, 0, i, slot]) == wanted, (row, i, slot)


def test_a_window_needs_depths() -> None:
    with pytest.raises(ValueError, match="depths"):
        attention_mask([3], torch.ones(1, 1, dtype=torch.bool), None, 2)


# -- forwards ---------------------------------------------------------------------------------------


def whole(model, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits [n, V] of a text, by transformers alone and without any cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def forward_tree(target, cache: KVCache, pending: list[int], parents: list[list[int]], nodes: list[list[int]]):  # type: ignore[no-untyped-def]
    rows, q = len(pending), 1 + max(len(n) for n in nodes)
    tokens = torch.zeros(rows, q, dtype=torch.long)
    ancestors = torch.eye(q, dtype=torch.bool).repeat(rows, 1, 1)
    depths = torch.zeros(rows, q, dtype=torch.long)
    for row in range(rows):
        tokens[row, : 1 + len(nodes[row])] = torch.tensor([pending[row], *nodes[row]])
        for i, line in enumerate(lineage(parents[row])):
            ancestors[row, i, line] = True
            depths[row, i] = len(line) - 1
    return target.forward(tokens, cache, ancestors, depths)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("implementation", ["folded", "sdpa", "eager"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_tree_forward_equals_the_whole_texts(implementation, family, small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    """Ragged rows, several steps, beyond the sliding window: every node's logits are those of its whole text."""
    target, model = small_target(family, implementation), reference_model(family)
    rows = data.draw(st.integers(1, 3))
    token = st.integers(0, 63)
    texts = [data.draw(st.lists(token, min_size=1, max_size=14)) for _ in range(rows)]
    cache = KVCache(rows, capacity=4)
    for row, text in enumerate(texts):
        single = KVCache(1, capacity=len(text))
        logits = target.forward(torch.tensor([text]), single)[0]
        assert torch.allclose(logits, whole(model, text), atol=2e-4, rtol=1e-4)
        single.commit([range(len(text))])
        cache.load_row(row, single)
    for _ in range(2):
        pending = [data.draw(token) for _ in range(rows)]
        parents = [data.draw(trees()) for _ in range(rows)]
        nodes = [[data.draw(token) for _ in p] for p in parents]
        logits = forward_tree(target, cache, pending, parents, nodes)
        paths = []
        for row in range(rows):
            inputs = [pending[row], *nodes[row]]
            lines = lineage(parents[row])
            for i, line in enumerate(lines):
                alone = whole(model, texts[row] + [inputs[j] for j in line])[-1]
                assert torch.allclose(logits[row, i], alone, atol=2e-4, rtol=1e-4), (row, i)
            path = data.draw(st.sampled_from(lines))
            paths.append(path)
            texts[row] = texts[row] + [inputs[j] for j in path]
        cache.commit(paths)


def test_one_more_token_a_row_in_a_wide_ragged_batch(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    """From WIDE rows on the cache shows whole rows, and the mask has to hide what lies behind."""
    target, model = small_target("llama"), reference_model("llama")
    generator = torch.Generator().manual_seed(3)
    for lengths in ([5] * WIDE, [3 + i % 4 for i in range(WIDE)]):
        cache = KVCache(WIDE, capacity=8)
        texts = [torch.randint(64, (n,), generator=generator).tolist() for n in lengths]
        for row, text in enumerate(texts):
            single = KVCache(1, capacity=len(text))
            target.forward(torch.tensor([text]), single)
            single.commit([range(len(text))])
            cache.load_row(row, single)
        for buffer in (*cache.keys, *cache.values):  # what must not be seen
            for row, n in enumerate(lengths):
                buffer[row, :, n:] = 50.0
        logits = target.forward(torch.tensor([[9]] * WIDE), cache)[:, 0]
        for row, text in enumerate(texts):
            assert torch.allclose(logits[row], whole(model, [*text, 9])[-1], atol=2e-4, rtol=1e-4)


def test_flash_attention_is_refused_for_trees(small_target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    cache = KVCache(1)
    target.forward(torch.tensor([[1, 2]]), cache)
    cache.commit([[0, 1]])
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(TargetError, match="flash_attention_2"):
        forward_tree(target, cache, [1], [[-1, -1]], [[2, 3]])
