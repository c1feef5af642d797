"""llama.cpp as a peer (see `process.py`): a script for any Python, which imports nothing of this project.

Runs a llama-server binary, or the server inside xllamacpp, on one GGUF file and asks it over its local address.
Times are the server's own: reading the prompt up to the first token, and from there to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

DRAFT = 10


def main() -> None:
    """Start a server, say so, and answer a question a line until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--server", default="", help="a llama-server binary; without one, xllamacpp")
    parser.add_argument("--ngram", action="store_true", help="draft from n-grams of the context (ngram-simple)")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    with contextlib.ExitStack() as stack:
        try:
            address, what = (binary if arguments.server else library)(arguments, stack)
        except Exception as error:  # whatever it is, the other side must be told
            reply({"error": f"llama.cpp cannot be started: {error}"})
            return
        differs = f"weights of {os.path.basename(arguments.gguf)}, quantized; its own attention and KV cache"
        reply({"ready": what, "differs": differs})
        for line in sys.stdin:
            try:
                reply(ask(address, json.loads(line)))
            except Exception as error:
                reply({"error": f"llama.cpp gave no answer: {error}"})


def library(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str, str]:
    """Start the server inside xllamacpp: its address, and its name with the version."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments.gguf
    params.n_ctx, params.n_parallel = arguments.context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    if arguments.ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    stack.callback(lambda: server)  # kept alive
    return server.listening_address, f"xllamacpp {getattr(xllamacpp, '__version__', '')}".strip()


def binary(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str, str]:
    """Start a llama-server binary: its address, and its name with the version.

    Raises RuntimeError if it ends, or is not ready after 240 seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [arguments.server, "-m", arguments.gguf, "--host", "127.0.0.1", "--port", str(port), "-np", "1"]
    command += ["-t", str(arguments.threads), "-tb", str(arguments.threads), "-c", str(arguments.context)]
    if arguments.ngram:
        command += ["--spec-type", "ngram-simple", "--draft-max", str(DRAFT)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
    stack.callback(process.terminate)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 240
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"{arguments.server} ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{arguments.server} is not ready after 240 s") from None
            time.sleep(0.2)
    version = subprocess.run([arguments.server, "--version"], capture_output=True, text=True, check=False)
    told = (version.stdout + version.stderr).strip().splitlines()
    return address, next((line for line in told if "version" in line), arguments.server)


def ask(address: str, question: dict[str, Any]) -> dict[str, Any]:
    """The greedy answer to a prompt of token ids, with its steps and times in seconds, as `process.py` wants it."""
    body = {
        "prompt": question["prompt"], "n_predict": question["max_new_tokens"], "temperature": 0, "top_k": 1,
        "samplers": ["top_k"], "return_tokens": True, "cache_prompt": False, "stream": False,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    tokens = [int(t) for t in found["tokens"]]
    timings = found["timings"]
    drafted, kept = int(timings.get("draft_n") or 0), int(timings.get("draft_n_accepted") or 0)
    decoded = int(found["tokens_predicted"]) - 1
    stops = question["stop"]
    if found.get("stop_type") == "eos" and stops and not set(tokens[-1:]) & set(stops):
        tokens.append(stops[0])  # some versions choose the end of a text without writing it
    tokens = tokens[: question["max_new_tokens"]]
    return {
        "tokens": tokens,
        "decoded": decoded,
        "steps": decoded - kept if drafted or not kept else 0,
        "first_token_seconds": timings["prompt_ms"] / 1e3,
        "decode_seconds": timings["predicted_ms"] / 1e3,
    }


if __name__ == "__main__":
    main()
