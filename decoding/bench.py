"""The benchmark: modes interleaved on the same prompts in one process, beside Hugging Face `generate`.

Rows are appended to `rows.jsonl` as they end, keyed by prompt, mode and a hash of the settings: the same command
goes on where it was cut. Outputs are greedy, so every lossless mode must write the same text; where one differs in
bfloat16, the target is asked whether the two tokens were a near-tie.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from activations.cache import KVCache
from activations.provenance import provenance
from activations.store import write_json
from activations.target import Target, TargetError
from decoding.baselines import BASELINES, LOOKUP_TOKENS, hugging_face
from decoding.costs import machine
from decoding.decoder import Decoder
from decoding.modes import DecodingError, ModeSettings
from decoding.suite import SuitePrompt
from decoding.summary import Drafts, Row, divergence, gate_quality, markdown, plot, summarize

if TYPE_CHECKING:
    from decoding.trace import StepRecord

T = TypeVar("T")

NEAR_TIE_ULPS = 4.0
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    modes: tuple[str, ...] = ("ar", "copy", "eagle", "switchsd", "switchsd/gate=match")
    """Modes to compare; settings of their own may follow after slashes, as in eagle/neural_nodes=23/neural_depth=6."""
    baselines: tuple[str, ...] = ("hf", "hf-lookup")
    """Hugging Face generate beside them: plain (hf), with prompt lookup (hf-lookup), or nothing."""
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
            if name not in BASELINES:
                raise ValueError(f"unknown baseline {name!r}: choose from {', '.join(BASELINES)}")
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

    def __init__(self, decoder: Decoder, suite: Sequence[SuitePrompt], config: BenchConfig, folder: Path) -> None:
        self.decoder = decoder
        self.suite = list(suite)
        self.config = config
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings(decoder, config)
        self.runners = {column: runner(decoder, column) for column in config.columns}
        self.mode_settings = {m: {**self.settings, **mode_settings(*self.runners[m])} for m in config.columns}
        self.hashes = {mode: _hash(value) for mode, value in self.mode_settings.items()}
        wanted = {(p.key, mode, self.hashes[mode]) for p in suite for mode in config.columns}
        for prompt in suite:  # one that is too long must not end the run half way
            try:
                decoder.target.encode_messages(prompt.messages)
            except TargetError as error:
                raise TargetError(f"{prompt.key}: {error}") from error
        stored = _read(folder / "rows.jsonl", Row.from_dict)
        self.rows = [r for r in stored if (r.key, r.mode, r.settings) in wanted]
        self._done = {(r.key, r.mode) for r in self.rows}

    @property
    def total(self) -> int:
        return len(self.suite) * len(self.config.columns)

    @property
    def done(self) -> int:
        return len(self._done)

    def run(self) -> Iterator[Row]:
        """Measure what is missing. The order of the modes rotates from prompt to prompt, so that none has the
        better place; each has had a warm-up."""
        if self.done == self.total:
            return
        for mode in self.config.columns:
            self._measure(self.suite[0], mode, WARM_UP_TOKENS)
        columns = self.config.columns
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as out:
            for i, prompt in enumerate(self.suite):
                for mode in (*columns[i % len(columns) :], *columns[: i % len(columns)]):
                    if (prompt.key, mode) in self._done:
                        continue
                    row = self._measure(prompt, mode, self.config.max_new_tokens)
                    out.write(json.dumps(row.to_dict()) + "\n")
                    out.flush()
                    self.rows.append(row)
                    self._done.add((prompt.key, mode))
                    yield row

    def _measure(self, prompt: SuitePrompt, column: str, max_new_tokens: int) -> Row:
        row = measure(*self.runners[column], prompt, max_new_tokens)
        return replace(row, mode=column, settings=self.hashes[column])

    def result(self) -> dict[str, Any]:
        """Everything there is to say; writes `result.json`, `table.md` and `plot.png`."""
        rows = sorted(self.rows, key=lambda r: (r.key, r.mode))
        found = {
            "settings": self.settings,
            "modes": self.mode_settings,
            "provenance": provenance(),
            "summary": summarize([r for p in self.suite for r in self.rows if r.key == p.key], self.config.columns),
            "gate": [q for a, b in gated(self.runners) if (q := gate_quality(rows, a, b)) is not None],
            "equality": self.equality(),
        }
        write_json(self.folder / "result.json", found)
        (self.folder / "table.md").write_text(markdown(found), encoding="utf-8")
        if found["summary"]:
            plot(found, self.folder / "plot.png")
        return found

    def equality(self) -> dict[str, Any]:
        """How each mode's text compares with the reference's (plain `generate`, else `ar`)."""
        columns = self.config.columns
        reference = next((m for m in ("hf", "ar") if m in columns), columns[0])
        texts = {r.key: r for r in self.rows if r.mode == reference}
        prompts = {p.key: p for p in self.suite}
        stored = _read(self.folder / "differences.jsonl", lambda d: Difference(**{**d, "tokens": tuple(d["tokens"])}))
        known = {(d.key, d.mode, d.settings, d.reference, d.index): d for d in stored}
        modes: dict[str, Any] = {}
        with (self.folder / "differences.jsonl").open("a", encoding="utf-8") as out:
            for mode in columns:
                if mode == reference:
                    continue
                differences = []
                mine = [r for r in self.rows if r.mode == mode and r.key in texts]
                for row in mine:
                    index = divergence(row.tokens, texts[row.key].tokens)
                    if index is None:
                        continue
                    key = (row.key, mode, row.settings, reference, index)
                    if key not in known:
                        known[key] = difference(
                            self.decoder.target, prompts[row.key], row, texts[row.key].tokens, index, reference
                        )
                        out.write(json.dumps(asdict(known[key])) + "\n")
                    differences.append(known[key])
                modes[mode] = {
                    "prompts": len(mine),
                    "different": len(differences),
                    "near_ties": sum(d.near_tie for d in differences),
                    "differences": [asdict(d) for d in differences],
                }
        return {"reference": reference, "exact": self.decoder.target.dtype == torch.float32, "modes": modes}


def unequal(result: dict[str, Any]) -> list[str]:
    """Modes whose text is wrong: any difference in float32, one that is no near-tie otherwise."""
    same = result["equality"]
    return [
        mode
        for mode, found in same["modes"].items()
        if found["different"] and (same["exact"] or found["near_ties"] < found["different"])
    ]


def measure(decoder: Decoder, mode: str, prompt: SuitePrompt, max_new_tokens: int) -> Row:
    """One row, without the hash of its settings."""
    ids = decoder.target.encode_messages(prompt.messages)
    place: dict[str, Any] = {"key": prompt.key, "group": prompt.group, "copy_heavy": prompt.copy_heavy}
    place |= {"mode": mode, "settings": ""}
    if mode in BASELINES:
        written = hugging_face(decoder.target, ids, max_new_tokens, mode)
        return Row(
            **place,
            prompt_tokens=len(ids),
            tokens=written.tokens,
            decoded=sum(written.pieces[1:]),
            steps=len(written.pieces) - 1,
            first_token_seconds=written.first_token_seconds,
            decode_seconds=written.decode_seconds,
        )
    generation = decoder.generate(ids, mode=mode, max_new_tokens=max_new_tokens)
    if generation.interrupted:
        raise KeyboardInterrupt
    return Row(
        **place,
        prompt_tokens=len(ids),
        tokens=list(generation.tokens),
        decoded=len(generation.tokens) - 1,
        steps=generation.steps,
        first_token_seconds=generation.first_token_seconds,
        decode_seconds=generation.decode_seconds,
        drafts=drafts_of(decoder.trace.records),
    )


def drafts_of(records: Sequence[StepRecord]) -> dict[str, Drafts]:
    """What each drafter's drafts came to."""
    found: dict[str, Drafts] = {}
    for record in records:
        for name in set(record.source):
            kept = sum(record.source[node] == name for node in record.accepted)
            found[name] = found.get(name, Drafts()) + Drafts(1, kept, int(kept == 0))
    return found


def difference(
    target: Target, prompt: SuitePrompt, row: Row, reference: Sequence[int], index: int, name: str
) -> Difference:
    """Ask the target, fed with the text that both share, how near the two tokens were."""
    mine = row.tokens[index] if index < len(row.tokens) else None
    theirs = reference[index] if index < len(reference) else None
    gap = ulps = None
    if mine is not None and theirs is not None:
        shared = [*target.encode_messages(prompt.messages), *row.tokens[:index]]
        tokens = torch.tensor([shared], device=target.device)
        logits = target.forward(tokens, KVCache(1, capacity=len(shared)), logits_to_keep=1)[0, -1].float()
        top = float(logits.max())
        gap = top - min(float(logits[mine]), float(logits[theirs]))
        ulps = gap / 2.0 ** (math.floor(math.log2(abs(top))) - 7) if top else float("inf")
    return Difference(row.key, row.mode, row.settings, name, index, (mine, theirs), gap, ulps)


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


OF_DRAFTER = {"copy": ("depth", "copy_nodes"), "eagle": ("neural_nodes", "neural_depth", "neural_tree")}
"""Mode settings that matter where a drafter takes part; the drafter's own description says the rest."""


def runner(decoder: Decoder, column: str) -> tuple[Decoder, str]:
    """The decoder and mode of a column: a mode's name, and settings of its own after slashes."""
    mode, *changes = column.split("/")
    if not changes:
        return decoder, mode
    known = {f.name for f in fields(ModeSettings)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known or not text:
            raise DecodingError(f"{column!r}: {change!r} is no setting=value; settings are {', '.join(sorted(known))}")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    try:
        changed = replace(decoder.settings, **values)
    except (TypeError, ValueError) as error:
        raise DecodingError(f"{column!r}: {error}") from error
    return Decoder(decoder.target, decoder.probe, decoder.neural, changed, lengths=decoder.lengths), mode


def gated(runners: Mapping[str, tuple[Decoder, str]]) -> list[tuple[str, str]]:
    """Pairs of columns that differ in the gate alone: one that chooses, and one that copies at every suffix match."""
    plans = {c: d.describe(mode) for c, (d, mode) in runners.items() if mode not in BASELINES}
    drafts = {c: (p["drafters"], settings_of_drafters(p)) for c, p in plans.items()}
    always = [c for c, p in plans.items() if p["gate"] == "MatchLengthGate"]
    return [
        (column, other)
        for column, plan in plans.items()
        if plan["gate"] not in ("MatchLengthGate", "Never", "Always")
        for other in always
        if drafts[other] == drafts[column]
    ]


def mode_settings(decoder: Decoder, mode: str) -> dict[str, Any]:
    """What a mode's rows depend on besides: only what it uses, so that a new probe leaves the rows of `ar` alone."""
    if mode in BASELINES:
        return {"mode": mode, "lookup_tokens": LOOKUP_TOKENS if mode == "hf-lookup" else 0}
    found = decoder.describe(mode)
    used = settings_of_drafters(found)
    if found["probe"] is not None:
        used["tau"] = found["settings"]["tau"]
    return {**found, "settings": used}


def settings_of_drafters(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of a mode's description, the settings that its drafters' trees depend on."""
    names = [name for drafter in described["drafters"] for name in OF_DRAFTER.get(drafter["name"], ())]
    return {name: described["settings"][name] for name in names}


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
