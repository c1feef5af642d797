"""The decoder: text from prompts, in any mode, with numbers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, overload

from activations.matching.shared import SharedConfig, SharedStore
from activations.sampling import Sampling
from activations.target import Target
from decoding.costs import CostTable, cached_costs, get_costs
from decoding.drafters import CopyDrafter, Drafter
from decoding.engine import Commit, Engine
from decoding.gates import ProbeGate
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.modes import DecodingError, ModeSettings, Parts, Plan, SiteProbe, get_mode
from decoding.request import TARGET, Request
from decoding.scheduler import SequentialScheduler
from decoding.selfcheck import ensure_tree_forward
from decoding.text import TextStream
from decoding.trace import About, Trace
from probes.length_head import LengthHead

if TYPE_CHECKING:
    from decoding.policies.policy import PolicyArtifact

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages, or token ids."""


@dataclass(frozen=True)
class Generation:
    """A finished text."""

    text: str
    tokens: list[int]
    """Generated ids; a stop token, or the token that completed a stop string, is the last one."""
    sources: list[str]
    """Who drafted each token: target, copy, eagle, draft."""
    prompt_tokens: int
    steps: int
    """Verifying forwards; prefill, which gives the first token, is none."""
    copy_steps: int
    """Steps that copied."""
    stopped: bool
    """A stop token or stop string ended it; else a limit, or an interruption."""
    interrupted: bool
    cut: str
    """Why it ended before its text did: out of memory; else empty."""
    first_token_seconds: float
    """From the call (in a batch, from the request's admission) to the first token."""
    decode_seconds: float
    """From the end of prefill to the last token; requests decoded together share their seconds."""
    prefilled: int = 1
    """Tokens that prefill gave: 1, or 0 where drafts compete for the first one too (mode cospec)."""

    @property
    def decoded(self) -> int:
        """Tokens that steps gave."""
        return max(len(self.tokens) - self.prefilled, 0)

    @property
    def tokens_per_second(self) -> float:
        """After prefill: what it gave and its time do not count."""
        return self.decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Accepted length + 1, on average."""
        return self.decoded / self.steps if self.steps else 0.0

    @property
    def copy_share(self) -> float:
        """Share of the steps that copied."""
        return self.copy_steps / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Event:
    """New text of one request: a run of tokens of one source. The text may lag behind the tokens where a character
    is incomplete or a stop string may have begun."""

    request: int
    text: str
    tokens: list[int]
    source: str
    done: Generation | None = None
    """On a request's last event, everything."""


@dataclass(frozen=True)
class Call:
    """What was asked of a decoder, checked."""

    mode: str
    settings: ModeSettings
    plan: Plan
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    batch: int

    def request(self, number: int, prompt: list[int], longest: int) -> Request:
        """One prompt's request, to a target that takes texts of `longest` tokens."""
        return Request(number, prompt, min(self.max_new_tokens, longest - len(prompt)), self.sampling, self.stop)


@dataclass(eq=False)
class _Progress:
    """What is known of a running request."""

    request: Request
    text: TextStream
    began: float
    prefilled: int
    first: float = 0.0
    last: float = 0.0
    steps: int = 0
    copy_steps: int = 0
    stopped: bool = False
    over: bool = False
    cut: str = ""
    emitted: bool = field(default=False)


class Decoder:
    """A target with what speeds it up. `generate` and `stream` take the same options; `trace` is the latest call's."""

    def __init__(
        self,
        target: Target,
        probe: SiteProbe | None = None,
        neural: Drafter | Mapping[str, Drafter] | None = None,
        settings: ModeSettings | None = None,
        costs: CostTable | None = None,
        lengths: LengthHead | None = None,
        elsewhere: Mapping[str, Drafter] | None = None,
        policies: Mapping[str, PolicyArtifact] | None = None,
    ) -> None:
        """`neural`: the neural drafters by name, or a single one. Modes and settings choose among them. `elsewhere`:
        the same in processes of their own, for mode minedraft. `policies`: those of the learned modes, by kind."""
        self.target = target
        self.probe = probe
        self.neural: Mapping[str, Drafter] = (
            neural if isinstance(neural, Mapping) else {} if neural is None else {neural.name: neural}
        )
        self.elsewhere = {} if elsewhere is None else elsewhere
        self.policies: Mapping[str, PolicyArtifact] = {} if policies is None else policies
        self.lengths = lengths
        self.shared: SharedStore | None = None
        """What finished texts leave to copy from, where `shared_tokens` asks for it; `reset()` empties it."""
        self.settings = settings or ModeSettings()
        self.trace = Trace()
        self._given_costs = costs
        self._turn = RLock()
        self._costs = costs

    # -- what users call ----------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Sequence[Mapping[str, str]] | Sequence[int], **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
        """The text after a prompt, or one for each of a list of prompts. Options: see `stream`.

        Ctrl-C returns what there is, `interrupted` set; prompts that had not begun give empty texts. Raises
        DecodingError as `stream` does.
        """
        prompts, single = _prompts(prompt)
        results: dict[int, Generation] = {}
        running: dict[int, _Progress] = {}
        encoded = [self.target.encode(p) for p in prompts]
        events = self._events(encoded, running, **options)
        try:
            for event in events:
                if event.done is not None:
                    results[event.request] = event.done
        except KeyboardInterrupt:
            events.close()
            for number, ids in enumerate(encoded):
                if number not in results:
                    results[number] = self._finished(running.get(number), len(ids), interrupted=True)
        out = [results[i] for i in range(len(prompts))]
        return out[0] if single else out

    def stream(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generator[Event, None, None]:
        """Events as the text grows. Options:

        mode            a name of `decoding.modes.MODES` (default switchsd)
        max_new_tokens  most tokens to write (default 256)
        temperature     0 = greedy (default); top_k, top_p, seed: as in `activations.sampling.Sampling`
        stop            a text or texts that end the generation, and are no part of it
        batch           most prompts decoded together (default 8)
        kappa, candidates, depth, copy_nodes, neural_nodes, neural_depth, draft_tokens, acceptance, tau, gate, neural:
                        see `ModeSettings`

        Raises DecodingError for a prompt that is none, an unknown option or value, and parts that the mode lacks;
        TargetError for a prompt that does not fit.
        """
        prompts, _ = _prompts(prompt)
        return self._events([self.target.encode(p) for p in prompts], {}, **options)

    # -- inside -------------------------------------------------------------------------------------

    def _events(
        self, prompts: list[list[int]], running: dict[int, _Progress], **options: Any
    ) -> Generator[Event, None, None]:
        """Checks everything at once, so that a bad option fails at the call and not at the first event."""
        call = self.call(**options)
        requests = [call.request(i, ids, self.target.max_length) for i, ids in enumerate(prompts)]

        def events() -> Generator[Event, None, None]:  # nothing is attached to the target before the first one
            self.trace = self.tracing(call.mode, call.plan, call.settings, call.sampling)
            with self._turn:
                engine = Engine(self.target, call.plan, min(call.batch, len(requests)), self.trace, call.mode)
            try:
                yield from self.run(requests, engine, running)
            finally:
                with self._turn:
                    engine.close()

        return events()

    def call(
        self,
        *,
        mode: str = "switchsd",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        batch: int = 8,
        **settings: Any,
    ) -> Call:
        """The options of `stream`, checked. Raises DecodingError."""
        for name, value in (("max_new_tokens", max_new_tokens), ("batch", batch)):
            if not isinstance(value, int) or value < 1:
                raise DecodingError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else tuple(stop)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise DecodingError(f"a stop string is empty or no text ({text!r}): give it some text")
        known = [f.name for f in fields(ModeSettings)]
        for name in settings:
            if name not in known:
                raise DecodingError(
                    f"unknown option {name!r}: there are max_new_tokens, temperature, top_p, top_k, seed, stop, and "
                    f"the settings of the modes, {', '.join(known)}"
                )
        try:
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
            chosen = replace(self.settings, **settings)
            plan = self.plan(mode, chosen)
            plan.verifier.check(sampling)
        except (ValueError, TypeError) as error:
            raise DecodingError(str(error)) from error
        return Call(mode, chosen, plan, sampling, stops, max_new_tokens, batch)

    def plan(self, mode: str, settings: ModeSettings | None = None) -> Plan:
        """A mode, built from this decoder's parts."""
        parts = Parts(
            self.target, settings or self.settings, self.probe, self.neural, self.lengths, self.costs, self._store,
            self.elsewhere, self.policies,
        )  # fmt: skip
        built = get_mode(mode).build(parts)
        if built.drafters:
            ensure_tree_forward(self.target)
        return built

    def describe(self, mode: str) -> dict[str, Any]:
        """Everything of this decoder that a mode's text and speed depend on, for JSON."""
        plan = self.plan(mode)
        ruled = {} if plan.verifier.keyed else {"acceptance": self.settings.acceptance}
        return {
            "mode": mode,
            "lossless": get_mode(mode).lossless,
            **ruled,
            **plan.verifier.describe(),
            "settings": asdict(self.settings),
            "gate": type(plan.gate).__name__,
            "drafters": [d.describe() for d in plan.drafters],
            "probe": None if plan.probe is None else plan.probe.config.to_dict(),
            "lengths": None if plan.lengths is None else plan.lengths.digest,
        }

    def tracing(self, mode: str, plan: Plan, settings: ModeSettings, sampling: Sampling) -> Trace:
        """An empty trace for texts that are written so."""
        probe, copy = plan.probe, next((d for d in plan.drafters if isinstance(d, CopyDrafter)), None)
        about = About(
            target=self.target.name,
            mode=mode,
            lossless=get_mode(mode).lossless,
            gate=type(plan.gate).__name__,
            site=None if probe is None else ", ".join(probe.config.sites),
            label=None if probe is None else str(probe.config.to_dict().get("label")),
            tau=plan.gate.tau if isinstance(plan.gate, ProbeGate) else None,
            kappa=None if copy is None else copy.config.kappa,
            settings=asdict(settings),
            sampling=asdict(sampling),
        )
        return Trace(about=about, decode=partial(self.target.decode, skip_special_tokens=False))

    def _store(self, config: SharedConfig) -> SharedStore:
        """The store of finished texts; other settings begin another one."""
        if self.shared is None or self.shared.config != config:
            self.shared = SharedStore(config)
        return self.shared

    def costs_known(self, *drafters: str) -> bool:
        """Whether a cost table with the times of these drafters was given or is cached, so that it need not be
        measured."""
        return self._given_costs is not None or cached_costs(self.target, self._chosen(drafters)) is not None

    def costs(self, *drafters: str) -> CostTable:
        """The cost table with the times of these drafters: given, cached, or measured now (about 12 s)."""
        chosen = self._chosen(drafters)
        if self._costs is None or (self._given_costs is None and not all(map(self._costs.knows, chosen))):
            self._costs = get_costs(self.target, chosen, self.probe)
        return self._costs

    def _chosen(self, drafters: Sequence[str]) -> list[Drafter]:
        return [self.neural[name] for name in drafters if name in self.neural]

    def run(
        self, requests: list[Request], engine: Engine, running: dict[int, _Progress] | None = None
    ) -> Generator[Event, None, None]:
        """The events of requests in an engine's rows. Calls from several threads take turns, a step at a time: they
        share the target and the drafters."""
        running = {} if running is None else running
        began, prefilled = perf_counter(), int(not engine.plan.verifier.opens)
        scheduler = (OverlappedScheduler if engine.plan.overlapped else SequentialScheduler)(engine)

        def admitted() -> Iterator[Request]:
            for request in requests:
                start = began if not running else perf_counter()
                text = TextStream(self.target, request.stop)
                running[request.number] = _Progress(request, text, start, prefilled)
                yield request

        out: dict[int, list[Event]] = {}

        def ended(commit: Commit) -> bool:
            progress = running[commit.request.number]
            out[commit.request.number] = self._advance(progress, commit)
            return progress.over

        commits = scheduler.run(admitted(), ended)
        try:
            while True:
                with self._turn:
                    commit = next(commits, None)
                if commit is None:
                    return
                number = commit.request.number
                events = out.pop(number)
                if running[number].over:
                    tail = running[number].text.finish()
                    done = self._finished(running[number], len(commit.request.prompt))
                    events[-1] = replace(events[-1], text=events[-1].text + tail, done=done)
                yield from events
        finally:
            with self._turn:
                commits.close()

    def _advance(self, progress: _Progress, commit: Commit) -> list[Event]:
        """Cut what lies behind a stop or a limit, and turn the rest into events."""
        request = progress.request
        now = perf_counter()
        if commit.cut:
            progress.over, progress.cut = True, commit.cut
            return [Event(request.number, "", [], TARGET)]
        if not progress.emitted:
            progress.first, progress.emitted = now, True
        else:
            progress.steps += 1
            progress.copy_steps += commit.copied
        progress.last = now
        tokens, sources = commit.tokens, commit.sources
        extra = len(request.tokens) - len(request.prompt) - request.max_new_tokens
        keep = len(tokens) - max(extra, 0)
        for i, token in enumerate(tokens[:keep]):
            if token in self.target.stop_ids:
                keep, progress.stopped = i + 1, True
                break
        events: list[Event] = []
        at = 0
        while at < keep:
            to = at + 1
            while to < keep and not request.stop and sources[to] == sources[at]:
                to += 1
            shown = to - (progress.stopped and to == keep)  # a stop token is no text
            text = progress.text.push(tokens[at:shown]) if shown > at else ""
            events.append(Event(request.number, text, tokens[at:to], sources[at]))
            at = to
            if progress.text.stopped:
                keep, progress.stopped = at, True
        dropped = len(tokens) - keep
        if dropped:
            del tokens[keep:], sources[keep:], request.tokens[-dropped:], request.sources[-dropped:]
        progress.over = progress.stopped or len(request.sources) >= request.max_new_tokens
        return events or [Event(request.number, "", [], TARGET)]  # particles that do not agree yet

    def _finished(self, progress: _Progress | None, prompt_tokens: int, interrupted: bool = False) -> Generation:
        if progress is None or not progress.emitted:
            cut = progress.cut if progress is not None else ""
            return Generation("", [], [], prompt_tokens, 0, 0, False, interrupted, cut, 0.0, 0.0)
        if interrupted:
            progress.text.finish()
        request = progress.request
        count = min(len(request.generated), len(request.sources))
        return Generation(
            text=progress.text.text,
            tokens=request.generated[:count],
            sources=request.sources[:count],
            prompt_tokens=prompt_tokens,
            steps=progress.steps,
            copy_steps=progress.copy_steps,
            stopped=progress.stopped,
            interrupted=interrupted,
            cut=progress.cut,
            first_token_seconds=progress.first - progress.began,
            decode_seconds=progress.last - progress.first,
            prefilled=progress.prefilled,
        )


def _prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a single one was given (text, one list of messages, or one list of ids)."""
    if isinstance(prompt, str):
        return [prompt], True
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise DecodingError(
            f"a prompt is text, a list of chat messages or a list of token ids, not {type(prompt).__name__}"
        )
    items: list[Any] = list(prompt)
    if not items:
        raise DecodingError("no prompt was given")
    if isinstance(items[0], (int, Mapping)):
        return [items], True
    return items, False
