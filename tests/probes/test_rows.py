from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.artifact import ProbeError
from probes.rows import PARTS, check_classes, choose_sites, is_site, labels_of, manifest_hash, split_rows


@given(st.integers(0, 1000), st.floats(0.01, 0.99), st.booleans())
def test_a_group_is_in_one_part(fake_store: Any, seed: int, share: float, given_split: bool) -> None:
    rows = fake_store(length=2, split=given_split).rows()
    split = split_rows(rows, share, seed)
    for group in np.unique(rows["group"]):
        assert len(set(split.part[rows["group"] == group])) == 1
    assert set(split.part) == set(PARTS)


def test_the_validation_part_is_the_test_and_chooses_nothing(fake_store: Any) -> None:
    rows = fake_store().rows()
    part = split_rows(rows, 0.2, 0).part
    assert ((part == "test") == (rows["split"] == "validation")).all()
    groups = {p: len(set(rows["group"][part == p])) for p in ("fit", "selection")}
    assert groups["selection"] == round(0.2 * sum(groups.values()))
    assert (split_rows(rows, 0.2, 0).part == part).all()
    assert (split_rows(rows, 0.2, 1).part != part).any()


def test_counts_are_of_kept_rows(fake_store: Any) -> None:
    rows = fake_store(documents=30, length=10).rows()
    split = split_rows(rows, 0.2, 0)
    found = split.counts(rows, rows["position"] < 4)
    assert found["test"] == {"groups": 10, "documents": 10, "rows": 40}
    assert sum(found[p]["rows"] for p in PARTS) == 120


def test_near_duplicates_on_both_sides_are_refused(fake_store: Any) -> None:
    rows = fake_store().rows()
    rows["group"][rows["document"] < 2] = "same"
    with pytest.raises(ProbeError, match="group 'same' is in the train and in the validation part"):
        split_rows(rows, 0.2, 0)


@pytest.mark.parametrize(
    ("documents", "split", "says"), [(2, True, "train part has 1 group"), (2, False, "has 2 group")]
)
def test_too_few_groups(documents: int, split: bool, says: str, fake_store: Any) -> None:
    with pytest.raises(ProbeError, match=says):
        split_rows(fake_store(documents=documents, split=split).rows(), 0.2, 0)


def test_follow_is_unknown_without_a_match_and_at_a_cut() -> None:
    rows = {
        "match_length": np.array([0, 5, 5, 5, 6]),
        "accepted": np.array([0, 2, 1, 9, 3]),
        "censored": np.array([False, False, False, True, False]),
    }
    assert labels_of(rows, "follow", 2).tolist() == [-1, 1, 0, -1, 1]
    assert labels_of({"span_2": np.array([0, -1, 1])}, "span_2", 1).tolist() == [0, -1, 1]


def test_sites_by_pattern_keep_the_stores_order(fake_store: Any) -> None:
    store = fake_store(documents=3)
    assert choose_sites(store, []) == store.sites
    assert choose_sites(store, ["resid_post.*", "attn_out.1"]) == ["attn_out.1", "resid_post.1", "resid_post.2"]
    with pytest.raises(ProbeError, match=r"no captured site is 'mlp_out\.\*'; the store has embed, attn_out\.1"):
        choose_sites(store, ["embed", "mlp_out.*"])


def test_states_of_other_places_are_only_chosen_by_their_name(fake_store: Any) -> None:
    store = fake_store(documents=3)
    own = store.sites
    for name in ("resid_mid.1@source", "resid_mid.1@candidate", "lookback"):
        store._states[name] = store.states("embed")
    assert choose_sites(store, []) == choose_sites(store, ["*"]) == own
    assert choose_sites(store, ["resid_mid.*", "embed"]) == ["embed", "resid_mid.1"]
    assert choose_sites(store, ["*@candidate", "lookback"]) == ["resid_mid.1@candidate", "lookback"]
    assert choose_sites(store, ["resid_mid.1@source"]) == ["resid_mid.1@source"]
    with pytest.raises(ProbeError, match="no captured site is 'look\\*'"):
        choose_sites(store, ["look*"])
    assert is_site("embed+resid_mid.1") and is_site("attn_out.12")
    for name in ("lookback", "resid_mid.1@source", "embed+resid_mid.1@candidate", "resid_mid", ""):
        assert not is_site(name)


def test_a_part_of_one_class_is_refused() -> None:
    y = np.array([0, 1, 0, 0, 0, 1], dtype=np.int8)
    part = np.array(["fit", "fit", "selection", "selection", "test", "test"])
    with pytest.raises(ProbeError, match="the selection part has 2 rows with a known span_1 label, 0 of them positive"):
        check_classes(y, part, np.ones(6, bool), "span_1")


def test_manifest_hash_follows_the_content(fake_store: Any) -> None:
    one, other = fake_store(documents=3), fake_store(documents=3)
    other.manifest = dict(reversed(other.manifest.items()))
    assert manifest_hash(one) == manifest_hash(other)
    other.manifest["seed"] = 1
    assert manifest_hash(one) != manifest_hash(other)
