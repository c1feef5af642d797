"""Capturing: what a row and its state are, and which captures may be continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.store import CaptureStore, StoreError
from activations.target import Target

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
        (TEXTS, replace(CONFIG, seed=1), "config differ"),
        (TEXTS, replace(CONFIG, sites=("resid_mid.1",)), "sites, config differ"),
    ):
        with pytest.raises(StoreError, match=says):
            capture(target, other, store.folder, config)
    with pytest.raises(StoreError, match="attention differ"):
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


def test_a_base_model_continues_the_bare_text(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    assert not target.tokenizer.chat_template
    messages = [{"role": "system", "content": "ABC"}, {"role": "user", "content": "abc"}]
    assert target.encode_messages(messages) == target.encode("ABC\n\nabc")
