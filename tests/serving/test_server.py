"""`switchsd serve` under many streams at once, some of which end in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import TOKENS, K, prompts, tokenizer

from decoding.peers.start import VLLM

START_SECONDS = 240


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "switchsd", "serve", "smollm2", "--speculative-tokens", str(K)]
    command += [
        "--dtype",
        "float32",
        "--",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--max-model-len",
        "1024",
    ]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--block-size", "32"]
    environment = {**os.environ, **VLLM, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / "server.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    try:
        while not answers(f"{address}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(address: str) -> str:
    """What is there; nothing where nobody answers."""
    try:
        with urllib.request.urlopen(address, timeout=10) as reply:
            return reply.read().decode() or "ok"
    except (urllib.error.URLError, OSError):
        return ""


def counters(address: str) -> dict[str, float]:
    """Every counter of the endpoint, over all labels."""
    found: dict[str, float] = defaultdict(float)
    for line in answers(f"{address}/metrics").splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removesuffix("_total")] += float(value)
    return found


async def streams(address: str, asked: list[list[int]], given_up: dict[int, int]) -> list[str]:
    """The texts, all asked at once; those given up end after so many pieces."""
    from openai import AsyncOpenAI

    async def one(place: int) -> str:
        stream = await client.completions.create(
            model="smollm2", prompt=asked[place], max_tokens=TOKENS, temperature=0, stream=True
        )
        text = ""
        pieces = 0
        async for event in stream:
            text += event.choices[0].text
            pieces += 1
            if pieces == given_up.get(place):
                await stream.close()
                break
        return text

    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=300, max_retries=0) as client:
        return list(await asyncio.gather(*(one(place) for place in range(len(asked)))))


def test_thirty_two_streams_and_a_third_of_them_given_up(server: str, written: Callable[..., list[list[int]]]) -> None:
    asked = prompts(16, 16)
    expected = [tokenizer().decode(text, skip_special_tokens=True) for text in written(asked)]
    given_up = {place: 1 + place % 5 for place in range(0, len(asked), 3)}
    before = counters(server)
    texts = asyncio.run(streams(server, asked, given_up))
    for place, (text, whole) in enumerate(zip(texts, expected, strict=True)):
        assert whole.startswith(text) if place in given_up else text == whole, place
    middle = counters(server)
    assert asyncio.run(streams(server, asked, {})) == expected, "nothing is left of those given up"
    assert answers(f"{server}/health")
    after = counters(server)
    for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens", "switchsd:steps",
                 "switchsd:row_steps", "switchsd:copy_steps", "switchsd:copied_tokens_kept",
                 "switchsd:probe_score_count"):  # fmt: skip
        assert before.get(name, 0) < middle.get(name, 0) < after.get(name, 0), name
