"""Distilling a draft model: the loss against its plain definition, parts of the vocabulary, and whole small runs."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_target
from safetensors.torch import load_file
from written import PROMPT, WRITTEN, write_store

from activations.cache import KVCache
from activations.sites import last_site
from activations.store import CaptureStore
from activations.structure import LogitRule
from activations.target import Target
from decoding.answers import MIX, Question, Questions, held_out
from decoding.draft.model import DraftError, cut, load_draft, read_draft
from decoding.draft.training import (
    TAUGHT,
    Divergence,
    DraftTrainConfig,
    Outputs,
    Student,
    Vocabulary,
    answer_tokens,
    evaluate,
    examine,
    lesson,
    lessons,
    loss_of,
    mixed,
    train,
)
from decoding.training import Document, learning_rate, padded, rows_of_a_pass

EXACT = DraftTrainConfig(precision="float32", frequent=8, sampled=4, batch_tokens=64, prompt_weight=0.25)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(target: Target, lengths: list[int], seed: int = 0) -> list[Document]:
    """Random tokens with the states that the target has there."""
    found = []
    for length in lengths:
        ids = torch.randint(0, target.vocab_size - 2, (length + 1,), generator=generator(seed + length))
        with target.read([last_site(target.blocks)]) as reader:
            target.forward(ids[None, :-1], KVCache(1))
        (last,) = reader.states.values()
        written = torch.arange(length) >= length // 2
        found.append({"token": ids[:-1], "pending": ids[1:], "written": written, "last": last[0]})
    return found


def batch_of(docs: list[Document]) -> Document:
    (batch,) = padded(docs, 10_000)
    return batch


# -- the loss ---------------------------------------------------------------------------------------------


def plain(outputs: Outputs, states: torch.Tensor, wanted: torch.Tensor, variation: float) -> torch.Tensor:
    """Each row's loss by its definition, for autograd."""

    def law(x: torch.Tensor) -> torch.Tensor:
        product = x @ outputs.weight.T
        product = product if outputs.bias is None else product + outputs.bias
        logits = outputs.rule(product)
        return (logits if outputs.shift is None else logits + outputs.shift).log_softmax(-1)

    log_q, log_p = law(states), law(wanted)
    distance = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    return (1 - variation) * -(log_p.exp() * log_q).sum(-1) + variation * distance


@pytest.mark.parametrize("variation", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "rule", [LogitRule(), LogitRule("times", 0.3), LogitRule("over", 7.0), LogitRule("softcap", 2.0)], ids=str
)
@pytest.mark.parametrize("extras", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_definition(variation: float, rule: LogitRule, extras: bool) -> None:
    g = generator(1)
    n, size, width = 2 * Divergence.ROWS + 5, 23, 8
    weight, bias = torch.randn(size, width, generator=g), torch.randn(size, generator=g)
    outputs = Outputs(weight, bias if extras else None, torch.rand(size, generator=g) if extras else None, rule)
    states, wanted = torch.randn(n, width, generator=g).requires_grad_(), torch.randn(n, width, generator=g)
    weights = torch.rand(n, generator=g)
    reference = (plain(outputs, states, wanted, variation) * weights).sum()
    (expected,) = torch.autograd.grad(3 * reference, states)
    loss = Divergence.apply(states, wanted, weights, outputs, variation)
    (found,) = torch.autograd.grad(3 * loss, states)
    assert torch.allclose(loss, reference, rtol=1e-4)
    assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


def test_a_part_that_is_the_whole_vocabulary_gives_the_whole_loss(small_target: Callable[..., Target]) -> None:
    target = small_target()
    batch, student = batch_of(texts(target, [12, 9])), Student(target, 2)
    frequent = torch.arange(8)
    losses = []
    for known, sampled in ((torch.arange(64), 0), (frequent, 64), (frequent, 56)):
        config = replace(EXACT, sampled=sampled)
        loss, weight = loss_of(student, target, batch, Vocabulary(target, known, config), config, generator())
        losses.append(loss.item())
        assert weight == pytest.approx(6 + 5 + 0.25 * (6 + 4))
    hidden, wanted = student.hidden(batch["token"])[1], target.final_norm(batch["last"])[1]  # the longer text
    whole = plain(Vocabulary(target, frequent, EXACT).whole, hidden, wanted, 0.0)
    alone = batch_of(texts(target, [12]))
    first, _ = loss_of(student, target, alone, Vocabulary(target, torch.arange(64), EXACT), EXACT, generator())
    assert first.item() == pytest.approx(float(whole[6:].sum() + 0.25 * whole[:6].sum()), rel=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == losses[2]
    part, _ = loss_of(student, target, batch, Vocabulary(target, frequent, EXACT), EXACT, generator())
    assert float(part) != pytest.approx(losses[0], rel=1e-3), "four of the others are not all of them"


def test_sampled_tokens_stand_for_all_that_are_left_out(small_target: Callable[..., Target]) -> None:
    """The sum that a softmax divides by is right on average, and exact in the tokens that are always there."""
    target = small_target()
    vocabulary = Vocabulary(target, torch.tensor([3, 5, 9]), replace(EXACT, sampled=6))
    state = torch.randn(1, 32, generator=generator(2))
    whole = vocabulary.whole.logits(state).exp().sum()
    present, g, sums = torch.tensor([5, 11, 12]), generator(3), []
    for _ in range(2000):
        part = vocabulary.part(present, g)
        assert part.weight.shape == (5 + 6, 32) and part.shift is not None
        assert torch.equal(part.weight[:5], target.head.weight[[3, 5, 9, 11, 12]]) and not part.shift[:5].any()
        assert len(part.weight.unique(dim=0)) == 11, "no token twice"
        sums.append((part.logits(state) + part.shift).exp().sum())
    found = torch.stack(sums)
    assert abs(float(found.mean() - whole)) < 4 * float(found.std()) / 2000**0.5
    assert float(found.std()) > 0


def test_padding_and_company_change_nothing(small_target: Callable[..., Target]) -> None:
    target, docs = small_target(), texts(small_target(), [10, 17, 13])
    student, vocabulary = Student(target, 2), Vocabulary(target, torch.arange(64), EXACT)
    together, weight = loss_of(student, target, batch_of(docs), vocabulary, EXACT, generator())
    alone = [loss_of(student, target, batch_of([doc]), vocabulary, EXACT, generator()) for doc in docs]
    assert float(together) == pytest.approx(sum(float(loss) for loss, _ in alone), rel=1e-5)
    assert weight == pytest.approx(sum(w for _, w in alone))


def test_rows_that_do_not_count(small_target: Callable[..., Target]) -> None:
    target = small_target()
    student, vocabulary = Student(target, 2), Vocabulary(target, torch.arange(64), EXACT)
    batch = batch_of(texts(target, [10, 17]))
    batch["written"][:] = False
    loss, weight = loss_of(student, target, batch, vocabulary, replace(EXACT, prompt_weight=0.0), generator())
    assert (loss.item(), weight) == (0.0, 0.0)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_computes_what_the_draft_will(family: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        monkeypatch.setattr("decoding.draft.training.PLAIN", 0)
    target = family_target(family)
    student, draft = Student(target, [0, 2]), cut(target, [0, 2])
    tokens = torch.randint(1, 90, (2, 13), generator=generator())
    hidden = student.hidden(tokens)
    vocabulary = Vocabulary(target, torch.arange(5), EXACT)
    assert torch.allclose(vocabulary.whole.logits(hidden), draft.forward(tokens, KVCache(2)), atol=2e-4)
    before = target.forward(tokens, KVCache(2))
    docs = texts(target, [11, 14])
    loss, _ = loss_of(student, target, batch_of(docs), vocabulary, EXACT, generator())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters.values())
    assert all(p.grad.any() for name, p in student.parameters.items() if p.grad is not None and "experts" not in name)
    with torch.no_grad():
        for p in student.parameters.values():
            p.add_(1.0)
    assert torch.equal(target.forward(tokens, KVCache(2)), before), "the target is not touched"


# -- questions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [0, 4, 64])
def test_right_answers_are_learned_as_they_stand(sampled: int, small_target: Callable[..., Target]) -> None:
    """The cross-entropy of the written tokens alone, whatever part of the vocabulary is looked at."""
    target = small_target()
    docs = [{k: v for k, v in doc.items() if k != "last"} for doc in texts(target, [12, 9])]
    student, config = Student(target, 2), replace(EXACT, sampled=sampled, variation=1.0)
    vocabulary = Vocabulary(target, torch.tensor([3, 5, 9, 40]), config)
    loss, weight = loss_of(student, target, batch_of(docs), vocabulary, config, generator(5))
    g, reference = generator(5), 0.0
    part = vocabulary.part(torch.cat([doc["pending"] for doc in docs]), g)
    for doc in docs:
        logits = part.logits(student.hidden(doc["token"][None])[0])
        if part.shift is not None:
            logits = logits + part.shift
        rows = part.tokens if part.tokens is not None else torch.arange(target.vocab_size)
        right = torch.stack([(rows == token).nonzero()[0, 0] for token in doc["pending"]])
        lost = torch.nn.functional.cross_entropy(logits, right, reduction="none")
        reference += float(lost[doc["written"]].sum())
    assert weight == 6 + 5
    assert loss.item() == pytest.approx(reference, rel=1e-4)


def test_a_lesson_is_what_the_target_would_write(small_target: Callable[..., Target]) -> None:
    target = small_target()
    question = Questions({"sum": 2}, 3, "train")[0]
    doc = lesson(target, question)
    prompt = target.encode_messages(question.messages)
    whole = [*doc["token"].tolist(), int(doc["pending"][-1])]
    assert whole[: len(prompt)] == prompt and doc["pending"].tolist() == whole[1:]
    assert target.decode(whole[len(prompt) : -1]) == question.answer and whole[-1] in target.stop_ids
    assert doc["written"].tolist() == [False] * (len(prompt) - 1) + [True] * (len(question.answer) + 1)


def test_lessons_are_never_held_out(small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    import decoding.draft.training as module

    asked: list[Question] = []
    monkeypatch.setattr(module, "lesson", lambda target, question: asked.append(question) or lesson(target, question))
    config, taught = replace(SMALL, questions=2 * len(TAUGHT)), []
    for batch in itertools.islice(lessons(small_target(), config, random.Random(0), {}), 300):
        taught += batch["written"].any(-1).tolist()
    assert len(asked) >= len(taught) > 200 and all(taught)
    assert len({q.key for q in asked}) == 2 * len(TAUGHT), "as many as there are"
    assert not any(held_out(q.prompt) for q in asked)


def test_what_is_known_is_asked_less(small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    import decoding.draft.training as module

    asked: list[Question] = []
    monkeypatch.setattr(module, "lesson", lambda target, question: asked.append(question) or lesson(target, question))
    known = dict.fromkeys(TAUGHT, 1.0) | {"sum": 0.5}
    for _ in itertools.islice(lessons(small_target(), replace(SMALL, questions=100), random.Random(0), known), 900):
        pass
    counts = Counter(q.kind for q in asked)
    others = sum(n for kind, n in counts.items() if kind != "sum") / (len(TAUGHT) - 1)
    assert set(counts) == set(TAUGHT) and 4.5 < counts["sum"] / others < 6.7, "0.55 to 0.1"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_the_share_of_questions(share: float) -> None:
    batches = mixed([{"text": torch.ones(1)}] * 2000, itertools.repeat({}), share, random.Random(1))
    assert sum("text" in batch for batch in batches) == 2000
    assert abs(sum("text" not in batch for batch in batches) / len(batches) - share) < 0.02


def test_a_draft_learns_what_its_target_does_not_know(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = {"sum": (2,), "item": (2,)}
    monkeypatch.setattr("decoding.draft.training.TAUGHT", taught)
    target, folder = small_target(), tmp_path / "draft"
    config = replace(
        SMALL, tokens=16_000, batch_tokens=192, questions=4, question_share=0.8, frequent=4, checkpoint_seconds=1e6,
        learning_rate=1e-2,
    )  # fmt: skip
    *_, last = train(target, [store], folder, config)
    assert set(last["answers"]) == set(MIX) and all(0 <= share <= 1 for share in last["answers"].values())
    draft = load_draft(folder, target)
    for number in range(4):
        doc = lesson(target, Questions(taught, config.seed, "train")[number])
        learned, knew = (
            (m.forward(doc["token"][None], KVCache(1))[0].argmax(-1) == doc["pending"])[doc["written"]]
            for m in (draft, target)
        )
        assert learned.all() and not knew.all()
        assert set(doc["pending"][doc["written"]].tolist()) <= set(read_draft(folder)["frequent"])


def test_held_out_questions_are_examined(small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a student that knows the answers of one kind."""
    import decoding.draft.training as module

    target = small_target()
    student, vocabulary = Student(target, 2), Vocabulary(target, torch.arange(9), EXACT)
    known = {tuple(lesson(target, Questions(MIX, 0, "held-out")[n])["token"].tolist()): n for n in range(300)}
    kinds, rows = list(MIX), target.head.weight.detach()

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        question = Questions(MIX, 0, "held-out")[known[tuple(tokens[0].tolist())]]
        wanted = lesson(target, question)["pending"]
        if question.kind != kinds[3]:
            wanted = torch.cat([wanted[:-1], (wanted[-1:] + 1) % 60])
        return 1e4 * rows[wanted][None] / rows[wanted].norm(dim=-1)[None, :, None] ** 2

    monkeypatch.setattr(student, "hidden", hidden)
    monkeypatch.setattr(
        module.Outputs, "logits", lambda self, x: -torch.cdist(x / 1e4, rows / rows.norm(dim=-1, keepdim=True) ** 2)
    )
    assert examine(student, target, vocabulary, EXACT) == {kind: float(kind == kinds[3]) for kind in kinds}


# -- beginning from a draft -------------------------------------------------------------------------------


def test_a_run_begins_from_another_draft(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target, one, two = small_target(), tmp_path / "one", tmp_path / "two"
    *_, ended = train(target, [store], one, replace(SMALL, checkpoint_seconds=1e6), [0, 2])
    saved = read_draft(one)
    config = replace(SMALL, tokens=1, frequent=4, questions=3, checkpoint_seconds=1e6)
    begun, *_, last = train(target, [store], two, config, start=one)
    assert begun["acceptance"] == pytest.approx(ended["acceptance"], abs=0.02), "weights come in bfloat16"
    again = read_draft(two)
    assert again["blocks"] == [0, 2] and set(saved["frequent"]) <= set(again["frequent"])
    assert set(answer_tokens(target, config).tolist()) <= set(again["frequent"])
    list(train(target, [store], two, replace(config, tokens=200), start=one))
    assert read_draft(two)["rows"] >= 200 > last["rows"], "the run goes on, and does not begin again"


def test_drafts_that_no_run_can_begin_from(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target, one = small_target(), tmp_path / "one"
    list(train(target, [store], one, replace(SMALL, tokens=1)))
    with pytest.raises(DraftError, match=r"one holds blocks \[0, 3\], not \[0, 1\]: name those, or none"):
        next(train(target, [store], tmp_path / "two", SMALL, [0, 1], one))
    other = small_target("qwen3")
    with pytest.raises(DraftError, match=r"one was cut from another target than small-qwen3 \(.*\)"):
        next(train(other, [store], tmp_path / "two", SMALL, start=one))
    with pytest.raises(DraftError, match="is no draft model"):
        next(train(target, [store], tmp_path / "two", SMALL, start=tmp_path))


# -- validation -------------------------------------------------------------------------------------------


def test_the_target_agrees_with_itself(small_target: Callable[..., Target]) -> None:
    target = small_target()
    docs = texts(target, [40, 150])
    found = evaluate(Student(target, target.blocks), target, docs, Vocabulary(target, torch.arange(9), EXACT), EXACT)
    assert (found["agreement"], found["acceptance"], found["divergence"]) == (1.0, 1.0, 0.0)
    assert found["cross_entropy"] > 0.5, "which is the target's entropy"
    assert found["agreement_by_position"] == {"0-64": 1.0, "64-128": 1.0, "128-256": 1.0}


def test_what_a_validation_counts(small_target: Callable[..., Target]) -> None:
    """Against full laws, row by row."""
    target = small_target()
    docs = texts(target, [80, 30])
    student, draft = Student(target, 2), cut(target, 2)
    found = evaluate(student, target, docs, Vocabulary(target, torch.arange(9), EXACT), EXACT)
    agreed, accepted, crossed = [], [], []
    for doc in docs:
        p, q = (m.forward(doc["token"][None], KVCache(1))[0].softmax(-1)[doc["written"]] for m in (target, draft))
        agreed.append(p.argmax(-1) == q.argmax(-1))
        accepted.append(torch.minimum(p, q).sum(-1))
        crossed.append(-(p * q.log()).sum(-1))
    assert found["agreement"] == pytest.approx(float(torch.cat(agreed).float().mean()), abs=1e-4)
    assert found["acceptance"] == pytest.approx(float(torch.cat(accepted).mean()), abs=1e-4)
    assert found["cross_entropy"] == pytest.approx(float(torch.cat(crossed).mean()), abs=1e-3)
    late = accepted[0][64 - 40 :]  # the first text's own tokens are at 40 to 79
    assert found["acceptance_by_position"]["64-128"] == pytest.approx(float(late.mean()), abs=1e-4)


# -- runs -------------------------------------------------------------------------------------------------

SMALL = DraftTrainConfig(
    tokens=3000, batch_tokens=48, frequent=24, sampled=16, validation_documents=1, checkpoint_seconds=1e-6,
    learning_rate=3e-3, precision="float32",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, small_target: Callable[..., Target]) -> Path:
    return write_store(small_target(), tmp_path / "text")


def test_training_learns_resumes_and_saves(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    folder = tmp_path / "draft"
    run = train(target, [store], folder, SMALL)
    first = next(run)
    assert first["rows"] == 0 and first["acceptance"] < 0.9
    half = next(r for r in run if r["rows"] > 1000)
    run.close()  # interrupted: the next call goes on from the last checkpoint
    early = load_draft(folder, target)
    assert early.blocks == 2, "a checkpoint is a draft that can be used"
    records = list(train(target, [store], folder, SMALL))
    assert (records[0]["rows"], records[0]["acceptance"]) == (half["rows"], half["acceptance"])
    saved = json.loads((folder / "draft.json").read_text())
    assert saved["blocks"] == [0, 3] and saved["rows"] == records[-1]["rows"] >= 3000
    assert saved["target"] == target.fingerprint.to_dict()
    assert [run["rows"] for run in saved["runs"]] == [0, half["rows"]], "what held from which row"
    assert saved["runs"][1]["config"]["learning_rate"] == 3e-3 and saved["runs"][1]["provenance"]["seed"] == 0
    assert saved["written_tokens"] == 2 * 4 * WRITTEN and saved["text"][0]["store"] == "text"
    assert saved["result"]["acceptance"] == records[-1]["acceptance"]
    assert [line["rows"] for line in saved["log"]][-1] == saved["rows"] and saved["provenance"]["seed"] == 0

    draft = load_draft(folder, target)
    ids = CaptureStore.open(store).shard_rows(1)["token"][: PROMPT + WRITTEN - 1]
    tokens = torch.from_numpy(ids.astype("int64"))[None]
    theirs = target.forward(tokens, KVCache(1)).argmax(-1)[0, PROMPT:]
    agreement = [
        float((m.forward(tokens, KVCache(1)).argmax(-1)[0, PROMPT:] == theirs).float().mean())
        for m in (cut(target, 2), draft)
    ]
    assert agreement[1] > max(0.8, agreement[0] + 0.2), agreement


def test_a_run_continued_is_as_good_as_its_state(
    store: Path, tmp_path: Path, small_target: Callable[..., Target]
) -> None:
    """Weights, moments and counters come back as they were: the next step is what it would have been."""
    target = small_target()
    folder = tmp_path / "draft"
    run = train(target, [store], folder, replace(SMALL, tokens=10_000))
    next(r for r in run if r["rows"] > 300)
    run.close()
    kept = load_file(folder / "run" / "state.safetensors")
    assert sum(name.endswith("exp_avg_sq") for name in kept) == len(Student(target, 2).parameters)
    list(train(target, [store], folder, replace(SMALL, tokens=1)))  # over already: nothing moves
    again = load_file(folder / "run" / "state.safetensors")
    assert kept.keys() == again.keys() and all(torch.equal(kept[k], again[k]) for k in kept)


def interrupted(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """Ctrl-C at one call of a function of the training."""
    import decoding.draft.training as module

    whole, count = getattr(module, name), itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(count) == calls:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(module, name, call)


def test_an_interrupted_run_loses_nothing(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = small_target(), tmp_path / "draft"
    config = replace(SMALL, tokens=500, checkpoint_seconds=1e6)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, "loss_of", 1)
        list(train(target, [store], folder, config))
    assert not list((folder / "run").iterdir()), "nothing was trained, and nothing is promised"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, "loss_of", 4)
        list(train(target, [store], folder, config))
    assert sorted(p.name for p in (folder / "run").iterdir()) == ["state.json", "state.safetensors"]
    state = json.loads((folder / "run" / "state.json").read_text())
    tensors = load_file(folder / "run" / "state.safetensors")
    assert state["updates"] == 3 and 3 * 23 <= state["rows"] <= 3 * 48 and state["seconds"] > 0
    assert any(not torch.equal(tensors[k], v) for k, v in Student(target, 2).parameters.items())
    run = train(target, [store], folder, config)
    assert next(run)["rows"] == state["rows"]
    saved = load_file(folder / "draft.safetensors")
    norm = tensors["norm.weight"].bfloat16()
    assert torch.equal(saved["norm.weight"], norm), "the draft so far, which the interruption had no time for"
    assert [r["rows"] for r in run][-1] >= 500


def test_a_run_interrupted_in_its_last_validation_still_leaves_a_draft(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = small_target(), tmp_path / "draft"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, "evaluate", 2)
        list(train(target, [store], folder, replace(SMALL, tokens=1)))
    assert not (folder / "draft.json").exists()
    (record,) = train(target, [store], folder, replace(SMALL, tokens=1))
    assert load_draft(folder, target).blocks == 2
    found = json.loads((folder / "draft.json").read_text())
    assert found["result"]["acceptance"] == record["acceptance"] and found["rows"] == record["rows"] > 0


def test_rows_of_a_pass(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    each = PROMPT + WRITTEN - 1
    assert rows_of_a_pass([store], [1]) == (3 + 4) * each
    assert rows_of_a_pass([store, store], [4, 9]) == (0 + 4 + 0 + 4) * each
    passes = replace(SMALL, tokens=7 * each)
    *_, last = train(small_target(), [store], tmp_path / "draft", passes)
    assert last["rows"] == 7 * each


def test_a_seed_decides_a_run(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    made = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        list(train(small_target(), [store], tmp_path / name, replace(SMALL, tokens=300, seed=seed)))
        made.append(load_file(tmp_path / name / "draft.safetensors"))
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])
    assert any(not torch.equal(made[0][k], made[2][k]) for k in made[0])


def test_a_store_that_grows_is_read_further(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    run = train(target, [store], tmp_path / "draft", replace(SMALL, tokens=100_000))
    next(r for r in run if r["rows"])
    write_store(target, tmp_path / "more", shards=3)
    for name in ("rows/00002.parquet", "states/00002.safetensors", "manifest.json"):
        (store / name).write_bytes((tmp_path / "more" / name).read_bytes())
    next(itertools.islice((r for r in run if r["rows"]), 8, None))
    run.close()
    saved = json.loads((tmp_path / "draft" / "draft.json").read_text())
    assert saved["written_tokens"] == 3 * 4 * WRITTEN


def test_a_run_of_minutes_ends_by_the_clock(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that moves a tenth of a second whenever it is asked. The caller's time does not count."""
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr("decoding.draft.training.time.monotonic", lambda: next(clock))
    config = replace(SMALL, tokens=10**9, minutes=0.5, checkpoint_seconds=10.0)
    folder, kept = tmp_path / "draft", []
    run = train(small_target(), [store], folder, config)
    assert next(run)["rows"] == 0
    for _ in range(2):
        assert next(run)["rows"] > 0
        kept.append(json.loads((folder / "run" / "state.json").read_text())["seconds"])
        for _ in range(5000):
            next(clock)
    run.close()
    assert 10 < kept[0] < 13 and 10 < kept[1] - kept[0] < 13
    *_, last = train(small_target(), [store], folder, config)  # goes on where it was
    ended = json.loads((folder / "run" / "state.json").read_text())
    assert 30 <= ended["seconds"] < 33 and ended["rows"] == last["rows"]
    assert [r["rows"] for r in train(small_target(), [store], folder, config)] == [last["rows"]], "it is over"


def test_a_run_keeps_its_blocks(store: Path, tmp_path: Path, small_target: Callable[..., Target]) -> None:
    target = small_target()
    list(train(target, [store], tmp_path / "draft", replace(SMALL, tokens=1), blocks=[0, 1]))
    assert json.loads((tmp_path / "draft" / "draft.json").read_text())["blocks"] == [0, 1]
    with pytest.raises(DraftError, match=r"trains blocks \[0, 1\], not \[0, 3\]"):
        next(train(target, [store], tmp_path / "draft", SMALL))


def test_texts_that_no_draft_can_learn_from(
    store: Path, tmp_path: Path, small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target()
    one = write_store(target, tmp_path / "one", shards=1)
    with pytest.raises(ValueError, match="no text to train on beside the 4 documents that are held out"):
        list(train(target, [one], tmp_path / "draft", replace(SMALL, validation_documents=4)))
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest | {"sites": ["resid_pre.2"]}))
    with pytest.raises(DraftError, match=r"a draft learns from resid_post.3, and .*text holds no states of it"):
        next(train(target, [store], tmp_path / "draft", SMALL))
    (store / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    with pytest.raises(DraftError, match="has no complete shard yet"):
        next(train(target, [store], tmp_path / "draft", SMALL))
    monkeypatch.setattr(target, "quantization", "bnb-4bit")
    with pytest.raises(DraftError, match=r"small-llama is quantized .bnb-4bit.: train a draft of it unquantized"):
        next(train(target, [one], tmp_path / "draft", SMALL))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocks", 0), ("tokens", 0), ("batch_tokens", -1), ("accumulate", 0), ("frequent", 0), ("sampled", -1),
        ("variation", 1.5), ("prompt_weight", -0.1), ("learning_rate", float("nan")), ("clip", 0.0),
        ("minutes", -1.0), ("checkpoint_seconds", 0.0), ("weight_decay", float("inf")), ("precision", "fp8"),
        ("validation_documents", 0), ("questions", -1), ("question_share", 1.0), ("question_share", -0.5),
    ],
)  # fmt: skip
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        DraftTrainConfig(**{name: value})  # type: ignore[arg-type]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(1.0, p) for p in (0.0, 0.01, 0.02, 0.5, 0.9, 1.0)]
    assert rates[0] == pytest.approx(0.05) and rates[0] < rates[1] < rates[2] > rates[3] > rates[4] > rates[5] == 0.0
    assert rates[3] == pytest.approx(0.5)
