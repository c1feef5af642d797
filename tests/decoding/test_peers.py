"""Other engines behind a pipe, played by small scripts."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from activations.target import Target
from decoding import columns as columns_module
from decoding.bench import Bench, BenchConfig, unequal
from decoding.columns import PeerColumn, column
from decoding.decoder import Decoder
from decoding.modes import DecodingError
from decoding.peers import start as start_module
from decoding.peers.process import Peer, PeerError
from decoding.peers.start import PEERS, PeerConfig, installed, start, vllm_command
from decoding.suite import SuitePrompt

FAKE = """
import json, sys
print("loading", file=sys.stderr)
def say(message):
    print(json.dumps(message), flush=True)
{first}
for line in sys.stdin:
    question = json.loads(line)
    {answer}
"""
READY = 'say({"ready": "fake 1", "differs": "everything"})'
COUNTS = """
    n = question["max_new_tokens"]
    tokens = [(question["prompt"][-1] + i) % 63 for i in range(n)]
    took = {"first_token_seconds": 0.5, "decode_seconds": 0.1 * (n - 1)}
    say({"tokens": tokens, "decoded": n - 1, "steps": n - 1, **took})
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.peers.process.SETTLE_SECONDS", 0.0)


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Peer]:
    def make(first: str = READY, answer: str = COUNTS.strip(), **options: object) -> Peer:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("{first}", first).replace("{answer}", answer))
        return Peer("fake", [sys.executable, str(script)], {"n": 1}, log=tmp_path / "fake.log", **options)  # type: ignore[arg-type]

    return make


def test_a_peer_answers_and_ends(fake: Callable[..., Peer], tmp_path: Path) -> None:
    peer = fake()
    assert peer.about == {}
    told = peer.ask([5, 7], 4)
    assert (told.tokens, told.decoded, told.first_token_seconds) == ([7, 8, 9, 10], 3, 0.5)
    assert peer.about == {"ready": "fake 1", "differs": "everything"}
    assert peer.ask([1], 2).tokens == [1, 2]
    process = peer._process
    peer.close()
    peer.close()
    assert process is not None and process.returncode == 0
    assert "loading" in (tmp_path / "fake.log").read_text()
    assert peer.ask([1], 2).tokens == [1, 2], "a closed peer starts again"
    peer.close()


@pytest.mark.parametrize(
    ("first", "answer", "text"),
    [
        ('say({"error": "no model: get one"})', "pass", "fake: no model: get one"),
        (READY, 'say({"error": "out of memory"})', "out of memory"),
        (READY, "print('hello', flush=True)", "no JSON: 'hello'"),
        (READY, "say([1])", "said"),
        (READY, 'say({"tokens": [1]})', "another form"),
        (READY, COUNTS.replace("range(n)", "range(n + 1)").strip(), "wrote 5 tokens where 1 to 4"),
        (READY, COUNTS.replace("range(n)", "range(0)").strip(), "wrote 0 tokens"),
        (READY, "sys.exit(3)", "ended by itself"),
        ("import os; os._exit(1)", "pass", "ended by itself"),
    ],
)
def test_a_peer_that_fails_is_named_and_ended(fake: Callable[..., Peer], first: str, answer: str, text: str) -> None:
    peer = fake(first, answer)
    with pytest.raises(PeerError, match=re.escape(text)) as error:
        peer.ask([5], 4)
    assert "fake.log" in str(error.value)
    assert peer._process is None


def test_a_peer_that_hangs_is_given_up(fake: Callable[..., Peer]) -> None:
    peer = fake(answer="import time; time.sleep(60)", answer_seconds=0.2)
    with pytest.raises(PeerError, match="no answer within"):
        peer.ask([5], 4)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(PeerError, match="cannot run /no/such/engine"):
        Peer("x", ["/no/such/engine"]).ask([1], 2)


def test_a_peer_runs_in_a_benchmark_and_may_write_other_text(
    fake: Callable[..., Peer], small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "start", lambda name, config, target: fake())
    suite = [SuitePrompt(f"s:{i}", "qa", False, ({"role": "user", "content": "ABAB"},)) for i in range(2)]
    config = BenchConfig(modes=("ar", "copy"), baselines=("llama.cpp",), max_new_tokens=20, over=("ar", "llama.cpp"))
    run = Bench(Decoder(small_target("llama")), suite, config, tmp_path / "run")
    rows = list(run.run())
    assert [r.mode for r in rows] == ["llama.cpp", "ar", "copy", "ar", "copy", "llama.cpp"]
    peer = run.columns["llama.cpp"]
    assert isinstance(peer, PeerColumn) and peer.peer._process is None, "ended with the run"
    result = run.result()
    found = {(r["group"], r["mode"]): r for r in result["summary"]}
    assert found["qa", "llama.cpp"]["tokens_per_second"] == pytest.approx(10.0)
    assert found["qa", "ar"]["over_llama.cpp"]["estimate"] == pytest.approx(found["qa", "ar"]["tokens_per_second"] / 10)
    same = result["equality"]["modes"]
    assert (same["llama.cpp"]["reference"], same["llama.cpp"]["judged"], same["llama.cpp"]["different"]) == (
        "ar",
        False,
        2,
    )
    assert same["copy"]["judged"]
    assert unequal(result) == []
    assert result["differs"] == {"llama.cpp": "fake 1: everything"}
    assert "- llama.cpp: fake 1: everything" in (tmp_path / "run" / "table.md").read_text()
    again = Bench(Decoder(small_target("llama")), suite, config, tmp_path / "run")
    assert again.done == again.total


def test_what_is_missing_is_said(small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target("llama")
    monkeypatch.setattr(start_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(start_module.importlib.util, "find_spec", lambda name: None)
    found, missing = installed(PEERS, PeerConfig(), target)
    assert found == []
    assert [line.split(":")[0] for line in missing] == list(PEERS)
    assert "--llama-cpp" in missing[0] and "--vllm-python" in missing[2]
    with pytest.raises(DecodingError, match=r"no llama\.cpp is found"):
        column(Decoder(target), "llama.cpp")
    with pytest.raises(DecodingError, match="--assistant"):
        column(Decoder(target), "hf-assisted")
    with pytest.raises(DecodingError, match="no model is there"):
        column(Decoder(target), "hf-assisted", PeerConfig(assistant="/no/such"))
    with pytest.raises(ValueError, match="--gguf /no/such: no such file"):
        PeerConfig(gguf="/no/such")


def test_commands_name_the_model_and_the_threads(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    server, gguf = tmp_path / "llama-server", tmp_path / "m.gguf"
    server.touch()
    gguf.write_bytes(b"1234")
    with pytest.raises(DecodingError, match="no GGUF file of small-llama"):
        start("llama.cpp", PeerConfig(llama_cpp=str(server)), target)
    config = PeerConfig(llama_cpp=str(server), gguf=str(gguf))
    peer = start("llama.cpp-ngram", config, target)
    assert peer._command[-3:] == ["--server", str(server), "--ngram"]
    assert peer.settings == {"gguf": "m.gguf", "bytes": 4, "llama_cpp": str(server), "threads": 1}
    python = tmp_path / "python3"
    python.touch()  # cannot even be run
    with pytest.raises(DecodingError, match="has no xllamacpp"):
        start("llama.cpp", replace(config, llama_cpp=str(python)), target)
    with pytest.raises(DecodingError, match="has no vllm"):
        start("vllm", PeerConfig(vllm_python=str(python)), target)
    python.write_text('#!/bin/sh\ncase "$2" in *arctic*) exit 1;; esac\n')  # has everything else
    python.chmod(0o755)
    assert start("llama.cpp", replace(config, llama_cpp=str(python)), target)._command[0] == str(python)
    vllm = PeerConfig(vllm_python=str(python))
    with pytest.raises(DecodingError, match="needs the target in a folder"):
        start("vllm", vllm, target)
    with pytest.raises(DecodingError, match="arctic-inference"):
        start("vllm-suffix", vllm, _in_folder(target, tmp_path))
    command = start("vllm-ngram", vllm, _in_folder(target, tmp_path))._command
    engine = json.loads(command[-1])
    assert (engine["model"], engine["dtype"], engine["max_model_len"]) == (str(tmp_path), "float32", 256)
    assert engine["speculative_config"]["method"] == "ngram"


def _in_folder(target: Target, folder: Path) -> Target:
    return Target(target.model, target.tokenizer, "x", folder)


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--version" in sys.argv:
    print("version: 7 (fake)")
    sys.exit()
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert question["temperature"] == 0 and question["cache_prompt"] is False
        self.reply({"tokens": question["prompt"][-3:], "tokens_predicted": 4, "stop_type": "eos",
                    "timings": {"prompt_ms": 250.0, "predicted_ms": 1500.0, "draft_n": 5, "draft_n_accepted": 1}})
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_llama_server_is_asked_over_its_address(tmp_path: Path, small_target: Callable[..., Target]) -> None:
    server, gguf = tmp_path / "llama-server", tmp_path / "m.gguf"
    server.write_text(SERVER.replace("{python}", sys.executable))
    server.chmod(0o755)
    gguf.touch()
    peer = start("llama.cpp", PeerConfig(llama_cpp=str(server), gguf=str(gguf)), small_target("llama"))
    told = peer.ask([1, 2, 3, 4], 8, stop=[63])
    assert told.tokens == [2, 3, 4, 63], "a stop token that is not written counts all the same"
    assert peer.ask([1, 2, 3, 63], 8, stop=[63]).tokens == [2, 3, 63]
    assert (told.decoded, told.steps, told.first_token_seconds, told.decode_seconds) == (3, 2, 0.25, 1.5)
    assert "version: 7" in peer.about["ready"] and "m.gguf" in peer.about["differs"]
    peer.close()


def test_scripts_import_nothing_of_the_project() -> None:
    for name in ("llama_cpp", "vllm_engine"):
        text = (Path(start_module.__file__).parent / f"{name}.py").read_text()
        assert not re.search(r"^\s*(from|import) (activations|probes|decoding|switchsd|torch)\b", text, re.MULTILINE)


def test_vllm_script_says_what_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    script = Path(start_module.__file__).parent / "vllm_engine.py"
    options = ["--settings", json.dumps({"model": str(tmp_path)})]
    with pytest.raises(PeerError, match="vllm cannot be started: ModuleNotFoundError"):
        Peer("vllm", [sys.executable, str(script), *options]).ask([1], 2)


VLLM = """
import sys, types
class Registry:
    def collect(self):
        sample = types.SimpleNamespace(name="vllm:drafts_total", value=3.0)
        return [types.SimpleNamespace(name="vllm:drafts", type="counter", samples=[sample])]
sys.modules["prometheus_client"] = types.SimpleNamespace(REGISTRY=Registry())
__version__ = "0 (fake)"
class SamplingParams:
    def __init__(self, **given):
        self.__dict__ |= given
class Output:
    def __init__(self, number, tokens, finished):
        self.outputs = [self]
        self.request_id, self.token_ids, self.finished = number, tokens, finished
class LLM:
    def __init__(self, **given):
        print("loading", given)
        self.llm_engine = self.engine_core = self.scheduler = self
        self.running = {}
        self.most = 0
    def add_request(self, number, prompt, sampling):
        self.running[number] = [prompt["prompt_token_ids"], [], sampling.max_tokens]
        self.most = max(self.most, len(self.running))
        return number + "-inside"
    def abort_request(self, numbers):
        for number in numbers:
            del self.running[number]
    def has_unfinished_requests(self):
        return bool(self.running)
    def schedule(self):
        new = [types.SimpleNamespace(req_id=n + "-inside", num_computed_tokens=1)
               for n, (prompt, tokens, _) in self.running.items() if not tokens and len(prompt) > 1]
        counts = {n + "-inside": 3 if tokens else len(prompt) for n, (prompt, tokens, _) in self.running.items()}
        drafts = {n + "-inside": [0, 0] for n, (_, tokens, _) in self.running.items() if tokens}
        return types.SimpleNamespace(
            scheduled_new_reqs=new, num_scheduled_tokens=counts, scheduled_spec_decode_tokens=drafts)
    def step(self):
        self.scheduler.schedule()
        outputs = []
        for number, (prompt, tokens, most) in list(self.running.items()):
            tokens = tokens + [prompt[-1]] * min(3 if tokens else 1, most - len(tokens))
            self.running[number][1] = tokens
            if len(tokens) == most:
                del self.running[number]
            outputs.append(Output(number, tokens, len(tokens) == most))
        return outputs
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Iterator[Peer]:
    (tmp_path / "vllm.py").write_text(VLLM)
    command = vllm_command(sys.executable, {"model": "m", "speculative_config": {"method": "ngram"}})
    peer = Peer("vllm-ngram", command, environment={"PYTHONPATH": str(tmp_path)})
    yield peer
    peer.close()


def test_vllm_is_stepped_and_its_pieces_are_counted(fake_vllm: Peer) -> None:
    told = fake_vllm.ask([1, 5], 9)
    assert told.tokens == [5] * 9
    assert (told.decoded, told.steps) == (8, 3), "the first token comes from reading the prompt"
    assert told.first_token_seconds > 0 and told.decode_seconds > 0
    assert fake_vllm.about["ready"] == "vllm 0 (fake)" and "ngram" in fake_vllm.about["differs"]
    assert fake_vllm.ask([7], 2).tokens == [7, 7]


def test_vllm_answers_a_batch(fake_vllm: Peer) -> None:
    batch = fake_vllm.ask_all([[1, 5], [6], [1, 2, 7]], 9, abort={"1": 4}, profile="vllm")
    assert [a.tokens for a in batch.answers] == [[5] * 9, [6] * 4, [7] * 9], "the second one was given up"
    assert [(a.decoded, a.steps, a.drafted, a.prompt_forwards, a.cached) for a in batch.answers] == [
        (8, 3, 6, 1, 1), (3, 1, 2, 1, 0), (8, 3, 6, 1, 1),
    ]  # fmt: skip
    assert (batch.forwards, batch.counters) == (4, {"vllm:drafts": 3.0})
    assert {"vllm.py:step", "vllm.py:schedule"} <= {f["function"] for f in batch.profile}
    one_by_one = fake_vllm.ask_all([[1], [2]], 4, concurrency=1)
    assert one_by_one.forwards == 4 and one_by_one.profile == []


def test_assisted_generation_gives_the_same_text(
    small_target: Callable[..., Target], reference_model: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    target = small_target("llama")
    reference_model("llama").save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    suite = [SuitePrompt("s:0", "qa", False, ({"role": "user", "content": "ABABAB"},))]
    config = BenchConfig(modes=("ar",), baselines=("hf", "hf-assisted"), max_new_tokens=20)
    run = Bench(Decoder(target), suite, config, tmp_path / "run", PeerConfig(assistant=str(tmp_path)))
    rows = {r.mode: r for r in run.run()}
    assert rows["hf-assisted"].tokens == rows["hf"].tokens == rows["ar"].tokens
    assert rows["hf-assisted"].steps < rows["hf"].steps
    assert json.loads((tmp_path / "run" / "rows.jsonl").read_text().splitlines()[0])["looped"] >= 0
