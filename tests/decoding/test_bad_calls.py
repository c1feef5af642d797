"""Calls that cannot be carried out name the value that was wrong, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations.target import TargetError
from decoding.decoder import Decoder
from decoding.modes import DecodingError


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, b"ab", {"role": "user", "content": "x"}, np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1)],
        [True, False], [1, "a"], [1.5], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": "x"}, "y"], [{"content": "x"}], [-1], [64], "\ud800", "", [], [""],
    ],
    ids=repr,
)  # fmt: skip
def test_prompts(small_target, prompt) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((DecodingError, TargetError), match=r"prompt|chat message|token id"):
        Decoder(small_target()).generate(prompt, mode="ar", max_new_tokens=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", "a"), ("max_new_tokens", 2.5), ("max_new_tokens", None), ("batch", 1.5), ("mode", None),
        ("temperature", "a"), ("temperature", None), ("top_k", 1.5), ("top_p", None), ("seed", 1.5), ("seed", None),
        ("stop", 5), ("stop", ["a", 5]), ("kappa", "a"), ("kappa", 2.5), ("depth", None), ("tau", "x"), ("zorp", 1),
    ],
)  # fmt: skip
def test_options(small_target, name: str, value: object) -> None:  # type: ignore[no-untyped-def]
    options = {"mode": "ar", name: value}
    with pytest.raises(DecodingError, match=name) as caught:
        Decoder(small_target()).generate([1, 2], **options)
    assert name in ("zorp", "stop") or repr(value) in str(caught.value)
