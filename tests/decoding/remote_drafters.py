"""Drafters that tests build in another process, by name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from activations.matching.match import MatchConfig
from decoding.budgets import Budget
from decoding.drafters import CopyDrafter
from decoding.request import Request
from decoding.tree import DraftTree

VOCABULARY, WIDTH = 97, 32  # of the small families, whose module takes seconds to import
DRAFT_TOKENS = torch.arange(0, VOCABULARY, 2)
SITES = ["resid_pre.1", "resid_pre.2", "resid_post.2"]


def head() -> Any:
    from decoding.eagle.head import EagleHead, HeadConfig

    torch.manual_seed(0)
    config = HeadConfig(
        hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCABULARY, draft_vocab_size=len(DRAFT_TOKENS), target_hidden_size=WIDTH,
    )  # fmt: skip
    made = EagleHead(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
    made.set_vocabulary(DRAFT_TOKENS)
    return made.eval().requires_grad_(False)


def eagle() -> Any:
    from families import family_target

    from decoding.eagle.drafter import EagleDrafter

    return EagleDrafter(family_target("llama"), head(), sites=SITES)


class Copies(CopyDrafter):
    """Drafts copies at every step."""

    name = "draft"

    def __init__(self) -> None:
        super().__init__(MatchConfig(kappa=2))


class Laws(Copies):
    """Tells the law of every node, as a draft model does: its own features, or something of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[Request, list[torch.Tensor]] = {}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        super().start(request, features)
        self.features[request] = [] if features is None else [features]

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        super().observe(request, features)
        if features is not None:
            self.features[request].append(features)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request in requests:
            law = torch.cat(self.features[request]).float()
            trees.append(DraftTree([1] * len(law), [-1] * len(law), ["draft"] * len(law), [-0.5] * len(law), law))
        return trees


class Failing(Copies):
    """Does something bad at its n-th question. With a file, only while that is not there, which it writes."""

    def __init__(self, how: str, after: int = 0, file: str = "", sites: Sequence[str] = ()) -> None:
        super().__init__()
        self.how, self.after, self.file, self.sites = how, after, file, tuple(sites)
        if how == "no start":
            os.write(2, b"nothing works here\n")
            os._exit(3)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self.after -= 1
        if self.after < 0 and not (self.file and Path(self.file).exists()):
            if self.file:
                Path(self.file).touch()
            if self.how == "die":
                os._exit(1)
            if self.how == "hang":
                time.sleep(600)
            if self.how == "raise":
                raise RuntimeError("it is broken")
        return super().propose(requests, budgets)


def failing(**options: Any) -> Failing:
    return Failing(**options)
