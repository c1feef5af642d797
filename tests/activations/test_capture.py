"""Capturing: what a row and its state are, and which captures may be continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from activations import capture as capture_module
from activations import store as store_module
from activations.capture import CaptureConfig, capture, estimate_bytes, suitable, token_class
from activations.causal import CausalConfig, causal_drops, document_matches
from activations.corpus import Prompt, Skipped
from activations.generation import Request, complete
from activations.labels import LabelConfig
from activations.store import CaptureStore, StoreError
from activations.target import Target, TargetError

CONFIG = CaptureConfig(sites=("resid_mid.1", "resid_post.2"), max_new_tokens=24, batch=2)


def prompts(*texts: str) -> list[Prompt]:
    return [
        Prompt(f"p{i}", "qa", f"g{i}", "train", None, ({"role": "user", "content": t},)) for i, t in enumerate(texts)
    ]


TEXTS = prompts("ABCDABCDABCD", "list:0;1;2;", "aaaa")


@pytest.fixture(scope="module")
def store(small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    return capture(small_target("llama"), TEXTS, tmp_path_factory.mktemp("store") / "s", CONFIG)


def test_a_state_is_that_of_the_anchor_and_has_not_seen_the_pending_token(
    store: CaptureStore, small_target: Callable[..., Target]
) -> None:
    """Against transformers' own forward over nothing but the tokens up to the anchor."""
    target = small_target("llama")
    rows, states = store.rows(), store.states("resid_post.2")
    assert len(states) == len(rows["position"]) == len(store)
    for number, prompt in enumerate(TEXTS):
        mine = np.flatnonzero(rows["document"] == number)
        ids = target.encode_messages(prompt.messages)
        assert rows["position"][mine[0]] == len(ids) - 1, "the first anchor is the last prompt position"
        ids += rows["pending"][mine].tolist()
        for row in mine[:: max(1, len(mine) // 4)]:
            t = int(rows["position"][row])
            assert (rows["token"][row], rows["pending"][row]) == (ids[t], ids[t + 1])
            found = target.model(torch.tensor([ids[: t + 1]]), output_hidden_states=True)
            assert torch.allclose(found.hidden_states[3][0, -1], states[row], atol=1e-5)
            law = found.logits[0, -1].softmax(-1)
            assert rows["max_prob"][row] == pytest.approx(float(law.max().detach()), abs=1e-5)
            assert int(law.argmax()) == ids[t + 1]


def test_the_leak_check_is_the_next_position_s_logits(store: CaptureStore, small_target: Callable[..., Target]) -> None:
    target, rows = small_target("llama"), store.rows()
    known = np.flatnonzero(np.isfinite(rows["next_logprob"]))
    assert len(known) > 5 and (rows["match_length"][known] > 0).all()
    for row in known[:: len(known) // 5]:
        mine = np.flatnonzero(rows["document"] == rows["document"][row])
        ids = target.encode_messages(TEXTS[rows["document"][row]].messages) + rows["pending"][mine].tolist()
        context = ids[: rows["position"][row] + 2]
        starts = [p for p in range(5, len(context)) if context[p - 5 : p] == context[-5:]]
        logp = target.model(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert rows["next_logprob"][row] == pytest.approx(float(logp[context[starts[-1]]].detach()), abs=1e-4)


def test_a_capture_goes_on_at_the_first_missing_shard(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path
) -> None:
    class Cut(Exception):
        pass

    def cut(done: int, total: int) -> None:
        if done == 3:
            raise Cut

    with pytest.raises(Cut):
        capture(small_target("llama"), TEXTS, tmp_path / "s", CONFIG, cut)
    assert [s["documents"] for s in CaptureStore.open(tmp_path / "s").shards] == [[0, 1]]
    again = capture(small_target("llama"), TEXTS, tmp_path / "s", CONFIG)
    again.verify()
    for name, column in store.rows().items():
        assert np.array_equal(again.rows()[name], column, equal_nan=column.dtype.kind == "f"), name
    assert torch.equal(again.states("resid_mid.1"), store.states("resid_mid.1"))


def test_another_capture_is_not_continued(store: CaptureStore, small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    for other, config, says in (
        (prompts("ABCDABCDABCD", "another", "aaaa"), CONFIG, "prompts differ"),
        (TEXTS[:2], CONFIG, "prompts differ"),
        (TEXTS, replace(CONFIG, seed=1), r"other settings than this run's: config.seed \(0 and 1\) differ"),
        (TEXTS, replace(CONFIG, labels=LabelConfig(kappa=3)), r"config.labels.kappa \(5 and 3\)"),
        (
            TEXTS,
            replace(CONFIG, sites=("resid_mid.1",)),
            r"sites \(only the first has resid_post.2\), config.sites \(only .*\) differ",
        ),
    ):
        with pytest.raises(StoreError, match=says):
            capture(target, other, store.folder, config)
    with pytest.raises(StoreError, match=r"attention \(\"folded\" and \"eager\"\) differ"):
        capture(small_target("llama", "eager"), TEXTS, store.folder, CONFIG)
    assert len(capture(target, TEXTS, store.folder, CONFIG)) == len(store)


def test_only_rows_with_a_match_are_kept_if_asked(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path
) -> None:
    few = capture(small_target("llama"), TEXTS, tmp_path / "m", replace(CONFIG, selection="matches"))
    kept = store.rows()["match_length"] > 0
    assert 0 < len(few) == kept.sum() < len(store)
    assert np.array_equal(few.rows()["position"], store.rows()["position"][kept])
    assert torch.equal(few.states("resid_mid.1"), store.states("resid_mid.1")[torch.from_numpy(kept)])


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_kth_anchor_of_a_document_is_kept(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path, every: int
) -> None:
    few = capture(small_target("llama"), TEXTS, tmp_path / "e", replace(CONFIG, selection="every", every=every))
    rows = store.rows()
    kept: list[int] = []
    for number in range(len(TEXTS)):
        kept += np.flatnonzero(rows["document"] == number).tolist()[::every]
    assert np.array_equal(few.rows()["position"], rows["position"][kept])
    assert torch.equal(few.states("resid_mid.1"), store.states("resid_mid.1")[torch.tensor(kept)])


def test_all_positions_are_kept_as_whole_texts(
    store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = small_target("llama")
    config = replace(CONFIG, selection="all", sites=("eagle", "resid_mid.1"))
    whole = capture(target, TEXTS, tmp_path / "a", config)
    assert whole.sites == ["resid_pre.1", "resid_pre.2", "resid_pre.3", "resid_post.3", "resid_mid.1"]
    anchors = store.rows()
    assert sum(s["written"] for s in whole.shards) == len(store)
    for number, prompt in enumerate(TEXTS):
        rows, states = whole.document(number)
        length = len(target.encode_messages(prompt.messages))
        ids = [*target.encode_messages(prompt.messages), *rows["pending"][length - 1 :].tolist()]
        assert [*rows["token"].tolist(), int(rows["pending"][-1])] == ids
        assert rows["position"].tolist() == list(range(len(ids) - 1))
        assert rows["loss_mask"].tolist() == [n >= length - 1 for n in range(len(ids) - 1)]
        assert (rows["group"][0], rows["split"][0], rows["family"][0]) == (prompt.group, "train", "qa")
        mine = anchors["document"] == number
        assert rows["pending"][rows["loss_mask"]].tolist() == anchors["pending"][mine].tolist()
        written = torch.from_numpy(np.flatnonzero(rows["loss_mask"]))
        assert torch.equal(states["resid_mid.1"][written], store.states("resid_mid.1")[torch.from_numpy(mine)])


def test_the_batch_changes_no_state(store: CaptureStore, small_target: Callable[..., Target], tmp_path: Path) -> None:
    """States come from one forward a document, so that what shares its batch or its shard does not matter."""
    for batch in (1, 3):
        other = capture(small_target("llama"), TEXTS, tmp_path / f"{batch}", replace(CONFIG, batch=batch))
        assert np.array_equal(other.rows()["pending"], store.rows()["pending"])
        assert all(torch.equal(other.states(site), store.states(site)) for site in store.sites)


@pytest.mark.parametrize("selection", ["anchors", "matches", "every", "all"])
def test_the_size_is_an_upper_bound_and_near_where_it_can_be(
    small_target: Callable[..., Target], tmp_path: Path, selection: Literal["anchors", "matches", "every", "all"]
) -> None:
    target = small_target("llama")
    config = replace(CONFIG, selection=selection, every=5)
    bound = estimate_bytes(target, TEXTS, config)
    states = 4 * target.width * len(CONFIG.sites) * len(capture(target, TEXTS, tmp_path / "s", config))
    assert states <= bound
    if selection in ("anchors", "all"):  # no completion of these stops early
        assert bound <= 1.3 * states


def test_a_store_that_the_disk_cannot_hold_is_refused_before_it_is_begun(
    small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target("llama")
    bound = estimate_bytes(target, TEXTS, CONFIG)
    monkeypatch.setattr(store_module, "free_bytes", lambda folder: store_module.MARGIN + bound - 1)
    with pytest.raises(StoreError, match="or store less"):
        capture(target, TEXTS, tmp_path / "s", CONFIG)
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(store_module, "free_bytes", lambda folder: store_module.MARGIN + bound)
    assert len(capture(target, TEXTS, tmp_path / "s", CONFIG)) > 0


def test_a_disk_that_fills_up_is_refused_between_shards(
    small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows have a match is not known before: what is written so far tells how much more there will be."""
    target = small_target("llama")
    texts = prompts("ABCDABCDABCD", "list:0;1;2;", "aaaa", "0101", "XYZ")
    config = replace(CONFIG, selection="matches", batch=1)
    most = max(estimate_bytes(target, [text], config) for text in texts)
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="or store less"):
        patch.setattr(store_module, "free_bytes", lambda folder: store_module.MARGIN + most)
        capture(target, texts, tmp_path / "s", config)
    kept = len(CaptureStore.open(tmp_path / "s").shards)
    assert 1 <= kept < 5
    assert len(capture(target, texts, tmp_path / "s", config).shards) == 5


def test_states_that_are_not_finite_end_the_run_and_name_the_prompt(
    small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = capture_module.read_document

    def broken(target: Target, prompt: Prompt, *rest: Any) -> Any:
        rows, states = read(target, prompt, *rest)
        if prompt.id == "p2":
            states["resid_mid.1"][1, 0] = float("inf")
        return rows, states

    monkeypatch.setattr(capture_module, "read_document", broken)
    target = small_target("llama")
    with pytest.raises(StoreError, match=r"1 of \d+ rows of shard 1 .* in document 2 \(p2\); at most a share of 0.01"):
        capture(target, TEXTS, tmp_path / "s", CONFIG)
    assert len(CaptureStore.open(tmp_path / "s").shards) == 1
    made = capture(target, TEXTS, tmp_path / "s", replace(CONFIG, max_nonfinite=0.5))  # goes on, and says so
    assert [s["nonfinite_rows"] for s in made.shards] == [{}, {"2": 1}]


def test_a_capture_of_nothing_is_refused(small_target: Callable[..., Target], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        capture(small_target("llama"), [], tmp_path / "s", CONFIG)
    assert not (tmp_path / "s").exists()


def test_documents_without_a_match_leave_an_empty_shard(small_target: Callable[..., Target], tmp_path: Path) -> None:
    config = replace(CONFIG, selection="matches", max_new_tokens=1)
    made = capture(small_target("llama"), prompts("AB", "ABCDABCDABCD"), tmp_path / "s", replace(config, batch=1))
    made.verify()
    assert made.shards[0]["documents"] == [] and len(made.states("resid_mid.1")) == len(made)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"selection": "some"}, "unknown selection 'some'"),
        ({"every": 0}, "every is 0"),
        ({"max_nonfinite": 1.5}, "max_nonfinite is 1.5"),
        ({"max_nonfinite": float("nan")}, "max_nonfinite is nan"),
        ({"sites": ()}, "no sites"),
    ],
)
def test_a_wrong_config_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CaptureConfig(**options)


def test_settings_that_decide_nothing_do_not_keep_a_capture_from_going_on() -> None:
    assert CONFIG.described() == replace(CONFIG, every=3, max_nonfinite=0.5).described()
    every = replace(CONFIG, selection="every")
    assert every.described() != replace(every, every=3).described()


def test_a_base_model_continues_the_bare_text(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    assert not target.tokenizer.chat_template
    messages = [{"role": "system", "content": "ABC"}, {"role": "user", "content": "abc"}]
    assert target.encode_messages(messages) == target.encode("ABC\n\nabc")


def test_causal_columns_are_kept_on_request(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    removal = CausalConfig(causal_batch=3, causal_keep=1)
    config = replace(CONFIG, selection="matches", causal=True, removal=removal)
    made = capture(target, TEXTS, tmp_path / "causal", config)
    rows = made.rows()
    for number, prompt in enumerate(TEXTS):
        ids = target.encode_messages(prompt.messages)
        (done,) = complete(target, [Request(0, ids, CONFIG.max_new_tokens)], rows=1)
        positions = rows["position"][rows["document"] == number]
        found = document_matches(ids + done.tokens, positions, config.labels.match)
        for name, values in causal_drops(target, ids + done.tokens, positions, found, removal).items():
            np.testing.assert_array_equal(rows[name][rows["document"] == number], values)
    assert np.isfinite(rows["causal_mask"]).any()
    assert made.manifest["config"]["removal"]["causal_keep"] == 1
    assert set(config.described()) - set(replace(config, causal=False).described()) == {"causal", "removal"}
    with pytest.raises(ValueError, match="are about anchors"):
        replace(config, selection="all")


def test_states_at_the_source_are_those_of_the_places_that_the_match_names(
    small_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = small_target("llama")
    config = replace(CONFIG, source_sites=("resid_mid.1",), labels=LabelConfig(kappa=1))
    made = capture(target, TEXTS, tmp_path / "s", config)
    assert made.sites == ["resid_mid.1", "resid_post.2", "resid_mid.1@source", "resid_mid.1@candidate"]
    whole = capture(target, TEXTS, tmp_path / "all", replace(CONFIG, selection="all", labels=LabelConfig(kappa=1)))
    rows, matched, behind = made.rows(), 0, 0
    for row in range(len(made)):
        text, kept = whole.document(int(rows["document"][row]))
        states = kept["resid_mid.1"]
        start = int(rows["position"][row]) + 2 - int(rows["distance"][row])
        found = [made.states(f"resid_mid.1@{place}")[row] for place in ("source", "candidate")]
        if not rows["match_length"][row]:
            assert not any(state.any() for state in found)
            continue
        assert [*text["token"], rows["pending"][row]][start - 1] == rows["pending"][row]
        matched += 1
        behind += start < 2
        twin = states[start - 2] if start >= 2 else torch.zeros_like(states[0])
        assert torch.allclose(found[0], twin, atol=1e-5)
        assert torch.allclose(found[1], states[min(start, int(rows["position"][row]))], atol=1e-5)
    assert matched > 10


def test_lookback_is_what_the_weights_of_attention_say(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    made = capture(target, TEXTS, tmp_path / "s", replace(CONFIG, lookback=True))
    rows = made.rows()
    model = small_target("llama", "eager").model
    for number, prompt in enumerate(TEXTS):
        mine = np.flatnonzero(rows["document"] == number)
        ids = target.encode_messages(prompt.messages)
        start = len(ids)
        ids = ids + rows["pending"][mine].tolist()
        weights = model(torch.tensor([ids[:-1]]), output_attentions=True).attentions
        for row in mine:
            t = int(rows["position"][row])
            ratios = []
            for layer in weights:
                for head in layer[0]:
                    p, n = head[t, :start].mean(), head[t, start : t + 1].mean() if t >= start else torch.tensor(0)
                    ratios.append(float(p / (p + n)))
            assert made.states("lookback")[row].tolist() == pytest.approx(ratios, abs=1e-5)


def test_without_a_match_states_are_zeros_whatever_the_anchor_s_are() -> None:
    states = torch.full((4, 3), torch.inf)
    states[1] = torch.nan
    states[0] = 7.0
    rows = {
        "distance": np.array([0, 2, 0]),
        "match_length": np.array([0, 5, 0]),
        "position": np.array([1, 2, 3]),
    }
    for place in ("source", "candidate"):
        found = capture_module._elsewhere(states, place, rows)
        assert not found[[0, 2]].any(), place
    assert capture_module._elsewhere(states, "source", rows)[1].tolist() == [7.0] * 3


def test_attention_that_hides_its_weights_is_refused_before_anything_is_written(
    small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "read_shard", lambda *rest: pytest.fail("text was generated"))
    config = replace(CONFIG, lookback=True)
    for ask in (estimate_bytes, lambda *rest: capture(rest[0], TEXTS, tmp_path / "s", config)):
        with pytest.raises(TargetError, match="'eager', whose weights cannot be seen: capture without lookback"):
            ask(small_target("llama", "eager"), TEXTS, config)
    assert not (tmp_path / "s").exists()


def test_prompts_that_the_target_cannot_take_are_told(small_target: Callable[..., Target]) -> None:
    target, skipped = small_target("llama"), Skipped()
    texts = prompts("ABC", "A" * target.max_length, " ", "DEF")
    assert [p.id for p in suitable(target, texts, skipped)] == ["p0", "p3"]
    assert skipped.count == 2
    assert skipped.first[0].startswith("prompt p1: the prompt has") and "p2: the prompt is empty" in skipped.first[1]


def test_the_class_of_the_pending_token_is_kept(small_target: Callable[..., Target], store: CaptureStore) -> None:
    target, rows = small_target("llama"), store.rows()
    for token, found in zip(rows["pending"].tolist(), rows["pending_class"].tolist(), strict=True):
        assert found == token_class(target, token)
    said = {text: token_class(target, target.tokenizer.convert_tokens_to_ids(text)) for text in ("A", "1", ";")}
    assert said == {"A": "word", "1": "number", ";": "punctuation"}
    assert {token_class(target, token) for token in target.tokenizer.all_special_ids} <= {"special"}
