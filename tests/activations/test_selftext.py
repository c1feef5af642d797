"""Text that the target writes itself: what is kept of it, resuming, decontamination."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from activations.cache import KVCache
from activations.corpus import Prompt
from activations.generation import Request, complete
from activations.sampling import Sampling
from activations.selftext import (
    Conversation,
    SelfTextConfig,
    beginning,
    benchmark_ngrams,
    chat_frame,
    word_ngrams,
    write,
)
from activations.store import CaptureStore, StoreError
from activations.target import Target
from activations.tasks import documentation, functions, task, whole_words

STOP = 63
TEMPLATE = (
    "{% for m in messages %}{{ 'A' if m['role'] == 'user' else 'B' }}{{ m['content'] }}o{% endfor %}"
    "{% if add_generation_prompt %}B{% endif %}"
)
CONFIG = SelfTextConfig(tokens=300, max_new_tokens=20, rows=5, own_turns=1.0, shard_documents=3)


@pytest.fixture
def chatting(small_target: Callable[..., Target]) -> Target:
    """A small target with a chat template: A turn stop B answer stop."""
    target = copy.copy(small_target())
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = TEMPLATE
    return target


def test_the_frame_is_the_templates(chatting: Target) -> None:
    a, b = (chatting.tokenizer.convert_tokens_to_ids(c) for c in "AB")
    assert chat_frame(chatting) == ([a], [b])


def test_documents_are_whole_and_masked(chatting: Target, tmp_path: Path) -> None:
    counts = list(write(chatting, tmp_path / "text", CONFIG))
    assert counts == sorted(counts) and counts[-1] >= 300
    store = CaptureStore.open(tmp_path / "text")
    a, b = (chatting.tokenizer.convert_tokens_to_ids(c) for c in "AB")
    written = 0
    for shard in store.shards:
        for number in shard["documents"]:
            rows, states = store.document(number)
            ids = [*rows["token"].tolist(), int(rows["pending"][-1])]
            assert rows["position"].tolist() == list(range(len(ids) - 1))
            assert rows["pending"].tolist() == ids[1:]
            assert ids[0] == a and ids[ids.index(STOP) + 1] == b
            assert rows["loss_mask"].all()  # all behind the prefix of one token is the target's own
            written += int(rows["loss_mask"].sum())
            with chatting.read(store.sites) as reader:
                chatting.hidden(torch.tensor([ids[:-1]]), KVCache(1))
                for site, state in reader.states.items():
                    assert torch.allclose(states[str(site)], state[0], atol=1e-4)
    assert written == counts[-1] == sum(s["written"] for s in store.shards)


def test_a_cut_run_goes_on_after_its_last_shard(chatting: Target, tmp_path: Path) -> None:
    run = write(chatting, tmp_path / "text", CONFIG)
    for _ in range(7):
        next(run)
    run.close()
    before = CaptureStore.open(tmp_path / "text").shards
    assert len(before) == 2
    list(write(chatting, tmp_path / "text", CONFIG))
    after = CaptureStore.open(tmp_path / "text").shards
    assert after[:2] == before
    numbers = [d for s in after for d in s["documents"]]
    assert len(numbers) == len(set(numbers)) and sum(s["written"] for s in after) >= 300
    with pytest.raises(StoreError, match="other settings"):
        next(write(chatting, tmp_path / "text", SelfTextConfig(tokens=300, max_new_tokens=30)))


def test_benchmark_text_is_dropped_and_counted(chatting: Target, tmp_path: Path) -> None:
    text = " ".join(f"w{i}" for i in range(20))
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps({"turns": [text], "reference": ["other words here"]}) + "\n")
    grams = benchmark_ngrams([file])
    assert len(grams) == 8 and not grams.isdisjoint(word_ngrams("said: " + text.upper()))
    assert grams.isdisjoint(word_ngrams(" ".join(f"w{i}" for i in range(12))))
    texts = iter([text] * 3)
    decode = chatting.decode
    chatting.decode = lambda ids, *a: next(texts, decode(ids))  # type: ignore[method-assign]
    list(write(chatting, tmp_path / "text", CONFIG, [file]))
    assert sum(s["contaminated"] for s in CaptureStore.open(tmp_path / "text").shards) == 3


def test_prompts_of_the_user_are_answered_in_turn(chatting: Target, tmp_path: Path) -> None:
    prompts = [
        Prompt(str(i), "user", str(i), None, None, ({"role": "user", "content": "x" * (i + 1)},)) for i in range(3)
    ]
    config = SelfTextConfig(tokens=250, max_new_tokens=12, rows=2, shard_documents=4)
    list(write(chatting, tmp_path / "text", config, prompts=prompts))
    store = CaptureStore.open(tmp_path / "text")
    answers: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for number in sorted(d for shard in store.shards for d in shard["documents"]):
        rows, _ = store.document(number)
        prompt = chatting.encode_messages(prompts[(number - 1) % 3].messages)
        ids = [*rows["token"].tolist(), int(rows["pending"][-1])]
        assert ids[: len(prompt)] == prompt
        assert rows["loss_mask"].tolist() == [i >= len(prompt) - 1 for i in range(len(ids) - 1)]
        answers[(number - 1) % 3].append(ids[len(prompt) :])
    assert all(len(found) > 2 for found in answers.values())
    for i, found in answers.items():  # the first answer is greedy, the later ones differ
        greedy = Request(0, chatting.encode_messages(prompts[i].messages), 12, Sampling())
        assert found[0] == next(iter(complete(chatting, [greedy], rows=1))).tokens
    assert any(found[1] != found[0] for found in answers.values())
    with pytest.raises(StoreError, match="prompts differ"):
        next(write(chatting, tmp_path / "text", config, prompts=prompts[:2]))


def test_a_run_that_cannot_end_says_so(chatting: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activations.selftext.FUTILE", 12)
    text = " ".join(f"w{i}" for i in range(20))
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps({"turns": [text]}) + "\n")
    chatting.decode = lambda ids, *a: text  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="12 documents share 13 words with the benchmark files, and only 0 do not"):
        list(write(chatting, tmp_path / "text", CONFIG, [file]))
    tasks = SelfTextConfig(tokens=300, max_prompt_tokens=1, own_turns=0.0)
    with pytest.raises(ValueError, match="no task prompt fits into max_prompt_tokens = 1"):
        Conversation(chatting, tasks, (["Some passage."], set())).next_request()


@pytest.mark.parametrize(("name", "value"), [("tokens", 0), ("rows", -1), ("greedy", 1.5), ("own_turns", -0.1)])
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SelfTextConfig(**{name: value})  # type: ignore[arg-type]


def test_tasks_are_prompts_of_every_kind() -> None:
    draw = random.Random(0)
    passages = ["The first sentence is here. The second one follows it. " * 4, "Another short text. It ends."]
    vocabulary = whole_words(["Ġhouse", "Ġgarden", "ĠPeru", "ĠChopin", "Ġa", "ĠDNAx", "x", "Ġstraße"])
    assert vocabulary == (["Chopin", "Peru"], ["garden", "house"])
    made = [task(draw, passages, 30, vocabulary) for _ in range(400)]
    kinds, counts = np.unique([kind for _, kind in made], return_counts=True)
    assert list(kinds) == ["code", "math", "passage", "question", "translation", "words"] and counts.min() > 10
    assert len({text for text, _ in made}) > 200
    assert all("{" not in text for text, kind in made if kind not in ("passage", "code"))
    assert len(functions()) > 100 and len(documentation()) > 100


def test_a_base_model_writes_texts_from_their_beginning(small_target: Callable[..., Target], tmp_path: Path) -> None:
    """Sliding windows included: answers are longer than the window of 8."""
    target = copy.copy(small_target("gemma3"))
    target.tokenizer = copy.deepcopy(target.tokenizer)
    config = SelfTextConfig(tokens=300, max_new_tokens=24, rows=5, shard_documents=3, own_turns=0.6)
    conversation = Conversation(target, config, ([], set()))
    assert all(len(conversation.next_request().prompt) > 1 for _ in range(20)), "without any mark there are only tasks"
    target.tokenizer.eos_token = "o"
    assert beginning(target) == [STOP]
    target.tokenizer.bos_token = "A"
    assert beginning(target) == [17]
    list(write(target, tmp_path / "text", config))
    store = CaptureStore.open(tmp_path / "text")
    whole = 0
    for number in (d for shard in store.shards for d in shard["documents"]):
        rows, states = store.document(number)
        ids = [*rows["token"].tolist(), int(rows["pending"][-1])]
        whole += bool(rows["loss_mask"].all()) and ids[0] == 17
        with target.read(store.sites) as reader:
            target.hidden(torch.tensor([ids[:-1]]), KVCache(1))
            for site, state in reader.states.items():
                assert torch.allclose(states[str(site)], state[0], atol=1e-4)
    documents = sum(len(shard["documents"]) for shard in store.shards)
    assert 0 < whole < documents
