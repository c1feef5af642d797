"""The texts behind a capture store, which keeps rows and states but no prompts.

The prompts are known by the manifest's hash, and the target's own tokens stand in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from activations.corpus import Prompt, prompts_hash, spread
from activations.store import StoreError
from activations.target import Target


@dataclass(frozen=True)
class StoredText:
    """A prompt and what the target wrote."""

    document: int
    """Its number in the store."""
    ids: list[int]
    prompt: int
    """Tokens of the prompt."""


def prompts_of(manifest: Mapping[str, Any], pools: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompts that a store was made of: one of `pools`, or as many as the store has, evenly spread over one.

    Raises StoreError if the manifest's hash is that of none of them.
    """
    wanted, count = manifest.get("prompts"), int(manifest.get("documents", 0))
    if wanted is None:
        raise StoreError("this store does not say which prompts it was made of: capture it again")
    for pool in pools:
        if not 0 < count <= len(pool):
            continue
        for chosen in (spread(pool, count), list(pool[:count])):
            if prompts_hash(chosen) == wanted:
                return chosen
    raise StoreError(
        f"the {count} prompts that this store was made of are not those given: name their source with --prompts"
    )


def stored_text(target: Target, rows: Mapping[str, np.ndarray], document: int, prompt: Prompt) -> StoredText:
    """One document's text. `rows` are those of the whole store, which must have a row for every anchor.

    Raises StoreError where rows and prompt do not belong together.
    """
    where = np.flatnonzero(rows["document"] == document)
    ids = target.encode_messages(prompt.messages)
    position, token, pending = (rows[name][where] for name in ("position", "token", "pending"))
    written = [*ids, *map(int, pending)]
    if not (
        len(where)
        and np.array_equal(position, np.arange(len(ids) - 1, len(written) - 1))
        and np.array_equal(token, written[len(ids) - 1 : -1])
    ):
        raise StoreError(
            f"the rows of document {document} are not those of every anchor of prompt {prompt.id} as {target.name} "
            "encodes it: capture again, with selection anchors"
        )
    return StoredText(document, written, len(ids))
