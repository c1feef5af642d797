"""Prompt lookup behind a probe, in the assisted generation of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from activations.packaged import folder, gguf_file, place
from activations.target import Fingerprint
from decoding.serving.hugging_face import lookup
from decoding.serving.hugging_face.lookup import GatedLookup, gated_lookup, hidden_state
from probes.artifact import ChoiceError, Probe, ProbeConfig

PROMPT = [7, 3, 12, 9, 3, 12, 9, 3, 12]
NEW = 48


@pytest.fixture(scope="module")
def model(reference_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(reference_model("llama"))


def probe_at(site: str, bias: float = 0.0, weight: float = 0.0, **target: Any) -> Probe:
    made = {"architecture": "LlamaForCausalLM", "width": 32, "blocks": 4, "vocabulary": "v", "revision": "r", **target}
    config = ProbeConfig(
        site, 32, "follow", {"match": 1}, 0.5, "given", Fingerprint(**made), "small", "", {}, {}, {}
    )  # fmt: skip
    return Probe(config, torch.linspace(-1, 1, 32) * weight, bias)


class Watch:
    """Every candidate generator that is made, and what it was asked and said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.scored: list[torch.Tensor] = []
        watch = self

        class Watched(GatedLookup):
            def get_candidates(self, input_ids: torch.Tensor, **how: Any) -> Any:  # type: ignore[override]
                out = super().get_candidates(input_ids, **how)
                watch.texts.append(input_ids[0].tolist())
                watch.drafts.append(out[0][0, input_ids.shape[1] :].tolist())
                return out

        monkeypatch.setattr(lookup, "GatedLookup", Watched)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def generate(model: PreTrainedModel, **how: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
        **how,
    }
    return model.generate(ids, **options)[0].tolist()


@pytest.mark.parametrize(
    "how", [{}, {"repetition_penalty": 1.2}, {"eos_token_id": [63, 33, 17]}, {"min_new_tokens": 9}]
)
@pytest.mark.parametrize("bias", [-9.0, 0.0, 9.0], ids=["never", "by state", "always"])
def test_same_ids(bias: float, how: dict[str, Any], model: Any, watch: Watch) -> None:
    with gated_lookup(model, probe_at("resid_post.1", bias, weight=2.0)):
        mine = generate(model, prompt_lookup_num_tokens=6, **how)
    assert mine == generate(model, **how)
    drafted = [bool(draft) for draft in watch.drafts]
    assert not drafted[0]  # nothing has been read yet
    if bias == -9:
        assert not any(drafted)
    elif not how:
        assert any(drafted)
        accepted = len(mine) - len(PROMPT) - len(drafted)
        assert accepted > 0
        assert all(len(draft) <= 6 for draft in watch.drafts)


def test_the_probe_reads_the_state_that_predicted_the_newest_token(model: Any, monkeypatch: Any, watch: Watch) -> None:
    """Against a forward of the whole text, at every step, after drafts that were kept, in part or not at all."""
    probe = probe_at("resid_post.1", weight=2.0)
    seen: list[torch.Tensor] = []
    score = probe.score
    monkeypatch.setattr(probe, "score", lambda state: (seen.append(state), score(state))[1])
    with gated_lookup(model, probe, tau=0.5):
        text = generate(model, prompt_lookup_num_tokens=6)
    hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[2][0]
    expected = iter(seen)
    kept = set()
    for at, (before, draft) in enumerate(zip(watch.texts, watch.drafts, strict=True)):
        index = lookup.SuffixIndex(lookup.MatchConfig(kappa=1, candidates=1, depth=6), before)
        if at == 0 or not index.find().starts or len(before) == len(PROMPT) + NEW - 1:
            continue
        torch.testing.assert_close(next(expected), hidden[len(before) - 2], atol=1e-4, rtol=1e-4)
        after = watch.texts[at + 1] if at + 1 < len(watch.texts) else text
        if draft:
            kept.add(len(after) - len(before) - 1)
    assert next(expected, None) is None
    assert 0 in kept and max(kept) > 1


def test_no_draft_crosses_a_stop_token_or_the_end(model: Any, watch: Watch) -> None:
    stops = {9}
    with gated_lookup(model, probe_at("resid_pre.2", 9.0)):
        generate(model, prompt_lookup_num_tokens=20, eos_token_id=sorted(stops), min_new_tokens=30)
    for text, draft in zip(watch.texts, watch.drafts, strict=True):
        assert not stops & set(draft)
        assert len(text) + len(draft) < len(PROMPT) + NEW


def test_sampling_runs(model: Any) -> None:
    torch.manual_seed(0)
    with gated_lookup(model, probe_at("resid_post.0", 9.0)):
        text = generate(model, prompt_lookup_num_tokens=6, do_sample=True, temperature=0.8)
    assert len(text) > len(PROMPT)


def test_the_model_is_as_it_was(model: Any) -> None:
    probe = probe_at("resid_post.1", 9.0)
    with gated_lookup(model, probe):
        assert lookup.MAKER in vars(model)
        with gated_lookup(model, probe, tau=1.0), pytest.raises(RuntimeError):
            raise RuntimeError
        assert lookup.MAKER in vars(model)
        plain = generate(model, assistant_model=copy.deepcopy(model))  # someone else's drafts
    assert lookup.MAKER not in vars(model)
    assert plain == generate(model)


@pytest.mark.parametrize(
    ("probe", "how", "told"),
    [
        (probe_at("resid_post.1", width=64), {}, "width: 64 and 32"),
        (probe_at("resid_post.1", blocks=30), {}, "blocks: 30 and 4"),
        (probe_at("resid_post.1", architecture="Qwen3ForCausalLM"), {}, "architecture: Qwen3ForCausalLM and Llama"),
        (probe_at("resid_mid.1"), {}, "reads resid_mid.1, and generate hands out states between blocks alone"),
        (probe_at("resid_post.3"), {}, "reads resid_post.3, and .* use a serving probe .resid_post.0 to resid_post.2."),
        (probe_at("resid_pre.0"), {}, "reads resid_pre.0, and"),
        (probe_at("resid_post.1"), {"tau": 2.0}, "tau is 2.0"),
        (probe_at("resid_post.1"), {"kappa": 0}, "kappa is 0"),
        (probe_at("resid_post.1"), {"kappa": 33}, "kappa is 33"),
    ],
)
def test_refused(probe: Probe, how: dict[str, Any], told: str, model: Any) -> None:
    with pytest.raises(ChoiceError, match=told) as caught, gated_lookup(model, probe, **how):
        pass
    assert "\n" not in str(caught.value)
    assert lookup.MAKER not in vars(model)


def test_places_from_the_end(model: Any) -> None:
    states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert hidden_state("resid_pre.3", 4) == hidden_state("resid_post.2", 4) == -2
    seen: list[torch.Tensor] = []
    handle = model.model.layers[2].register_forward_hook(lambda module, args, out: seen.append(out))
    again = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    handle.remove()
    assert torch.equal(again[-2], seen[0]) and torch.equal(states[-2], seen[0])


@pytest.mark.real
@pytest.mark.skipif(
    gguf_file("smollm2") is None and not (place("smollm2") / "config.json").is_file(), reason="smollm2 is not installed"
)
def test_real_model_with_its_serving_probe(watch: Watch) -> None:
    """It copies where it is asked to, and drafts less where it is not than a lookup without a probe."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = folder("smollm2")
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(where)
    story = (
        "The old mill stood by the river for two hundred years. Every spring the water rose and the wheel turned "
        "again, and the miller's children counted the sacks of flour before the carts came."
    )

    def run(question: str, tau: float | None) -> tuple[int, int]:
        """Steps, and tokens drafted."""
        asked = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        how = {**inputs, "max_new_tokens": 48, "do_sample": False}
        watch.drafts.clear()
        with gated_lookup(model, "smollm2/serving", tau=tau):
            text = model.generate(**how, prompt_lookup_num_tokens=8)
        assert text.tolist() == model.generate(**how).tolist()
        return len(watch.drafts), sum(map(len, watch.drafts))

    steps, _ = run(f"Repeat the following text exactly: {story}", None)
    assert steps < 20
    question = "Repeat this twice: apples, pears, plums, cherries, figs."  # which it declines to do
    assert run(question, None)[1] < run(question, 0.0)[1]
