"""Text that comes in pieces is the text of the whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from activations.target import Target
from decoding.text import TextStream


def byte_target():  # type: ignore[no-untyped-def]
    """One token a byte, so that every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    return SimpleNamespace(
        tokenizer=tokenizer, decode=lambda ids: Target.decode(SimpleNamespace(tokenizer=tokenizer), ids)
    )  # type: ignore[arg-type]


BYTES = byte_target()
texts = st.text(st.sampled_from("ab .é漢😀\n"), max_size=20)


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    at = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(at)]


@given(texts, st.lists(st.integers(0, 100), max_size=8))
def test_pieces_add_up(text: str, cuts: list[int]) -> None:
    stream = TextStream(BYTES)
    shown = [stream.push(part) for part in pieces(BYTES.tokenizer(text)["input_ids"], cuts)]
    assert not any("\N{REPLACEMENT CHARACTER}" in s for s in shown)
    shown.append(stream.finish())
    assert "".join(shown) == stream.text == text


@given(texts, st.lists(st.text(st.sampled_from("ab .é\n"), min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_stop_string_ends_the_text_before_itself(text: str, stops: list[str]) -> None:
    stream = TextStream(BYTES, stops)
    shown = ""
    for token in BYTES.tokenizer(text)["input_ids"]:
        shown += stream.push([token])
        assert text.startswith(shown)
        if stream.stopped:
            break
    shown += stream.finish()
    ends = [text.find(s) for s in stops if s in text]
    assert stream.stopped == bool(ends)
    assert shown == (text[: min(ends)] if ends else text)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, ["\n\nUser:"])
    ids = BYTES.tokenizer("yes\n\nUs!")["input_ids"]
    shown = [stream.push([i]) for i in ids]
    assert shown == ["y", "e", "s", "", "", "", "", "\n\nUs!"]


@pytest.mark.parametrize("broken", [[0xE9], [0xF0, 0x9F]])
def test_half_a_character_at_the_end_is_shown_at_the_end(broken: list[int]) -> None:
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = {bytes([b]): i for b in range(128) for i, c in enumerate(order) if c == chr(b)}
    ids = BYTES.tokenizer("é" if len(broken) == 1 else "😀")["input_ids"][: len(broken)]
    assert whole and ids
    stream = TextStream(BYTES)
    assert stream.push(ids) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
