"""Modes: named choices of gate, drafters and verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from activations.matching.match import MatchConfig
from activations.matching.shared import SharedConfig, SharedStore
from activations.target import Target
from decoding.budgets import FixedBudget, PricedBudget
from decoding.cospec.verifier import ArbitrationVerifier
from decoding.draft.drafter import DraftModelDrafter
from decoding.drafters import CopyDrafter, Drafter
from decoding.gates import COPY, Always, BanditGate, Choice, Gate, MatchLengthGate, Never, ProbeGate
from decoding.length_gate import LengthGate
from decoding.ltd.budget import LearnedBudget
from decoding.rejection import RejectionVerifier
from decoding.smc.lookahead import Lookahead, LookaheadGate
from decoding.smc.resampling import RESAMPLING
from decoding.smc.verifier import ParticleVerifier
from decoding.verifier import Verifier
from probes.length_head import LengthHead

if TYPE_CHECKING:
    from decoding.costs import CostTable
    from decoding.policies.policy import PolicyArtifact

EAGLE, DRAFT = "eagle", "draft"
"""Names of the neural drafters."""
NEURAL = (EAGLE, DRAFT, "none")
"""Neural sides that `--neural` chooses from."""
NEURAL_TREES = ("priced", "fixed", "learned")
"""Rules that `--neural-tree` chooses from."""
ACCEPTANCES = ("keyed", "rejection")
"""Rules that `--acceptance` chooses from."""
GATES = ("auto", "probe", "cost", "match", "bandit", "always", "never")
"""Gates that `--gate` chooses from."""
START = 4
"""Tokens that a lookahead drafts before it has seen any ratios."""
WIDEST_COPY = 31
"""Most nodes of a copy that a length gate may ask for."""
WIDEST_TREE = (31, 4)
"""Most nodes and levels of a neural tree that a length gate may ask for; it is priced and trimmed."""


class DecodingError(Exception):
    """A generation that was asked for in a way that cannot be done. The message says what to do."""


MOST_POWER = 100
"""Beyond it a power leaves nothing but the likeliest token."""
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
    """What a probe says of itself: where it reads, and from which output and match length on it copies."""

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
    """The neural drafter's tree: priced (as far as the cost table says it pays), fixed (always that large), learned (as
    Learning to Draft's policies say, whose own limits hold then; an EAGLE head's alone). Mode ltd is always learned."""
    draft_tokens: int = 8
    """Most tokens that a draft model drafts at a step; fewer where the neural tree is priced and they would not pay.
    Mode cospec drafts as many as its policy was trained with."""
    acceptance: str = "keyed"
    """How drafted tokens are accepted where the target samples: keyed (the target draws its own token, and a draft is
    right that is the same: the text is the target's own at the seed), rejection (mode sd: classical rejection sampling;
    the text has the target's law, and is another one at the same seed)."""
    particles: int = 4
    """Texts that mode smcsd writes side by side, each a row of its own; one of them is chosen at the end."""
    ess_threshold: float = 0.5
    """Particles are resampled where fewer than this share of them still count."""
    resampling: str = "systematic"
    """How particles are resampled: systematic or multinomial."""
    lookahead: float | None = None
    """Mode smcsd drafts as far as this share of the particles (0.3, say) is expected to count still, at most
    draft_tokens; by default always draft_tokens."""
    power: float = 1.0
    """Mode smcsd follows the product of the tokens' probabilities to this power; 1 is the target's own law."""
    arbitration: float | None = None
    """Mode cospec, which is not lossless, keeps a drafted token that the target would not write where its policy's
    probability that this is right reaches this threshold; 1 = never, which is exact; by default the policy's own."""
    tau: float | None = None
    """Copy intent from which the switch copies; by default the probe's own threshold."""
    read_intent: bool = False
    """Read the probe where the gate decides without it, too, so that the trace tells copy intent; 1 to 2 % slower."""
    gate: str = "auto"
    """Gate of `switchsd`: auto (cost where there is a length head and no tau was given, else probe), probe (SwitchSD's
    rule), cost (expected tokens per millisecond, from a length head; it sizes all drafts itself), match (any suffix
    match of kappa tokens), bandit (whichever has paid), always (the neural side), never (the target alone)."""
    neural: str = "eagle"
    """Neural side of `switchsd` and drafter of `minedraft`: eagle (an EAGLE head), draft (a small draft model) or none
    (copies alone)."""

    def __post_init__(self) -> None:
        counts = ("candidates", "depth", "copy_nodes", "neural_nodes", "neural_depth", "draft_tokens", "particles")
        for name in ("kappa", *counts):
            value = getattr(self, name)
            if name == "kappa" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if not isinstance(self.shared_tokens, int) or self.shared_tokens < 0:
            raise ValueError(f"shared_tokens is {self.shared_tokens!r}; it must be a whole number, 0 (none) or more")
        if self.gate not in GATES:
            raise ValueError(f"unknown gate {self.gate!r}: use {', '.join(GATES[:-1])} or {GATES[-1]}")
        if self.neural_tree not in NEURAL_TREES:
            raise ValueError(f"unknown neural_tree {self.neural_tree!r}: use {', '.join(NEURAL_TREES)}")
        if self.resampling not in RESAMPLING:
            raise ValueError(f"unknown resampling {self.resampling!r}: use {' or '.join(RESAMPLING)}")
        if not (isinstance(self.ess_threshold, (int, float)) and 0 <= self.ess_threshold <= 1):
            raise ValueError(
                f"ess_threshold is {self.ess_threshold!r}; it must be a share of the particles, from 0 to 1"
            )
        if self.lookahead is not None and not (isinstance(self.lookahead, (int, float)) and 0 < self.lookahead < 1):
            raise ValueError(
                f"lookahead is {self.lookahead!r}; it must be a share between 0 and 1 (0.3, say), or be left out"
            )
        if not (isinstance(self.power, (int, float)) and 0 < self.power <= MOST_POWER):
            raise ValueError(f"power is {self.power!r}; it must be above 0 and at most {MOST_POWER}")
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"unknown acceptance {self.acceptance!r}: use {' or '.join(ACCEPTANCES)}")
        if self.neural not in NEURAL:
            raise ValueError(f"unknown neural side {self.neural!r}: use {', '.join(NEURAL)}")
        if self.arbitration is not None and not (
            isinstance(self.arbitration, (int, float))
            and not isinstance(self.arbitration, bool)
            and 0 <= self.arbitration <= 1
        ):
            raise ValueError(f"arbitration is {self.arbitration!r}; a threshold of a probability lies in [0, 1]")
        if self.tau is not None and not (isinstance(self.tau, (int, float)) and 0 <= self.tau <= 1):
            raise ValueError(f"tau is {self.tau!r}; a threshold of a probability lies in [0, 1]")


@dataclass(frozen=True)
class Parts:
    """What a mode may be built from."""

    target: Target
    settings: ModeSettings
    probe: SiteProbe | None = None
    neural: Mapping[str, Drafter] = field(default_factory=dict)
    """Neural drafters by name."""
    lengths: LengthHead | None = None
    costs: Callable[[str], CostTable] | None = None
    """Gives the cost table with the times of the named drafter (\"\": of none); called only by what needs it, because
    it may have to measure."""
    shared: Callable[[SharedConfig], SharedStore] | None = None
    """Gives the store of finished texts for its settings; called only where there is to be one."""
    elsewhere: Mapping[str, Drafter] = field(default_factory=dict)
    """The neural drafters in processes of their own, which start when they are asked for."""
    policies: Mapping[str, PolicyArtifact] = field(default_factory=dict)
    """Learned policies by kind: ltd, cospec."""

    def copy(self) -> tuple[CopyDrafter, Choice]:
        """The copy drafter with its budget. A kappa that is not set is the length head's or the probe's."""
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
        if self.lengths is None or s.gate == "cost":
            return self.lengths is not None
        known = s.neural != DRAFT or self.lengths.knows(DRAFT)
        return s.gate == "auto" and s.tau is None and known

    def length_gate(self, copy: Choice, neural: Choice | None) -> LengthGate | None:
        """The cost gate on a length head, which sizes the drafts; None where it is not asked for or there is none.

        Raises DecodingError where it does not know the draft model, or there is no cost table.
        """
        if not self._by_length or self.lengths is None:
            return None
        if self.settings.neural == DRAFT and not self.lengths.knows(DRAFT):
            raise DecodingError(
                f"gate 'cost' weighs drafts by a length head, and the one of {self.target.name} knows no draft model: "
                "use gate=probe or gate=match, or neural=eagle"
            )
        costs = self.cost_table("gate 'cost'", "gate=probe", neural.name if neural is not None else "")
        copy = Choice(copy.name, FixedBudget(WIDEST_COPY, self.settings.depth))
        if neural is not None and neural.name != DRAFT and self.settings.neural_tree != "learned":
            neural = Choice(neural.name, PricedBudget.of(costs, neural.name, *WIDEST_TREE))
        return LengthGate(costs, self.lengths, copy, neural)

    def neural_choice(self) -> Choice | None:
        """The neural side that the settings ask for; None where they ask for none, or for a head and there is none."""
        name = self.settings.neural
        if name == DRAFT:
            self.draft_model("the neural side 'draft'")
        return self.choice(name) if name != "none" and name in self.neural else None

    def choice(self, name: str) -> Choice:
        """A neural drafter with the budget that the settings give it."""
        s = self.settings
        if s.neural_tree == "learned":
            return Choice(name, self.learned_budget(name))
        size = (s.draft_tokens, s.draft_tokens) if name == DRAFT else (s.neural_nodes, s.neural_depth)
        if s.neural_tree == "fixed" or self.costs is None:
            return Choice(name, FixedBudget(*size))
        costs = self.cost_table("neural_tree 'priced'", "neural_tree=fixed", name)
        return Choice(name, PricedBudget.of(costs, name, *size))

    def learned_budget(self, name: str) -> LearnedBudget:
        """Learning to Draft's policies as a budget. Raises DecodingError."""
        if name != EAGLE:
            raise DecodingError(
                f"neural_tree=learned sizes trees of an EAGLE head, and neural={name} drafts chains: use neural=eagle, "
                "or neural_tree=priced"
            )
        return LearnedBudget.of(self.policy("ltd", self.neural[name]))

    def policy(self, kind: str, drafter: Drafter) -> PolicyArtifact:
        """The policy of that kind for this target and drafter. Raises DecodingError."""
        if kind not in self.policies:
            raise DecodingError(
                f"a policy of kind {kind!r} for {self.target.name} is needed, and none is in use: make one (switchsd "
                f"train-policy {kind}), or name its folder (--policy)"
            )
        found = self.policies[kind]
        found.check(kind, self.target, drafter)
        return found

    def draft_model(self, what: str) -> Drafter:
        """The drafter with the draft model. Raises DecodingError, saying what needs it."""
        if DRAFT not in self.neural:
            raise DecodingError(
                f"{what} needs a draft model for {self.target.name}, and none is in use: make one "
                "(switchsd write, then switchsd train draft), or name a small model with the same tokenizer (--draft)"
            )
        return self.neural[DRAFT]

    def cost_table(self, what: str, instead: str, drafter: str) -> CostTable:
        """Measured milliseconds, the drafter's among them. Raises DecodingError, saying what needs them, and what to
        use `instead`."""
        if self.costs is None:
            raise DecodingError(f"{what} needs a cost table: run `switchsd profile`, or use {instead}")
        return self.costs(drafter)


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
    overlapped: bool = False
    """One half of the requests is drafted for while the other half is verified."""


@dataclass(frozen=True)
class Mode:
    """A named way of decoding."""

    name: str
    summary: str
    lossless: bool
    """True: the text is the target's own; where it was sampled by rejection, in law."""
    make: Callable[[Parts], Plan]
    neural: str = "none"
    """Name of the neural drafter that it uses; "chosen": the one of the settings."""
    refuses_rejection: str = ""
    """Why drafts cannot be accepted by rejection sampling; empty where they can."""

    def build(self, parts: Parts) -> Plan:
        """Raises DecodingError where the parts or the settings do not allow it."""
        if parts.settings.acceptance == "rejection" and self.refuses_rejection:
            raise DecodingError(
                f"acceptance=rejection is not for mode {self.name!r}: {self.refuses_rejection}; use acceptance=keyed, "
                "or mode sd"
            )
        return self.make(parts)

    def side(self, settings: ModeSettings) -> str:
        """Name of the neural drafter that it uses under these settings, or none."""
        return settings.neural if self.neural == "chosen" else self.neural


def _ar(parts: Parts) -> Plan:
    return Plan(Never())


def _copy(parts: Parts) -> Plan:
    drafter, choice = parts.copy()
    return Plan(MatchLengthGate(choice), (drafter,))


def _eagle(parts: Parts, mode: str = EAGLE) -> Plan:
    if EAGLE not in parts.neural:
        raise DecodingError(
            f"mode {mode!r} needs an EAGLE head for {parts.target.name}, and none is in use: "
            "name one as the drafter, or use mode copy, switchsd or ar"
        )
    return Plan(Always(parts.choice(EAGLE)), (parts.neural[EAGLE],))


def _ltd(parts: Parts) -> Plan:
    return _eagle(replace(parts, settings=replace(parts.settings, neural_tree="learned")), "ltd")


def _sd(parts: Parts) -> Plan:
    drafter = parts.draft_model("mode 'sd'")
    gate = Always(parts.choice(DRAFT))
    if parts.settings.acceptance == "keyed":
        return Plan(gate, (drafter,))
    if not isinstance(drafter, DraftModelDrafter):
        raise DecodingError("acceptance=rejection needs a draft model that tells what it draws from: use keyed")
    return Plan(gate, (drafter.drawing("own"),), verifier=RejectionVerifier())


def _cospec(parts: Parts) -> Plan:
    drafter = parts.draft_model("mode 'cospec'")
    if not isinstance(drafter, DraftModelDrafter):
        raise DecodingError("mode 'cospec' needs a draft model that tells its probabilities: use mode sd")
    if parts.settings.neural_tree == "learned":
        parts.learned_budget(DRAFT)  # says why not
    policy = parts.policy("cospec", drafter)
    verifier = ArbitrationVerifier.of(parts.target, policy, parts.settings.arbitration)
    n = policy.settings["draft_tokens"]  # as it was trained: this mode's text depends on where blocks end
    return Plan(Always(Choice(DRAFT, FixedBudget(n, n))), (drafter.telling(),), verifier=verifier)


def _smcsd(parts: Parts) -> Plan:
    s = parts.settings
    drafter = parts.draft_model("mode 'smcsd'")
    if not isinstance(drafter, DraftModelDrafter):
        raise DecodingError("mode 'smcsd' needs a draft model that tells what it draws from: use mode sd")
    k = s.draft_tokens
    lookahead = Lookahead(min(START, k), k, s.lookahead) if s.lookahead is not None else None
    verifier = ParticleVerifier(
        s.particles,
        parts.target.stop_ids,
        resampling=s.resampling,
        threshold=s.ess_threshold,
        power=s.power,
        lookahead=lookahead,
    )
    gate = LookaheadGate(DRAFT, lookahead) if lookahead is not None else Always(Choice(DRAFT, FixedBudget(k, k)))
    return Plan(gate, (drafter.drawing("own"),), verifier=verifier, particles=s.particles)


def _minedraft(parts: Parts) -> Plan:
    name = parts.settings.neural
    if name == "none":
        drafter, copy = parts.copy()
        return Plan(MatchLengthGate(copy), (drafter,), overlapped=True)
    if name not in parts.elsewhere:
        raise DecodingError(
            f"mode 'minedraft' drafts with neural={name} in a process of its own, and {parts.target.name} has no such "
            "drafter there: name a head or a draft model, or choose neural=eagle, draft or none (it copies)"
        )
    if parts.settings.neural_tree == "learned":
        raise DecodingError("neural_tree=learned does not go to another process: use priced or fixed in mode minedraft")
    choice = parts.choice(name)
    if isinstance(choice.budget, PricedBudget):  # drafting costs no time while the other batch is verified
        choice = Choice(name, replace(choice.budget, level=0.0))
    return Plan(Always(choice), (parts.elsewhere[name],), overlapped=True)


def _switchsd(parts: Parts) -> Plan:
    s = parts.settings
    if s.gate == "never":
        return Plan(Never())
    drafter, copy = parts.copy()
    neural = parts.neural_choice()
    if s.gate == "always":
        if neural is None:
            raise DecodingError(
                f"gate 'always' lets the neural side draft at every step, and {parts.target.name} has none in use: "
                "name an EAGLE head or a draft model, or use another gate"
            )
        return Plan(Always(neural), (parts.neural[neural.name],))
    drafters: tuple[Drafter, ...] = (drafter,) if neural is None else (drafter, parts.neural[neural.name])
    if s.gate == "match":
        return Plan(MatchLengthGate(copy, neural), drafters)
    if s.gate == "bandit":
        return Plan(BanditGate(copy, neural), drafters)
    gate = parts.length_gate(copy, neural)
    if gate is not None:
        return Plan(gate, drafters, parts.probe if s.read_intent else None, parts.lengths)
    if s.gate == "cost":
        raise DecodingError(
            f"gate 'cost' needs a length head for {parts.target.name}, and none is loaded: "
            "train one (switchsd train lengths), or use gate=probe or gate=match"
        )
    if parts.probe is None:
        raise DecodingError(
            f"mode 'switchsd' needs a probe for {parts.target.name}, and none is loaded: "
            "train one (switchsd capture, then switchsd train probe), or use gate=match or mode copy"
        )
    tau = s.tau if s.tau is not None else parts.probe.config.threshold
    return Plan(ProbeGate(copy, neural, tau), drafters, parts.probe)


COPIES = "copied drafts are certain and branch, and rejection sampling judges chains that were drawn from a law"
WEIGHED = "its particles keep every drafted token, and are weighed instead"
ARBITRATED = "a policy judges what the target would not write"
ELSEWHERE = "its drafter draws with the target's own noise"
TREES = "an EAGLE head drafts trees of its best tokens, and rejection sampling judges chains that were drawn from a law"

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("ar", "the target alone, one token a step", True, _ar),
        Mode("copy", "copies wherever a suffix match exists", True, _copy, refuses_rejection=COPIES),
        Mode("eagle", "drafts with an EAGLE head at every step", True, _eagle, EAGLE, TREES),
        Mode("ltd", "drafts with an EAGLE head, as far and as wide as learned policies say", True, _ltd, EAGLE, TREES),
        Mode("sd", "drafts with a small draft model at every step", True, _sd, DRAFT),
        Mode(
            "minedraft",
            "drafts for half of the requests, in another process, while the other half is verified",
            True,
            _minedraft,
            "chosen",
            ELSEWHERE,
        ),
        Mode(
            "cospec",
            "drafts with a small draft model, and a learned policy keeps some tokens that the target would not write",
            False,
            _cospec,
            DRAFT,
            ARBITRATED,
        ),
        Mode("smcsd", "drafts several texts and weighs them: nearly the target's law", False, _smcsd, DRAFT, WEIGHED),
        Mode(
            "switchsd",
            "copies where a probe says that the target will, else drafts with a head or a draft model",
            True,
            _switchsd,
            "chosen",
            COPIES,
        ),
    )
}


def get_mode(name: str) -> Mode:
    """The mode of a name. Raises DecodingError, which lists them."""
    if name not in MODES:
        raise DecodingError(f"unknown mode {name!r}: use {', '.join(MODES)}")
    return MODES[name]


def told_modes() -> str:
    """The modes' names for people, and which are not lossless."""
    return ", ".join(mode.name if mode.lossless else f"{mode.name} (not lossless)" for mode in MODES.values())
