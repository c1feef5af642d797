"""Engines that several tests ask, and the texts that all of them must write."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import TOKENS, engine, settings

from decoding.peers.process import Peer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here: make test-serving installs it"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines log to."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def plain(folder: Path) -> Iterator[Peer]:
    """vLLM without any drafting."""
    peer = engine("none", settings("none"), folder)
    yield peer
    peer.close()


@pytest.fixture(scope="session")
def switch(folder: Path) -> Iterator[Peer]:
    """vLLM with the switch, eight tokens a draft."""
    peer = engine("switchsd", settings("switchsd"), folder)
    yield peer
    peer.close()


@pytest.fixture(scope="session")
def written(plain: Peer) -> Callable[..., list[list[int]]]:
    """written(prompts, max_new_tokens=TOKENS): what the target writes by itself, greedily; asked once."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def texts(prompts: list[list[int]], max_new_tokens: int = TOKENS) -> list[list[int]]:
        new = [p for p in prompts if (tuple(p), max_new_tokens) not in known]
        if new:
            batch = plain.ask_all(new, max_new_tokens)
            known.update({(tuple(p), max_new_tokens): a.tokens for p, a in zip(new, batch.answers, strict=True)})
        return [known[tuple(p), max_new_tokens] for p in prompts]

    return texts
