"""The process that a `RemoteDrafter` draws its drafts from: builds a drafter from its spec and answers questions.

A message holds a list of operations, which are carried out in order; `ask` is answered. The requests here are mirrors
of those on the other side: their tokens come with the operations.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import select
import socket
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from activations.sampling import Sampling
from decoding.budgets import Budget, FixedBudget, PricedBudget
from decoding.drafters import CopyDrafter, Drafter
from decoding.minedraft import wire
from decoding.request import Request
from decoding.tree import DraftTree

BUDGETS: dict[str, type[FixedBudget] | type[PricedBudget]] = {"fixed": FixedBudget, "priced": PricedBudget}
"""Budgets that are plain numbers, and can be sent."""


@dataclass(frozen=True)
class DrafterSpec:
    """What to build in the other process; plain values only."""

    kind: str
    """eagle, draft, copy, or a function of one's own that gives a drafter: package.module:function."""
    target: str = "smollm2"
    """The target whose embedding and output matrix are used: an alias, a hub id or a folder."""
    dtype: str = "auto"
    """As `load_target` takes it."""
    device: str = "cpu"
    """Where the drafter works; with a GPU for the target, another one."""
    folder: str | None = None
    """The EAGLE head, or the draft model that was made for the target."""
    model: str | None = None
    """A causal LM that drafts instead: a hub id or a folder."""
    blocks: int | list[int] | None = None
    """The target cut to so many blocks, or to these, drafts instead."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the drafter, or of one's own function."""
    threads: int = 1
    cores: tuple[int, ...] = ()
    """CPU cores that the process keeps to; none given = those of its parent."""


def build(spec: DrafterSpec) -> Drafter:
    """The drafter of a spec. Of the target nothing stays in memory that the drafter does not use.

    Raises ValueError for an unknown kind, and for a draft model that is not named.
    """
    if ":" in spec.kind:
        module, _, name = spec.kind.partition(":")
        made: Drafter = getattr(importlib.import_module(module), name)(**spec.options)
        return made
    if spec.kind == "copy":
        from activations.matching.match import MatchConfig

        return CopyDrafter(MatchConfig(**spec.options))
    if spec.kind not in ("eagle", "draft"):
        raise ValueError(f"unknown drafter {spec.kind!r}: use eagle, draft, copy or package.module:function")
    from activations.target import load_target

    target = load_target(spec.target, dtype=spec.dtype, device=spec.device)
    drafter = _eagle(spec, target) if spec.kind == "eagle" else _draft(spec, target)
    target.drop_blocks()
    gc.collect()
    return drafter


def _eagle(spec: DrafterSpec, target: Any) -> Drafter:
    from decoding.eagle.drafter import EagleDrafter
    from decoding.eagle.formats import load_head

    if spec.folder is None:
        raise ValueError("an EAGLE drafter needs the folder of its head")
    return EagleDrafter(target, load_head(Path(spec.folder), target.vocab_size), **spec.options)


def _draft(spec: DrafterSpec, target: Any) -> Drafter:
    from decoding.draft.drafter import DraftModelDrafter, drafter_of
    from decoding.draft.model import cut, independent

    if spec.folder is not None:
        return drafter_of(spec.folder, target, **spec.options)
    if spec.model is not None:
        model = independent(spec.model, target)
    elif spec.blocks is not None:
        model = cut(target, spec.blocks)
    else:
        raise ValueError("a draft model needs a folder, a model or a number of blocks")
    return DraftModelDrafter(target, model, **spec.options)


class Worker:
    """Carries out operations on mirrors of the requests."""

    def __init__(self, drafter: Drafter, device: str = "cpu") -> None:
        self.drafter = drafter
        self._device = device
        self._mirrors: dict[int, Request] = {}
        self._failed: dict[int, str] = {}
        """Requests of which the drafter has no state, because it raised: questions about them are answered so."""

    def about(self) -> dict[str, Any]:
        return {
            "ready": True,
            "name": self.drafter.name,
            "sites": list(self.drafter.sites),
            "describe": self.drafter.describe(),
        }

    def carry_out(
        self, operation: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """One operation; an answer where it asks for one. Tensors: features [n, sites * width] in, the laws of drafted
        nodes [nodes, V] out."""
        kind = operation["op"]
        if kind == "ask":
            return self._answer(operation)
        try:
            getattr(self, f"_{kind}")(operation, tensors)
        except Exception as error:
            for number in operation.get("ids", [operation.get("id")]):
                self._failed[number] = _first_line(error)
        return None

    def _start(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        request = self._mirror(operation)
        self.drafter.start(request, self._features(operation, tensors))

    def _resume(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        request, before = self._mirror(operation), self._mirrors[operation["before"]]
        self.drafter.resume(request, self._features(operation, tensors), before, operation["kept"])

    def _observe(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        request = self._mirrors[operation["id"]]
        request.tokens[operation["at"] :] = operation["tokens"]
        if operation["id"] not in self._failed:
            self.drafter.observe(request, self._features(operation, tensors))

    def _select(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        requests = [self._mirrors[i] for i in operation["ids"]]
        self.drafter.select(requests, operation["rows"], operation["from"])
        texts = [list(requests[row].tokens) for row in operation["rows"]]
        for request, tokens in zip(requests, texts, strict=True):
            request.tokens = tokens

    def _close(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        for number in operation["ids"]:
            self._failed.pop(number, None)
            request = self._mirrors.pop(number, None)
            if request is not None:
                self.drafter.close(request)

    def _answer(self, operation: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        ids = operation["ids"]
        broken = next((self._failed[i] for i in ids if i in self._failed), None)
        if broken is not None:
            return {"n": operation["n"], "error": broken}, []
        began = perf_counter()
        try:
            trees = self.drafter.propose(
                [self._mirrors[i] for i in ids], [budget_from(plain) for plain in operation["budgets"]]
            )
        except Exception as error:
            return {"n": operation["n"], "error": _first_line(error)}, []
        laws: list[torch.Tensor] = []
        plain = [None if tree is None else tree_to(tree, laws) for tree in trees]
        return {"n": operation["n"], "trees": plain, "ms": (perf_counter() - began) * 1e3}, laws

    def _mirror(self, operation: dict[str, Any]) -> Request:
        """A new mirror."""
        plain = dict(operation["request"])
        request = Request(**{**plain, "sampling": Sampling(**plain["sampling"])})
        self._mirrors[operation["id"]] = request
        return request

    def _features(self, operation: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Tensor | None:
        index = operation.get("features")
        return None if index is None else tensors[index].to(self._device)


def request_to(request: Request) -> dict[str, Any]:
    """What a drafter may read of a request, as plain values."""
    return {
        "number": request.number,
        "particle": request.particle,
        "prompt": list(request.prompt),
        "tokens": list(request.tokens),
        "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(request.sampling),
    }


def tree_to(tree: DraftTree, laws: list[torch.Tensor]) -> dict[str, Any]:
    """A tree as plain values; the laws [nodes, V] that its nodes were drawn from are put behind `laws`."""
    if tree.q_logits is not None:
        laws.append(tree.q_logits)
    return {
        "tokens": list(tree.tokens),
        "parents": list(tree.parents),
        "source": list(tree.source),
        "logq": list(tree.logq),
        "law": None if tree.q_logits is None else len(laws) - 1,
    }


def tree_from(plain: dict[str, Any], laws: list[torch.Tensor]) -> DraftTree:
    """The tree that `tree_to` made values of, with its laws [nodes, V] where it has any."""
    law = plain["law"]
    return DraftTree(
        plain["tokens"], plain["parents"], plain["source"], plain["logq"], None if law is None else laws[law]
    )


def budget_to(budget: Budget) -> dict[str, Any]:
    """A budget as plain values. Raises TypeError for one that is more than numbers."""
    for name, kind in BUDGETS.items():
        if type(budget) is kind:
            return {"kind": name, **asdict(budget)}
    raise TypeError(f"a budget of type {type(budget).__name__} cannot be sent to another process: use fixed or priced")


def budget_from(plain: dict[str, Any]) -> Budget:
    """The budget that a message describes: its `kind` and its fields."""
    return BUDGETS[plain["kind"]](**{k: v for k, v in plain.items() if k != "kind"})


def main() -> None:
    """What the other process runs: serve the socket whose number is its argument, until that ends."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    sock = socket.socket(fileno=int(sys.argv[1]))
    spec_message, _ = wire.receive(sock)
    spec_message["spec"]["cores"] = tuple(spec_message["spec"]["cores"])
    spec = DrafterSpec(**spec_message["spec"])
    torch.set_num_threads(spec.threads)
    try:
        worker = Worker(build(spec), spec.device)
        about = worker.about()
    except Exception as error:
        wire.send(sock, {"error": f"{type(error).__name__}: {_first_line(error)}"})
        return
    wire.send(sock, about)
    # Messages are taken off the socket at once, so that nobody waits for a question to be answered to send the next.
    inbox: queue.Queue[tuple[dict[str, Any], list[torch.Tensor]] | None] = queue.Queue()
    threading.Thread(target=_read, args=(sock, inbox), daemon=True).start()
    while (found := inbox.get()) is not None:
        message, tensors = found
        for operation in message["do"]:
            answer = worker.carry_out(operation, tensors)
            if answer is not None:
                try:
                    wire.send(sock, *answer)
                except wire.WireError:
                    return


def _read(sock: socket.socket, inbox: queue.Queue[Any]) -> None:
    try:
        while True:
            inbox.put(wire.receive(sock))
    except wire.WireError:
        inbox.put(None)


def _watch(parent: int) -> None:
    """End with the parent, whatever this process is at: standard input is a pipe that only the parent holds, and if a
    fork of it holds that too, the parent's number changes."""
    while not select.select([sys.stdin], [], [], 5.0)[0] and os.getppid() == parent:
        pass
    os._exit(0)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
