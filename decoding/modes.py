"""Modes: named choices of gate, drafters and verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from activations.matching.match import MatchConfig
from activations.matching.shared import SharedConfig, SharedStore
from activations.target import Target
from decoding.budgets import FixedBudget, PricedBudget
from decoding.drafters import CopyDrafter, Drafter
from decoding.gates import COPY, Always, BanditGate, Choice, Gate, MatchLengthGate, Never, ProbeGate
from decoding.length_gate import LengthGate
from decoding.verifier import Verifier
from probes.length_head import LengthHead

if TYPE_CHECKING:
    from decoding.costs import CostTable

NEURAL = ("eagle", "draft", "none")
"""Neural sides that `--neural` chooses from."""
GATES = ("auto", "probe", "cost", "match", "bandit", "always", "never")
"""Gates that `--gate` chooses from."""
WIDEST_COPY = 31
"""Most nodes of a copy that a length gate may ask for."""
WIDEST_TREE = (31, 4)
"""Most nodes and levels of a neural tree that a length gate may ask for; it is priced and trimmed."""


class DecodingError(Exception):
    """A generation that was asked for in a way that cannot be done. The message says what to do."""


KAPPA = 5
"""Shortest suffix match where neither a setting nor a probe says otherwise: SwitchSD's own."""


class SiteProbe(Protocol):
    """What decoding needs of a probe."""

    @property
    def config(self) -> ProbeSite: ...

    def score(self, state: torch.Tensor) -> torch.Tensor:
        """Probabilities [...] of states [..., sites * width]."""
        ...


class ProbeSite(Protocol):
    @property
    def sites(self) -> Sequence[str]: ...

    @property
    def threshold(self) -> float: ...

    @property
    def kappa(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ModeSettings:
    """What the modes can be told."""

    kappa: int | None = None
    """Shortest suffix match that is copied from; by default the one that the probe was chosen for, or 5."""
    candidates: int = 10
    """Most copy candidates: the longest matches, the most recent of equals first."""
    depth: int = 20
    """Most tokens of a copy candidate."""
    copy_nodes: int = 12
    """Most nodes of a copy trie."""
    shared_tokens: int = 0
    """Tokens of finished answers kept to copy from, across requests; 0 = none. For texts that may see each other."""
    neural_nodes: int = 12
    """Most nodes of the neural drafter's tree."""
    neural_depth: int = 4
    """Most levels of the neural drafter's tree."""
    neural_tree: str = "priced"
    """The neural drafter's tree: priced (as far as the cost table says it pays), fixed (always that large)."""
    tau: float | None = None
    """Copy intent from which the switch copies; by default the probe's own threshold."""
    gate: str = "auto"
    """Gate of `switchsd`: auto (cost where there is a length head and no tau was given, else probe), probe (SwitchSD's
    rule), cost (expected tokens per millisecond, from a length head; it sizes all drafts itself), match (any suffix
    match of kappa tokens), bandit (whichever has paid), always (the neural side), never (the target alone)."""
    neural: str = "eagle"
    """Neural side: eagle or none (draft, a small draft model, is not yet available)."""

    def __post_init__(self) -> None:
        for name in ("kappa", "candidates", "depth", "copy_nodes", "neural_nodes", "neural_depth"):
            value = getattr(self, name)
            if name == "kappa" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if not isinstance(self.shared_tokens, int) or self.shared_tokens < 0:
            raise ValueError(f"shared_tokens is {self.shared_tokens!r}; it must be a whole number, 0 (none) or more")
        if self.gate not in GATES:
            raise ValueError(f"unknown gate {self.gate!r}: use {', '.join(GATES[:-1])} or {GATES[-1]}")
        if self.neural_tree not in ("fixed", "priced"):
            raise ValueError(f"unknown neural_tree {self.neural_tree!r}: use fixed or priced")
        if self.neural not in NEURAL:
            raise ValueError(f"unknown neural side {self.neural!r}: use {', '.join(NEURAL)}")
        if self.tau is not None and not (isinstance(self.tau, (int, float)) and 0 <= self.tau <= 1):
            raise ValueError(f"tau is {self.tau!r}; a threshold of a probability lies in [0, 1]")


@dataclass(frozen=True)
class Parts:
    """What a mode may be built from."""

    target: Target
    settings: ModeSettings
    probe: SiteProbe | None = None
    neural: Drafter | None = None
    lengths: LengthHead | None = None
    costs: Callable[[], CostTable] | None = None
    """Gives the cost table; called only by what needs it, because it may have to measure."""
    shared: Callable[[SharedConfig], SharedStore] | None = None
    """Gives the store of finished texts for its settings; called only where there is to be one."""

    def copy(self) -> tuple[CopyDrafter, Choice]:
        s = self.settings
        source = self.lengths if self._by_length else self.probe
        kappa = s.kappa or (source.config.kappa if source is not None else KAPPA)
        config, shared = MatchConfig(kappa=kappa, candidates=s.candidates, depth=s.depth), None
        if s.shared_tokens and self.shared is not None:
            longest = config.max_length
            shared = self.shared(SharedConfig(s.shared_tokens, kappa=kappa, max_length=longest, depth=s.depth))
        drafter = CopyDrafter(config, shared)
        return drafter, Choice(COPY, FixedBudget(s.copy_nodes, s.depth))

    @property
    def _by_length(self) -> bool:
        s = self.settings  # a threshold that was asked for is one of the probe gate
        return self.lengths is not None and (s.gate == "cost" or (s.gate == "auto" and s.tau is None))

    def length_gate(self, copy: Choice, neural: Choice | None) -> LengthGate | None:
        """The cost gate on a length head, which sizes the drafts; None where it is not asked for or there is none."""
        if not self._by_length or self.lengths is None:
            return None
        costs = self.cost_table("gate 'cost'", "gate=probe")
        copy = Choice(copy.name, FixedBudget(WIDEST_COPY, self.settings.depth))
        if neural is not None:
            neural = Choice(neural.name, PricedBudget.of(costs, neural.name, *WIDEST_TREE))
        return LengthGate(costs, self.lengths, copy, neural)

    def neural_choice(self) -> Choice | None:
        """The neural side that the settings ask for; None where they ask for none or there is none."""
        s = self.settings
        if s.neural == "draft" and (self.neural is None or self.neural.name != "draft"):
            raise DecodingError("the neural side 'draft' (a small draft model) is not yet available: use eagle or none")
        if s.neural == "none" or self.neural is None:
            return None
        if s.neural != self.neural.name:
            raise DecodingError(
                f"the neural side {s.neural!r} was asked for and {self.neural.name!r} is loaded: "
                f"use neural={self.neural.name} or none"
            )
        if s.neural_tree == "fixed" or self.costs is None:
            return Choice(self.neural.name, FixedBudget(s.neural_nodes, s.neural_depth))
        costs = self.cost_table("neural_tree 'priced'", "neural_tree=fixed")
        return Choice(self.neural.name, PricedBudget.of(costs, self.neural.name, s.neural_nodes, s.neural_depth))

    def cost_table(self, what: str, instead: str) -> CostTable:
        if self.costs is None:
            raise DecodingError(f"{what} needs a cost table: run `switchsd profile`, or use {instead}")
        return self.costs()


@dataclass(frozen=True)
class Plan:
    """A mode, built: what the engine runs."""

    gate: Gate
    drafters: tuple[Drafter, ...] = ()
    probe: SiteProbe | None = None
    lengths: LengthHead | None = None
    """Says how far drafts will be followed, where the gate asks."""
    verifier: Verifier = field(default_factory=Verifier)
    particles: int = 1
    """Rows of a request."""


@dataclass(frozen=True)
class Mode:
    """A named way of decoding."""

    name: str
    summary: str
    lossless: bool
    """True: the text is the target's own."""
    build: Callable[[Parts], Plan]


def _ar(parts: Parts) -> Plan:
    return Plan(Never())


def _copy(parts: Parts) -> Plan:
    drafter, choice = parts.copy()
    return Plan(MatchLengthGate(choice), (drafter,))


def _eagle(parts: Parts) -> Plan:
    choice = parts.neural_choice()
    if choice is None or parts.neural is None:
        raise DecodingError(
            f"mode 'eagle' needs an EAGLE head for {parts.target.name}, and none is in use: "
            "name one as the drafter (and leave neural at eagle), or use mode copy, switchsd or ar"
        )
    return Plan(Always(choice), (parts.neural,))


def _switchsd(parts: Parts) -> Plan:
    s = parts.settings
    drafter, copy = parts.copy()
    neural = parts.neural_choice()
    drafters: tuple[Drafter, ...] = (drafter,) if neural is None or parts.neural is None else (drafter, parts.neural)
    if s.gate == "never":
        return Plan(Never())
    if s.gate == "always":
        return _eagle(parts)
    if s.gate == "match":
        return Plan(MatchLengthGate(copy, neural), drafters)
    if s.gate == "bandit":
        return Plan(BanditGate(copy, neural), drafters)
    gate = parts.length_gate(copy, neural)
    if gate is not None:
        return Plan(gate, drafters, lengths=parts.lengths)
    if s.gate == "cost":
        raise DecodingError(
            f"gate 'cost' needs a length head for {parts.target.name}, and none is loaded: "
            "train one (switchsd train lengths), or use gate=probe or gate=match"
        )
    if parts.probe is None:
        raise DecodingError(
            f"mode 'switchsd' needs a probe for {parts.target.name}, and none is loaded: "
            "train one (switchsd train), or use gate=match or mode copy"
        )
    tau = s.tau if s.tau is not None else parts.probe.config.threshold
    return Plan(ProbeGate(copy, neural, tau), drafters, parts.probe)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("ar", "the target alone, one token a step", True, _ar),
        Mode("copy", "copies wherever a suffix match exists", True, _copy),
        Mode("eagle", "drafts with an EAGLE head at every step", True, _eagle),
        Mode("switchsd", "copies where a probe says that the target will, else drafts with a head", True, _switchsd),
    )
}


def get_mode(name: str) -> Mode:
    if name not in MODES:
        raise DecodingError(f"unknown mode {name!r}: use {', '.join(MODES)}")
    return MODES[name]
