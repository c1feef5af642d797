"""The processes that train a head together: each has the whole head, and a share of the batches of every step.

One process needs no launcher. Several are started by `accelerate launch` (or torchrun), which tells them through the
environment who they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Workers:
    """This process among those that were started together."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = 0
        self._accelerator: Any = None
        if self.count > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=not torch.cuda.is_available())
            self.rank = self._accelerator.process_index
            if torch.cuda.is_available():  # where a target that is loaded on "cuda" goes
                torch.cuda.set_device(self._accelerator.device)

    @property
    def leads(self) -> bool:
        """This process evaluates, saves and tells."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.count]

    def agree(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every process gets the first one's parameters; what was random in a head's start is the same for all."""
        if self._accelerator is None:
            return
        from accelerate.utils import broadcast

        with torch.no_grad():
            for p in parameters:
                p.copy_(broadcast(p.detach().clone(), from_process=0))
        self.wait()

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every process's gradients become their sum; a process that had no batch adds nothing."""
        if self._accelerator is None:
            return
        listed = [p for p in parameters if p.requires_grad]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in listed])
        flat = self._accelerator.reduce(flat, reduction="sum")
        for p, part in zip(listed, flat.split([p.numel() for p in listed]), strict=True):
            p.grad = part.view_as(p)

    def wait(self) -> None:
        """For all of them."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
