"""Draft models: cut from a target of any family, kept in files, or another model of the same vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY, family_target
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from activations.cache import KVCache
from activations.linear import PackedLinear, packs
from activations.target import Target
from decoding.draft.model import (
    DraftError,
    cut,
    independent,
    load_draft,
    own_state,
    read_draft,
    save_draft,
    spread,
)

TOKENS = torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(3))


@contextmanager
def without(blocks: list[Any]) -> Iterator[None]:
    """Within, these blocks hand their input on, in the form of their output."""

    def around(usual: Callable[..., Any]) -> Callable[..., Any]:
        def forward(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = usual(state, *args, **kwargs)
            return (state, *made[1:]) if isinstance(made, tuple) else state

        return forward

    for block in blocks:
        block.forward = around(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def reference(target: Target, kept: list[int]) -> torch.Tensor:
    """Logits of the model as transformers runs it, the other blocks left out."""
    with without([block for k, block in enumerate(target.layers) if k not in kept]), torch.no_grad():
        logits: torch.Tensor = target.model(input_ids=TOKENS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("blocks", [[0, 2], [1]], ids=str)
def test_a_cut_target_is_the_target_without_the_other_blocks(family: str, blocks: list[int]) -> None:
    target = family_target(family)
    draft = cut(target, blocks)
    wanted = reference(target, blocks)
    assert draft.blocks == len(blocks) and draft.config.num_hidden_layers == len(blocks)
    cache = KVCache(2)
    steps = [draft.forward(TOKENS[:, :15], cache)]
    cache.commit([range(15)] * 2)
    for at in range(15, 21):
        steps.append(draft.forward(TOKENS[:, at : at + 1], cache))
        cache.commit([[0]] * 2)
    assert torch.allclose(torch.cat(steps, 1), wanted, atol=2e-4)
    assert len(cache.keys) == len(blocks), "its cache has a layer for each of its blocks"
    assert (target.blocks, target.config.num_hidden_layers) == (BLOCKS, BLOCKS), "the target is left as it was"


def test_the_lists_of_a_configuration_are_cut(small_target: Callable[..., Target]) -> None:
    draft = cut(family_target("gemma3"), [1, 2])
    assert draft.config.layer_types == ["full_attention", "sliding_attention"]
    smollm3 = family_target("smollm3")
    assert cut(smollm3, [0, 2]).config.no_rope_layers == [smollm3.config.no_rope_layers[k] for k in (0, 2)]
    gemma = small_target("gemma3")
    assert cut(gemma, [1, 3]).window is None, "no block of it has the window"
    assert cut(gemma, [0, 2]).window == gemma.window


def test_memory_is_shared_where_it_is_said_and_nowhere_else(small_target: Callable[..., Target]) -> None:
    for target in (small_target(), family_target("gpt2"), family_target("gemma2")):
        draft = cut(target, [0, target.blocks - 1])
        assert draft.embed.weight.data_ptr() == target.embed.weight.data_ptr()
        assert draft.head.weight.data_ptr() == target.head.weight.data_ptr()
        theirs = {x.data_ptr() for x in target.model.parameters()}
        own = {x.data_ptr() for x in (*draft.layers.parameters(), *draft.final_norm.parameters())}
        assert not own & theirs, "training a draft must leave the target alone"
        others = {p.data_ptr() for p in draft.model.parameters()} - own
        assert others <= theirs, "nothing else is copied"


def bfloat(small_target: Callable[..., Target]) -> Target:
    whole = small_target()
    config = LlamaConfig(**{k: v for k, v in whole.config.to_dict().items() if k != "dtype"})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.set_attn_implementation("folded")
    target = Target(model, whole.tokenizer, "small", None)
    target.speed_up()
    return target


def test_a_packed_target_shares_its_packed_output_matrix(small_target: Callable[..., Target]) -> None:
    target = bfloat(small_target)
    if not packs(torch.zeros(1, 1, dtype=torch.bfloat16)):
        pytest.skip("nothing packs on this machine")
    draft = cut(target, 2)
    assert isinstance(target.head, PackedLinear) and isinstance(draft.head, PackedLinear)
    assert draft.head.product is target.head.product and draft.head is not target.head
    assert draft.forward_kind == target.forward_kind == "fast, packed layers"
    assert isinstance(draft.layers[0].mlp.down_proj, PackedLinear)
    assert draft.layers[0].mlp.down_proj.product is not target.layers[0].mlp.down_proj.product


def test_who_watches_the_target_does_not_see_the_draft(small_target: Callable[..., Target]) -> None:
    target = small_target()
    with target.read(["embed", "resid_post.0"]) as reader:
        target.forward(TOKENS[:, :5], KVCache(2))
        before = dict(reader.states)
        draft = cut(target, 2)
        draft.forward(TOKENS, KVCache(2))
        assert all(reader.states[site] is state for site, state in before.items())
    with draft.read(["resid_post.1"]) as reader:
        draft.forward(TOKENS, KVCache(2))
        assert [s.shape for s in reader.states.values()] == [(2, 21, 32)]


def test_blocks_are_spread_over_the_target() -> None:
    assert [spread(n, 30) for n in (1, 2, 3, 4)] == [[0], [0, 29], [0, 14, 29], [0, 10, 19, 29]]
    assert spread(30, 30) == list(range(30))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (0, "a draft of 0 blocks cannot be cut from a target of 4"), (5, "choose 1 to 4"),
        ([], "blocks none cannot be cut from small-llama"), ([2, 1], "blocks 2, 1 .* increasing numbers from 0 to 3"),
        ([1, 1], "blocks 1, 1 "), ([0, 4], "blocks 0, 4 "), ([-1], "blocks -1 "),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be_cut(small_target: Callable[..., Target], blocks: Any, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        cut(small_target(), blocks)


def test_a_spread_out_target_is_refused(small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    monkeypatch.setattr(target.layers[1], "_hf_hook", object(), raising=False)
    with pytest.raises(DraftError, match="spread over devices"):
        cut(target, 2)


# -- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, small_target: Callable[..., Target]) -> Path:
    """A draft of bfloat16 values, moved away from the target's."""
    target = small_target()
    draft = cut(target, [0, 2])
    with torch.no_grad():
        for x in own_state(draft).values():
            x.mul_(1.25).copy_(x.bfloat16())
    save_draft(tmp_path / "draft", draft, [0, 2], target, result={"agreement": 0.5})
    return tmp_path / "draft"


def test_a_draft_is_saved_and_loaded(saved: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    draft = load_draft(saved, target)
    assert draft.name == str(saved) and draft.forward_kind == target.forward_kind
    stored = load_file(saved / "draft.safetensors")
    assert stored.keys() == own_state(draft).keys()
    assert all(name.startswith(("blocks.0.", "blocks.1.", "norm.")) for name in stored)
    assert {x.dtype for x in stored.values()} == {torch.bfloat16}
    with torch.no_grad():
        again = cut(target, [0, 2])
        for name, x in own_state(again).items():
            assert torch.equal(stored[name].float(), (x * 1.25).bfloat16().float())
            x.copy_(stored[name])
    assert torch.equal(draft.forward(TOKENS, KVCache(2)), again.forward(TOKENS, KVCache(2)))
    assert read_draft(saved)["result"] == {"agreement": 0.5}
    assert sorted(p.name for p in saved.iterdir()) == ["draft.json", "draft.safetensors"], "no scratch files"


def test_a_packed_draft_is_saved_and_loaded(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = bfloat(small_target)
    draft = cut(target, 2)
    save_draft(tmp_path, draft, [0, 3], target)
    assert torch.equal(load_draft(tmp_path, target).forward(TOKENS, KVCache(2)), draft.forward(TOKENS, KVCache(2)))


def test_a_draft_of_another_target_is_refused(saved: Path, small_target: Callable[..., Target]) -> None:
    other = small_target("qwen3")
    with pytest.raises(DraftError, match=r"another target than small-qwen3 .architecture: Qwen3ForCausalLM and Llama"):
        load_draft(saved, other)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_damaged_drafts(saved: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()

    def fails(name: str, message: str, change: Callable[[Path], object]) -> None:
        folder = Path(shutil.copytree(saved, tmp_path / name))
        change(folder)
        with pytest.raises(DraftError, match=message):
            load_draft(folder, target)

    fails("none", "is no draft model .draft.json is missing.: make one", lambda f: (f / "draft.json").unlink())
    fails("half", "draft.json is damaged", lambda f: (f / "draft.json").write_text("{"))
    fails("words", "draft.json is damaged.*'blocks' is", lambda f: edit(f / "draft.json", blocks=["0"]))
    for name, blocks in (
        ("order", [3, 0]),
        ("beyond", [0, 4]),
        ("truth", [True, 3]),
        ("no-blocks", []),
        ("below", [-1, 2]),
    ):
        fails(
            name, "draft.json is damaged.*'blocks' is.*make the", lambda f, b=blocks: edit(f / "draft.json", blocks=b)
        )  # type: ignore[misc]
    fails("nobody", "draft.json is damaged", lambda f: edit(f / "draft.json", target={"width": 1}))
    fails("weights", "cannot read .*draft.safetensors", lambda f: (f / "draft.safetensors").write_bytes(b"x"))
    fails("lost", "cannot read .*draft.safetensors", lambda f: (f / "draft.safetensors").unlink())
    fails("three", "does not hold the blocks of.*blocks.2.input", lambda f: edit(f / "draft.json", blocks=[0, 1, 2]))

    def shorten(folder: Path) -> None:
        state = load_file(folder / "draft.safetensors")
        save_file(state | {"norm.weight": torch.zeros(3)}, folder / "draft.safetensors")

    fails("shape", "does not hold the blocks.*norm.weight for one", shorten)


# -- other models -----------------------------------------------------------------------------------------


def other_model(target: Target, folder: Path, rows: int, words: dict[str, int] | None = None, **more: Any) -> Path:
    """A smaller Llama with `rows` tokens, saved with the target's tokenizer, or one of these words."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=63, pad_token_id=None, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = target.tokenizer
    if words is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=words, merges=[])))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [64, 80])
def test_an_independent_model_of_the_same_tokens(
    small_target: Callable[..., Target], tmp_path: Path, rows: int, tied: bool
) -> None:
    target = small_target()
    draft = independent(other_model(target, tmp_path, rows, tie_word_embeddings=tied), target)
    assert draft.dtype == target.dtype
    logits = draft.forward(TOKENS, KVCache(2))
    whole = LlamaForCausalLM.from_pretrained(tmp_path)(input_ids=TOKENS).logits
    assert logits.shape[-1] == target.vocab_size == 64
    assert torch.allclose(logits, whole[..., :64], atol=1e-4)


def test_independent_models_that_cannot_draft(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target()
    with pytest.raises(DraftError, match="knows 48 token ids and the target 64"):
        independent(other_model(target, tmp_path / "few", 48), target)
    words = dict(target.tokenizer.get_vocab())
    words["5"], words["6"] = words["6"], words["5"]
    with pytest.raises(DraftError, match=r"2 tokens have other ids, '5' for one .6 there, 5 here."):
        independent(other_model(target, tmp_path / "mixed", 64, words), target)
    words = {token: number for token, number in target.tokenizer.get_vocab().items() if token != "7"}
    with pytest.raises(DraftError, match=r"1 tokens have other ids, '7' for one .none there, 7 here."):
        independent(other_model(target, tmp_path / "lacks", 64, words), target)


def test_every_family_has_the_vocabulary_that_the_tests_use() -> None:
    assert int(TOKENS.max()) < VOCABULARY
