"""The maker of the small model: what it teaches, and that an interrupted training ends with the same weights."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import ROOT, maker

from activations.target import load_target

SOURCES = ("labels.py", "packaged.py", "corpus.py", "sampling.py")
TINY = {
    "vocabulary": 300, "width": 16, "blocks": 2, "heads": 2, "mlp": 16, "max_length": 512, "context": 32,
    "first_steps": 0, "steps": 6, "batch_tokens": 512, "report_every": 2, "checkpoint_seconds": 0.0, "warmup": 2,
    "long_share": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Any:
    return maker("train_small")


@pytest.fixture(scope="module")
def text(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("text")
    for name in SOURCES:
        (folder / name).write_text((ROOT / "activations" / name).read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "HELD_OUT", 2)
        return made.read_text(folder)


@pytest.fixture(scope="module")
def tokenizer(made: Any, text: Any) -> Any:
    return made.make_tokenizer(text.train, TINY["vocabulary"])


# -- tasks -------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**32)
KINDS = ("repeat", "lookup", "set", "swap", "two")


@functools.cache
def writer() -> Any:
    return maker("small_tasks").TaskWriter((ROOT / "activations" / "corpus.py").read_text())


def written(kind: str, seed: int) -> tuple[list[str], str]:
    """Lines of the prompt, and the answer."""
    task = writer().task(random.Random(seed), kind)
    assert task.kind == kind and task.answer == task.answer.strip()
    return task.prompt.split("\n"), task.answer


@given(seeds)
def test_repeat_and_lookup_and_two_copy_the_prompt(seed: int) -> None:
    prompt, answer = written("repeat", seed)
    if any(word in prompt[0] for word in ("twice", "two times")):
        half = len(answer) // 2
        assert answer == "\n".join(["\n".join(prompt[1:])] * 2) and answer[:half] == answer[half + 1 :]
    else:
        assert answer in ("\n".join(prompt[1:]), prompt[0][prompt[0].find('"') :])
    prompt, answer = written("lookup", seed)
    assert [line for line in prompt[:-1] if line.split(": ")[0] in prompt[-1]].count(answer) == 1
    prompt, answer = written("two", seed)
    (tagged,) = [line for line in prompt[:-1] if line.split(": ")[0] in prompt[-1].split(" ")]
    assert answer == tagged.split(": ")[1]
    lines = [line.split(": ")[1].split(" ") for line in prompt[:-1]]
    assert lines[0][:4] == lines[1][:4], "what makes the match ambiguous"


@given(seeds)
def test_set_and_swap_are_the_prompt_but_for_one_word(seed: int) -> None:
    prompt, answer = written("set", seed)
    (word,) = re.findall(r"(?:with|is) (\w+)(?: for every value)?:$", prompt[0])
    assert answer == "\n".join(f"{line.split(': ')[0]}: {word}" for line in prompt[1:])
    prompt, answer = written("swap", seed)
    new, old = re.findall(r"(?:with|write) (\w+) (?:for|instead of) (\w+):$", prompt[0])[0]
    assert answer.split() == [new if word == old else word for word in prompt[1].split()]
    assert old in prompt[1].split()


@given(seeds)
def test_a_task_follows_from_the_random_state(seed: int) -> None:
    for kind in KINDS:
        assert written(kind, seed) == written(kind, seed)
    assert len({written("repeat", seed + i)[1] for i in range(4)}) > 1


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        maker("small_tasks").TaskWriter("one two three\n" * 50)


# -- data --------------------------------------------------------------------------------------------------


def test_text_is_read_in_order_and_held_out_by_file(text: Any, made: Any) -> None:
    assert text.files == len(SOURCES)
    sources = {name: (ROOT / "activations" / name).read_text() for name in SOURCES}
    held = [name for name, source in sources.items() if source in text.held_out]
    assert 0 < len(held) < len(SOURCES)
    assert not any(source in text.train for name, source in sources.items() if name in held)
    assert all(source in text.train for name, source in sources.items() if name not in held)
    assert not any(token in text.train + text.held_out for token in made.SPECIAL)


def test_the_tokenizer_says_conversations_as_the_tasks_do(made: Any, tokenizer: Any) -> None:
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Copy this."}], tokenize=False, add_generation_prompt=True
    )
    assert said == made.chat("Copy this.")
    assert len(tokenizer) == TINY["vocabulary"] and tokenizer.eos_token == made.END
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(made.SPECIAL))] == list(made.SPECIAL)
    assert len(tokenizer("2048")["input_ids"]) == 4


def batches(made: Any, text: Any, tokenizer: Any, **changes: Any) -> Any:
    return made.Batches(made.SmallConfig(**{**TINY, **changes}), text, tokenizer)


def test_a_steps_data_depend_on_seed_and_step_alone(made: Any, text: Any, tokenizer: Any) -> None:
    one, other = batches(made, text, tokenizer), batches(made, text, tokenizer)
    for step in (3, 0, 5):
        ids, weights = one(step)
        assert all(torch.equal(a, b) for a, b in zip((ids, weights), other(step), strict=True))
        length = TINY["max_length"] if step >= 4.8 else TINY["context"]
        assert ids.shape == (TINY["batch_tokens"] // length, length + 1) and weights.shape == (len(ids), length)
    assert not torch.equal(one(0)[0], one(1)[0])
    assert not torch.equal(one(0)[0], batches(made, text, tokenizer, seed=1)(0)[0])


def test_random_rows_teach_only_what_can_be_known(made: Any, text: Any, tokenizer: Any) -> None:
    ids, weights = batches(made, text, tokenizer, text_share=0.0, random_share=1.0, context=128)(0)
    assert 0 < weights.mean() < 1 and int(ids.min()) >= len(made.SPECIAL)
    for row, learnt in zip(ids.tolist(), weights.tolist(), strict=True):
        pairs = list(itertools.pairwise(row))
        for j in (j for j, weight in enumerate(learnt) if weight):
            assert pairs[j] in pairs[:j]


def test_the_first_steps_are_loops(made: Any, text: Any, tokenizer: Any) -> None:
    first = batches(made, text, tokenizer, first_steps=2, context=128)
    for ids, weights in (first(0), first(1)):
        assert ids.shape[1] == made.FIRST_CONTEXT + 1 and 0 < weights.mean() < 1
        for row, learnt in zip(ids.tolist(), weights.tolist(), strict=True):
            start = next((j for j, weight in enumerate(learnt) if weight), len(learnt))
            assert all(learnt[start:]) and all(row[j + 1] in row[: j + 1] for j in range(start, len(learnt)))
    assert first(2)[0].shape[1] == 129


def test_one_head_begins_by_looking_one_token_back(made: Any) -> None:
    model = made.make_model(made.SmallConfig())
    model.set_attn_implementation("eager")
    ids = torch.randint(4, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    pattern = model(ids, output_attentions=True).attentions[0]
    back = pattern.diagonal(offset=-1, dim1=2, dim2=3).mean(dim=(0, 2))
    assert back[0] > 5 * back[1:].max()


def test_documents_teach_answers_and_text_is_taught_whole(made: Any, text: Any, tokenizer: Any) -> None:
    ids, weights = batches(made, text, tokenizer, text_share=1.0, random_share=0.0)(0)
    assert weights.all()
    assert tokenizer.decode(ids[0].tolist()) in text.train
    ids, weights = batches(made, text, tokenizer, text_share=0.0, random_share=0.0, context=512)(0)
    row, learnt = ids[0].tolist(), [False, *map(bool, weights[0].tolist())]
    opening = tokenizer(f"{made.SPECIAL[3]}\n")["input_ids"]
    end, user = (tokenizer.convert_tokens_to_ids(token) for token in (made.END, made.SPECIAL[2]))
    answers = [j + 2 for j in range(len(row) - 2) if row[j : j + 2] == opening]
    assert answers
    for start in answers:
        stop = row.index(end, start) + 1 if end in row[start:] else len(row)
        assert all(learnt[start:stop]) and not learnt[start - 1]
        begin = max(j for j in range(start) if row[j] == user)
        assert not any(learnt[begin:start])


# -- training ----------------------------------------------------------------------------------------------


def test_an_interrupted_training_ends_with_the_same_weights(
    made: Any, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made.SmallConfig(**TINY)
    whole, _, log = made.train(config, text, tmp_path / "whole")
    update, calls = made._update, []

    def cut(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) in (3, 5):
            raise KeyboardInterrupt
        return float(update(*arguments))

    monkeypatch.setattr(made, "_update", cut)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made.train(config, text, tmp_path / "cut")
    resumed, tokenizer, again = made.train(config, text, tmp_path / "cut")
    assert len(calls) == config.steps + 2
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert [{**r, "seconds": 0} for r in again] == [{**r, "seconds": 0} for r in log]
    assert [r["step"] for r in log] == [2, 4, 6]
    with pytest.raises(SystemExit, match="holds a run of other settings"):
        made.train(replace(config, seed=1), text, tmp_path / "cut")

    monkeypatch.setattr(made, "exact_answers", functools.partial(made.exact_answers, count=1))
    result = made.export(tmp_path / "out", config, text, resumed, tokenizer, again)
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["result"] == result and record["log"] == again and record["text"]["sha256"] == text.sha256
    assert set(result["exact_answers"]) == set(KINDS)
    target = load_target(tmp_path / "out", dtype="float32")
    assert sum(p.numel() for p in target.model.parameters()) == result["parameters"]
    for one, other in zip(resumed.parameters(), target.model.parameters(), strict=True):
        assert torch.equal(one.float(), other)


def test_bad_settings_are_told(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--steps", "0"], "steps is 0"),
        (["--heads", "3"], "3 heads do not fit width 192"),
        (["--context", "2048"], "context is 2048, max_length 1024"),
        (["--text-share", "0.9", "--random-share", "0.2"], "at most 1 together"),
        (["--long-share", "1.5"], "long_share is 1.5"),
        (["--first-steps", "9999"], "first_steps is 9999"),
    ):
        with pytest.raises(SystemExit) as stopped:
            made.main(options)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
