"""How a target's blocks are built, found by watching them work instead of by the names of their parts.

One short forward runs one block of each kind (the others hand their input on) while every module in it is watched.
A place counts only if the block's own arithmetic is met bit for bit, in the target's dtype:

    sequential   resid_mid = resid_pre + attn_out, and it enters a module;  resid_post = resid_mid + mlp_out
    parallel     resid_post = resid_pre + attn_out + mlp_out, in one of the three orders of adding

The attention branch is the one that mixes positions: two rows are fed whose last positions enter the block equal.
The same forward tells where the final norm is, and what becomes of the output matrix's product.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

LENGTH = 6
"""Positions of each of the two probing rows."""


@dataclass(frozen=True)
class Place:
    """Where one kind of site is read in a block."""

    path: str
    """The module, named from the block on; empty for the block itself."""
    is_input: bool
    """The state is what enters the module, else what leaves it."""
    scale: str | None = None
    """The block's attribute by which the state is multiplied before it is added."""
    overwritten: bool = False
    """The block changes the tensor afterwards, so that a reader has to keep a copy."""


ENTERING, LEAVING = Place("", is_input=True), Place("", is_input=False)


@dataclass(frozen=True)
class Layout:
    """The places of one block. What cannot be read is missing, and `problem` says why."""

    block: str
    """Class of the block."""
    places: Mapping[str, Place]
    parallel: bool = False
    problem: str = ""

    def place(self, kind: str) -> Place:
        """Raises ValueError, saying why, where this block has no such state."""
        if kind in self.places:
            return self.places[kind]
        if self.parallel and kind == "resid_mid":
            raise ValueError(
                f"{self.block} adds both branches at once (parallel), so that there is no resid_mid: "
                "read resid_pre, attn_out, mlp_out or resid_post"
            )
        raise ValueError(f"{kind} of {self.block} cannot be read ({self.problem}): read resid_pre, resid_post or embed")


@dataclass(frozen=True)
class LogitRule:
    """What a family does to the product of its output matrix."""

    kind: str = "none"
    """none, times, over or softcap."""
    value: float = 1.0

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        if self.kind == "times":
            return product * self.value
        if self.kind == "over":
            return product / self.value
        if self.kind == "softcap":
            return torch.tanh(product / self.value) * self.value
        return product


@dataclass(frozen=True)
class Structure:
    """What one probing forward found."""

    layouts: tuple[Layout, ...]
    """One a block; blocks of one kind share theirs."""
    final_norm: nn.Module | None
    """The module between the last block and the final states; an identity where there is none, None if not found."""
    logit_rule: LogitRule | None
    """None if the logits follow from the output matrix's product in a way that is not known."""

    def problems(self) -> list[str]:
        """Everything that was not found, in words."""
        found = [f"{layout.block}: {layout.problem}" for layout in self.layouts if layout.problem]
        found = list(dict.fromkeys(found))
        if self.final_norm is None:
            found.append("no module between the last block and the final states was found")
        if self.logit_rule is None:
            found.append("the logits are not the output matrix's product, scaled or soft-capped")
        return found


def find_blocks(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    """The only list of `count` modules directly below a decoder, under whatever name; None if there is no such."""
    found = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    return found[0] if len(found) == 1 else None


def read_structure(model: Any, decoder: nn.Module, blocks: nn.ModuleList, device: torch.device) -> Structure:
    """Watch one forward of 2 x LENGTH tokens, given on `device`. The model is left as it was."""
    kinds = [_kind(block) for block in blocks]
    watches = {kind: _Watch(blocks[kinds.index(kind)]) for kind in dict.fromkeys(kinds)}
    watched = {id(watch.block): watch for watch in watches.values()}
    ends: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    followers = {name: m for name, m in decoder.named_children() if m is not blocks}
    ends_of = {**followers, "last block": blocks[-1], "decoder": decoder, "head": model.get_output_embeddings()}
    with ExitStack() as stack, torch.no_grad():
        for block in blocks:
            if id(block) in watched:
                stack.enter_context(watched[id(block)].attached())
            else:
                stack.enter_context(_skipped(block, watches[kinds[0]]))
        for name, module in ends_of.items():
            if module is not None:
                stack.callback(module.register_forward_hook(_keep(ends, name), with_kwargs=True).remove)
        logits = model(input_ids=_tokens(model).to(device), use_cache=False).logits
    layouts = {kind: watch.layout() for kind, watch in watches.items()}
    leaving, final = ends["last block"][1], ends["decoder"][1]
    norm: nn.Module | None = nn.Identity() if _equal(leaving, final) else None
    for name, module in followers.items():
        if name in ends and _equal(ends[name][0], leaving) and _equal(ends[name][1], final):
            norm = module
    rule = None
    if "head" in ends and _equal(ends["head"][0], final):
        rule = _logit_rule(ends["head"][1], logits, model)
    return Structure(tuple(layouts[kind] for kind in kinds), norm, rule)


def entering_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The state [B, Q, width] among a module's arguments: the first tensor."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)


def leaving_tensor(output: Any) -> torch.Tensor | None:
    """The state [B, Q, width] in what a module returned: a tensor, or the first value of a tuple."""
    first = output[0] if isinstance(output, (tuple, ModelOutput)) and len(output) else output
    return first if isinstance(first, torch.Tensor) else None


# -- the forward ----------------------------------------------------------------------------------------


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What blocks of one kind share: their modules' classes and their own switches; sizes and numbers may differ."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    switches = tuple((k, v) for k, v in vars(block).items() if isinstance(v, (bool, str)) and k != "training")
    scales = tuple(k for k, v in vars(block).items() if isinstance(v, float))
    return modules, switches, scales


def _tokens(model: Any) -> torch.Tensor:
    """Two rows of different tokens that end in the same one."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = [1 + i * (size - 2) // (2 * LENGTH) for i in range(2 * LENGTH - 1)]
    rows = [ids[:LENGTH], [*ids[LENGTH:], ids[LENGTH - 1]]]
    return torch.tensor(rows)


def _keep(ends: dict[str, tuple[torch.Tensor, torch.Tensor]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entering, leaving = entering_tensor(args, kwargs), leaving_tensor(output)
        if entering is not None and leaving is not None:
            ends[name] = (entering.clone(), leaving.clone())

    return hook


@contextmanager
def _skipped(block: nn.Module, first: _Watch) -> Iterator[None]:
    """The block hands its input on, in the form in which the first block returns its output."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = entering_tensor(args, kwargs)
        return (state, *[None] * (first.returned - 1)) if first.returned else state

    had = vars(block).get("forward")  # libraries that place weights put their own there
    block.forward = forward
    try:
        yield
    finally:
        if had is None:
            del block.forward
        else:
            block.forward = had


@dataclass
class _Seen:
    """A tensor of the residual stream's shape that entered or left a module of a watched block."""

    module: str
    is_input: bool
    order: int
    value: torch.Tensor
    """As it was at that moment."""
    live: torch.Tensor
    """The tensor itself, which the block may have changed since."""

    @property
    def rank(self) -> tuple[int, int]:
        """Among equal values: the outermost module; then the last that gave it, or the first that took it."""
        return self.module.count("."), self.order if self.is_input else -self.order

    def place(self, scale: str | None = None) -> Place:
        return Place(self.module, self.is_input, scale, overwritten=not _equal(self.value, self.live))


class _Watch:
    """Keeps what enters and leaves every module of one block."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.returned = 0
        """Length of the tuple that the block returned; 0 if it returned a tensor."""
        self._pre = self._post = torch.empty(0)
        self._seen: list[_Seen] = []
        self._calls: Counter[str] = Counter()
        self.scales: dict[str, float] = {k: v for k, v in vars(block).items() if isinstance(v, float) and v != 1.0}

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.block.named_modules():
                before = self._entered(name) if name else self._enter
                after = self._left(name) if name else self._leave
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Let the last positions of both rows enter the block equal."""
        state = entering_tensor(args, kwargs)
        if state is None:
            return args, kwargs
        self._pre = state.clone()
        self._pre[1, -1] = self._pre[0, -1]
        mine = self._pre.clone()
        return tuple(mine if v is state else v for v in args), {k: mine if v is state else v for k, v in kwargs.items()}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        leaving = leaving_tensor(output)
        self.returned = len(output) if isinstance(output, tuple) else 0
        if leaving is not None:
            self._post = leaving.clone()

    def _entered(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[name] += 1
            self._note(name, True, entering_tensor(args, kwargs))

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._note(name, False, leaving_tensor(output))

        return hook

    def _note(self, name: str, is_input: bool, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.shape == self._pre.shape and tensor.is_floating_point():
            self._seen.append(_Seen(name, is_input, len(self._seen), tensor.clone(), tensor))

    # -- what was seen ------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """The places that the arithmetic of this forward allows."""
        name, ends = type(self.block).__name__, {"resid_pre": ENTERING, "resid_post": LEAVING}
        try:
            found, parallel = self._branches()
        except _Unread as problem:
            return Layout(name, ends, problem=str(problem))
        return Layout(name, {**ends, **found}, parallel)

    def _branches(self) -> tuple[dict[str, Place], bool]:
        if not (self._pre.isfinite().all() and self._post.isfinite().all()):
            raise _Unread("its states are not finite")
        seen = [s for s in self._seen if self._calls[s.module] == 1]
        inputs = sorted((s for s in seen if s.is_input and not _equal(s.value, self._pre)), key=lambda s: s.rank)
        outputs = sorted((s for s in seen if not s.is_input and s.value.any()), key=lambda s: s.rank)
        branches = [(s, scale) for s in outputs for scale in (None, *self.scales)]
        for mid in inputs:
            first = [b for b in branches if b[0].order < mid.order and _equal(self._pre + self._value(b), mid.value)]
            second = [b for b in branches if b[0].order > mid.order and _equal(mid.value + self._value(b), self._post)]
            if first and second:
                attention, mlp = self._one(first), self._one(second)
                if not self._mixes(attention):
                    raise _Unread(f"what it adds first, the output of {attention[0].module}, is no attention")
                places = {"attn_out": attention, "resid_mid": (mid, None), "mlp_out": mlp}
                return {kind: s.place(scale) for kind, (s, scale) in places.items()}, False
        return self._parallel(branches), True

    def _parallel(self, branches: list[_Branch]) -> dict[str, Place]:
        unlike: list[_Branch] = []  # the first of each value
        for branch in branches:
            if not any(_equal(self._value(branch), self._value(known)) for known in unlike):
                unlike.append(branch)
        pairs = [
            (one, other)
            for one, other in itertools.combinations(unlike, 2)
            if any(_equal(total, self._post) for total in _sums(self._pre, self._value(one), self._value(other)))
        ]
        if not pairs:
            raise _Unread("its output is not its input with the outputs of two of its modules added")
        if len(pairs) > 1:
            raise _Unread("more than one pair of its modules' outputs makes up what it adds")
        mixing = [self._mixes(branch) for branch in pairs[0]]
        if all(mixing):
            raise _Unread("the state between its two branches enters none of its modules")
        if not any(mixing):
            raise _Unread("neither branch mixes positions")
        attention, mlp = pairs[0] if mixing[0] else pairs[0][::-1]
        return {"attn_out": attention[0].place(attention[1]), "mlp_out": mlp[0].place(mlp[1])}

    def _value(self, branch: _Branch) -> torch.Tensor:
        seen, scale = branch
        return (seen.value if scale is None else seen.value * self.scales[scale]).to(self._pre.device)

    def _one(self, branches: list[_Branch]) -> _Branch:
        """The first of branches that must be equal."""
        if not all(_equal(self._value(branches[0]), self._value(other)) for other in branches):
            names = " and ".join(sorted({seen.module for seen, _ in branches}))
            raise _Unread(f"{names} differ and fit equally well")
        return branches[0]

    def _mixes(self, branch: _Branch) -> bool:
        """Whether the last position's value depends on the earlier positions: there the rows differ, here not."""
        one, other = self._value(branch)[:, -1].float()
        rounding = 4 * torch.finfo(self._pre.dtype).eps
        return bool((one - other).norm() > max(rounding, 1e-4) * one.norm())


_Branch = tuple[_Seen, str | None]
"""What a module gave, and the block's attribute that multiplies it."""


class _Unread(Exception):
    """Why a block's branches were not found."""


# -- arithmetic -----------------------------------------------------------------------------------------


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other.to(one.device))


def _sums(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x + a + b
    yield x + b + a
    yield x + (a + b)


def _logit_rule(product: torch.Tensor, logits: torch.Tensor, model: Any) -> LogitRule | None:
    """The rule that gives these logits exactly, with a number that stands in the configuration."""
    config = model.config.get_text_config()
    numbers = {float(v) for v in vars(config).values() if isinstance(v, (int, float)) and not isinstance(v, bool) and v}
    rules = [LogitRule()]
    rules += [LogitRule(kind, value) for value in sorted(numbers) for kind in ("times", "over", "softcap")]
    logits = logits.to(product.dtype)  # some return them wider
    last = slice(None), slice(-1, None)  # most rules fail there already
    return next((r for r in rules if _equal(r(product[last]), logits[last]) and _equal(r(product), logits)), None)
