"""Tables of steps, and tables that Markdown cannot read as anything else."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_steps import RECORDS, record

from decoding.tables import as_markdown, step_table
from decoding.trace import Trace


def test_a_row_for_each_step_of_the_text() -> None:
    heads, rows = step_table(Trace(RECORDS))
    assert len(rows) == len(RECORDS) and all(len(row) == len(heads) for row in rows)
    by_head = dict(zip(heads, rows[0], strict=True))
    assert by_head["intent"] == "0.90" and by_head["match"] == "2" and by_head["ms"] == "21.5"
    assert by_head["drafted by"] == "copy" and by_head["why"] == "intent"
    assert (by_head["draft (first branch)"], by_head["accepted"]) == ("'#0#1#2#3#4#5'", "'#0#1#2#3'")
    last = dict(zip(heads, rows[-1], strict=True))
    assert (last["intent"], last["drafted by"], last["draft (first branch)"], last["accepted"]) == ("–", "–", "", "")
    assert step_table(Trace(RECORDS), text=3)[1] == []


def test_a_tree_is_told_by_its_first_branch() -> None:
    tree = record(0, ("eagle",) * 4, 0, tokens=(5, 6, 7, 8), parents=(-1, -1, 0, 2))
    heads, [row] = step_table(Trace([replace(tree, accepted=(1,))]))
    by_head = dict(zip(heads, row, strict=True))
    assert (by_head["draft (first branch)"], by_head["accepted"]) == ("'#5#7#8'", "'#6'")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp", "Cs"]), max_size=30))
def test_a_cell_is_read_as_it_stands(text: str) -> None:
    head, bar, row = as_markdown(["what"], [[text]]).split("\n")
    assert (head, bar) == ("| what |", "| --- |")
    inside = row[2:-2]
    assert html.unescape(inside) == text
    assert not set("|<>`*_[]\\$~!") & set(inside)


@pytest.mark.parametrize("text", ["<|im_start|>", "**bold**", "`a`", "$x$", "a | b", "[a](b)"])
def test_what_would_be_markup_is_none(text: str) -> None:
    assert html.unescape(as_markdown(["a"], [[text]]).split("\n")[2]) == f"| {text} |"
    assert text not in as_markdown(["a"], [[text]])
