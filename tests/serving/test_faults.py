"""What goes wrong around the switch is served as the target alone would, or refused at the start with one line."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import HEAD, PROBE, TOKENS, engine, prompts, settings, tokenizer
from scipy.stats import chi2_contingency

from decoding.peers.process import Batch, Peer, PeerError

Texts = Callable[..., list[list[int]]]


def texts(batch: Batch) -> list[list[int]]:
    return [a.tokens for a in batch.answers]


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an artifact whose config.json says something else."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- refused at the start ---------------------------------------------------------------------------


def of_another_model(config: dict[str, Any]) -> None:
    config["target"] = {**config["target"], "blocks": 24, "vocabulary": "0" * 16}
    config["target_name"] = "other-model"


def at_the_end(config: dict[str, Any]) -> None:
    config["site"] = "resid_post.29"


def inside_a_block(config: dict[str, Any]) -> None:
    config["site"] = "resid_mid.18"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_another_model, ("other-model", "do not fit|does not fit", "blocks")),
        (at_the_end, ("resid_post.29", "resid_post.28")),
        (inside_a_block, ("resid_mid.18", "resid_post.28")),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], said: Sequence[str], tmp_path: Path
) -> None:
    probe = changed(PROBE, tmp_path / "probe", change)
    peer = engine("refused", settings("switchsd", additional_config={"switchsd": {"probe": str(probe)}}), tmp_path)
    with pytest.raises(PeerError) as refused:
        peer.ask_all([[1, 2, 3]], 4)
    message = str(refused.value)
    assert "cannot be started" in message and "\n" not in message
    for part in said:
        assert any(p in message for p in part.split("|")), message
    assert peer._process is None, "it has ended"


def test_another_vllm_is_left_as_it_is(written: Texts, folder: Path) -> None:
    asked = prompts(4, 4)
    before = ["import vllm", "vllm.__version__ = '9.9.0'"]
    peer = engine("another-version", settings("switchsd"), folder, before)
    batch = peer.ask_all(asked, TOKENS)
    peer.close()
    assert texts(batch) == written(asked)
    assert batch.counters["vllm:spec_decode_num_accepted_tokens"] > 0, "its own drafter drafts"
    assert not any(name.startswith("switchsd:") for name in batch.counters)
    log = (folder / "another-version.log").read_text().splitlines()
    lines = [line for line in log if "switchsd is off" in line]
    assert len(lines) == 1 and "9.9.0" in lines[0], lines


# -- served -----------------------------------------------------------------------------------------


def test_preempted_requests_are_recomputed(written: Texts, folder: Path) -> None:
    asked = prompts(6, 8)
    room = 3 + max(map(len, asked)) // 32  # blocks of 32 tokens: the longest one, and little besides
    peer = engine("preempted", settings("switchsd", num_gpu_blocks_override=room + 1, max_model_len=32 * room), folder)
    batch = peer.ask_all(asked, TOKENS)
    peer.close()
    assert texts(batch) == written(asked)
    assert batch.counters["vllm:num_preemptions"] > 0


def test_beyond_the_length_that_the_head_was_made_for(written: Texts, folder: Path, tmp_path: Path) -> None:
    """Here the engine also does one thing after the other."""
    asked = prompts(4, 4)
    length = sorted(map(len, asked))[len(asked) // 2] + TOKENS // 2
    assert any(len(p) > length for p in asked) and any(len(p) < length < len(p) + TOKENS for p in asked)
    head = changed(HEAD, tmp_path / "head", lambda config: config.update(max_position_embeddings=length))
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 8}
    engine_settings = settings("switchsd", speculative_config=speculative, async_scheduling=False)
    peer = engine("short-head", engine_settings, folder)
    batch = peer.ask_all(asked, TOKENS)
    peer.close()
    assert texts(batch) == written(asked)


def test_requests_that_are_given_up_and_names_that_are_used_again(switch: Peer, written: Texts) -> None:
    asked = prompts(8, 7)
    given_up = {str(place): 1 + place % 7 for place in range(0, len(asked), 2)}
    for batch_prompts in (asked, asked[::-1]):  # each batch counts its requests from 0, so that names come again
        batch = switch.ask_all(batch_prompts, TOKENS, abort=given_up)
        for place, (answer, text) in enumerate(zip(batch.answers, written(batch_prompts), strict=True)):
            if str(place) in given_up:
                assert answer.tokens == text[: len(answer.tokens)]
            else:
                assert answer.tokens == text
    assert texts(switch.ask_all(asked, TOKENS)) == written(asked)


def test_one_request_alone(switch: Peer, written: Texts) -> None:
    asked = prompts(2, 2)
    assert texts(switch.ask_all(asked, TOKENS, concurrency=1)) == written(asked)


# -- sampling ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampling(folder: Path) -> Iterator[Peer]:
    # Prompts in one piece: where one with a seed is cut, vLLM 0.32 on a CPU asks a generator for what it has not.
    peer = engine("sampling", settings("switchsd", 3, max_num_batched_tokens=1024), folder)
    yield peer
    peer.close()


def test_a_seed_gives_one_text(sampling: Peer) -> None:
    asked = prompts(3, 2)
    first, again, other = (
        texts(sampling.ask_all(asked, 24, sampling={"temperature": 0.8, "seed": seed}, concurrency=1))
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_samples_have_the_targets_law(sampling: Peer, plain: Peer) -> None:
    """Three of three allowed tokens, after a prompt that repeats these: copies are drafted, kept and rejected."""
    colours = [tokenizer()(text, add_special_tokens=False)["input_ids"][0] for text in (" red", " green", " blue")]
    prompt = [colours[i] for i in (0, 1, 2, 0, 1, 0, 2, 1, 0, 1, 2, 0, 0, 1, 2, 0)]
    found = []
    for peer in (plain, sampling):
        batch = peer.ask_all([prompt] * 400, 3, sampling={"temperature": 1.0, "allowed_token_ids": colours})
        found.append(Counter(tuple(answer.tokens) for answer in batch.answers))
    assert sum(a.decoded - a.steps for a in batch.answers) > 40, "drafts were kept"
    assert sum(a.drafted for a in batch.answers) > 2 * sum(a.decoded - a.steps for a in batch.answers), "and rejected"
    table = np.array([[counts[outcome] for outcome in set(found[0]) | set(found[1])] for counts in found])
    often = table.sum(0) >= 10
    table = np.hstack([table[:, often], table[:, ~often].sum(1, keepdims=True)])
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] >= 5
    assert chi2_contingency(table).pvalue > 1e-3, table
