"""The benchmark of arbitration: who is right alone, ways of arbitrating, and what they are summed up to."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from small import maker

from activations.target import Target
from decoding.answers import MIX, Question, held_out, questions, right
from decoding.columns import ModeColumn, column
from decoding.cospec.branches import Decisions, Outcome, Place
from decoding.cospec.state import STATE
from decoding.decoder import Decoder
from decoding.policies.policy import Policy


@pytest.fixture(scope="module")
def arbitration() -> ModuleType:
    return maker("arbitration")


def test_held_out_questions_are_asked_once(arbitration: ModuleType) -> None:
    few, many = arbitration.held_out(60, 7), arbitration.held_out(300, 7)
    assert many[:60] == few and len({q.prompt for q in many}) == 300
    assert all(held_out(q.prompt) for q in many) and {q.kind for q in few} == set(MIX)
    with pytest.raises(ValueError, match="there are no 500 different held-out questions"):
        arbitration.held_out(500, 7, {"date": (1,)})


# -- each model alone ---------------------------------------------------------------------------------


def test_answers_are_written_once(arbitration: ModuleType, small_target: Callable[..., Target], tmp_path: Path) -> None:
    target, file = small_target(), tmp_path / "rows.jsonl"
    asked = questions({"sum": 1}, 5, seed=1)
    first = arbitration.alone("target", target, "a", asked[:3], 6, file)
    assert [row.key for row in first] == [q.key for q in asked[:3]] and len(file.read_text().splitlines()) == 3
    file.write_text(file.read_text() + '{"cut off')
    again = arbitration.alone("target", target, "a", asked, 6, file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert again[:3] == first and [line["key"] for line in lines][:3] == [row.key for row in first] and len(lines) == 5
    assert all(row.right == right(q, row.text) and 1 <= row.tokens <= 6 for q, row in zip(asked, again, strict=True))
    arbitration.alone("target", target, "other settings", asked[:1], 6, file)
    arbitration.alone("draft", target, "a", asked[:1], 6, file)
    assert len(file.read_text().splitlines()) == 7


def test_shares(arbitration: ModuleType) -> None:
    def told(kind: str, marks: str) -> list[Any]:
        return [arbitration.Told("m", "s", f"{kind}{i}", kind, 1, m == "1", 3, "") for i, m in enumerate(marks)]

    target, draft = told("sum", "1100") + told("item", "01"), told("sum", "1010") + told("item", "11")
    found = arbitration.shares(target, draft)
    assert found["sum"] == {"questions": 4, "both": 0.25, "only_draft": 0.25, "only_target": 0.25, "neither": 0.25}
    assert found["item"] == {"questions": 2, "both": 0.5, "only_draft": 0.5, "only_target": 0.0, "neither": 0.0}
    assert found["all"]["questions"] == 6 and found["all"]["only_draft"] == pytest.approx(2 / 6)
    page = arbitration.shares_markdown(
        {"settings": {"target": "t", "questions": 6, "max_new_tokens": 9}, "shares": {"d": found}}
    )
    assert "| sum | 4 | 25.0 | 25.0 | 25.0 | 25.0 | 50.0 | 50.0 | 75.0 |" in page


# -- ways of arbitrating ------------------------------------------------------------------------------


def place(draft_over_target: float = 0.0, position: int = 5) -> Place:
    state = torch.zeros(len(STATE))
    state[STATE.index("target_logp_target")] = -1.0
    state[STATE.index("target_logp_draft")] = -1.0 + draft_over_target
    return Place(1, 2, position, state)


class Known:
    """Questions with two mismatches each, right where exactly the wanted decisions are made."""

    def __init__(self, wanted: Sequence[Decisions]) -> None:
        self.wanted, self.seen = wanted, set[tuple[int, Decisions]]()
        self.questions = questions({"sum": 1}, len(wanted))
        self.visits: list[list[tuple[int, Decisions]]] = []
        self.store = self

    def __len__(self) -> int:
        return len(self.wanted)

    def flush(self) -> None: ...

    def at(self, question: int, decisions: Decisions) -> Place | Outcome | None:
        if (question, decisions) not in self.seen:
            return None
        if len(decisions) < 2:
            return place(-1.0 if question % 2 else -3.0, len(decisions))
        return Outcome(decisions == self.wanted[question], 6 + sum(decisions), 3)

    def visit(self, wanted: Sequence[tuple[int, Decisions]]) -> None:
        self.visits.append(list(wanted))
        self.seen |= set(wanted)


def test_a_walk_decides_at_every_mismatch(arbitration: ModuleType) -> None:
    wanted = list(itertools.product((False, True), repeat=2))
    known = Known(wanted)
    found = arbitration.walks(known, {"never": lambda *_: False, "always": lambda *_: True})
    assert [w.right for w in found["never"]] == [True, False, False, False]
    assert [w.right for w in found["always"]] == [False, False, False, True]
    assert all((w.asked, w.kept, w.tokens, w.forwards) == (2, 2, 8, 3) for w in found["always"])
    assert [len(v) for v in known.visits] == [4] * 5, "the first mismatch is shared, and all questions go on together"
    some = arbitration.walk(known, [2, 1], lambda question, p: p.position == 0)
    assert [(w.right, w.kept) for w in some] == [(True, 1), (False, 1)]


def test_the_ratio_is_one_of_probabilities(arbitration: ModuleType) -> None:
    question = questions(count=1)[0]
    half = arbitration.by_ratio(0.5)
    assert half(question, place(-0.69)) and not half(question, place(-0.70))
    tenth = arbitration.by_ratio(0.1)
    assert tenth(question, place(-2.30)) and not tenth(question, place(-2.31))


def test_chance_keeps_its_rate_and_its_choices(arbitration: ModuleType) -> None:
    asked = questions({"sum": 1}, 300)
    decide = arbitration.by_chance(0.3)
    chosen = [decide(q, place(position=p)) for q in asked for p in range(10)]
    assert abs(sum(chosen) / len(chosen) - 0.3) < 0.03
    assert chosen == [arbitration.by_chance(0.3)(q, place(position=p)) for q in asked for p in range(10)]
    assert chosen != [arbitration.by_chance(0.3, 1)(q, place(position=p)) for q in asked for p in range(10)]


def test_the_policy_keeps_from_its_threshold_on(arbitration: ModuleType) -> None:
    layer = torch.nn.Linear(len(STATE), 2)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.0, 1.0]))  # keeps with probability 0.731
    policy = Policy.of(torch.nn.Sequential(layer), torch.zeros(len(STATE)), torch.ones(len(STATE)))
    question = questions(count=1)[0]
    kept = [arbitration.by_policy(policy, t)(question, place()) for t in (0.0, 0.5, 0.73, 0.74, 1.0)]
    assert kept == [True, True, True, False, False]


def test_a_column_with_settings_keeps_the_policies(small_target: Callable[..., Target]) -> None:
    decoder = Decoder(small_target())
    decoder.policies = {"cospec": object()}  # type: ignore[dict-item]
    made = column(decoder, "cospec/arbitration=0.25")
    assert isinstance(made, ModeColumn) and made.decoder.policies is decoder.policies
    assert made.decoder.settings.arbitration == 0.25 and decoder.settings.arbitration is None


# -- the summary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_mcnemar_is_the_exact_test(arbitration: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    one, other = ([rng.random() < p for _ in range(80)] for p in (0.5, 0.35))
    b = sum(x and not y for x, y in zip(one, other, strict=True))
    c = sum(y and not x for x, y in zip(one, other, strict=True))
    assert arbitration.mcnemar(one, other) == pytest.approx(binomtest(min(b, c), b + c).pvalue)
    assert arbitration.mcnemar(other, one) == arbitration.mcnemar(one, other)
    assert arbitration.mcnemar(one, one) == 1.0


def test_a_summary_counts_help_and_hurt(arbitration: ModuleType) -> None:
    def walked(marks: str) -> list[Any]:
        return [arbitration.Walked(m == "1", 4, 1, 6, 3) for m in marks]

    asked = [Question(f"q{i}", "sum" if i < 6 else "item", 1, (), "") for i in range(8)]
    base = [m == "1" for m in "11100000"]
    found = {"sd": walked("11100000"), "x": walked("01111101"), "few": walked("0111")}
    same, better, few = arbitration.summary(asked, found, base, policy="x")
    assert few["questions"] == 4 and (few["helped"], few["hurt"]) == (1, 1)
    assert same["policy_over_it"]["estimate"] == 3 / 8 and few["policy_over_it"]["estimate"] == 0.0
    assert (same["helped"], same["hurt"], same["p"]) == (0, 0, 1.0)
    assert same["right_over_ar"] == {"estimate": 0.0, "lower": 0.0, "upper": 0.0}
    assert (better["helped"], better["hurt"]) == (4, 1) and better["right_over_ar"]["estimate"] == 3 / 8
    assert better["p"] == pytest.approx(binomtest(1, 5).pvalue)
    assert better["keep_rate"] == 0.25 and better["tokens_per_forward"] == 2.0
    assert better["right_by_kind"] == {"sum": 5 / 6, "item": 0.5}
    about = {"target": "t", "dtype": "bfloat16", "questions": 8, "max_new_tokens": 32, "threshold": 0.5}
    run = {
        "settings": about, "columns": [same, better], "right_alone": {"estimate": 0.375, "lower": 0.1, "upper": 0.6},
        "ceiling": {"questions": 0}, "oracle": {},
    }  # fmt: skip
    page = arbitration.markdown(run, None)
    assert "gets 37.5 [10.0, 60.0] right" in page and "| x | 8 | 75.0 [" in page and "| x | 83 | 50 |" in page
