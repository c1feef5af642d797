"""`switchsd serve`: the command line it makes, what it refuses, and how it hands on signals and the exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from activations.packaged import SHIPPED
from activations.target import unloaded_target
from probes.artifact import Probe, ProbeConfig
from switchsd.artifacts import cached
from switchsd.engine import INSTALL

Run = Callable[..., tuple[int, str, str]]
THERE = {"vllm": "0.32.0+cpu", "cpu": None, "plugins": ["switchsd"], "folders": {"vllm": "v", "decoding": "d"}}
FAKE = """#!{python}
import json, os, signal, sys, time
if sys.argv[1] == "-c":
    print('{there}')
    sys.exit()
metrics = os.environ["PROMETHEUS_MULTIPROC_DIR"]
seen = {"arguments": sys.argv[1:], "metrics": metrics, "fresh": os.listdir(metrics) == [],
        "cache": os.environ.get("VLLM_CPU_KVCACHE_SPACE"), "plugins": os.environ.get("VLLM_PLUGINS"), "signals": []}
def end(number, frame):
    seen["signals"].append(number)
    if number == signal.SIGTERM or len(seen["signals"]) == 2:
        time.sleep(0.2)
        open("{log}", "w").write(json.dumps(seen))
        sys.exit(5)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
open("{log}", "w").write(json.dumps(seen))
if "--wait" in sys.argv:
    print("ready", flush=True)
    time.sleep(60)
if "--killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """fake(**found) -> a Python that says of itself what is given, and as vLLM only logs how it was started."""
    for name in ("PROMETHEUS_MULTIPROC_DIR", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("decoding.serving.vllm.symbols.missing", lambda runner, folder: [])

    def make(**found: Any) -> Path:
        script = tmp_path / "python"
        text = FAKE.replace("{python}", sys.executable).replace("{log}", str(tmp_path / "log.json"))
        script.write_text(text.replace("{there}", json.dumps(THERE | found)))
        script.chmod(0o755)
        return script

    return make


@pytest.fixture
def probe(tiny_folder: Path) -> Callable[..., Path]:
    """probe(site, where) -> a probe of the tiny target, found by itself unless it is put elsewhere."""

    def make(site: str, where: Path | None = None, **changes: Any) -> Path:
        target = unloaded_target(tiny_folder)
        values: dict[str, Any] = {
            "site": site, "width": 64, "label": "follow", "label_settings": {"match": 2}, "threshold": 0.25,
            "threshold_rule": "none", "target": target.fingerprint, "target_name": "tiny", "store": "00", "split": {},
            "metrics": {}, "provenance": {},
        }  # fmt: skip
        place = where or cached("probe", str(tiny_folder), site.replace(".", "-"))
        config = ProbeConfig(**values | changes)
        return Probe(config, torch.ones(64 * len(config.sites))).save_pretrained(place)

    return make


@pytest.fixture
def head(tiny_folder: Path) -> Path:
    from decoding.eagle.head import EagleHead, HeadConfig

    torch.manual_seed(0)
    made = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=32))
    made.set_vocabulary(torch.arange(226, 258))
    made.save(cached("eagle", str(tiny_folder)))
    return cached("eagle", str(tiny_folder))


def options(printed: str) -> dict[str, Any]:
    """The options of a dry run's command, by name."""
    command = json.loads(printed)["command"]
    values = dict(pairwise(command))
    return {name: json.loads(values[name]) for name in values if name.endswith("-config")}


# -- the command line -------------------------------------------------------------------------------


def test_what_fits_is_found_and_the_head_exported(
    run: Run, fake: Any, probe: Any, head: Path, tiny_folder: Path, own_cache: Path
) -> None:
    """A probe at another place than a block boundary is passed over, a head without positions gets the target's."""
    (probe("resid_mid.2"), probe("resid_post.3"))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(
        json.dumps(config | {"switchsd": {"target": unloaded_target(tiny_folder).fingerprint.to_dict()}})
    )
    code, printed, told = run("serve", tiny_folder, "--vllm-python", fake(), "--dry-run", "--json")
    assert (code, told) == (0, "")
    command = json.loads(printed)["command"]
    assert command[:5] == [command[0], "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_folder)]
    made = options(printed)
    found = cached("probe", str(tiny_folder), "resid_post-3")
    assert made["--additional-config"] == {"switchsd": {"probe": str(found)}}
    speculative = made["--speculative-config"]
    written = Path(speculative.pop("model"))
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 8}
    exported = json.loads((written / "config.json").read_text())
    assert exported["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and own_cache in written.parents
    assert exported["transformer_layer_config"]["max_position_embeddings"] == 4096
    before = (written / "model.safetensors").stat().st_mtime_ns
    code, printed, _ = run("serve", tiny_folder, "--vllm-python", fake(), "--drafter", written, "--dry-run", "--json")
    assert options(printed)["--speculative-config"]["model"] == str(written)  # it is in that format already
    assert run("serve", tiny_folder, "--vllm-python", fake(), "--dry-run")[0] == 0
    assert (written / "model.safetensors").stat().st_mtime_ns == before


def test_settings_are_passed_on(run: Run, fake: Any, probe: Any, head: Path, tiny_folder: Path, tmp_path: Path) -> None:
    named = probe("resid_pre.4", tmp_path / "my probe")
    given = ("--probe", named, "--drafter", head, "--tau", 0.9, "--kappa", 3, "--speculative-tokens", 5)
    code, printed, _ = run(
        "serve", tiny_folder, "--vllm-python", fake(), *given, "--dtype", "float32", "--dry-run", "--json",
        "--", "--port", 8001, "--tensor-parallel-size", 2, "--chat-template", "a b.jinja",
    )  # fmt: skip
    assert code == 0
    made = options(printed)
    assert made["--additional-config"] == {"switchsd": {"probe": str(named), "tau": 0.9, "kappa": 3}}
    assert made["--speculative-config"]["num_speculative_tokens"] == 5
    found = json.loads(printed)
    assert found["command"][-6:] == ["--port", "8001", "--tensor-parallel-size", "2", "--chat-template", "a b.jinja"]
    assert found["environment"] == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert found["shell"].startswith('PROMETHEUS_MULTIPROC_DIR="$(mktemp -d)" VLLM_CPU_KVCACHE_SPACE=4 ')
    line = found["shell"].partition('-d)" ')[2]
    assert shlex.split(line)[1:] == found["command"]
    code, printed, _ = run("serve", tiny_folder, "--vllm-python", fake(), *given, "--dry-run")
    assert code == 0 and len(printed.splitlines()) == 1 and "'" in printed


def test_a_head_on_the_hub_is_named_as_it_is(run: Run, fake: Any, probe: Any, tiny_folder: Path) -> None:
    probe("resid_post.3")
    code, printed, _ = run(
        "serve", tiny_folder, "--vllm-python", fake(), "--drafter", "someone/head", "--dry-run", "--json"
    )
    assert code == 0 and options(printed)["--speculative-config"]["model"] == "someone/head"


def test_an_alias_is_served_under_its_name(run: Run, fake: Any) -> None:
    python, alias = fake(), "small-qwen3"
    code, printed, _ = run("serve", alias, "--drafter", "none", "--vllm-python", python, "--dry-run", "--json")
    command = json.loads(printed)["command"]
    assert code == 0 and command[4:7] == [str(SHIPPED[alias]), "--served-model-name", alias]
    name = ("--", "--served_model_name=mine")
    code, printed, _ = run("serve", alias, "--drafter", "none", "--vllm-python", python, "--dry-run", *name)
    assert code == 0 and f"--served-model-name {alias}" not in printed and name[1] in printed


def test_copying_alone_needs_neither_probe_nor_head(run: Run, fake: Any, tiny_folder: Path) -> None:
    given = ("serve", tiny_folder, "--drafter", "none", "--vllm-python", fake(plugins=[]), "--dry-run", "--json")
    code, printed, _ = run(*given)
    model = "decoding.serving.vllm.copying.CopyProposer"
    assert code == 0 and options(printed) == {
        "--speculative-config": {"method": "custom_class", "model": model, "num_speculative_tokens": 8}
    }
    assert json.loads(printed)["command"][1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(tiny_folder)]
    code, printed, _ = run(*given, "--kappa", 3)
    assert code == 0 and options(printed)["--additional-config"] == {"switchsd": {"kappa": 3}}


def test_the_package_for_cpus_has_no_command_that_works(run: Run, fake: Any, tiny_folder: Path) -> None:
    python = fake(vllm=None, cpu="0.32.0")
    code, printed, _ = run("serve", tiny_folder, "--drafter", "none", "--vllm-python", python, "--dry-run", "--json")
    found = json.loads(printed)
    assert code == 0 and found["environment"] == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert found["command"][1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_folder)]


def test_what_the_user_has_set_stays(
    run: Run, fake: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("serve", tiny_folder, "--drafter", "none", "--vllm-python", fake(), "--dry-run", "--json")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = json.loads(run(*given, "--", "--kv-cache-memory-bytes=1G")[1])
    assert found["environment"] == {"VLLM_PLUGINS": "other,switchsd"} and "mktemp" not in found["shell"]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "switchsd")
    assert json.loads(run(*given)[1])["environment"] == {}


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--probe", "smollm2/serving", "--drafter", "someone/head"), "was trained on smollm2"),
        (("--probe", "nothing"), "no probe 'nothing'"),
        ((), "no probe of"),
        (("--drafter", "none", "--probe", "smollm2/serving"), "leave out --probe and --tau"),
        (("--drafter", "none", "--tau", "0.5"), "leave out --probe and --tau"),
        (("--drafter", "none", "--kappa", "0"), "--kappa is 0"),
        (("--drafter", "none", "--speculative-tokens", "0"), "--speculative-tokens is 0"),
        (("--drafter", "none", "--vllm-python", "/no/python"), "/no/python: no such file"),
        (("--drafter", "none", "--", "--speculative_config={}"), "--speculative-config is what"),
        (("--drafter", "none", "--", "--additional-config", "{}"), "--additional-config is what"),
        (("--drafter", "none", "--dtype", "float32", "--", "--dtype", "auto"), "--dtype is given twice"),
        (("--drafter", "none", "--json"), "--json is for --dry-run"),
    ],
)
def test_wrong_command_lines(run: Run, fake: Any, tiny_folder: Path, arguments: tuple[str, ...], told: str) -> None:
    dry = () if "--json" in arguments else ("--dry-run",)
    code, printed, errors = run("serve", tiny_folder, "--vllm-python", fake(), *dry, *arguments)
    assert code == 2 and told in errors and printed == "" and len(errors.splitlines()) == 1


def test_a_target_must_be_named(run: Run, fake: Any) -> None:
    for arguments in ((), ("--", "--port", "8001")):
        code, _, errors = run("serve", *arguments)
        assert code == 2 and "issing" in errors


def test_probes_that_vllm_cannot_feed(
    run: Run, fake: Any, probe: Any, head: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    for number, (site, told) in enumerate({
        "resid_mid.3": "reads resid_mid.3", "resid_post.7": "reads resid_post.7",
        "resid_pre.1+resid_post.3": "reads several sites",
    }.items()):  # fmt: skip
        folder = probe(site, tmp_path / str(number))
        code, _, errors = run(
            "serve", tiny_folder, "--vllm-python", fake(), "--probe", folder, "--drafter", head, "--dry-run"
        )
        assert code == 2 and told in errors


def test_heads_that_vllm_cannot_load(
    run: Run, fake: Any, probe: Any, head: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    probe("resid_post.3")

    def refused(drafter: object) -> str:
        given = ("serve", tiny_folder, "--vllm-python", fake(), "--drafter", drafter, "--dry-run")
        code, _, errors = run(*given)
        assert code == 2
        return errors

    assert "no EAGLE-3 head of" in refused("auto")  # that one does not say whose it is
    assert "no such folder" in refused("nothing") and "no such folder" in refused("/a/b")
    config = json.loads((head / "config.json").read_text())
    theirs = unloaded_target(tiny_folder).fingerprint.to_dict() | {"revision": "another"}
    (head / "config.json").write_text(json.dumps(config | {"switchsd": {"target": theirs}}))
    assert "was trained for another target" in refused(head)
    from decoding.eagle.head import EagleHead, HeadConfig

    old = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=258, eagle=1, features=0,
                               own_head=False, first_norm=False, last_norm=False))  # fmt: skip
    old.set_vocabulary(torch.arange(258))
    old.save(tmp_path / "eagle1")
    assert "is an EAGLE-1 or -2 head" in refused(tmp_path / "eagle1")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"folders": {"decoding": "d"}}, "has no vLLM: install it into an environment"),
        ({"folders": {"vllm": "v"}}, "no switchsd with its plug-in"),
        ({"plugins": []}, "no switchsd with its plug-in"),
        ({"vllm": "0.31.2"}, "vLLM is 0.31.2, and the switch knows 0.32 to"),
        ({"vllm": None, "cpu": "0.99.0"}, "vLLM is 0.99.0, and the switch knows 0.32 to"),
    ],
)
def test_environments_that_lack_something(
    run: Run, fake: Any, tiny_folder: Path, found: dict[str, Any], told: str
) -> None:
    code, _, errors = run("serve", tiny_folder, "--vllm-python", fake(**found), "--dry-run")
    assert code == 2 and told in errors


def test_the_versions_to_install_are_those_that_are_tested() -> None:
    versions = (Path(__file__).parents[2] / "constraints-serving.txt").read_text(encoding="utf-8")
    tested = re.findall(r"^vllm-cpu==(\S+)", versions, re.MULTILINE)
    assert re.findall(r"vllm(?:-cpu)?==([0-9.]*[0-9])", INSTALL) == tested * 2 and len(tested) == 1


def test_a_vllm_that_lacks_what_the_plug_in_rests_on(
    run: Run, fake: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = fake(vllm="0.33.0")
    looked: list[tuple[str, Path]] = []
    lacks = lambda runner, folder: (looked.append((runner, folder)), ["no class EagleProposer"])[1]  # noqa: E731
    monkeypatch.setattr("decoding.serving.vllm.symbols.missing", lacks)
    code, _, errors = run("serve", tiny_folder, "--vllm-python", python, "--dry-run")
    assert code == 2 and "vLLM 0.33.0 is not as the switch knows" in errors and "no class EagleProposer" in errors
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    run("serve", tiny_folder, "--vllm-python", python, "--dry-run")
    assert looked == [("v2", Path("v")), ("v1", Path("v"))]


def test_what_is_no_python(run: Run, tiny_folder: Path) -> None:
    code, _, errors = run("serve", tiny_folder, "--vllm-python", "/bin/false", "--dry-run")
    assert code == 2 and "does not run as a Python" in errors


# -- running ----------------------------------------------------------------------------------------


def test_it_runs_and_passes_the_exit_code_on(
    run: Run, fake: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("serve", tiny_folder, "--drafter", "none", "--vllm-python", fake())
    code, _, told = run(*given, "--", "--port", 8001)
    seen = json.loads((tmp_path / "log.json").read_text())
    assert code == 3 and "copies alone, at most 8 tokens a step" in told
    assert seen["arguments"][-2:] == ["--port", "8001"] and seen["cache"] == "4" and seen["plugins"] is None
    assert seen["fresh"] and not Path(seen["metrics"]).exists()
    assert run(*given, "--", "--killed")[0] == 128 + signal.SIGKILL
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert run(*given)[0] == 3
    seen = json.loads((tmp_path / "log.json").read_text())
    assert seen["metrics"] == str(tmp_path) and tmp_path.exists()


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_signals_are_handed_on(fake: Any, tiny_folder: Path, tmp_path: Path, numbers: list[int]) -> None:
    """The server ends in its own time, and the folder of its metrics after it."""
    command = ["serve", str(tiny_folder), "--drafter", "none", "--vllm-python", str(fake()), "--", "--wait"]
    with subprocess.Popen(
        [sys.executable, "-m", "switchsd", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            os.kill(process.pid, number)
            time.sleep(0.3)
        assert process.wait(timeout=20) == 5
        assert "Traceback" not in process.stderr.read()
    seen = json.loads((tmp_path / "log.json").read_text())
    assert seen["signals"] == numbers and not Path(seen["metrics"]).exists()
