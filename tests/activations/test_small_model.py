"""The shipped small model is real: it copies, its matches have causes, and its labels are what the tasks say."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import maker

from activations import packaged
from activations.cache import KVCache
from activations.causal import causal_drops, document_matches
from activations.generation import Request, complete
from activations.labels import LabelConfig, follow_rows
from activations.matching.match import MatchConfig
from activations.target import Target, load_target

NAME = "small-qwen3"
FOLDER = packaged.SHIPPED[NAME]
KAPPA = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(NAME, device="cpu")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / "training.json").read_text())


def answers(target: Target, prompts: list[str], most: int = 160) -> list[list[int]]:
    requests = [Request(i, target.encode(prompt), most) for i, prompt in enumerate(prompts)]
    done = {c.request.number: c.tokens for c in complete(target, requests, rows=len(requests))}
    return [done[i] for i in range(len(prompts))]


# -- what is shipped -----------------------------------------------------------------------------------------


def test_it_is_small_and_safe_and_says_how_it_was_made(record: dict) -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert {name.rpartition(".")[2] for name in files} <= {"json", "safetensors", "jinja"}
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    assert record["provenance"]["command"][0].endswith("train_small.py")
    assert record["text"]["licence"] == "PSF-2.0"
    assert not re.search(r"/(home|root|tmp|work)/", "".join(f.read_text() for f in FOLDER.glob("*.json")))


def test_it_needs_no_download_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path / "cache"))
    target = load_target(NAME, device="cpu")
    target.check_structure()
    assert not (tmp_path / "cache").exists()
    assert target.fingerprint == load_target(FOLDER, device="cpu").fingerprint


def test_a_model_of_a_package_is_made_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path))
    assert packaged.place("smollm2") == tmp_path / "models" / "smollm2"
    assert packaged.place(NAME) == FOLDER


# -- its tokenizer -------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8"), max_size=60).filter(lambda text: "<|" not in text))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def _tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return _tokenizer.__dict__.setdefault("made", AutoTokenizer.from_pretrained(FOLDER))


def test_a_prompt_is_a_user_turn_with_the_answer_opened(target: Target) -> None:
    ids = target.encode("Copy this.")
    assert target.decode(ids, skip_special_tokens=False) == "<|user|>\nCopy this.<|end|>\n<|assistant|>\n"
    assert target.stop_ids == {target.tokenizer.convert_tokens_to_ids("<|end|>")}


# -- what it can do ------------------------------------------------------------------------------------------


def test_it_copies_runs_that_it_has_never_seen(target: Target, record: dict) -> None:
    """The induction score: random tokens twice in a row, the second time known from the first."""
    run = torch.randint(4, target.vocab_size, (16, 64), generator=torch.Generator().manual_seed(7))
    ids = torch.cat([run, run], 1)
    logits = target.forward(ids[:, :-1], KVCache(16, capacity=127)).float()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    right = logits.argmax(-1) == ids[:, 1:]
    first, second = loss[:, :63].mean(), loss[:, 63:].mean()
    assert second - first < -6
    assert right[:, 63:].float().mean() > 0.9
    assert right[:, :63].float().mean() < 0.02, "the first time there is nothing to know"
    assert abs(float(second - first) - record["result"]["induction"]["score"]) < 0.3


def test_it_repeats_what_it_is_told(target: Target) -> None:
    """Lists that begin alike and code it often gets wrong; words in a row it repeats."""
    texts = [
        "seven grey geese crossed the frozen lake",
        "zomu katape rilo vesaki bodo nafeli tugo",
        "nine small boats left the quiet harbour before the storm came in",
        "old doors open slowly when nobody is at home",
        "green apples, yellow pears and dark plums",
    ]
    found = [target.decode(a) for a in answers(target, [f"Repeat this:\n{text}" for text in texts])]
    assert sum(a == b for a, b in zip(found, texts, strict=True)) >= len(texts) - 1


# -- labels --------------------------------------------------------------------------------------------------


def test_what_is_repeated_is_followed(target: Target) -> None:
    """Where the answer is the text, every match with one occurrence leads on to the next token of it."""
    tasks = maker("small_tasks")
    lines = [f"word{chr(97 + i)} other line" for i in range(26)] + [f"{a}{b}n" for a in "abcdefgh" for b in "aeiou"]
    writer, draw = tasks.TaskWriter("\n".join(lines)), random.Random(3)
    chosen = [writer.task(draw, "repeat") for _ in range(32)]
    right = genuine = followed = 0
    for task, answer in zip(chosen, answers(target, [t.prompt for t in chosen]), strict=True):
        if target.decode(answer) != task.answer:
            continue
        right += 1
        prompt = target.encode(task.prompt)
        rows = follow_rows(prompt + answer, len(prompt), LabelConfig(kappa=KAPPA))
        inside = (rows["source"] == "prompt") & (rows["occurrences"] == 1)
        inside &= rows["pending"] != next(iter(target.stop_ids))
        inside &= rows["position"] != len(prompt) + len(answer) - 3  # the end of the answer follows
        followed += int(rows["follow"][inside].sum())
        genuine += int(inside.sum())
    assert right >= 10 and genuine > 200
    assert followed > 0.98 * genuine


def test_copied_tokens_rest_on_their_source(target: Target) -> None:
    """Causal labels: hiding the source takes the belief away, hiding as much elsewhere does not."""
    (answer,) = answers(target, ["Repeat this:\nnine small boats left the quiet harbour before the storm came in"])
    prompt = target.encode("Repeat this:\nnine small boats left the quiet harbour before the storm came in")
    ids = prompt + answer
    positions = list(range(len(prompt) + 3, len(ids) - 3))
    drops = causal_drops(target, ids, positions, document_matches(ids, positions, MatchConfig(kappa=KAPPA)))
    assert np.nanmedian(drops["causal_mask"]) > 2
    assert np.nanmedian(drops["causal_replace"]) > 2
    assert abs(np.nanmedian(drops["causal_control"])) < 0.5
