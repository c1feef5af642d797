"""Writing at a site: other states are put in the place of those that the target computed, and it goes on from them.

Readers and writers share the site names of `activations.sites`. A reader that is attached after a writer sees what
was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from activations.cache import KVCache
from activations.sites import BRANCHES, Site, find
from activations.structure import entering_tensor, leaving_tensor
from activations.target import Target

Edit = Callable[[torch.Tensor], torch.Tensor]
"""edit(state [B, Q, width]) gives the states that shall stand there: same shape, dtype and device."""
PROBING = 4
"""Tokens of the forward that tries a site."""


class SiteWriter:
    """Writes at one site of a target.

    `resid_mid` enters a module while the block also keeps it to add to, so there the tensor itself is overwritten;
    elsewhere what enters or leaves the module is exchanged. A short forward tries it: ValueError for a site that
    the target does not have, or that cannot be written.
    """

    def __init__(self, target: Target, site: str | Site) -> None:
        self._target = target
        (self.site,) = target.sites([site])
        structure = target.structure  # found by a forward of its own, which nothing may edit
        layouts = structure.layouts if self.site.kind in BRANCHES else ()
        self._module, self._place, _, scale = find(target.embed, target.layers, self.site, layouts)
        if scale is not None:
            raise self._refusal("its block multiplies it before it is added")
        self._try()

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"{self.site} of {self._target.name} cannot be written ({why}): choose resid_pre or resid_post"
        )

    @contextmanager
    def writing(self, edit: Edit) -> Iterator[None]:
        """Every forward within goes on from the edited states; `edit` is called with each forward's [B, Q, width]."""
        if self._place.is_input:
            handle = self._module.register_forward_pre_hook(self._enter(edit), with_kwargs=True)
        else:
            handle = self._module.register_forward_hook(self._leave(edit))
        try:
            yield
        finally:
            handle.remove()

    def _edited(self, state: torch.Tensor | None, edit: Edit) -> torch.Tensor:
        if state is None:
            raise ValueError(f"no state passed at {self.site}")
        new = edit(state)
        if new.shape != state.shape or new.dtype != state.dtype:
            raise ValueError(
                f"states {list(state.shape)} of {state.dtype} at {self.site} were edited into {list(new.shape)} of "
                f"{new.dtype}: an edit keeps shape and dtype"
            )
        # the block adds to such a tensor in place, which must not reach the editor's own
        return new.to(state.device, copy=self._place.overwritten)

    def _enter(self, edit: Edit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            state = entering_tensor(args, kwargs)
            new = self._edited(state, edit)
            if self.site.kind == "resid_mid" and state is not None:
                state.copy_(new)
                return None
            return (
                tuple(new if v is state else v for v in args),
                {k: new if v is state else v for k, v in kwargs.items()},
            )

        return hook

    def _leave(self, edit: Edit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            new = self._edited(leaving_tensor(output), edit)
            if isinstance(output, torch.Tensor):
                return new
            if type(output) is not tuple:
                raise self._refusal(f"its module returns a {type(output).__name__}")
            return (new, *output[1:])

        return hook

    def _try(self) -> None:
        """What is written must be read there, and must be what the block adds its second branch to."""
        target, site = self._target, self.site
        tokens = torch.arange(1, PROBING + 1, device=target.device)[None] % target.vocab_size
        written: list[torch.Tensor] = []

        def other(state: torch.Tensor) -> torch.Tensor:
            written.append(state.flip(1).contiguous())  # of the usual size, and another one
            return written[-1]

        after = [Site("mlp_out", site.block), Site("resid_post", site.block)] if site.kind == "resid_mid" else []
        with self.writing(other), target.read([site, *after]) as reader:
            target.hidden(tokens, KVCache(1, capacity=PROBING))
        states = reader.states
        if not torch.equal(states[site], written[0].to(states[site].device)):
            raise self._refusal("what is written there is not what is read there")
        if after and not torch.equal(states[site] + states[after[0]], states[after[1]]):
            raise self._refusal("its block keeps a copy to which it adds")
