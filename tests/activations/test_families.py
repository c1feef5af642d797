"""Every site of every family, against the modules that the family's own source names, and against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY, family_model, family_target
from hypothesis import given, settings
from hypothesis import strategies as st

from activations.cache import KVCache
from activations.sites import KINDS
from activations.target import Target

LENGTH = 14  # more than the sliding window
EVERY = pytest.mark.parametrize("family", FAMILIES)


def tokens(rows: int, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def sites_of(family: str) -> list[str]:
    kinds = [kind for kind in KINDS if kind != "resid_mid" or FAMILIES[family].mid]
    return ["embed", *(f"{kind}.*" for kind in kinds)]


@contextmanager
def by_names(target: Target, family: str) -> Iterator[dict[str, torch.Tensor]]:
    """The reference: states read at the modules that the family's source names."""
    named, states, handles = FAMILIES[family], {}, []

    def output(site: str, scale: float = 1.0) -> Callable[..., None]:
        def hook(module: Any, args: Any, given: Any) -> None:
            value = (given[0] if isinstance(given, tuple) else given).clone()  # Falcon adds into it
            states[site] = value if scale == 1.0 else value * scale

        return hook

    def entering(site: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            states[site] = (args[0] if args else kwargs["hidden_states"]).clone()

        return hook

    for k, block in enumerate(target.layers):
        handles.append(block.get_submodule(named.attention).register_forward_hook(output(f"attn_out.{k}", named.scale)))
        handles.append(block.get_submodule(named.mlp).register_forward_hook(output(f"mlp_out.{k}", named.scale)))
        if named.mid:
            module = block.get_submodule(named.mid)
            handles.append(module.register_forward_pre_hook(entering(f"resid_mid.{k}"), with_kwargs=True))
    handles.append(
        target.backbone.get_submodule(named.norm).register_forward_pre_hook(
            entering(f"resid_post.{BLOCKS - 1}"), with_kwargs=True
        )
    )
    yield states
    for handle in handles:
        handle.remove()


def check_sums(at: dict[str, torch.Tensor], parallel: bool) -> None:
    for k in range(BLOCKS):
        pre, attention, mlp, post = (at[f"{kind}.{k}"] for kind in ("resid_pre", "attn_out", "mlp_out", "resid_post"))
        if parallel:
            sums = [pre + attention + mlp, pre + (mlp + attention)]
            assert any(torch.equal(post, total) for total in sums)
        else:
            assert torch.equal(at[f"resid_mid.{k}"], pre + attention)
            assert torch.equal(post, at[f"resid_mid.{k}"] + mlp)
        assert not torch.equal(attention, mlp)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_states_are_those_of_the_named_modules_and_of_transformers(
    family: str, dtype: torch.dtype, padding: str
) -> None:
    target = family_target(family, dtype)
    ids, seen = tokens(2), torch.ones(2, LENGTH, dtype=torch.long)
    if padding == "left":
        seen[1, :4] = 0
    elif padding == "right":
        seen[1, -4:] = 0
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with target.read(sites_of(family)) as reader, by_names(target, family) as expected, torch.no_grad():
        output = target.model(
            ids, attention_mask=seen, position_ids=positions, output_hidden_states=True, use_cache=padding == "none"
        )
    at = {str(site): state for site, state in reader.states.items()}
    assert set(expected) <= set(at) and len(at) == len(target.sites(sites_of(family)))
    real = seen.bool()
    for site, state in expected.items():
        assert torch.equal(at[site][real], state[real]), site
    for k in range(BLOCKS):
        assert torch.equal(at[f"resid_pre.{k}"][real], output.hidden_states[k][real])
        if k < BLOCKS - 1:  # the last one is given after the final norm
            assert torch.equal(at[f"resid_post.{k}"][real], output.hidden_states[k + 1][real])
    check_sums({site: state[real] for site, state in at.items()}, FAMILIES[family].mid is None)
    assert torch.equal(at["embed"], target.embed(ids))
    assert torch.equal(target.final_norm(at[f"resid_post.{BLOCKS - 1}"])[real], output.hidden_states[-1][real])


@EVERY
def test_our_forward_reads_the_same_states_in_batches_behind_a_cache_and_behind_padding(family: str) -> None:
    """Rows of 14 and 10 tokens, right and left padded, whole and in parts, against each row alone."""
    target = family_target(family)
    ids = tokens(2)
    lengths = [LENGTH, LENGTH - 4]
    alone = []
    for row, length in enumerate(lengths):
        with target.read(sites_of(family)) as reader:
            target.hidden(ids[row : row + 1, :length], KVCache(1, capacity=4))
        alone.append({str(site): state[0] for site, state in reader.states.items()})

    def check(states: dict[str, torch.Tensor], row: int) -> None:
        check_sums(states, FAMILIES[family].mid is None)
        for site, state in states.items():
            assert torch.allclose(state, alone[row][site], atol=2e-5, rtol=1e-4), (site, row)

    for left in (False, True):
        pads = [LENGTH - n if left else 0 for n in lengths]
        padded = torch.stack([torch.roll(ids[row], pads[row]) for row in range(2)])
        own = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().repeat(2, 1, 1)
        depths = torch.arange(LENGTH).repeat(2, 1)
        for row, pad in enumerate(pads):
            own[row, :, :pad] = torch.eye(LENGTH, dtype=torch.bool)[:, :pad]
            depths[row] = (depths[row] - pad).clamp(min=0)
        cache = KVCache(2, capacity=4)
        with target.read(sites_of(family)) as reader:
            target.hidden(padded, cache, own if left else None, depths if left else None)
        for row, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
            check({str(s): state[row, pad : pad + length] for s, state in reader.states.items()}, row)
    cache, parts = KVCache(2, capacity=4), []
    with target.read(sites_of(family)) as reader:
        for part, kept in zip(ids.split([6, 1, 4, 3], 1), ([6, 3], [1, 1], [4, 4], [3, 2]), strict=True):
            starts = list(cache.lengths)  # the second row lags behind
            own_part = torch.stack([ids[row, at : at + part.shape[1]] for row, at in enumerate(starts)])
            target.hidden(own_part, cache)
            cache.commit([range(n) for n in kept])
            parts.append([{str(s): v[row, :n] for s, v in reader.states.items()} for row, n in enumerate(kept)])
    for row in range(2):
        check({site: torch.cat([part[row][site] for part in parts]) for site in alone[row]}, row)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_the_model_s_own(family: str, dtype: torch.dtype) -> None:
    target = family_target(family, dtype)
    assert target.model.config._attn_implementation == FAMILIES[family].implementation
    target.check_structure()
    ids = tokens(2)
    with torch.no_grad():
        own = target.model(ids, use_cache=False).logits
    assert torch.equal(target.forward(ids, KVCache(2)), own)
    last = target.forward(ids, KVCache(2), logits_to_keep=1)
    assert last.shape == (2, 1, VOCABULARY)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert torch.allclose(last[:, 0], own[:, -1], atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 99))
def test_logits_in_parts_are_those_of_one_pass(family: str, parts: list[int], seed: int) -> None:
    target = family_target(family)
    ids = tokens(1, sum(parts), seed)
    with torch.no_grad():
        own = target.model(ids, use_cache=False).logits
    cache, found = KVCache(1, capacity=2), []
    for part in ids.split(parts, 1):
        found.append(target.forward(part, cache))
        cache.commit([range(part.shape[1])])
    assert torch.allclose(torch.cat(found, 1), own, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["folded", "sdpa", "eager"])
def test_keys_and_values_of_different_sizes(implementation: str) -> None:
    """DeepSeek's values are narrower than its keys, and its cache holds neither; wide caches show unused slots."""
    model = family_model("deepseek-v3")
    ids = tokens(1, 12).expand(17, -1)
    with torch.no_grad():
        own = model(ids[:1], use_cache=False).logits
    target = family_target("deepseek-v3")
    model.set_attn_implementation(implementation)
    try:
        cache = KVCache(17, capacity=64)
        target.hidden(ids[:, :7], cache)
        cache.commit([range(3 + row % 4) for row in range(17)])
        starts = list(cache.lengths)
        found = target.forward(torch.stack([ids[0, at : at + 5] for at in starts]), cache)
    finally:
        model.set_attn_implementation("folded")
    for row, at in enumerate(starts):
        assert torch.allclose(found[row], own[0, at : at + 5], atol=1e-5)
