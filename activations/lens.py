"""TransformerLens as a second reader of the same sites, and the comparison of the two.

A bridge changes the model that it wraps, so `Lens` wraps a copy. It is for analysis and for checking the hooks of
`activations.sites`; decoding and capture read the target itself. TransformerLens is imported on first use (seconds).

Source: TransformerLens, github.com/TransformerLensOrg/TransformerLens.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from transformers.utils import logging as transformers_logging

from activations.cache import KVCache
from activations.sites import KINDS, Site, parse_sites
from activations.target import Target, TargetError

SLACK = 64
"""How far a difference may fall short of shrinking as the machine epsilons do, and still be rounding."""
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def hook_name(site: Site) -> str:
    """The bridge's name of a site. It has the same places, under its older names: `blocks.3.hook_resid_mid`."""
    return "embed.hook_out" if site.kind == "embed" else f"blocks.{site.block}.hook_{site.kind}"


class Lens:
    """A copy of a target inside a TransformerBridge.

    Raises TargetError if TransformerLens is missing or cannot wrap this architecture.
    """

    def __init__(self, target: Target) -> None:
        self.blocks = target.blocks
        self.device = target.device
        self._name = f"{target.name} ({type(target.model).__name__})"
        with _quiet():
            try:
                from transformer_lens.model_bridge.sources import build_bridge_from_module
            except ImportError as error:
                raise TargetError(
                    f"the TransformerLens back end needs transformer-lens 4.3 or later ({error})"
                ) from error
            model = copy.deepcopy(target.model)
            try:
                model.set_attn_implementation("eager")  # the bridge computes attention itself, from an additive mask
                self.bridge: Any = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
            except Exception as error:  # whatever an adapter stumbles over
                raise self._refusal("cannot wrap", error) from error
        self.hooks: frozenset[str] = frozenset(self.bridge.hook_dict)

    def _refusal(self, what: str, error: Exception) -> TargetError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return TargetError(
            f"TransformerLens {version('transformer-lens')} {what} {self._name}: {first}\n"
            "Read this target with the default hooks, which do not need it."
        )

    def has(self, site: Site) -> bool:
        """Whether the bridge has this place: a parallel block has no resid_mid."""
        return hook_name(site) in self.hooks

    def states(self, tokens: torch.Tensor, sites: Iterable[str | Site]) -> dict[Site, torch.Tensor]:
        """States [B, T, width] of tokens [B, T], without padding, by site."""
        wanted = parse_sites(sites, self.blocks)
        missing = [str(s) for s in wanted if not self.has(s)]
        if missing:
            raise TargetError(f"TransformerLens has no {', '.join(missing)} in {self._name}: leave these sites out")
        names = [hook_name(s) for s in wanted]
        with torch.no_grad(), _quiet():
            try:
                _, cache = self.bridge.run_with_cache(tokens.to(self.device), names_filter=names)
            except Exception as error:
                raise self._refusal("cannot run", error) from error
        return {site: cache[name] for site, name in zip(wanted, names, strict=True)}

    def head_scores(self, ids: Sequence[int], kind: Literal["induction", "previous"]) -> torch.Tensor:
        """float32 [blocks, heads]: TransformerLens's score of each head as an induction or a previous-token head: the
        share of its attention, over all queries of one text, that lies where such a head looks."""
        from transformer_lens import head_detector as detector

        make = {
            "induction": detector.get_induction_head_detection_pattern,
            "previous": detector.get_previous_token_head_detection_pattern,
        }[kind]
        tokens = torch.tensor([list(ids)])
        names = [f"blocks.{block}.attn.hook_pattern" for block in range(self.blocks)]
        with torch.no_grad(), _quiet():
            try:
                _, cache = self.bridge.run_with_cache(tokens.to(self.device), names_filter=names)
            except Exception as error:
                raise self._refusal("cannot run", error) from error
        how: Any = {"exclude_bos": False, "exclude_current_token": False, "error_measure": "mul"}
        score, wanted = detector.compute_head_attention_similarity_score, make(tokens)
        return torch.tensor([[score(head, wanted, **how) for head in cache[name][0].cpu()] for name in names])


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither the adapters' remarks about hooks that a family lacks nor transformers' about generation settings."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


class _Double(TorchFunctionMode):
    """Keeps float64 tensors float64.

    Models compute norms, softmax and routing in float32, which is a widening in bfloat16 and a narrowing in float64:
    with it a float64 pass would round like a float32 one, and could not tell rounding from an error.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args):
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


Verdict = Literal["equal", "rounding", "error"]


@dataclass(frozen=True)
class Difference:
    """How far the two readers are apart at one site in one dtype."""

    absolute: float
    """Largest difference of two numbers."""
    relative: float
    """Largest norm of a row's difference over the norm of the row."""
    equal: bool
    """All numbers are the same, bit for bit."""


@dataclass(frozen=True)
class Parity:
    """One site, read by hooks and by the bridge."""

    site: str
    rows: int
    """States compared."""
    float32: Difference
    float64: Difference
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: None stands for them."""
        out = asdict(self)
        for dtype in ("float32", "float64"):
            out[dtype] = {k: v if math.isfinite(v) else None for k, v in out[dtype].items()}
        return out


def verdict(single: Difference, double: Difference) -> Verdict:
    """Whether a difference is rounding.

    Rounding shrinks as the machine epsilon does, by 2**29 from float32 to float64; an error stays. Rounding is what
    in float64 is at most SLACK times the larger of (the float32 difference, shrunk so) and (one float64 epsilon),
    both relative to the state's norm. Anything else, and a number that is not finite, is an error.
    """
    if single.equal and double.equal:
        return "equal"
    shrunk = single.relative * EPSILON[torch.float64] / EPSILON[torch.float32]
    # written so that a comparison with NaN is an error
    small = double.relative <= SLACK * max(shrunk, EPSILON[torch.float64]) and single.relative < math.inf
    return "rounding" if small else "error"


def compare(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Difference:
    """Of states [rows, width], text by text."""
    absolute = relative = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a.shape != b.shape:
            return Difference(math.nan, math.nan, False)
        gap = (a - b).double()
        ratio = gap.norm(dim=-1) / a.double().norm(dim=-1)
        ratio = torch.where(gap.eq(0).all(-1), 0.0, ratio)  # rows of zeros
        # torch's max keeps NaN, Python's does not
        absolute = float(torch.stack([gap.abs().max(), gap.new_tensor(absolute)]).max())
        relative = float(torch.stack([ratio.max(), ratio.new_tensor(relative)]).max())
    return Difference(absolute, relative, all(map(torch.equal, mine, theirs)))


def readable_sites(target: Target) -> list[Site]:
    """Every site that the target has."""
    out = []
    for site in parse_sites(["embed", *(f"{kind}.*" for kind in KINDS)], target.blocks):
        try:
            out += target.sites([site])
        except ValueError:  # a parallel block has no resid_mid
            continue
    return out


def parity(target: Target, texts: Sequence[Sequence[int]]) -> list[Parity]:
    """Compare the two readers on token ids, at every site that both have. `target` must be in float32.

    Each text is read by itself. Takes the memory of the target several times over: a float64 copy and a wrapped copy
    of that. Raises TargetError for a target in another dtype, without a text, and like `Lens`.
    """
    if target.dtype != torch.float32:
        raise TargetError(f"parity starts from float32, and {target.name} is in {target.dtype}: load it in float32")
    if not texts or not all(texts):
        raise TargetError("parity needs at least one text, and none that is empty")
    single = _differences(target, texts)
    model = copy.deepcopy(target.model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # experts computed together take no float64
    wide = Target(model, target.tokenizer, target.name, target.folder)
    double = _differences(wide, texts)
    rows = sum(map(len, texts))
    return [Parity(str(s), rows, single[s], double[s], verdict(single[s], double[s])) for s in single]


def _differences(target: Target, texts: Sequence[Sequence[int]]) -> dict[Site, Difference]:
    lens = Lens(target)
    sites = [site for site in readable_sites(target) if lens.has(site)]
    mine: dict[Site, list[torch.Tensor]] = {site: [] for site in sites}
    theirs: dict[Site, list[torch.Tensor]] = {site: [] for site in sites}
    for ids in texts:
        tokens = torch.tensor([list(ids)], device=target.device)
        with target.read(sites) as reader, _Double():
            target.hidden(tokens, KVCache(1, capacity=len(ids)))
            read = lens.states(tokens, sites)
        for site in sites:
            mine[site].append(reader.states[site][0])
            theirs[site].append(read[site][0])
    return {site: compare(mine[site], theirs[site]) for site in sites}
