"""Questions whose answers can be checked."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.answers import KINDS, Question, questions, right


@given(st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.integers(1, 8))
def test_good_answers_are_right_and_answers_to_others_are_not(seed: int, kind: str, level: int) -> None:
    mine, other = questions({kind: level}, 2, seed)
    assert right(mine, mine.answer)
    assert right(mine, f"Sure! Here you are:\n\n{mine.answer}\n")
    assert right(mine, mine.answer.upper()) and right(mine, f" {mine.answer}.")
    assert right(mine, other.answer) == (mine.answer == other.answer)
    assert not right(mine, "") and not right(mine, "I do not know.")


@given(st.integers(0, 10**6), st.sampled_from(["extract", "lookup"]), st.integers(1, 4))
def test_the_first_one_named_counts(seed: int, kind: str, level: int) -> None:
    [question] = questions({kind: level}, 1, seed)
    prompt = question.messages[0]["content"]
    assert question.answer in prompt and all(wrong in prompt for wrong in question.wrong)
    assert question.answer not in question.wrong
    for wrong in question.wrong:
        assert right(question, f"It is {question.answer}, and not {wrong}.")
        assert not right(question, f"It is {wrong}, or {question.answer}.")
    assert not right(question, f"{question.answer}ish")


def test_lists_are_right_in_any_dress_but_whole_and_in_order() -> None:
    [question] = questions({"copy": 2}, 1, seed=1)
    items = question.answer.splitlines()
    assert len(items) == 4
    for form in ("- {}\n", "* {}\n", "{}, ", "1. {}\n"):
        assert right(question, "".join(form.format(item) for item in items))
    assert right(question, "\n".join(f"{i}) {item.title()}" for i, item in enumerate(items)))
    assert not right(question, "\n".join(items[:-1]))
    assert not right(question, "\n".join(reversed(items)))
    assert not right(question, "\n".join([items[0], "apple", *items[1:]]))


def test_sums_are_judged_by_the_last_number() -> None:
    question = Question("sum-1-0", "sum", 1, (), "1204")
    assert right(question, "1,204") and right(question, "1200 + 4 = 1204 apples.")
    assert not right(question, "1204 is what I get from 1200 + 4") and not right(question, "-1204")


def test_sums_are_right() -> None:
    for question in questions({"sum": 4}, 40, seed=2):
        numbers = [int(n) for n in re.findall(r"\d+", question.messages[0]["content"])]
        assert sum(numbers) == int(question.answer) and len(numbers) == 4


def test_json_is_read_wherever_it_stands() -> None:
    [question] = questions({"convert": 2}, 1, seed=3)
    facts = json.loads(question.answer)
    assert list(facts) == ["name", "age", "city"]
    assert right(question, f"```json\n{json.dumps(facts, indent=2)}\n```")
    assert right(question, json.dumps({k: str(v) for k, v in reversed(facts.items())}))
    assert right(question, "{broken} " + question.answer)
    assert not right(question, json.dumps({**facts, "age": facts["age"] + 1}))
    assert not right(question, json.dumps({**facts, "more": 1}))
    assert not right(question, question.answer[:-1])
    assert not right(question, "[1, {}]")


def test_the_same_seed_gives_the_same_questions_and_more_only_add() -> None:
    few, many = questions(count=7, seed=4), questions(count=23, seed=4)
    assert many[:7] == few and questions(count=7, seed=5) != few
    assert len({q.key for q in many}) == 23
    assert [q.kind for q in many[:5]] == list(KINDS)
    assert all(q.level == 1 and q.messages[-1]["role"] == "user" for q in many)


@pytest.mark.parametrize("kind", list(KINDS))
def test_levels_make_questions_longer(kind: str) -> None:
    lengths = [
        sum(len(q.messages[0]["content"]) + len(q.answer) for q in questions({kind: n}, 20, seed=6)) for n in (1, 3, 5)
    ]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("kinds", "count", "told"),
    [
        (["riddle"], 1, "unknown kind of question 'riddle': choose from extract"),
        ({"sum": 0}, 1, "level of 'sum' is 0"),
        ([], 1, "no kind of question is named"),
        (None, 0, "count is 0"),
    ],
)
def test_bad_calls_are_told(kinds: object, count: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        questions(kinds, count)  # type: ignore[arg-type]
