"""Draft trees against path sets: a tree is judged by the paths it holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoding.tree import DraftTree

tokens = st.integers(0, 3)  # few tokens, so that prefixes collide


@st.composite
def trees(draw: st.DrawFn, source: str = "a", unused: bool = False) -> DraftTree:
    n = draw(st.integers(0, 8))
    parents: list[int] = []
    for i in range(n):
        choices = [-1, *(j for j in range(i) if parents[j] != -2), *([-2] if unused else [])]
        parents.append(draw(st.sampled_from(choices)))
    return DraftTree(
        [draw(tokens) for _ in range(n)], parents, [source] * n, [draw(st.floats(-5, 0)) for _ in range(n)]
    )


def prefixes(tree: DraftTree) -> set[tuple[int, ...]]:
    """Every path from the root, as tokens, found by walking up."""
    out = set()
    for i in range(len(tree)):
        line, at = [], i
        while at >= 0:
            line.append(tree.tokens[at])
            at = tree.parents[at]
        if at == -1:
            out.add(tuple(reversed(line)))
    return out


def closed(paths: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(p[: i + 1]) for p in paths for i in range(len(p))}


@given(trees(unused=True))
def test_derived_views_agree_with_walking_up(tree: DraftTree) -> None:
    for i, parent in enumerate(tree.parents):
        line, at = [], i
        while at >= 0:
            line.append(at)
            at = tree.parents[at]
        assert tree.ancestors[i] == line[::-1]
        assert tree.depths[i] == (0 if parent == -2 else len(line))
    leaves = {i for i, p in enumerate(tree.parents) if p != -2} - set(tree.parents)
    assert {path[-1] for path in tree.paths} == leaves
    for (parent, token), node in tree.children.items():
        assert (tree.parents[node], tree.tokens[node]) == (parent, token)


@given(st.lists(trees(), min_size=1, max_size=3))
def test_merge_holds_exactly_the_paths_of_its_parts(parts: list[DraftTree]) -> None:
    named = [DraftTree(t.tokens, t.parents, [str(k)] * len(t), [float(-k)] * len(t)) for k, t in enumerate(parts)]
    merged = DraftTree.merge([*named, DraftTree((), (), (), ())])
    assert prefixes(merged) == set().union(*(prefixes(t) for t in named))
    assert len(merged) == len(prefixes(merged)), "equal siblings were left unmerged"
    assert all(p < i for i, p in enumerate(merged.parents))
    for i in range(len(merged)):  # the first tree that has a path owns its node
        path = tuple(merged.tokens[j] for j in merged.ancestors[i])
        owner = next(k for k, t in enumerate(named) if path in prefixes(t))
        assert merged.source[i] == str(owner) and merged.logq[i] == -owner


def test_merge_of_one_tree_is_that_tree() -> None:
    tree = DraftTree([1], [-1], ["a"], [0.0], q_logits="kept")
    assert DraftTree.merge([tree]) is tree


@given(st.lists(st.lists(tokens, max_size=6), max_size=4), st.integers(0, 12))
def test_trie_keeps_the_budget_and_the_first_candidate(candidates: list[list[int]], budget: int) -> None:
    tree = DraftTree.trie(candidates, "copy", budget)
    wanted = closed(candidates)
    got = prefixes(tree)
    assert got <= wanted and len(tree) == len(got) == min(budget, len(wanted))
    if candidates:
        first = candidates[0][:budget]
        assert list(tree.tokens[: len(first)]) == first
        assert list(tree.parents[: len(first)]) == list(range(-1, len(first) - 1))


def test_trie_grows_the_other_candidates_side_by_side() -> None:
    tree = DraftTree.trie([[1, 2], [3, 4, 5], [6, 7, 8]], "copy", 6)
    assert prefixes(tree) == {(1,), (1, 2), (3,), (6,), (3, 4), (6, 7)}


@given(trees(), st.integers(0, 5))
def test_cut_keeps_what_is_shallow(tree: DraftTree, depth: int) -> None:
    assert prefixes(tree.cut(depth)) == {p for p in prefixes(tree) if len(p) <= depth}


def test_chain() -> None:
    tree = DraftTree.chain([5, 6, 7], "eagle", [-0.1, -0.2, -0.3])
    assert tree.paths == [[0, 1, 2]] and list(tree.tokens) == [5, 6, 7]
    assert list(tree.logq) == [-0.1, -0.2, -0.3] and tree.source == ["eagle"] * 3
