"""Labels against their definitions, read off token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activations.causal import document_matches
from activations.labels import LabelConfig, follow_labels, follow_rows, outcomes, span_labels


def is_copied(ids: list[int], j: int, n: int, nonoverlap: bool, runs: bool, ignore: frozenset[int]) -> bool:
    """Does some window of n tokens that holds j occur earlier?"""
    for begin in range(max(j - n + 1, 0), min(j, len(ids) - n) + 1):
        window = ids[begin : begin + n]
        if (runs and n > 1 and window == [window[0]] * n) or (ignore and set(window) <= ignore):
            continue
        last = begin - n if nonoverlap else begin - 1
        if any(ids[s : s + n] == window for s in range(last + 1)):
            return True
    return False


texts = st.integers(2, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab - 1), max_size=60))


@given(
    texts,
    st.integers(1, 6),
    st.integers(0, 10),
    st.booleans(),
    st.booleans(),
    st.frozensets(st.integers(0, 3), max_size=2),
)
def test_span_is_the_definition(
    ids: list[int], n: int, start: int, nonoverlap: bool, runs: bool, ignore: frozenset[int]
) -> None:
    expected = [j >= start and is_copied(ids, j, n, nonoverlap, runs, ignore) for j in range(len(ids))]
    assert span_labels(ids, n, start, nonoverlap, runs, ignore).tolist() == expected


def test_span_options_on_a_ruler() -> None:
    ruler = [1] + [7] * 8
    assert span_labels(ruler).tolist() == [False] * 2 + [True] * 7
    assert not span_labels(ruler, nonoverlap=True).any()
    assert not span_labels(ruler, ignore_runs=True).any()
    assert not span_labels(ruler, ignore=frozenset({7})).any()


def expected_row(
    ids: list[int], prompt: int, t: int, c: LabelConfig, stopped: bool, template: frozenset[int]
) -> dict[str, object]:
    n = t + 2
    context = ids[:n]
    found = [p for p in range(c.kappa, n) if context[p - c.kappa : p] == context[n - c.kappa :]]
    limit = max(32, c.kappa)

    def length(p: int) -> int:
        return max(k for k in range(1, min(p, limit) + 1) if context[p - k : p] == context[-k:])

    starts = sorted(found, key=lambda p: (length(p), p), reverse=True)[: c.candidates]
    accepted, censored = 0, False
    for p in starts:
        candidate, truth = [context[p + k % (n - p)] for k in range(c.depth)], ids[n:]
        agreed = max(k for k in range(len(candidate) + 1) if candidate[:k] == truth[:k] and k <= len(truth))
        accepted = max(accepted, agreed)
        censored |= agreed == len(truth) < len(candidate) and not stopped
    row: dict[str, object] = {
        "position": t,
        "token": ids[t],
        "pending": ids[t + 1],
        "match_length": max(map(length, found), default=0),
        "occurrences": len(found),
        "distance": n - starts[0] if starts else 0,
        "agreement": np.float32(np.mean([ids[p] == ids[starts[0]] for p in starts])) if starts else 0.0,
        "source": ("prompt" if starts[0] < prompt else "output") if starts else "",
        "accepted": accepted,
        "censored": censored,
        "follow": -1 if not starts or (censored and accepted < c.follow_m) else int(accepted >= c.follow_m),
    }
    ignore = template if c.ignore_template else frozenset()
    for ahead in range(3):
        j = t + ahead
        known = j < len(ids) and (stopped or j + c.span_n <= len(ids))
        label = known and is_copied(ids, j, c.span_n, c.nonoverlap, c.ignore_runs, ignore)
        row[f"span_{ahead}"] = int(label) if known else -1
    return row


@st.composite
def label_configs(draw: st.DrawFn, kappas: tuple[int, ...] = (1, 2, 3, 4, 5)) -> LabelConfig:
    depth = draw(st.integers(1, 12))
    return LabelConfig(
        span_n=draw(st.integers(1, 6)),
        nonoverlap=draw(st.booleans()),
        ignore_runs=draw(st.booleans()),
        ignore_template=draw(st.booleans()),
        kappa=draw(st.sampled_from(kappas)),
        candidates=draw(st.integers(1, 6)),
        depth=depth,
        follow_m=draw(st.integers(1, depth)),
    )


@st.composite
def copying_texts(draw: st.DrawFn) -> list[int]:
    """Texts of many tokens in which long spans return: match lengths and candidates beyond every limit."""
    ids = draw(st.lists(st.integers(0, 30), min_size=8, max_size=60))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(ids) - 2))
        size = draw(st.integers(1, 50))
        ids = ids + ids[start : start + size] + draw(st.lists(st.integers(0, 30), max_size=2))
    return ids


@given(copying_texts(), label_configs(kappas=(1, 5, 20, 40)), st.booleans(), st.data())
def test_rows_with_long_copies_are_the_definition(
    ids: list[int], config: LabelConfig, stopped: bool, data: st.DataObject
) -> None:
    check_rows(ids, data.draw(st.integers(1, len(ids))), config, stopped)


@given(texts.filter(bool), label_configs(), st.booleans(), st.data())
def test_rows_are_the_definition(ids: list[int], config: LabelConfig, stopped: bool, data: st.DataObject) -> None:
    check_rows(ids, data.draw(st.integers(1, len(ids))), config, stopped)


def check_rows(ids: list[int], prompt: int, config: LabelConfig, stopped: bool) -> None:
    template = frozenset({0})
    columns = follow_rows(ids, prompt, config, stopped, template)
    expected = [expected_row(ids, prompt, t, config, stopped, template) for t in range(prompt - 1, len(ids) - 1)]
    assert {len(column) for column in columns.values()} == {len(expected)}
    for at, row in enumerate(expected):
        assert {name: column[at].item() for name, column in columns.items()} == row


@given(st.one_of(texts.filter(bool), copying_texts()), label_configs(), st.booleans(), st.data())
def test_what_a_cut_text_tells_the_whole_text_confirms(
    ids: list[int], config: LabelConfig, stopped: bool, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(1, len(ids)))
    cut = data.draw(st.integers(prompt, len(ids)))
    part, whole = (follow_rows(text, prompt, config, end) for text, end in ((ids[:cut], False), (ids, stopped)))
    rows = len(part["position"])
    for name in ("follow", "span_0", "span_1", "span_2"):
        known = part[name] != -1
        assert (part[name][known] == whole[name][:rows][known]).all(), name
    decided = ~part["censored"]
    assert (part["accepted"][decided] == whole["accepted"][:rows][decided]).all()
    assert (part["accepted"] <= whole["accepted"][:rows]).all()  # a lower bound where it is censored
    for m in range(1, config.depth + 1):
        labels, later = (follow_labels(c["match_length"], c["accepted"], c["censored"], m) for c in (part, whole))
        assert (labels[labels != -1] == later[:rows][labels != -1]).all()


def test_a_cut_text_leaves_its_end_open() -> None:
    prompt, copy = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6]
    cut = follow_rows(prompt + copy, len(prompt), stopped=False)
    ended = follow_rows(prompt + copy, len(prompt), stopped=True)
    assert cut["position"].tolist() == [8, 9, 10, 11, 12, 13]
    assert cut["match_length"].tolist() == [0, 0, 0, 0, 5, 6]
    assert cut["accepted"].tolist() == [0, 0, 0, 0, 1, 0]
    assert cut["censored"].tolist() == [False] * 4 + [True, True]
    assert not ended["censored"].any()
    assert cut["follow"].tolist() == [-1] * 4 + [1, -1]
    assert ended["follow"].tolist() == [-1] * 4 + [1, 0]
    assert cut["span_1"].tolist() == [1, 1, -1, -1, -1, -1]
    assert ended["span_1"].tolist() == [1] * 6
    assert ended["span_2"].tolist() == [1] * 5 + [-1]


def test_follow_for_another_m() -> None:
    length, accepted = np.array([5, 5, 0, 6]), np.array([3, 1, 0, 2])
    censored = np.array([True, False, False, True])
    assert follow_labels(length, accepted, censored, 3).tolist() == [1, 0, -1, -1]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"follow_m is 21; it must lie between 1 and depth \(20\)"):
        LabelConfig(follow_m=21)
    with pytest.raises(ValueError, match="kappa is 0; it must be 1 or more"):
        LabelConfig(kappa=0)
    with pytest.raises(ValueError, match="span_n is 0"):
        LabelConfig(span_n=0)
    with pytest.raises(ValueError, match="prompt_length is 4; it must lie between 1 and the text's 3 tokens"):
        follow_rows([1, 2, 3], 4)


@given(texts.filter(lambda ids: len(ids) > 3), st.integers(1, 2))
def test_outcomes_are_those_of_the_first_candidate(ids: list[int], kappa: int) -> None:
    config = LabelConfig(kappa=kappa, candidates=3)
    rows = follow_rows(ids, 2, config)
    found = outcomes(ids, rows)
    for t, name in zip(rows["position"].tolist(), found, strict=True):
        [matches] = document_matches(ids, [t], config.match)
        first = [ids[start] for start in matches.starts]
        if not first or t + 2 == len(ids):
            assert name == ""
        elif ids[t + 2] == first[0]:
            assert name == "genuine"
        else:
            assert name == ("other" if ids[t + 2] in first else "accidental")


def test_outcomes_of_a_known_text() -> None:
    ids = [1, 2, 1, 3, 1, 2, 4, 1, 5]  # after 1: 2, 3, 2, then 5
    assert outcomes(ids, follow_rows(ids, 2, LabelConfig(kappa=1))) == [
        "accidental",
        "",
        "other",
        "accidental",
        "",
        "accidental",
        "",
    ]
