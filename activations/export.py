"""Capture stores as the hidden-state files that other trainers of EAGLE-3 heads read.

A document of T rows (the tokens whose states exist) becomes one sample. Both formats want the states that enter a
low, a middle and a high block (`eagle_sites`), the last state, token ids, and a mask that is 1 on the tokens that
the target wrote itself (not, as in a store, on the rows that chose them).

speculators  `hidden_states/hs_I.safetensors`: `hidden_states` [T, 4, width], the last one before the final norm,
             and `token_ids` [T]. Beside it a `datasets` folder with `input_ids`, `loss_mask` and `seq_len`, and
             `token_freq.pt`: how often the target wrote each token.
SpecForge    `rows_0-2000/data_I.ckpt`: `aux_hidden_state` [1, T, 3 * width], `hidden_state` [1, T, width] after the
             final norm, `input_ids` [T] and `loss_mask` [T].

Samples with a state that is not finite are left out, as those trainers do themselves.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from activations.provenance import provenance
from activations.sites import eagle_sites, last_site
from activations.store import CaptureStore, StoreError, check_space, write_json

Format = Literal["speculators", "specforge"]
GROUP = 2000
"""Samples in a folder of SpecForge's."""


@dataclass
class Sample:
    """One document."""

    number: int
    token_ids: torch.Tensor
    """int64 [T]."""
    loss_mask: torch.Tensor
    """int64 [T], 1 on tokens that the target wrote."""
    features: torch.Tensor
    """[T, 3, width]: the states that enter a low, a middle and a high block."""
    last: torch.Tensor
    """[T, width]: the last state, before the final norm."""

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.features).all() and torch.isfinite(self.last).all())


def export(
    store: CaptureStore,
    folder: Path,
    format: Format,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Write the store's documents into the new folder `folder`; returns numbers of documents, left out and tokens.

    `norm` is the target's final norm, of states [T, width], which SpecForge's format needs. `progress(done, total)`
    counts shards. Raises StoreError if the store does not hold what the format needs, if `folder` holds something, or
    if the disk cannot hold the copy; ValueError if the norm is missing.
    """
    sites = needed_sites(store)
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{folder} is not empty: choose a new folder")
    if format == "specforge" and norm is None:
        raise ValueError("SpecForge's format holds the last state after the final norm: give the target's norm")
    size = len(sites) * int(store.manifest["target"]["width"]) * 4 + 32  # as if in float32: an upper bound
    check_space(folder, len(store) * size, "fewer documents in the store")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[int] = []
    left_out = tokens = 0
    for shard in range(len(store.shards)):
        for sample in samples(store, shard, sites):
            if not sample.finite:
                left_out += 1
                continue
            if format == "speculators":
                write_speculators(sample, folder, len(written))
            else:
                assert norm is not None
                write_specforge(sample, folder, len(written), norm)
            written.append(sample.number)
            tokens += len(sample.token_ids)
        if progress:
            progress(shard + 1, len(store.shards))
    if not written:
        raise StoreError(f"{store.folder} holds no document that could be exported: finish the capture first")
    if format == "speculators":
        _write_speculators_index(store, folder, set(written))
    found = {"documents": len(written), "left_out": left_out, "tokens": tokens}
    origin = {name: store.manifest.get(name) for name in ("target", "target_name", "dtype", "provenance")}
    write_json(folder / "export.json", {"format": format, "sites": sites, **found, **origin, "export": provenance()})
    return found


def needed_sites(store: CaptureStore) -> list[str]:
    """The three sites that a head reads, low to high, and the last one; StoreError if the store lacks one."""
    make = "make a store with `switchsd capture --selection all --sites eagle` or `switchsd write`"
    if store.manifest.get("selection") != "all":
        raise StoreError(f"{store.folder} does not hold whole texts: {make}")
    blocks = int(store.manifest["target"]["blocks"])
    sites = [*eagle_sites(blocks), last_site(blocks)]
    missing = [site for site in sites if site not in store.sites]
    if missing:
        raise StoreError(f"{store.folder} has no {', '.join(missing)}: {make}")
    return sites


def samples(store: CaptureStore, shard: int, sites: list[str]) -> Iterator[Sample]:
    """The documents of a shard, one in memory at a time."""
    states = {site: store.shard_states(shard, site) for site in sites}
    for number, start, stop, token_ids, loss_mask in texts(store, shard):
        features = torch.stack([states[site][start:stop] for site in sites[:3]], dim=1)
        yield Sample(number, token_ids, loss_mask, features, states[sites[3]][start:stop].clone())


def texts(store: CaptureStore, shard: int) -> Iterator[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
    """Number, first row, row behind the last, token ids and loss mask (int64 [T]) of a shard's documents."""
    rows = store.shard_rows(shard, ["document", "token", "loss_mask"])
    cuts = np.flatnonzero(np.diff(rows["document"], prepend=-1)).tolist()
    for start, stop in zip(cuts, [*cuts[1:], len(rows["document"])], strict=True):
        # A row's mask says that its pending token, which is the next row's token, is the target's own.
        mask = np.append(False, rows["loss_mask"][start : stop - 1])
        ids = torch.from_numpy(rows["token"][start:stop].astype(np.int64))
        yield int(rows["document"][start]), start, stop, ids, torch.from_numpy(mask.astype(np.int64))


def write_speculators(sample: Sample, folder: Path, index: int) -> None:
    """One sample's states as speculators reads them."""
    states = folder / "hidden_states"
    states.mkdir(exist_ok=True)
    hidden = torch.cat([sample.features, sample.last[:, None]], dim=1)
    save_file({"hidden_states": hidden, "token_ids": sample.token_ids}, states / f"hs_{index}.safetensors")


def _write_speculators_index(store: CaptureStore, folder: Path, written: set[int]) -> None:
    """The table of the samples, in the order of their files, and the counts of the tokens that the target wrote."""
    import datasets
    from datasets import Dataset, Features, Sequence, Value

    counts: Counter[int] = Counter()

    def records() -> Iterator[dict[str, Any]]:
        for shard in range(len(store.shards)):
            for number, _, _, ids, mask in texts(store, shard):
                if number in written:
                    counts.update(ids[mask.bool()].tolist())
                    yield {"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)}

    whole = Sequence(Value("int64"))
    features = Features({"input_ids": whole, "loss_mask": whole, "seq_len": Value("int64")})
    scratch = folder / ".scratch"
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # `progress` has told all there is to tell
    try:
        made = Dataset.from_generator(records, features=features, cache_dir=str(scratch), fingerprint="export")
        made.set_format("torch")  # kept in the folder, and counted on by its reader
        made.save_to_disk(folder)
        del made
    finally:
        if shown:
            datasets.enable_progress_bars()
    shutil.rmtree(scratch)
    # The reader's format is torch's; a plain dictionary of integers loads without running code (weights_only).
    torch.save(dict(counts), folder / "token_freq.pt")


def write_specforge(sample: Sample, folder: Path, index: int, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One sample as SpecForge reads it. `norm` is the target's final norm, of states [T, width]."""
    first = index // GROUP * GROUP
    group = folder / f"rows_{first}-{first + GROUP}"
    group.mkdir(exist_ok=True)
    with torch.no_grad():
        normed = norm(sample.last)
    # The reader's format is torch's; plain tensors load without running code (weights_only).
    torch.save(
        {
            "input_ids": sample.token_ids,
            "loss_mask": sample.loss_mask,
            "hidden_state": normed.cpu()[None],
            "aux_hidden_state": sample.features.flatten(1)[None],
        },
        group / f"data_{index}.ckpt",
    )
