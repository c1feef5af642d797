"""Columns of a benchmark: whatever can write a text from the same token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from activations.sampling import Sampling
from activations.target import Target
from decoding.baselines import BASELINES, LOOKUP_TOKENS, Assistant, hugging_face
from decoding.decoder import Decoder
from decoding.modes import DecodingError, ModeSettings, get_mode
from decoding.peers.process import Peer
from decoding.peers.start import PEERS, PeerConfig, start
from decoding.summary import Drafts

if TYPE_CHECKING:
    from decoding.trace import StepRecord

GREEDY = Sampling()


@dataclass(frozen=True)
class Answer:
    """A text and what it took. The fields are those of `decoding.summary.Row`."""

    tokens: list[int]
    decoded: int
    steps: int
    first_token_seconds: float
    decode_seconds: float
    drafts: dict[str, Drafts] = field(default_factory=dict)
    step_seconds: float = 0.0


class Column(Protocol):
    """What answers the prompts of a run: a mode, a Hugging Face baseline, or another engine."""

    sampling: Sampling

    @property
    def own(self) -> bool:
        """Whether its text must be the target's own: on the same weights, by code that this project answers for, and
        by the same draws."""
        ...

    def describe(self) -> dict[str, Any]:
        """What its rows depend on, for JSON."""
        ...

    def write(self, prompt: list[int], max_new_tokens: int) -> Answer:
        """The answer to a prompt of token ids, with its times in seconds."""
        ...

    def close(self) -> None: ...


@dataclass
class ModeColumn:
    """A mode of this project."""

    decoder: Decoder
    mode: str
    sampling: Sampling = GREEDY

    @property
    def own(self) -> bool:
        keyed = self.sampling.greedy or self.decoder.plan(self.mode).verifier.keyed
        return keyed and get_mode(self.mode).lossless

    def describe(self) -> dict[str, Any]:
        """Only what the mode uses, so that a new probe leaves the rows of `ar` alone."""
        found = self.decoder.describe(self.mode)
        used = settings_of_drafters(found)
        if found["probe"] is not None:
            used["tau"] = found["settings"]["tau"]
        sampled = {} if self.sampling.greedy else {"sampling": asdict(self.sampling)}
        return {**found, "settings": used, **sampled}

    def write(self, prompt: list[int], max_new_tokens: int) -> Answer:
        options = asdict(self.sampling)
        generation = self.decoder.generate(prompt, mode=self.mode, max_new_tokens=max_new_tokens, **options)
        if generation.interrupted:
            raise KeyboardInterrupt
        records = self.decoder.trace.records
        return Answer(
            tokens=list(generation.tokens),
            decoded=generation.decoded,
            steps=generation.steps,
            first_token_seconds=generation.first_token_seconds,
            decode_seconds=generation.decode_seconds,
            drafts=drafts_of(records),
            step_seconds=sum({r.start: r.milliseconds for r in records}.values()) / 1e3,  # particles share their steps
        )

    def close(self) -> None: ...


@dataclass
class HuggingFaceColumn:
    """`generate` of transformers on the same weights in memory."""

    target: Target
    name: str
    assistant: Assistant | None = None
    sampling = GREEDY
    own = True

    def describe(self) -> dict[str, Any]:
        assisted = {"assistant": self.assistant.name} if self.assistant else {}
        return {"mode": self.name, "lookup_tokens": LOOKUP_TOKENS if self.name == "hf-lookup" else 0, **assisted}

    def write(self, prompt: list[int], max_new_tokens: int) -> Answer:
        written = hugging_face(self.target, prompt, max_new_tokens, self.name, self.assistant)
        return Answer(
            tokens=written.tokens,
            decoded=sum(written.pieces[1:]),
            steps=len(written.pieces) - 1,
            first_token_seconds=written.first_token_seconds,
            decode_seconds=written.decode_seconds,
        )

    def close(self) -> None: ...


@dataclass
class PeerColumn:
    """Another engine, in a process of its own."""

    peer: Peer
    stops: list[int]
    sampling = GREEDY
    own = False

    def describe(self) -> dict[str, Any]:
        return {"mode": self.peer.name, **self.peer.settings}

    def write(self, prompt: list[int], max_new_tokens: int) -> Answer:
        told = self.peer.ask(prompt, max_new_tokens, self.stops)
        return Answer(told.tokens, told.decoded, told.steps, told.first_token_seconds, told.decode_seconds)

    def close(self) -> None:
        self.peer.close()


def column(decoder: Decoder, name: str, peers: PeerConfig | None = None) -> Column:
    """The column of a name: a baseline, a peer, or a mode with settings of its own after slashes.

    Raises DecodingError for a setting that is unknown or has a bad value.
    """
    peers = peers or PeerConfig()
    if name in BASELINES:
        return HuggingFaceColumn(decoder.target, name, _assistant(decoder.target, name, peers))
    if name in PEERS:
        return PeerColumn(start(name, peers, decoder.target), sorted(decoder.target.stop_ids))
    mode, *changes = name.split("/")
    if not changes:
        return ModeColumn(decoder, mode)
    of_mode, of_sampling = ({f.name for f in fields(c)} for c in (ModeSettings, Sampling))
    values: dict[str, dict[str, Any]] = {"mode": {}, "sampling": {}}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in of_mode | of_sampling or not text:
            known = ", ".join(sorted(of_mode | of_sampling))
            raise DecodingError(f"{name!r}: {change!r} is no setting=value; settings are {known}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        values["mode" if key in of_mode else "sampling"][key] = value
    try:
        changed, sampling = replace(decoder.settings, **values["mode"]), Sampling(**values["sampling"])
    except (TypeError, ValueError) as error:
        raise DecodingError(f"{name!r}: {error}") from error
    return ModeColumn(
        Decoder(
            decoder.target, decoder.probe, decoder.neural, changed, lengths=decoder.lengths, policies=decoder.policies
        ),
        mode,
        sampling,
    )


def _assistant(target: Target, name: str, peers: PeerConfig) -> Assistant | None:
    if name != "hf-assisted":
        return None
    if not peers.assistant:
        raise DecodingError("hf-assisted needs a draft model: name its folder with --assistant, or leave it out")
    return Assistant.load(peers.assistant, target)


OF_DRAFTER = {
    "copy": ("depth", "copy_nodes"),
    "eagle": ("neural_nodes", "neural_depth", "neural_tree"),
    "draft": ("draft_tokens", "neural_tree"),
}
"""Mode settings that matter where a drafter takes part; the drafter's own description says the rest."""


def settings_of_drafters(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of a mode's description, the settings that its drafters' trees depend on."""
    names = [name for drafter in described["drafters"] for name in OF_DRAFTER.get(drafter["name"], ())]
    return {name: described["settings"][name] for name in names}


def drafts_of(records: Sequence[StepRecord]) -> dict[str, Drafts]:
    """What each drafter's drafts came to."""
    found: dict[str, Drafts] = {}
    for record in records:
        empty = int(not record.accepted)
        for name in set(record.source):
            kept = sum(record.source[node] == name for node in record.accepted)
            drafts = Drafts(1, kept, empty, empty * record.milliseconds / 1e3)
            found[name] = found.get(name, Drafts()) + drafts
    return found
