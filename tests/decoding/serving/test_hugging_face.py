"""`generate` with and without the project's loop: the same ids, whatever is asked of it."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput

import switchsd
from activations.packaged import SHIPPED, gguf_file, place
from activations.target import TargetError, load_target, target_of
from decoding.decoder import Decoder
from decoding.modes import DecodingError, ModeSettings
from decoding.serving.hugging_face.custom_generate import CustomGenerate
from probes.artifact import ChoiceError

PROMPT = [7, 3, 12, 9, 3, 12, 9, 3, 12]
PROMPTS = [PROMPT, [5, 6, 5, 6, 5], [40], [11, 30, 2, 11, 30, 2, 11]]
NEW = 48


class Constant:
    """A probe that always says the same."""

    def __init__(self, score: float) -> None:
        self._score = score
        self.config = SimpleNamespace(sites=("resid_post.1",), threshold=0.5, kappa=1, to_dict=dict)

    def score(self, state: torch.Tensor) -> torch.Tensor:
        return torch.full(state.shape[:-1], self._score)


@pytest.fixture(scope="module")
def model(reference_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(reference_model("llama"))


@pytest.fixture(scope="module")
def make(model: PreTrainedModel, small_target: Callable[..., Any]) -> Callable[..., CustomGenerate]:
    def build(
        mode: str = "switchsd", score: float = 1.0, of: PreTrainedModel = model, **settings: Any
    ) -> CustomGenerate:
        chosen = ModeSettings(
            **{"gate": "probe", "neural": "none", "kappa": 1, "candidates": 4, "copy_nodes": 8, **settings}
        )
        target = target_of(of, small_target("llama").tokenizer)
        return CustomGenerate(Decoder(target, probe=Constant(score), settings=chosen), mode)

    return build


@pytest.fixture(scope="module")
def switch(make: Callable[..., CustomGenerate]) -> CustomGenerate:
    return make()


def padded(prompts: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


FRESH = ("logits_processor", "stopping_criteria", "streamer")
"""Options that keep something from one call to the next: made anew for each."""


def both(model: PreTrainedModel, switch: CustomGenerate, prompts: list[list[int]], **how: Any) -> tuple[Any, Any]:
    """What generate gives by itself, and what it gives with the loop."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **padded(prompts), **how}
    given = ({k: v() if k in FRESH else v for k, v in options.items()} for _ in range(2))
    return model.generate(**next(given)), model.generate(**next(given), custom_generate=switch)


class Odd(LogitsProcessor):
    """Forbids what it allowed at its last call: the order and the number of calls matter, and the text as well."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, (self.calls + int(input_ids[0, -1])) % 64] = -torch.inf
        return scores


class Third(StoppingCriteria):
    """Ends a row at its third token 9, counted over all calls."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count.update(row for row, token in enumerate(input_ids[:, -1].tolist()) if token % 8 == 1)
        return torch.tensor([self.count[row] >= 3 for row in range(len(input_ids))])


ASKED = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "bad words": {"bad_words_ids": [[9], [3, 12], [20, 21]]},
    "no ngrams": {"no_repeat_ngram_size": 3},
    "least new tokens": {"min_new_tokens": 20, "eos_token_id": list(range(0, 64, 3))},
    "stop tokens": {"eos_token_id": [63, 4, 17, 33, 25]},
    "no stop token": {"eos_token_id": None},
    "forced end": {"forced_eos_token_id": 5},
    "a processor that remembers": {"logits_processor": lambda: [Odd()]},
    "criterion that remembers": {"stopping_criteria": lambda: [Third()]},
    "criterion, no stop token": {"stopping_criteria": lambda: [Third()], "eos_token_id": None},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, text: [(row + k + len(text)) % 64 for k in (1, 8, 9)]},
    "max length": {"max_length": 21, "max_new_tokens": None},
    "several": {"repetition_penalty": 1.1, "bad_words_ids": [[9]], "suppress_tokens": [2], "renormalize_logits": True},
}  # fmt: skip


@pytest.mark.parametrize("prompts", [[PROMPT], PROMPTS], ids=["one", "batch"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("score", [0.0, 1.0], ids=["never", "always"])
def test_same_ids(score: float, asked: str, prompts: list[list[int]], model: Any, make: Any) -> None:
    switch = make(score=score)
    plain, mine = both(model, switch, prompts, **ASKED[asked])
    assert mine.tolist() == plain.tolist()
    accepted = sum(len(record.accepted) for record in switch.trace)
    if score == 0 or (len(prompts) > 1 and "remembers" in asked):
        assert accepted == 0
    elif asked == "greedy":
        assert accepted > 20  # it did copy


@pytest.mark.parametrize("mode", ["ar", "copy", "switchsd", "minedraft"])
def test_every_lossless_mode(mode: str, model: Any, make: Any) -> None:
    plain, mine = both(model, make(mode, gate="match"), PROMPTS, repetition_penalty=1.1)
    assert mine.tolist() == plain.tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families(family: str, reference_model: Any, make: Any) -> None:
    other = copy.deepcopy(reference_model(family))
    plain, mine = both(other, make(of=other), PROMPTS, repetition_penalty=1.2)
    assert mine.tolist() == plain.tolist()


def test_processors_and_criteria_are_called_as_generate_calls_them(model: Any, switch: CustomGenerate) -> None:
    """Once a token, in order, with the text so far: also for drafts, and no further than the text goes."""
    for prompts in ([PROMPT], PROMPTS):
        texts = []
        for how in ({}, {"custom_generate": switch}):
            odd = Odd()
            model.generate(
                **padded(prompts), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=[63, 33],
                logits_processor=[odd], **how,
            )  # fmt: skip
            texts.append(odd.seen)
        assert texts[0] == texts[1]


def test_a_processor_may_run_the_model(model: Any, switch: CustomGenerate) -> None:
    """Classifier-free guidance does, and keeps a cache of its own; the probe's states are not taken for its."""
    plain, mine = both(model, switch, [PROMPT], guidance_scale=1.5)
    assert mine.tolist() == plain.tolist()


def test_stop_strings(model: Any, switch: CustomGenerate, small_target: Any) -> None:
    """generate keeps the tokenizer from custom_generate, and wants it for `stop_strings`: so as a criterion."""
    tokenizer = small_target("llama").tokenizer
    text = model.generate(**padded([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    stop = tokenizer.decode(text[len(PROMPT) + 15 : len(PROMPT) + 17])
    plain, mine = both(model, switch, PROMPTS, stopping_criteria=lambda: [StopStringCriteria(tokenizer, [stop, "zz"])])
    assert mine.tolist() == plain.tolist()


# -- streamers ----------------------------------------------------------------------------------------


class Listener:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("prompts", [[PROMPT], PROMPTS], ids=["one", "batch"])
def test_streamer_hears_what_generate_tells_it(prompts: list[list[int]], model: Any, switch: CustomGenerate) -> None:
    heard = []
    for how in ({}, {"custom_generate": switch}):
        listener = Listener()
        model.generate(
            **padded(prompts), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=[63, 33, 17],
            streamer=listener, **how,
        )  # fmt: skip
        heard.append(listener.got)
    assert heard[0] == heard[1]
    assert heard[1][-1] == "end"


def test_text_streamer_in_a_thread(model: Any, switch: CustomGenerate, small_target: Any) -> None:
    tokenizer = small_target("llama").tokenizer
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    how = {**padded([PROMPT]), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    thread = threading.Thread(target=model.generate, kwargs={**how, "streamer": streamer, "custom_generate": switch})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(**how)[0, len(PROMPT) :])


# -- what comes back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[PROMPT], PROMPTS], ids=["one", "batch"])
def test_output_class(prompts: list[list[int]], model: Any, switch: CustomGenerate) -> None:
    how = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    plain, mine = both(model, switch, prompts, eos_token_id=[63, 33, 17], **how)
    assert type(mine) is GenerateDecoderOnlyOutput
    assert mine.sequences.tolist() == plain.sequences.tolist()
    assert mine.attentions is None and mine.hidden_states is None
    width = max(map(len, prompts))
    for name in ("scores", "logits"):
        assert len(mine[name]) == len(plain[name]) == mine.sequences.shape[1] - width
        for position, (a, b) in enumerate(zip(mine[name], plain[name], strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            going = [
                r
                for r in range(len(prompts))
                if not set(plain.sequences[r, width : width + position].tolist()) & {63, 33, 17}
            ]
            torch.testing.assert_close(a[going], b[going], atol=2e-4, rtol=1e-4)
    assert model.compute_transition_scores(mine.sequences, mine.scores).shape == (len(prompts), len(mine.scores))


def test_nothing_is_kept_unless_asked_for(model: Any, switch: CustomGenerate) -> None:
    _, mine = both(model, switch, [PROMPT], return_dict_in_generate=True)
    assert mine.scores is None and mine.logits is None


# -- sampling -------------------------------------------------------------------------------------------


def test_sampled_text_follows_the_seed_and_no_draft(model: Any, make: Any) -> None:
    texts = []
    for mode in ("ar", "copy", "switchsd"):
        torch.manual_seed(3)
        how = {
            **padded(PROMPTS),
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 20,
            "pad_token_id": 0,
            "max_new_tokens": NEW,
        }
        texts.append(model.generate(**how, custom_generate=make(mode)).tolist())
    assert texts[0] == texts[1] == texts[2]
    torch.manual_seed(4)
    assert model.generate(**how, custom_generate=make(mode)).tolist() != texts[0]


def test_sampled_law(model: Any, switch: CustomGenerate) -> None:
    """Pairs of tokens after a prompt, against the law that the model and the processors give (chi-square)."""
    rows = 4000
    how = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 4,
        "max_new_tokens": 2,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    found = model.generate(**padded([PROMPT]), **how, num_return_sequences=rows, custom_generate=switch)[:, -2:]
    assert found.shape == (rows, 2)

    def law(texts: torch.Tensor) -> torch.Tensor:
        logits = model(texts).logits[:, -1].float() / 0.7
        least = logits.topk(4).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf).softmax(-1)

    with torch.no_grad():
        first = law(torch.tensor([PROMPT]))[0]
        after = law(torch.tensor([[*PROMPT, t] for t in range(64)]))
    expected = (first[:, None] * after).flatten() * rows
    counts = torch.bincount(found[:, 0] * 64 + found[:, 1], minlength=64 * 64).double()
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    chi = (((counts - expected)[likely]) ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert degrees >= 8 and chi < degrees + 4 * (2 * degrees) ** 0.5


# -- what cannot be done --------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam_search was asked for"),
    "lookup": ({"prompt_lookup_num_tokens": 4}, "assisted_generation was asked for"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions=True"),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
    "synced": ({"synced_gpus": True}, "synced_gpus=True"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "padding_side='left'"),
    "holes": ({"attention_mask": torch.tensor([[1, 0] + [1] * 7])}, "padding_side='left'"),
    "positions": ({"position_ids": torch.arange(9)[None] + 3}, "position_ids other than"),
    "vectors": ({"inputs_embeds": torch.zeros(1, 9, 32)}, "inputs_embeds was given|hold some text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, model: Any, switch: CustomGenerate) -> None:
    how, told = REFUSED[name]
    with pytest.raises(DecodingError, match=told) as caught:
        model.generate(**{**padded([PROMPT]), "max_new_tokens": 4, "pad_token_id": 0, **how}, custom_generate=switch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_of_the_callers_is_refused(name: str, model: Any, switch: CustomGenerate) -> None:
    """Under both names; a transformers that does not know one of them says so itself."""
    cache = DynamicCache(config=model.config)
    model(
        torch.tensor([PROMPT[:4]]),
        **{("cache" if hasattr(model(torch.tensor([[1]])), "cache") else "past_key_values"): cache},
    )
    with pytest.raises((DecodingError, ValueError), match=r"a DynamicCache was given|not used by the model"):
        model.generate(**padded([PROMPT]), **{name: cache}, max_new_tokens=4, pad_token_id=0, custom_generate=switch)


def test_an_assistant_is_refused(model: Any, switch: CustomGenerate) -> None:
    with pytest.raises(DecodingError, match="an assistant was asked for"):
        model.generate(
            **padded([PROMPT]), max_new_tokens=4, assistant_model=copy.deepcopy(model), custom_generate=switch
        )


def test_another_model_is_refused(model: Any, switch: CustomGenerate) -> None:
    with pytest.raises(DecodingError, match="make one for each model"):
        copy.deepcopy(model).generate(**padded([PROMPT]), max_new_tokens=4, custom_generate=switch)


@pytest.mark.parametrize("mode", ["smcsd", "nonsense"])
def test_modes_that_are_refused(mode: str, make: Any) -> None:
    with pytest.raises(DecodingError):
        make(mode)


def test_more_than_the_positions_is_refused(small_target: Any, make: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    switch = make(of=model)
    plain, mine = both(model, switch, [PROMPT], max_new_tokens=32 - len(PROMPT))
    assert mine.tolist() == plain.tolist()
    with pytest.raises(DecodingError, match="max_length is 33, the prompt included; GPT2LMHeadModel has 32 positions"):
        model.generate(**padded([PROMPT]), max_new_tokens=33 - len(PROMPT), pad_token_id=0, custom_generate=switch)


def test_an_encoder_is_refused(small_target: Any) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(TargetError, match="decoder-only"):
        switchsd.custom_generate(T5ForConditionalGeneration(T5Config(**sizes)), small_target("llama").tokenizer)


def test_the_model_stays_its_owners(reference_model: Any, make: Any) -> None:
    """It trains on, with its own attention and no hooks left."""
    own = copy.deepcopy(reference_model("llama")).train()
    before = own.config._attn_implementation, [type(m) for m in own.modules()]
    switch = make(of=own)
    own.generate(**padded(PROMPTS), max_new_tokens=8, pad_token_id=0, do_sample=False, custom_generate=switch)
    assert own.training and all(p.requires_grad for p in own.parameters())
    assert before == (own.config._attn_implementation, [type(m) for m in own.modules()])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.modules())


# -- whole models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    target = load_target("small-qwen3", dtype="float32", device="cpu")
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(SHIPPED["small-qwen3"], dtype=torch.float32).eval(), target


def test_small_model_copies(small: Any) -> None:
    """The shipped model, found by its folder, in the form that users write."""
    model, target = small
    switch = switchsd.custom_generate(model, target.tokenizer, mode="copy", kappa=2)
    ids = torch.tensor([target.encode("Repeat: the river is wide and the night is long, and the boat is small.")])
    how = {"input_ids": ids, "max_new_tokens": 64, "do_sample": False}
    assert model.generate(**how, custom_generate=switch).tolist() == model.generate(**how).tolist()
    assert sum(len(record.accepted) for record in switch.trace) > 10


def test_parts_of_another_model_or_none_at_all(small: Any) -> None:
    model, target = small
    with pytest.raises(ChoiceError, match="does not fit") as caught:
        switchsd.custom_generate(model, target.tokenizer, probe="smollm2/serving")
    assert "\n" not in str(caught.value)
    with pytest.raises(DecodingError, match="needs a probe"):
        switchsd.custom_generate(model, target.tokenizer)


@pytest.mark.real
@pytest.mark.skipif(
    gguf_file("smollm2") is None and not (place("smollm2") / "config.json").is_file(), reason="smollm2 is not installed"
)
def test_real_model_with_its_probe_and_head() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from activations.packaged import folder

    where = folder("smollm2")
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
    switch = switchsd.custom_generate(model, tokenizer, gate="probe", neural_tree="fixed")
    asked = ["Repeat this twice: apples, pears, plums, cherries, figs.", "Name three colours of the sky."]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": a}], tokenize=False, add_generation_prompt=True)
        for a in asked
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    how = {**inputs, "max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.05}
    assert model.generate(**how, custom_generate=switch).tolist() == model.generate(**how).tolist()
    drafters = {name for record in switch.trace for name in record.drafters}
    assert drafters == {"copy", "eagle"}


def test_a_processor_that_comes_back_in_is_told_so(model: PreTrainedModel, make: Callable[..., CustomGenerate]) -> None:
    switch = make()

    class Inward(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.generate(**padded([PROMPT]), custom_generate=switch, max_new_tokens=2, pad_token_id=0)
            return scores

    with pytest.raises(DecodingError, match="calls generate with the custom_generate that calls it"):
        model.generate(
            **padded([PROMPT]), custom_generate=switch, max_new_tokens=4, pad_token_id=0, logits_processor=[Inward()]
        )
    alone, drafted = both(model, switch, [PROMPT])
    assert torch.equal(alone, drafted)
