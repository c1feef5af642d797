"""The benchmark: modes interleaved on the same prompts in one run, beside Hugging Face `generate` and other engines.

Rows are appended to `rows.jsonl` as they end, keyed by prompt, column and a hash of the settings: the same command
goes on where it was cut. Every lossless mode must write the same text, also where it samples; where one differs in
bfloat16, the target is asked whether the two tokens were a near-tie.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from activations.cache import KVCache
from activations.provenance import provenance
from activations.sampling import Sampling, gumbel
from activations.store import write_json
from activations.target import Target, TargetError
from decoding import plots
from decoding.baselines import BASELINES
from decoding.columns import Column, ModeColumn, PeerColumn, column, settings_of_drafters
from decoding.costs import machine
from decoding.decoder import Decoder
from decoding.peers.start import INSTALLED, PEERS, PeerConfig
from decoding.suite import CONTEXT, SuitePrompt, at_lengths
from decoding.summary import BASES, OVERALL, Row, divergence, gate_quality, summarize
from decoding.sweep import Sweep, points
from decoding.tables import markdown

T = TypeVar("T")

NEAR_TIE_ULPS = 4.0
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    modes: tuple[str, ...] = ("ar", "copy", "eagle", "switchsd", "switchsd/gate=match")
    """Modes to compare; settings of their own may follow after slashes, as in eagle/neural_nodes=23/neural_depth=6."""
    baselines: tuple[str, ...] = ("hf", "hf-lookup")
    """What runs beside them: Hugging Face generate, plain (hf), with prompt lookup (hf-lookup), with a draft model
    (hf-assisted); other engines (llama.cpp, llama.cpp-ngram, vllm, vllm-ngram, vllm-suffix), or all of these that are
    found (peers); or nothing."""
    over: tuple[str, ...] = BASES
    """Columns that speeds are shown over, where they are in the run."""
    sweep: str = ""
    """One setting at several values, as kappa=1,2,3,5: every mode that it touches is run at each. Any setting of a mode
    (kappa, tau, candidates, depth, ...), temperature, or context (prompt tokens: each prompt is filled up to so many
    with other prompts of its suite)."""
    limit: int = 0
    """Prompts of each file, spread over its groups; 0 = all."""
    max_new_tokens: int = 128
    """Most tokens to write for a prompt."""

    def __post_init__(self) -> None:
        if not self.modes:
            raise ValueError("no modes to compare: name at least one")
        for name in self.columns:
            if self.columns.count(name) > 1:
                raise ValueError(f"{name!r} is named twice: name each mode once")
        for name in self.baselines:
            if name not in (*BASELINES, *PEERS, INSTALLED):
                known = ", ".join((*BASELINES, *PEERS, INSTALLED))
                raise ValueError(f"unknown baseline {name!r}: choose from {known}")
        for name in self.over:
            if name not in (*BASES, *self.columns):
                raise ValueError(f"over {name!r}: it is not in the run, which has {', '.join(self.columns)}")
        if self.sweep:
            Sweep.parse(self.sweep)
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; a decode speed needs at least 2")
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}; it must be 0 (all) or more")

    @property
    def columns(self) -> tuple[str, ...]:
        """Everything that is run, baselines first."""
        return (*self.baselines, *self.modes)


@dataclass(frozen=True)
class Difference:
    """Where a mode's greedy text first leaves the reference's."""

    key: str
    mode: str
    settings: str
    reference: str
    index: int
    tokens: tuple[int | None, int | None]
    """The mode's token and the reference's; None where a text ended."""
    gap: float | None
    """The target's largest logit there less the smaller of the two tokens' logits."""
    ulps: float | None
    """The gap in bfloat16 units in the last place of the largest logit."""

    @property
    def near_tie(self) -> bool:
        return self.ulps is not None and self.ulps <= NEAR_TIE_ULPS


class Bench:
    """A run in a folder. `run` yields after each row; `result` sums up what is there."""

    def __init__(
        self,
        decoder: Decoder,
        suite: Sequence[SuitePrompt],
        config: BenchConfig,
        folder: Path,
        peers: PeerConfig | None = None,
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.folder = folder
        self.sweep = Sweep.parse(config.sweep) if config.sweep else None
        if self.sweep and self.sweep.setting == CONTEXT:
            suite = at_lengths(suite, decoder.target, self.sweep.lengths, config.max_new_tokens)
        self.suite = list(suite)
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings(decoder, config)

        def make(name: str) -> Column:
            return column(decoder, name, peers)

        self.columns = {name: make(name) for name in config.columns}
        if self.sweep:
            self.columns = self.sweep.expand(self.columns, make)
        for name, one in self.columns.items():
            if isinstance(one, PeerColumn):
                one.peer.log = folder / f"{name}.log"
        self.column_settings = {name: {**self.settings, **one.describe()} for name, one in self.columns.items()}
        self.hashes = {name: _hash(value) for name, value in self.column_settings.items()}
        wanted = {(p.key, name, self.hashes[name]) for p in self.suite for name in self.columns}
        self._ids = {}
        for prompt in self.suite:  # one that is too long must not end the run half way
            try:
                self._ids[prompt.key] = decoder.target.encode_messages(prompt.messages)
            except TargetError as error:
                raise TargetError(f"{prompt.key}: {error}") from error
        stored = _read(folder / "rows.jsonl", Row.from_dict)
        self.rows = [r for r in stored if (r.key, r.mode, r.settings) in wanted]
        self._done = {(r.key, r.mode) for r in self.rows}

    @property
    def total(self) -> int:
        return len(self.suite) * len(self.columns)

    @property
    def done(self) -> int:
        return len(self._done)

    def run(self) -> Iterator[Row]:
        """Measure what is missing. The order of the columns rotates from prompt to prompt, so that none has the
        better place; each has had a warm-up."""
        if self.done == self.total:
            return
        names = list(self.columns)
        try:
            for name in names:
                if any((p.key, name) not in self._done for p in self.suite):
                    self._measure(self.suite[0], name, WARM_UP_TOKENS)
            with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as out:
                for i, prompt in enumerate(self.suite):
                    for name in (*names[i % len(names) :], *names[: i % len(names)]):
                        if (prompt.key, name) in self._done:
                            continue
                        row = self._measure(prompt, name, self.config.max_new_tokens)
                        out.write(json.dumps(row.to_dict()) + "\n")
                        out.flush()
                        self.rows.append(row)
                        self._done.add((prompt.key, name))
                        yield row
        finally:
            for one in self.columns.values():
                one.close()

    def _measure(self, prompt: SuitePrompt, name: str, max_new_tokens: int) -> Row:
        row = measure(self.columns[name], prompt, self._ids[prompt.key], max_new_tokens)
        return replace(row, mode=name, settings=self.hashes[name])

    def result(self, oracle: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Any]:
        """Everything there is to say; writes `result.json`, `table.md`, `plot.png`, and `sweep.png` of a sweep.

        `oracle`: by column and group the share of the step oracle's gain that was reached, from a replay.
        """
        rows = sorted(self.rows, key=lambda r: (r.key, r.mode))
        ordered = [r for p in self.suite for r in self.rows if r.key == p.key]
        summary = summarize(ordered, list(self.columns), self.config.over, oracle)
        about = {n: c.peer.about for n, c in self.columns.items() if isinstance(c, PeerColumn) and c.peer.about}
        found: dict[str, Any] = {
            "settings": self.settings,
            "modes": self.column_settings,
            "provenance": provenance(),
            "peers": about,
            "differs": {name: f"{told['ready']}: {told['differs']}" for name, told in about.items()},
            "summary": summary,
            "sweep": points(self.sweep, summary, self.columns) if self.sweep else None,
            "gate": [q for a, b in gated(self.columns) if (q := gate_quality(rows, a, b)) is not None],
            "equality": self.equality(),
        }
        write_json(self.folder / "result.json", found)
        (self.folder / "table.md").write_text(markdown(found), encoding="utf-8")
        if summary:
            plots.speeds(found).savefig(self.folder / "plot.png", dpi=150)
        if found["sweep"]:
            title = f"{self.settings['target']}, {self.settings['dtype']}, {OVERALL}"
            plots.sweep(found["sweep"], title).savefig(self.folder / "sweep.png", dpi=150)
        return found

    def equality(self) -> dict[str, Any]:
        """How each column's text compares with its reference's.

        Raises ValueError if the file of differences of an earlier run is damaged.
        """
        texts = {(r.key, r.mode): r for r in self.rows}
        stored = _read(self.folder / "differences.jsonl", lambda d: Difference(**{**d, "tokens": tuple(d["tokens"])}))
        known = {(d.key, d.mode, d.settings, d.reference, d.index): d for d in stored}
        prompts = {p.key: p for p in self.suite}
        modes: dict[str, Any] = {}
        with (self.folder / "differences.jsonl").open("a", encoding="utf-8") as out:
            for mode, reference in references(self.columns).items():
                own = self.columns[mode].own and self.columns[reference].own
                pairs = [(r, t) for r in self.rows if r.mode == mode and (t := texts.get((r.key, reference)))]
                apart = [(a, b, i) for a, b in pairs if (i := divergence(a.tokens, b.tokens)) is not None]
                differences = []
                for row, other, index in apart if own else ():
                    key = (row.key, mode, row.settings, reference, index)
                    if key not in known:
                        sampling = self.columns[mode].sampling
                        known[key] = difference(self.decoder.target, prompts[row.key], row, other, index, sampling)
                        out.write(json.dumps(asdict(known[key])) + "\n")
                    differences.append(known[key])
                modes[mode] = {
                    "reference": reference,
                    "judged": own,
                    "prompts": len(pairs),
                    "different": len(apart),
                    "near_ties": sum(d.near_tie for d in differences) if own else None,
                    "differences": [asdict(d) for d in differences],
                }
        return {"exact": self.decoder.target.dtype == torch.float32, "modes": modes}


def unequal(result: dict[str, Any]) -> list[str]:
    """Columns whose text is wrong: any difference in float32, one that is no near-tie otherwise. Other engines may
    differ."""
    same = result["equality"]
    return [
        mode
        for mode, found in same["modes"].items()
        if found["judged"] and found["different"] and (same["exact"] or found["near_ties"] < found["different"])
    ]


def measure(column: Column, prompt: SuitePrompt, ids: list[int], max_new_tokens: int) -> Row:
    """One row, without its column's name and the hash of its settings."""
    place: dict[str, Any] = {"key": prompt.key, "group": prompt.group, "copy_heavy": prompt.copy_heavy}
    answer = column.write(ids, max_new_tokens)
    return Row(**place, mode="", settings="", prompt_tokens=len(ids), **vars(answer))


def difference(
    target: Target, prompt: SuitePrompt, row: Row, reference: Row, index: int, sampling: Sampling
) -> Difference:
    """Ask the target, fed with the text that both share, how near the two tokens were; where it samples, with the
    noise that both met, in units of logits."""
    mine = row.tokens[index] if index < len(row.tokens) else None
    theirs = reference.tokens[index] if index < len(reference.tokens) else None
    gap = ulps = None
    if mine is not None and theirs is not None:
        shared = [*target.encode_messages(prompt.messages), *row.tokens[:index]]
        tokens = torch.tensor([shared], device=target.device)
        logits = target.forward(tokens, KVCache(1, capacity=len(shared)), logits_to_keep=1)[0, -1].float()
        scores, top = logits, float(logits.max())
        if not sampling.greedy:
            place = torch.tensor([len(shared)], device=target.device)
            every = torch.arange(len(logits), device=target.device)
            noise = gumbel(sampling.seed, torch.zeros_like(place), place, every)[0]
            scores = (sampling.process(logits) + noise) * sampling.temperature
        gap = float(scores.max()) - min(float(scores[mine]), float(scores[theirs]))
        ulps = gap / 2.0 ** (math.floor(math.log2(abs(top))) - 7) if top else float("inf")
    return Difference(row.key, row.mode, row.settings, reference.mode, index, (mine, theirs), gap, ulps)


# -- what a row depends on --------------------------------------------------------------------------


def settings(decoder: Decoder, config: BenchConfig) -> dict[str, Any]:
    """What the whole run has in common."""
    target = decoder.target
    return {
        "target": target.name,
        "fingerprint": target.fingerprint.to_dict(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": machine(),
        "attention": target.model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "max_new_tokens": config.max_new_tokens,
        "torch": torch.__version__,
    }


def gated(columns: Mapping[str, Column]) -> list[tuple[str, str]]:
    """Pairs of columns that differ in the gate alone: one that chooses, and one that copies at every suffix match."""
    plans = {n: c.decoder.describe(c.mode) for n, c in columns.items() if isinstance(c, ModeColumn)}
    drafts = {c: (p["drafters"], settings_of_drafters(p)) for c, p in plans.items()}
    always = [c for c, p in plans.items() if p["gate"] == "MatchLengthGate"]
    return [
        (name, other)
        for name, plan in plans.items()
        if plan["gate"] not in ("MatchLengthGate", "Never", "Always")
        for other in always
        if drafts[other] == drafts[name]
    ]


def references(columns: Mapping[str, Column]) -> dict[str, str]:
    """The column whose text each other one's must be, among those that sample alike: plain `generate`, else the
    target alone, else the first of this project's."""
    found = {}
    for name, one in columns.items():
        alike = [n for n, c in columns.items() if c.sampling == one.sampling]
        plain = [n for n in alike if n.split("/")[0] == "ar"]
        own = [n for n in alike if columns[n].own]
        reference = next((n for n in ("hf", *plain, *own, *alike) if n in alike), name)
        if reference != name:
            found[name] = reference
    return found


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(file: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Records of a JSONL file; a half-written last line is cut off, so that appending goes on cleanly."""
    if not file.is_file():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(file, len(whole))
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found.append(make(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file}:{number} is damaged ({error!r}): remove the line, or choose another --out"
            ) from error
    return found
