"""Questions whose answers can be checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.answers import KINDS, MIX, Question, Questions, held_out, questions, read_gsm8k, right
from decoding.answers.facts import MONTHS
from decoding.answers.lists import COMMON

SAME = ("capitals", "join", "date")
"""Kinds in which case counts, or is no matter."""


@given(st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.integers(1, 8))
def test_good_answers_are_right_and_answers_to_others_are_not(seed: int, kind: str, level: int) -> None:
    mine, other = questions({kind: level}, 2, seed)
    assert right(mine, mine.answer)
    assert right(mine, f"Sure! Here you are:\n\n{mine.answer}\n")
    assert right(mine, f" {mine.answer}.") and right(mine, f'"{mine.answer}"')
    assert right(mine, mine.answer.swapcase()) or kind in SAME
    assert right(mine, other.answer) == (mine.answer.lower() == other.answer.lower())
    assert not right(mine, "") and not right(mine, "I do not know.")


@given(st.integers(0, 10**6), st.sampled_from(["extract", "lookup", "item", "longest"]), st.integers(1, 4))
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
    question = Question("sum-1-0", "sum", 1, (), "1204", check="number")
    assert right(question, "1,204") and right(question, "1200 + 4 = 1204 apples.") and right(question, "1204.00")
    assert not right(question, "1204 is what I get from 1200 + 4") and not right(question, "-1204")
    assert not right(question, "1204.5")


def numbers_of(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def listed(text: str) -> list[str]:
    """The list at the end of a prompt."""
    return re.split(r", | ", re.sub(r"\? Say only the number\.$", "", text).rpartition(": ")[2])


def two_steps(prompt: str) -> int:
    a, b, c = numbers_of(prompt)
    return a * b + c if "boxes" in prompt else a + b - c


def placed(prompt: str) -> str:
    words = listed(prompt)
    place = prompt.split()[3]
    return words[-1] if place == "last" else words[["first", "second", "third", "fourth", "fifth"].index(place)]


def in_order(prompt: str) -> str:
    items = listed(prompt)
    return ", ".join(sorted(items, key=int) if "numbers" in prompt else sorted(items))


REASONED: dict[str, Callable[[str], str]] = {
    "sum": lambda p: str(sum(numbers_of(p))),
    "difference": lambda p: str(numbers_of(p)[0] - numbers_of(p)[1]),
    "product": lambda p: str(numbers_of(p)[0] * numbers_of(p)[1]),
    "steps": lambda p: str(two_steps(p)),
    "count": lambda p: str(len(listed(p))),
    "item": placed,
    "longest": lambda p: max(listed(p), key=len),
    "reverse": lambda p: ", ".join(listed(p)[::-1]),
    "order": in_order,
    "capitals": lambda p: " ".join(listed(p)).upper(),
    "initials": lambda p: " ".join(word[0] for word in listed(p)),
    "join": lambda p: p.split()[4].join(listed(p)),
    "csv": lambda p: ", ".join(line.split(": ")[1] for line in p.splitlines()[1:]),
    "pairs": lambda p: "\n".join(line.replace(": ", "=") for line in p.splitlines()[1:]),
}
"""The answers, from the prompts alone."""


@given(st.integers(0, 10**6), st.sampled_from(list(REASONED)), st.integers(1, 3))
def test_answers_follow_from_their_prompts(seed: int, kind: str, level: int) -> None:
    [question] = questions({kind: level}, 1, seed)
    assert question.answer == REASONED[kind](question.prompt)


def test_dates_are_the_same_day() -> None:
    months = list(MONTHS)
    ways = set()
    for question in questions({"date": 2}, 40, seed=2):
        text = question.prompt.rpartition(": ")[2]
        words, figures = (text, question.answer) if " " in text else (question.answer, text)
        day, month, year = words.split()
        assert figures == f"{year}-{months.index(month) + 1:02}-{int(day):02}"
        ways.add(" " in text)
    assert ways == {True, False}


def test_lists_are_judged_whole() -> None:
    question = Question("reverse-2-0", "reverse", 2, (), "tea, cup, ear", check="list")
    for text in ("tea, cup, ear", "Tea cup ear.", "The list is: tea, cup, ear", "Reversed:\ntea - cup - ear\nDone"):
        assert right(question, text)
    for text in (
        "ear, cup, tea",
        "tea, cup",
        "tea, cup, ears",
        "tea, cup, ear, tea",
        "arm, tea, cup, ear",
        "tea\ncup\near",
    ):
        assert not right(question, text)


def test_to_the_letter() -> None:
    question = Question("join-1-0", "join", 1, (), "tea-cup", check="writes")
    for text in ("tea-cup", "It is tea-cup.", '"tea-cup"', "**tea-cup**", "`tea-cup`, as you wish"):
        assert right(question, text)
    for text in ("Tea-cup", "tea-cup-ear", "a-tea-cup", "tea - cup", "tea-cups"):
        assert not right(question, text)


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
    assert [q.kind for q in many[: len(KINDS)]] == list(KINDS)
    assert all(q.level == 1 and q.messages[-1]["role"] == "user" for q in many)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("date", "difference")])
def test_levels_make_questions_longer(kind: str) -> None:
    lengths = [
        sum(len(q.messages[0]["content"]) + len(q.answer) for q in questions({kind: n}, 150, seed=6)) for n in (1, 3, 5)
    ]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("kinds", "count", "told"),
    [
        (["riddle"], 1, "unknown kind of question 'riddle': choose from extract"),
        ({"sum": 0}, 1, "level of 'sum' is 0"),
        ({"sum": (2, 0)}, 1, "level of 'sum' is .2, 0.; it must be 1 or more"),
        ({"sum": ()}, 1, "level of 'sum' is ..; it must be 1 or more"),
        ([], 1, "no kind of question is named"),
        (None, 0, "count is 0"),
    ],
)
def test_bad_calls_are_told(kinds: object, count: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        questions(kinds, count)  # type: ignore[arg-type]


def test_levels_take_turns() -> None:
    found = questions({"sum": (1, 3), "item": 2}, 8, seed=9)
    assert [(q.kind, q.level) for q in found] == [("sum", 1), ("item", 2), ("sum", 3), ("item", 2)] * 2
    source = Questions({"sum": (1, 3), "item": 2}, seed=9)
    assert [source[n] for n in range(8)] == found


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_prompt_is_on_both_sides(seed: int, other: int) -> None:
    train, kept = questions(MIX, 45, seed, "train"), questions(MIX, 45, other, "held-out")
    assert not {q.prompt for q in train} & {q.prompt for q in kept}
    assert all(held_out(q.prompt) for q in kept) and not any(held_out(q.prompt) for q in train)
    assert questions(MIX, 20, seed, "train") == train[:20]


def test_one_prompt_in_eight_is_held_out() -> None:
    share = sum(held_out(q.prompt) for q in questions(MIX, 4000, seed=1)) / 4000
    assert 0.105 < share < 0.145
    with pytest.raises(ValueError, match="unknown split of the questions 'test': choose from train, held-out"):
        questions(MIX, 1, 0, "test")


def test_words_of_lists_differ() -> None:
    assert len({word.lower() for word in COMMON}) == len(COMMON) > 100


def test_gsm8k_files_of_both_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    lines = [
        {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"turns": ["How much?", "And now?"], "reference": ["It is 1,250.\n#### 1,250"]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_gsm8k(file)
    assert (first.prompt, first.answer, first.kind) == ("How many?", "5", "gsm8k")
    assert (second.prompt, second.answer) == ("How much?", "1250") and first.key != second.key
    assert right(first, "2 + 3 = 5.") and not right(first, "5 - 2") and right(second, "$1,250")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "How?", "answer": "5"}', "line 2: the answer does not end with `#### number`"),
        ('{"prompt": "How?"}', "line 2, holds no `question` and `answer`, nor `turns` and `reference`"),
        ("[]", "line 2, holds no"),
        ("{", "line 2, holds no"),
    ],
)
def test_bad_gsm8k_lines_are_named(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "How many?", "answer": "#### 5"}\n' + line)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_gsm8k(file)
