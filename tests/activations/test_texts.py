"""The texts of a store are had again from the prompts and the rows, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.generation import Request, complete
from activations.labels import LabelConfig
from activations.store import CaptureStore, StoreError
from activations.target import Target
from activations.texts import prompts_of, stored_text

PROMPTS = [
    Prompt(f"p{i}", "user", f"p{i}", None, None, ({"role": "user", "content": text},))
    for i, text in enumerate(["0123012", "abab", "klmklmkl", "5A5A5A", "QRQRQ"])
]


@pytest.fixture(scope="module")
def target(small_target: Callable[..., Target]) -> Target:
    return small_target("llama")


def make(target: Target, folder: Path, selection: str = "anchors") -> CaptureStore:
    config = CaptureConfig(
        ("resid_post.1",),
        max_new_tokens=12,
        batch=2,
        labels=LabelConfig(kappa=1),
        selection=selection,  # type: ignore[arg-type]
    )
    return capture(target, PROMPTS[::2], folder, config)


def test_texts_are_what_the_target_wrote(target: Target, tmp_path: Path) -> None:
    store = make(target, tmp_path / "s")
    rows = store.rows()
    requests = [Request(i, target.encode_messages(p.messages), 12) for i, p in enumerate(PROMPTS[::2])]
    for completion in complete(target, requests, rows=1):
        number = completion.request.number
        text = stored_text(target, rows, number, PROMPTS[::2][number])
        assert text.ids == completion.request.prompt + completion.tokens
        assert (text.document, text.prompt) == (number, len(completion.request.prompt))


def test_prompts_are_found_by_their_hash(target: Target, tmp_path: Path) -> None:
    manifest = make(target, tmp_path / "s").manifest
    assert prompts_of(manifest, [PROMPTS[:2], PROMPTS[::2]]) == PROMPTS[::2]
    assert prompts_of(manifest, [[*PROMPTS[::2], PROMPTS[1], PROMPTS[3]]]) == PROMPTS[::2]  # the first three
    spread = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3], PROMPTS[4], PROMPTS[1]]
    assert prompts_of(manifest, [spread]) == PROMPTS[::2]  # every second one
    changed = [replace(PROMPTS[0], messages=({"role": "user", "content": "other"},)), *PROMPTS[2::2]]
    with pytest.raises(StoreError, match="the 3 prompts that this store was made of are not those given"):
        prompts_of(manifest, [changed])
    with pytest.raises(StoreError, match="does not say which prompts"):
        prompts_of({k: v for k, v in manifest.items() if k != "prompts"}, [PROMPTS])


@pytest.mark.parametrize("damage", ["prompt", "token", "gap", "none"])
def test_rows_of_another_prompt_are_refused(target: Target, tmp_path: Path, damage: str) -> None:
    rows = make(target, tmp_path / "s").rows()
    prompt, document = PROMPTS[2], 1
    if damage == "prompt":
        prompt = PROMPTS[3]
    elif damage == "token":
        rows["token"] = rows["token"] + (np.arange(len(rows["token"])) == np.flatnonzero(rows["document"] == 1)[2])
    elif damage == "gap":
        rows = {k: np.delete(v, np.flatnonzero(rows["document"] == 1)[2]) for k, v in rows.items()}
    else:
        document = 7
    with pytest.raises(StoreError, match=f"the rows of document {document} are not those of every anchor"):
        stored_text(target, rows, document, prompt)
