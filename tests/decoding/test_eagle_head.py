"""The EAGLE-3 head: files, and the drafter's trees against a slow reference without a KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.formats import load_head
from decoding.eagle.head import EagleHead, HeadConfig, HeadError
from decoding.request import Request
from decoding.tree import DraftTree

DRAFT_TOKENS = torch.arange(0, 64, 2)


def random_head(seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    config = HeadConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=64, draft_vocab_size=len(DRAFT_TOKENS), target_hidden_size=32,
    )  # fmt: skip
    head = EagleHead(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
    head.set_vocabulary(DRAFT_TOKENS)
    return head.eval().requires_grad_(False)


def reference_outputs(
    head: EagleHead, embed: torch.nn.Module, features: torch.Tensor, tokens: list[int], chain: list[int]
) -> torch.Tensor:
    """Output [width] after feeding verified rows and then a chain of drafted tokens, attending to all rows so far.

    Row i < n has the feature of token i and the embedding of token i + 1; the rows after it have the output before.
    """
    ids = [*tokens[1:], *chain]
    n = len(features)
    hidden = [*head.fc(features)]
    keys, values = [], []
    output = torch.empty(0)
    for i, token in enumerate(ids):
        if i >= n:
            hidden.append(output)
        q, k, v = head.project(hidden[i][None], embed(torch.tensor([token])), torch.tensor([i]))
        keys.append(k[0])
        values.append(v[0])
        groups = head.config.num_attention_heads // head.config.num_key_value_heads
        k_all = torch.stack(keys).repeat_interleave(groups, 1)  # [i + 1, H, D]
        v_all = torch.stack(values).repeat_interleave(groups, 1)
        weight = (torch.einsum("hd,nhd->hn", q[0], k_all) / head.config.per_head**0.5).softmax(-1)
        attended = torch.einsum("hn,nhd->hd", weight, v_all).flatten()
        output = head.finish(hidden[i], attended)
    return output


def reference_tree(
    head: EagleHead,
    embed: torch.nn.Module,
    features: torch.Tensor,
    tokens: list[int],
    top_k: int,
    nodes: int,
    depth: int,
) -> list[tuple[tuple[int, ...], float]]:
    """The chosen nodes as (path of tokens, log-probability), best cumulative score first among all that are grown."""
    grown: list[tuple[tuple[int, ...], float, float]] = []
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in beams:
            output = reference_outputs(head, embed, features, tokens, list(path))
            logp = head.logits(output).log_softmax(-1)
            best, index = logp.topk(top_k)
            for value, draft in zip(best.tolist(), index.tolist(), strict=True):
                level.append(((*path, int(DRAFT_TOKENS[draft])), score + value, value))
        grown += level
        beams = [(path, score) for path, score, _ in sorted(level, key=lambda x: -x[1])[:top_k]]
    best_first = sorted(grown, key=lambda x: -x[1])[:nodes]
    return [(path, value) for path, _, value in best_first]


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[j] for j in line): tree.logq[i] for i, line in enumerate(tree.ancestors)}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 63), min_size=1, max_size=12),
    steps=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=5), max_size=4),
    top_k=st.integers(1, 4),
    nodes=st.integers(1, 14),
    depth=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_tree_is_the_reference_after_lazy_catch_up(
    small_target: Callable[..., Target],
    prompt: list[int], steps: list[list[int]], top_k: int, nodes: int, depth: int, seed: int,
) -> None:  # fmt: skip
    target, head = small_target(), random_head(seed)
    drafter = EagleDrafter(target, head, top_k=top_k, sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    generator = torch.Generator().manual_seed(seed)
    request = Request(0, prompt, max_new_tokens=60, tokens=[*prompt, 5])
    features = torch.randn(len(prompt), 96, generator=generator)
    drafter.start(request, features)
    for number, step in enumerate(steps):  # now and then a proposal in between, whose rows must leave no trace
        if number % 2:
            drafter.propose([request], [FixedBudget(4, 2)])
        fresh = torch.randn(len(step), 96, generator=generator)
        request.tokens += step
        features = torch.cat([features, fresh])
        drafter.observe(request, fresh)
    [tree] = drafter.propose([request], [FixedBudget(nodes, depth)])
    assert tree is not None
    expected = reference_tree(head, target.embed, features, request.tokens, top_k, nodes, depth)
    found = paths_of(tree)
    assert len(found) == len(tree)
    assert set(found) == {path for path, _ in expected}
    for path, value in expected:
        assert found[path] == pytest.approx(value, abs=2e-3)


def test_no_room_no_tree(small_target: Callable[..., Target]) -> None:
    drafter = EagleDrafter(small_target(), random_head(), sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    request = Request(0, [1, 2], max_new_tokens=1, tokens=[1, 2, 3])
    drafter.start(request, torch.zeros(2, 96))
    assert drafter.propose([request], [FixedBudget(4, 3)]) == [None]


def test_select_copies_the_state_of_a_row(small_target: Callable[..., Target]) -> None:
    drafter = EagleDrafter(small_target(), random_head(), sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    a, b = (Request(i, [1, 2, 3], max_new_tokens=9, tokens=[1, 2, 3, 4]) for i in range(2))
    torch.manual_seed(1)
    drafter.start(a, torch.randn(3, 96))
    drafter.start(b, torch.randn(3, 96))
    before = drafter.propose([a, b], [FixedBudget(5, 2)] * 2)
    drafter.select([a, b], [1, 1], from_position=3)
    for request in (a, b):
        request.tokens.append(9)
    features = torch.randn(1, 96)
    drafter.observe(a, features)
    drafter.observe(b, features)
    trees = drafter.propose([a, b], [FixedBudget(5, 2)] * 2)
    assert before[0] is not None and before[1] is not None and trees[0] is not None and trees[1] is not None
    assert before[0].tokens != before[1].tokens
    assert trees[0].tokens == trees[1].tokens and trees[0].logq == trees[1].logq


def test_head_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    head = random_head()
    head.save(tmp_path)
    again = load_head(tmp_path, 64)
    assert again.config.per_head == 8 and again.config.feature_width == 96
    assert torch.equal(again.draft_tokens, DRAFT_TOKENS) and int(again.t2d.sum()) == len(DRAFT_TOKENS)
    for name, tensor in head.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], tensor.bfloat16().float()), name


def test_other_names_and_missing_maps_are_understood(tmp_path: Path) -> None:
    head = random_head()
    head.save(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {k.replace("midlayer.", "model.layers.0."): v for k, v in state.items() if k != "t2d"}
    save_file(renamed | {"embed_tokens.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    assert torch.equal(load_head(tmp_path, 64).t2d, head.t2d)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b"nonsense"), "cannot read the weights"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: _edit(f, drop="fc.weight"), "fc.weight missing"),
        (lambda f: _edit(f, drop="midlayer.mlp.up_proj.weight"), "missing .*up_proj"),
        (lambda f: _edit(f, drop="d2t"), "no d2t tensor"),
        (lambda f: _edit(f, d2t=torch.full((32,), 60)), "does not map into the target's vocabulary"),
    ],
)
def test_a_damaged_head_says_what_is_wrong(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    random_head().save(tmp_path)
    break_it(tmp_path)
    with pytest.raises(HeadError, match=message):
        load_head(tmp_path, 64)


def test_a_head_of_another_target_is_refused(tmp_path: Path, small_target: Callable[..., Target]) -> None:
    random_head().save(tmp_path)
    with pytest.raises(HeadError, match="vocabulary of 64, the target has 100"):
        load_head(tmp_path, 100)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["target_hidden_size"] == 32
    wide = EagleHead(
        HeadConfig(
            hidden_size=64, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, draft_vocab_size=32,
        )
    )  # fmt: skip
    with pytest.raises(HeadError, match="states of width 64, the target's are 32"):
        EagleDrafter(small_target(), wide)


def _edit(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> None:
    state = load_file(folder / "model.safetensors")
    if drop:
        del state[drop]
    save_file(state | tensors, folder / "model.safetensors")


def test_description_tells_heads_apart(small_target: Callable[..., Target]) -> None:
    sites = ("resid_pre.1", "resid_pre.2", "resid_pre.3")
    one, same, other = (EagleDrafter(small_target(), random_head(seed), sites=sites).describe() for seed in (0, 0, 1))
    assert one == same and one != other
    assert json.loads(json.dumps(one)) == one


def test_positions_behind_the_first_table_are_there_before_they_are_needed(small_target: Callable[..., Target]) -> None:
    """A device is never asked how far the positions go, so the table has to cover a request from its start."""
    drafter = EagleDrafter(small_target("llama"), random_head())
    short = drafter._cos.clone()
    request = Request(0, [1, 2, 3], max_new_tokens=3000)
    request.tokens = [*request.prompt, 4]
    drafter.start(request, torch.zeros(3, 96))
    assert len(drafter._cos) == len(drafter._sin) > len(request.tokens) + request.max_new_tokens > len(short)
    assert torch.equal(drafter._cos[: len(short)], short)
