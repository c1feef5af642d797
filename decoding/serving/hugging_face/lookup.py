"""Gated prompt lookup for the assisted generation of `transformers`: copies are drafted where a probe expects them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig
from activations.sites import Site
from activations.target import weights_hash
from probes.artifact import ChoiceError, Probe

MAKER = "_get_candidate_generator"
"""The method of a model that makes its candidate generators."""


class GatedLookup(CandidateGenerator):
    """Drafts what followed the latest longest suffix match, if the probe's output at the anchor reaches tau; else
    nothing. For one call of `generate`, of one row.

    The newest token has no state yet: the probe reads the state that predicted it.
    """

    requires_model_outputs = True

    def __init__(
        self, probe: Probe, depth: int, tau: float, kappa: int, max_length: int, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        """depth: most tokens of a draft. tau: least probability that drafts. kappa: shortest suffix match. max_length:
        of the whole text. stop_ids: a draft ends before one of them."""
        self.probe = probe
        self.tau = tau
        blocks = probe.config.target.blocks
        self._places = [hidden_state(site, blocks) for site in probe.config.sites]
        # One of two numbers is right: transformers 5.24 counts the embedding as the first state, 5.19 does not, and
        # 5.16 gives all states. What is not asked for is None, and places from the end are the same in all three.
        numbers = {number for place in self._places for number in (blocks + place, blocks + place + 1)}
        self.model_kwargs_overrides = {"output_hidden_states": sorted(numbers)}
        self._index = SuffixIndex(MatchConfig(kappa=kappa, candidates=1, depth=depth))
        self._max_length, self._stop_ids = max_length, stop_ids
        self._drafted = 0

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        model_outputs: Any = None,
        n_last_matches: int | torch.Tensor = 0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """The text [1, tokens] with a draft behind it, or as it is. `model_outputs` are those of the latest forward,
        whose last rows are the pending token and the draft, of which `n_last_matches` were kept."""
        index = self._index
        index.extend(input_ids[0, len(index) :].tolist())
        last, self._drafted = self._drafted, 0
        if model_outputs is None:  # the prompt has not been read yet
            return input_ids, None
        draft = self._draft(len(index))
        if not draft:  # nothing to gate
            return input_ids, None
        states = [model_outputs.hidden_states[place][0] for place in self._places]
        row = states[0].shape[0] - 1 - last + int(n_last_matches)
        if float(self.probe.score(torch.cat([state[row] for state in states]))) < self.tau:
            return input_ids, None
        self._drafted = len(draft)
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing is learnt from the text [1, tokens] or the logits [1, drafted + 1, V]."""

    def _draft(self, length: int) -> list[int]:
        """Of a text of that length; the target adds a token of its own."""
        found = self._index.candidates(self._index.find())
        draft = found[0][: max(self._max_length - length - 1, 0)] if found else []
        ends = [i for i, token in enumerate(draft) if token in self._stop_ids]
        return draft[: ends[0]] if ends else draft


@contextmanager
def gated_lookup(
    model: PreTrainedModel,
    probe: str | os.PathLike[str] | Probe,
    *,
    tau: float | None = None,
    kappa: int | None = None,
) -> Iterator[None]:
    """Within, `model.generate(..., prompt_lookup_num_tokens=n)` drafts up to n tokens where the probe says so, in place
    of wherever the last tokens occurred. `generate` takes no candidate generator, so that the model is given another
    maker of them; whatever else is asked of it stays as it was.

    probe: a folder, a hub id, the name of a shipped one, or loaded; at sites between blocks. tau, kappa: threshold
    and shortest suffix match; by default the probe's.

    Raises ProbeError for a probe of another model, or at a site that `generate` does not hand out; ChoiceError for a
    tau or kappa out of range.
    """
    one = probe if isinstance(probe, Probe) else Probe.from_pretrained(probe)
    check(one, model)
    least = one.config.threshold if tau is None else tau
    if not 0 <= least <= 1:
        raise ChoiceError(f"tau is {least}; a threshold of a probability lies in [0, 1]")
    shortest = one.config.kappa if kappa is None else kappa
    if not 1 <= shortest <= MatchConfig.max_length:
        raise ChoiceError(f"kappa is {shortest}; a suffix match has 1 to {MatchConfig.max_length} tokens")
    owner: Any = model
    before, usual = owner.__dict__.get(MAKER), owner._get_candidate_generator

    def make(**how: Any) -> Any:
        config = how["generation_config"]
        if config.prompt_lookup_num_tokens is None:
            return usual(**how)
        stops = getattr(config, "_eos_token_tensor", None)
        stop_ids = frozenset(() if stops is None else stops.flatten().tolist())
        return GatedLookup(one, config.prompt_lookup_num_tokens, least, shortest, config.max_length, stop_ids)

    setattr(owner, MAKER, make)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, MAKER)
        else:
            setattr(owner, MAKER, before)


def hidden_state(site: str, blocks: int) -> int:
    """Where among the `hidden_states` of a model with so many blocks a site is, counted from the end. Raises
    ChoiceError for one that is not between two blocks: what is handed out before and after them differs."""
    at = Site.parse(site)
    before = {"resid_pre": at.block, "resid_post": at.block + 1}.get(at.kind, 0)
    if not 0 < before < blocks:
        raise ChoiceError(
            f"the probe reads {site}, and generate hands out states between blocks alone: use a serving probe "
            f"(resid_post.0 to resid_post.{blocks - 2})"
        )
    return before - blocks - 1


def check(probe: Probe, model: PreTrainedModel) -> None:
    """Raise ChoiceError unless the probe was trained on this model, as far as the model can tell, and its sites are
    handed out."""
    config, theirs = model.config.get_text_config(), probe.config.target
    name, blocks = model.name_or_path, int(config.num_hidden_layers)
    revision = getattr(model.config, "_commit_hash", None)
    if revision is None and name and Path(name).is_dir():
        revision = weights_hash(Path(name))
    mine: Mapping[str, Any] = {
        "architecture": type(model).__name__, "width": int(config.hidden_size), "blocks": blocks,
        **({} if revision is None else {"revision": revision}),
    }  # fmt: skip
    different = [
        f"{key}: {getattr(theirs, key)} and {value}" for key, value in mine.items() if getattr(theirs, key) != value
    ]
    if different:
        raise ChoiceError(
            f"the probe was trained on {probe.config.target_name} and does not fit {name or type(model).__name__}; "
            f"they differ in {'; '.join(different)}. Choose the probe of this model, or train one with "
            "`switchsd train probe`."
        )
    for site in probe.config.sites:
        hidden_state(site, blocks)
