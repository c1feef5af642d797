"""What is said of two manifests that differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from activations.differences import differences

SETTINGS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.lists(st.integers(0, 3), max_size=2))


@given(SETTINGS, SETTINGS)
def test_an_entry_is_named_if_and_only_if_it_differs(first: dict[str, object], second: dict[str, object]) -> None:
    found = differences({"config": first}, {"config": second}, ("config",), ("config.c",))
    changed = {f"config.{k}" for k in "ab" if first.get(k) != second.get(k)}
    assert {text.split(" (")[0] for text in found} == changed


def test_values() -> None:
    first = {"config": {"seed": 0, "labels": {"kappa": 5}, "sites": ("a", "b")}, "prompts": "x", "dtype": "float16"}
    second = {"config": {"seed": 0, "labels": {"kappa": 3}, "sites": ("b", "c"), "every": 2}, "prompts": "y"}
    assert differences(first, second, ("config", "prompts", "dtype")) == [
        "config.labels.kappa (5 and 3)",
        "config.sites (only the first has a, only the second has c)",
        "config.every (none and 2)",
        "prompts",
        'dtype ("float16" and none)',
    ]
    assert differences({"sites": ["a", "b"]}, {"sites": ["b", "a"]}, ["sites"]) == ['sites (["a", "b"] and ["b", "a"])']


def test_long_values_are_cut_to_where_they_differ() -> None:
    sites = [f"resid_post.{n}" for n in range(9)]
    (text,) = differences({"sites": sites}, {"sites": sites[:2]}, ["sites"])
    assert text.endswith(
        "(only the first has resid_post.2, resid_post.3, resid_post.4, resid_post.5, resid_post.6 and 2 more)"
    )
    (text,) = differences({"t": "x" * 500 + "one" + "y" * 90}, {"t": "x" * 500 + "two"}, ["t"])
    assert text == f't (...{"x" * 10}one{"y" * 47}... and ...{"x" * 10}two")'
