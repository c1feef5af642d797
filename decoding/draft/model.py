"""Draft models: a target cut to a few of its blocks, or another causal LM of the same vocabulary.

A cut target keeps the target's embedding and output matrix: the same memory, so that it speaks the whole vocabulary
and costs only its blocks. Its files hold nothing else:

    draft.safetensors   the blocks and the final norm, bfloat16
    draft.json          which blocks, of which target, how they were trained, how well they agree with it, and which
                        tokens are frequent enough to be proposed where not all need be
"""

from __future__ import annotations

import copy
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from activations.linear import PackedLinear
from activations.store import write_json
from activations.target import Fingerprint, Target, TargetError, load_target

WEIGHTS, CONFIG = "draft.safetensors", "draft.json"


class DraftError(Exception):
    """A draft model that cannot be made, read or used. The message says what to do."""


def spread(count: int, blocks: int) -> list[int]:
    """`count` of `blocks` block numbers: the first, the last, and evenly spaced ones between.

    Raises DraftError for fewer than 1 or more than there are.
    """
    if not 1 <= count <= blocks:
        raise DraftError(f"a draft of {count} blocks cannot be cut from a target of {blocks}: choose 1 to {blocks}")
    if count == 1:
        return [0]
    return [round(i * (blocks - 1) / (count - 1)) for i in range(count)]


def increasing(blocks: Sequence[int], count: int) -> bool:
    """Whether these are increasing block numbers of a target with `count` blocks, at least one."""
    return bool(blocks) and list(blocks) == sorted(set(blocks)) and 0 <= blocks[0] <= blocks[-1] < count


def cut(target: Target, blocks: Sequence[int] | int) -> Target:
    """A causal LM of the target's family: copies of the chosen blocks and of the final norm between the target's own
    embedding and output matrix, whose memory is shared.

    blocks: their numbers in the target, increasing; or how many (`spread`).

    Raises DraftError for blocks that the target lacks, or a target that cannot be cut.
    """
    draft = cut_ordinary(target, blocks)
    return _as_fast_as(target, draft)


def cut_ordinary(target: Target, blocks: Sequence[int] | int) -> Target:
    """`cut` with ordinary linear layers in the blocks, whose weights can be trained or replaced.

    Raises DraftError for blocks that are not there, and for a target that does not run with some of its blocks alone.
    """
    chosen = spread(blocks, target.blocks) if isinstance(blocks, int) else [int(b) for b in blocks]
    if not increasing(chosen, target.blocks):
        raise DraftError(
            f"blocks {', '.join(map(str, chosen)) or 'none'} cannot be cut from {target.name}: choose increasing "
            f"numbers from 0 to {target.blocks - 1}"
        )
    if any(hasattr(module, "_hf_hook") for module in target.model.modules()):
        raise DraftError(f"{target.name} is spread over devices: load it on one to cut a draft from it")
    if getattr(target.config, "num_kv_shared_layers", 0):
        raise DraftError(f"blocks of {target.name} share their keys and values: it cannot be cut")
    try:
        model = _copied(target, chosen)
        name = f"{target.name} cut to {'block' if len(chosen) == 1 else 'blocks'} {', '.join(map(str, chosen))}"
        draft = Target(model, target.tokenizer, name, None, target.quantization)
        draft.check_structure()
    except (TargetError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        family = type(target.model).__name__
        raise DraftError(f"{target.name} ({family}) does not run with blocks {chosen} alone: {error}") from error
    return draft


def _copied(target: Target, chosen: Sequence[int]) -> Any:
    """The target's model with copies of the chosen blocks only."""
    memo: dict[int, Any] = {}
    _share(target.model, memo, copied=[*(target.layers[b] for b in chosen), target.final_norm])
    memo[id(target.layers)] = nn.ModuleList(copy.deepcopy(target.layers[b], memo) for b in chosen)
    model = copy.deepcopy(target.model, memo)
    for number, block in enumerate(memo[id(target.layers)]):
        for module in block.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = number
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        _cut_config(config, target.blocks, chosen)
    return model


def _share(model: nn.Module, memo: dict[int, Any], copied: Sequence[nn.Module]) -> None:
    """Let a deep copy of the model have its parameters in common with it, but for those of `copied`.

    A packed layer outside of these has no parameter: it is shared by a layer of the same product.
    """
    own = {id(x) for module in copied for x in (*module.parameters(), *module.modules())}
    for module in model.modules():  # who watches the target does not watch the draft
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                memo[id(hooks)] = OrderedDict()
    for parameter in model.parameters():
        if id(parameter) not in own:
            memo[id(parameter)] = parameter
    for module in model.modules():
        if isinstance(module, PackedLinear) and id(module) not in own:
            memo[id(module)] = PackedLinear(module.product, module.start, module.stop)


def _cut_config(config: Any, blocks: int, chosen: Sequence[int]) -> None:
    """The configuration of the chosen blocks: their number, and every list that has an entry for each block."""
    lists = {k: v for k, v in vars(config).items() if "layer" in k and isinstance(v, list) and len(v) == blocks}
    config.num_hidden_layers = len(chosen)
    for name, values in lists.items():
        setattr(config, name, [values[b] for b in chosen])


def _as_fast_as(target: Target, draft: Target) -> Target:
    """The draft in the target's kind of forward."""
    if target.forward_kind != "general, ordinary layers":
        draft.speed_up()
    return draft


def own_state(draft: Target) -> dict[str, torch.Tensor]:
    """The tensors that a cut target has for itself, by name: `blocks.<number>.<weight>` and `norm.<weight>`."""
    parts = {f"blocks.{number}": block for number, block in enumerate(draft.layers)} | {"norm": draft.final_norm}
    return {f"{part}.{name}": x for part, module in parts.items() for name, x in module.state_dict().items()}


def save_draft(folder: Path, draft: Target, blocks: Sequence[int], target: Target, **record: Any) -> None:
    """Write a draft that was cut from `target`; `record` (settings, metrics, provenance) goes into draft.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (x.detach().to(torch.bfloat16) if x.is_floating_point() else x.detach()).contiguous().clone()
        for name, x in own_state(draft).items()
    }
    save_file(state, folder / f"{WEIGHTS}.tmp")
    os.replace(folder / f"{WEIGHTS}.tmp", folder / WEIGHTS)
    write_json(folder / CONFIG, {"blocks": list(blocks), "target": target.fingerprint.to_dict(), **record})


def read_draft(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """draft.json of a folder. Raises DraftError if there is none or it is damaged."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise DraftError(f"{folder} is no draft model ({CONFIG} is missing): make one with `switchsd train draft`")
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        blocks, of = found["blocks"], Fingerprint(**found["target"]).blocks
        if any(type(block) is not int for block in blocks) or not increasing(blocks, of):
            raise ValueError(f"'blocks' is {blocks!r}, no increasing numbers from 0 to {of - 1}")
    except (ValueError, KeyError, TypeError) as error:
        raise DraftError(f"{file} is damaged ({error!r}): make the draft model again") from error
    return found


def load_draft(folder: str | os.PathLike[str], target: Target) -> Target:
    """The draft model of a folder, sharing `target`'s embedding and output matrix.

    Raises DraftError, naming both, if it was cut from another target.
    """
    config = read_draft(folder)
    different = target.fingerprint.mismatch(Fingerprint(**config["target"]))
    if different:
        raise DraftError(
            f"the draft model in {folder} was cut from another target than {target.name} ({'; '.join(different)}): "
            "choose the one that was made for it, or make one with `switchsd train draft`"
        )
    draft = cut_ordinary(target, config["blocks"])
    draft.name = str(folder)
    load_weights(draft, Path(folder) / WEIGHTS)
    return _as_fast_as(target, draft)


def load_weights(draft: Target, file: Path) -> None:
    """Fill a cut target's own tensors. Raises DraftError if the file does not hold them."""
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DraftError(f"cannot read {file} ({error}): make the draft model again") from error
    mine = own_state(draft)
    wrong = sorted(mine.keys() ^ state.keys()) or sorted(k for k in mine if mine[k].shape != state[k].shape)
    if wrong:
        raise DraftError(f"{file} does not hold the blocks of {draft.name}: {wrong[0]} for one")
    copy_state(state, mine)


def copy_state(source: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Values of the same names, in the dtype and on the device of those that they replace."""
    with torch.no_grad():
        for name, x in into.items():
            x.copy_(source[name])


def independent(name: str | os.PathLike[str], target: Target) -> Target:
    """Another causal LM, by hub id or folder, as a draft model: it must have the target's tokens under their ids.

    An output matrix with more rows than the target's (padding) is cut to it. Raises DraftError with the reason if the
    vocabularies differ or the matrix has fewer rows.
    """
    draft = load_target(name, dtype=target.dtype, device=target.device)
    mine, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if mine != theirs:
        differing = [t for t in mine.keys() | theirs.keys() if mine.get(t) != theirs.get(t)]
        first = min(differing, key=lambda t: (mine.get(t, theirs.get(t, 0)), t))
        raise DraftError(
            f"{name} cannot draft for {target.name}: {len(differing)} tokens have other ids, {first!r} for one "
            f"({theirs.get(first, 'none')} there, {mine.get(first, 'none')} here); choose a model with "
            "the same tokenizer"
        )
    rows = int(draft.head.weight.shape[0])
    if min(rows, draft.vocab_size) < target.vocab_size:
        raise DraftError(
            f"{name} cannot draft for {target.name}: it knows {min(rows, draft.vocab_size)} token ids and the target "
            f"{target.vocab_size}; choose a model with as many"
        )
    if rows > target.vocab_size:
        _cut_head(draft, target.vocab_size)
    return draft


def _cut_head(draft: Target, size: int) -> None:
    """Leave the first `size` rows of the output matrix."""
    head = draft.head
    bias = getattr(head, "bias", None)
    made = nn.Linear(head.weight.shape[1], size, bias is not None, device="meta")
    made.weight = nn.Parameter(head.weight[:size].detach().clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias[:size].detach().clone(), requires_grad=False)
    draft.model.set_output_embeddings(made)
    draft.head = made
    if isinstance(head, PackedLinear):
        draft.speed_up()
