"""Branches: what decisions lead to is what the engine writes, and none of it is lost or asked for twice."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cospec_toy import Toy, toy_questions
from test_cospec_verifier import plan_of, write
from test_draft_drafter import draft_of

from activations.sampling import Sampling
from decoding.answers import Question
from decoding.cospec.branches import (
    Branches,
    BranchStore,
    Explored,
    Job,
    Outcome,
    Place,
    Runner,
    examples,
    explore,
    identity,
    plans,
    shares,
)
from decoding.cospec.verifier import ScriptedArbiter
from decoding.draft.drafter import DraftModelDrafter
from decoding.policies.policy import PolicyError


def asked(count: int, answer: str = "0") -> list[Question]:
    """For the small targets, whose tokens are characters."""
    draw = random.Random(3)
    texts = ["".join(chr(ord("0") + draw.randrange(62)) for _ in range(draw.randrange(4, 20))) for _ in range(count)]
    return [Question(f"q-{i}", "lookup", 1, ({"role": "user", "content": t},), answer) for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def runner(small_target) -> Runner:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    return Runner(target, DraftModelDrafter(target, draft_of(target, 0.1)), 4, 16, rows=5)


def test_runs_are_what_the_engine_writes(small_target, runner: Runner) -> None:  # type: ignore[no-untyped-def]
    """The same texts as an engine that remembers no prompts, whatever is written beside them."""
    target = small_target("llama")
    questions = asked(4)
    draw = random.Random(1)
    scripts = [tuple(draw.random() < 0.5 for _ in range(n)) for n in (0, 1, 2, 3, 5)]
    jobs = [Job(question, script) for question in questions for script in scripts]
    runs = runner.run(jobs)
    assert _same(runner.run(jobs[::-1])[::-1], runs)
    for run, job in zip(runs, jobs, strict=True):
        prompt = target.encode_messages(job.question.messages)
        plan = plan_of(target, ScriptedArbiter({0: job.script}), 4)
        [tokens], engine = write(target, plan, [prompt], 1, 16, [Sampling()])
        assert list(run.tokens) == tokens
        assert run.outcome.forwards == len(engine.trace)
        assert run.decisions[: len(job.script)] == job.script[: len(run.decisions)]
        assert not any(run.decisions[len(job.script) :])
        assert len(run.places) == len(run.decisions) == sum(record.asked for record in engine.trace)
        for place, kept in zip(run.places, run.decisions, strict=True):
            at = place.position - len(prompt)
            assert at >= len(tokens) or tokens[at] == (place.draft if kept else place.target)
    assert len({run.tokens for run in runs}) > len(questions)  # decisions change texts
    assert runs[0].question == identity(questions[0])


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        (a.question, a.decisions, a.tokens, a.outcome) == (b.question, b.decisions, b.tokens, b.outcome)
        and all(
            x[:3] == y[:3] and torch.allclose(x.state, y.state, atol=1e-4)
            for x, y in zip(a.places, b.places, strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def test_the_first_token_is_put_to_the_arbiter(runner: Runner) -> None:
    runs = runner.run([Job(question, (True,)) for question in asked(12)])
    prompts = [len(runner.target.encode_messages(question.messages)) for question in asked(12)]
    first = [run for run, n in zip(runs, prompts, strict=True) if run.places and run.places[0].position == n]
    assert first and all(run.tokens[0] == run.places[0].draft for run in first)


def test_what_is_right_is_told_by_the_answer(runner: Runner) -> None:
    [question] = asked(1)
    [run] = runner.run([Job(question, ())])
    bare = Question("x", "sum", 1, question.messages, "123456")
    assert not runner.run([Job(bare, ())])[0].outcome.right
    assert run.text == "".join(chr(ord("0") + t) for t in run.tokens if t != 63)


# -- remembering --------------------------------------------------------------------------------------


def explored(folder: Path, questions: Sequence[Question], toy: Toy | None = None) -> BranchStore:
    toy = toy or Toy()
    store = BranchStore(folder, toy.describe())
    list(explore(store, toy, questions, first=3, together=8))
    return store


def test_what_was_explored_is_read_again_and_not_written_again(tmp_path: Path) -> None:
    questions = toy_questions(30)
    store = explored(tmp_path, questions)
    assert not any(list(plans(store, question, 3)) for question in questions)
    toy = Toy()
    again = explored(tmp_path, questions, toy)
    assert toy.written == 0
    for question in questions:
        key = identity(question)
        assert again.outcomes(key) == store.outcomes(key)
        mine, theirs = again.places(key), store.places(key)
        assert mine.keys() == theirs.keys()
        for decisions, place in mine.items():
            assert place[:3] == theirs[decisions][:3] and place.state.equal(theirs[decisions].state)
    assert shares(again, questions) == shares(store, questions)


def test_an_interrupted_exploration_goes_on_where_it_was(tmp_path: Path) -> None:
    questions = toy_questions(40)
    with pytest.raises(KeyboardInterrupt):
        explored(tmp_path / "a", questions, Toy(fails_after=120))
    toy = Toy()
    store = explored(tmp_path / "a", questions, toy)
    whole = Toy()
    reference = explored(tmp_path / "b", questions, whole)
    assert 0 < toy.written < whole.written
    for question in questions:
        assert store.outcomes(identity(question)) == reference.outcomes(identity(question))


def test_where_either_token_leads(tmp_path: Path) -> None:
    """Against the toy's own answers."""
    questions, toy = toy_questions(60), Toy()
    store = explored(tmp_path, questions)
    for own in (False, True):
        found = examples(store, questions, own, 3)
        assert len(found.states) > 60
        by_state = {
            tuple(place.state.tolist()): (question, decisions)
            for question in questions
            for decisions, place in store.places(identity(question)).items()
        }
        for state, keep, take, number in zip(*(x.tolist() for x in found), strict=True):
            question, decisions = by_state[tuple(state)]
            assert question is questions[number]
            rest = (True,) * 9 if own else ()
            runs = toy.run([Job(question, (*decisions, True, *rest)), Job(question, (*decisions, False))])
            assert [keep, take] == [run.outcome.right for run in runs]
    told = shares(store, questions)
    target = [run.outcome.right for run in toy.run([Job(q, ()) for q in questions])]
    draft = [run.outcome.right for run in toy.run([Job(q, (True,) * 9) for q in questions])]
    assert told["target"] == pytest.approx(sum(target) / 60) and told["draft"] == pytest.approx(sum(draft) / 60)
    assert told["both"] + told["only_draft"] + told["only_target"] + told["neither"] == pytest.approx(1)
    assert told["best"] >= told["both"] + told["only_draft"] + told["only_target"]


def test_what_was_seen_first_stands() -> None:
    branches, toy, [question] = Branches(), Toy(), toy_questions(1, seed=4)
    key = identity(question)
    [run] = toy.run([Job(question, ())])
    branches.add(run)
    before = dict(branches.places(key)), dict(branches.outcomes(key))
    assert branches.contradictions == 0
    first = run.places[0]
    other = run.__class__(key, (True, True), (first, first._replace(draft=999)), Outcome(True, 3, 1), (1,), "")
    branches.add(other, (True, True))  # nothing was known behind (True,)
    assert branches.contradictions == 0
    third = run.__class__(key, (True, False), (first, first._replace(draft=77)), Outcome(True, 4, 1), (1,), "")
    branches.add(third, (True, False))
    assert branches.contradictions == 1
    assert branches.at(key, (True, False)) == third.outcome  # where it was asked for, so that nobody asks again
    place = branches.at(key, (True,))
    assert isinstance(place, Place) and place.draft == 999
    assert before[0].items() <= branches.places(key).items() and before[1].items() <= branches.outcomes(key).items()


def test_a_visit_makes_everything_known(tmp_path: Path) -> None:
    toy, questions = Toy(), toy_questions(80)
    answers = Explored(BranchStore(tmp_path, {}), toy, questions)
    wanted = [(q, ()) for q in range(80)]
    assert all(answers.at(*one) is None for one in wanted)
    answers.visit(wanted)
    assert all(answers.at(*one) is not None for one in wanted)
    assert toy.written == 80


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    explored(tmp_path, toy_questions(8))
    with pytest.raises(
        PolicyError, match=r"branches of other models or settings \(toy: 1 and 2\): choose another folder"
    ):
        BranchStore(tmp_path, {"toy": 2})
    part = tmp_path / "runs" / "00000.jsonl"
    text = part.read_text()
    part.write_text(text[: len(text) // 2])
    with pytest.raises(PolicyError, match=r"cannot read .*00000.jsonl .*delete it and the file of states beside it"):
        BranchStore(tmp_path, {"toy": 1})
    lines = text.splitlines()
    part.write_text("\n".join(lines[:-1]))
    with pytest.raises(PolicyError, match="do not belong to its lines"):
        BranchStore(tmp_path, {"toy": 1})
    part.with_suffix(".safetensors").unlink()
    with pytest.raises(PolicyError, match="cannot read"):
        BranchStore(tmp_path, {"toy": 1})
    (tmp_path / "branches.json").write_text("[")
    with pytest.raises(PolicyError, match=r"branches.json .*delete .* and begin again"):
        BranchStore(tmp_path, {"toy": 1})


def test_the_folder_is_json_and_safetensors(tmp_path: Path) -> None:
    explored(tmp_path, toy_questions(8))
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} == {".json", ".jsonl", ".safetensors"}
    line = json.loads((tmp_path / "runs" / "00000.jsonl").read_text().splitlines()[0])
    assert set(line) == {"question", "decisions", "mismatches", "right", "forwards", "tokens", "text"}
