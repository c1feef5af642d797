"""Is a probe's direction used? Its component is changed at anchors, and the target goes on from there.

    ablate        the component becomes the mean of the other class (genuine or accidental)
    interchange   it becomes that of an anchor of the other class with the nearest match length

The pending token is fed as it stands, so the effect is measured on two predictions: `own`, that of the pending
token at the anchor, and `next`, that of the candidate's first token behind it. The controls move the same state by
the same distance along random directions. All versions of an anchor are branches of one tree forward, an
unchanged one included, from which changes are counted.

Sources: removing what a probe reads, Elazar et al. 2020, arXiv 2006.00995; interchange, Geiger et al. 2021, arXiv
2106.02997.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from activations.cache import KVCache
from activations.intervene import SiteWriter
from activations.target import Target
from probes.anchors import CLASSES, Anchor, AnchoredText, Clusters, margins
from probes.artifact import ChoiceError, Probe, ProbeError
from probes.evaluation import Floats, Interval

Intervention = Literal["ablate", "interchange"]
INTERVENTIONS: tuple[Intervention, ...] = ("ablate", "interchange")
Where = Literal["anchor", "suffix"]
WHERE: tuple[Where, ...] = ("anchor", "suffix")
"""Positions changed: the anchor alone, or every token of the suffix match, the pending one and the anchor included."""
Prediction = Literal["next", "own"]
PREDICTIONS: tuple[Prediction, ...] = ("next", "own")


@dataclass(frozen=True)
class Change:
    """How far one prediction moves: logit of the token less that of the best other one, means over anchors."""

    before: Interval
    """The margin of the unchanged target."""
    probe: Interval
    """Change by the probe's direction."""
    random: Interval
    """Change by random directions, the mean over them."""
    difference: Interval
    """The first less the second, paired by anchor."""
    beyond: int
    """Random directions whose mean change is at least as large as the probe's, whatever its sign."""

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Interval) else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class Effect:
    """One intervention on anchors of one class."""

    intervention: Intervention
    where: Where
    kind: str
    """genuine or accidental, what the anchors are."""
    anchors: int
    documents: int
    displacement: float
    """Mean distance by which the anchor's state is moved."""
    norm: float
    """Mean norm of that state."""
    next: Change
    own: Change

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Change) else v for k, v in vars(self).items()}


def unit_direction(probe: Probe) -> torch.Tensor:
    """float32 [width], towards copying.

    Raises ChoiceError for a probe that has no one direction at one site, ProbeError for one whose weights are all 0.
    """
    if probe.config.kind != "linear" or len(probe.config.sites) != 1:
        raise ChoiceError(
            f"this probe is {probe.config.kind} at {probe.config.site}: a direction belongs to a linear probe of one "
            "site; choose such a probe"
        )
    weight = probe.tensors["weight"] * probe.tensors["scale"] * probe.tensors["calibration"][0]
    if not weight.norm() > 0:
        raise ProbeError("this probe's weights are all zero, so that it has no direction: train it again")
    return weight / weight.norm()


def random_directions(width: int, count: int, seed: int) -> torch.Tensor:
    """float32 [count, width] of norm 1, uniform."""
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm(dim=1, keepdim=True)


def choose_anchors(texts: Sequence[AnchoredText], most: int, seed: int) -> list[AnchoredText]:
    """The texts with at most `most` anchors of each class, drawn at random; those without one are left out.

    Raises ProbeError if there are not both classes.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for text in texts:
        kept: list[Anchor] = []
        for genuine in (True, False):
            there = [a for a in text.anchors if a.genuine == genuine]
            kept += [there[i] for i in rng.permutation(len(there))[:most]]
        if kept:
            kept.sort(key=lambda a: a.position)
            chosen.append(AnchoredText(text.document, text.ids[: kept[-1].position + 2], tuple(kept)))
    found = {a.genuine for text in chosen for a in text.anchors}
    if len(found) < 2:
        raise ProbeError(
            f"{sum(len(t.anchors) for t in texts)} anchors with a match were found, and both genuine and accidental "
            "ones are needed: take more documents, or a store of shorter matches (--kappa 1)"
        )
    return chosen


@dataclass(frozen=True)
class _Job:
    """One anchor, changed at one set of positions."""

    row: int
    anchor: Anchor
    where: Where

    @property
    def start(self) -> int:
        """First position that is computed anew."""
        here = self.anchor.position
        return here if self.where == "anchor" else max(0, min(here, here + 2 - self.anchor.match_length))

    @property
    def size(self) -> int:
        return self.anchor.position + 2 - self.start


def tokens_needed(texts: Sequence[AnchoredText], directions: int) -> int:
    """Tokens that `direction_effects` feeds for these anchors."""
    branches = 1 + len(INTERVENTIONS) * (1 + directions)
    jobs = sum(_Job(0, a, w).size for t in texts for a in t.anchors for w in WHERE)
    return branches * jobs + 2 * sum(len(t.ids) for t in texts)


def direction_effects(
    target: Target,
    probe: Probe,
    texts: Sequence[AnchoredText],
    directions: int,
    resamples: int,
    seed: int,
    tell: Callable[[int], None] = lambda tokens: None,
) -> list[Effect]:
    """Every intervention at every anchor of `texts` (see `choose_anchors`); `tell(tokens)` as they are fed.

    Raises ChoiceError as `unit_direction`, and ValueError for a site that cannot be written.
    """
    unit = unit_direction(probe).to(target.device)
    writer = SiteWriter(target, probe.config.site)
    lines = torch.cat([unit[None], random_directions(len(unit), directions, seed).to(unit)])  # [1 + N, width]
    anchors = [a for t in texts for a in t.anchors]
    documents = np.array([t.document for t in texts for _ in t.anchors])
    component, norm = _components(target, probe.config.site, texts, unit, tell)
    goals = _goals(anchors, component, seed)
    margin = np.empty((len(WHERE), len(anchors), 1 + len(INTERVENTIONS) * len(lines), len(PREDICTIONS)))
    row = 0
    for text in texts:
        jobs = [_Job(row + i, a, w) for i, a in enumerate(text.anchors) for w in WHERE]
        row += len(text.anchors)
        cache = KVCache(1, capacity=len(text.ids))
        target.hidden(torch.tensor([text.ids], device=target.device), cache)
        cache.commit([range(len(text.ids))])
        tell(len(text.ids))
        for job in sorted(jobs, key=lambda j: -j.start):  # each writes behind its start, which the next do not need
            cache.crop_row(0, job.start)
            goal = torch.tensor([goals[name][job.row] for name in INTERVENTIONS]).to(unit)
            margin[WHERE.index(job.where), job.row] = _branches(target, writer, cache, text, job, unit, lines, goal)
            tell(margin.shape[2] * job.size)
    effects = []
    for kind in CLASSES:
        of_kind = np.array([a.genuine == (kind == "genuine") for a in anchors])
        clusters = Clusters(documents[of_kind], resamples, seed)
        for i, name in enumerate(INTERVENTIONS):
            moved = float(np.abs(goals[name] - component)[of_kind].mean())
            for w, where in enumerate(WHERE):
                part = slice(1 + i * len(lines), 1 + (i + 1) * len(lines))
                before, after = margin[w, of_kind, :1], margin[w, of_kind, part]
                following, own = (_change(before[..., n], after[..., n], clusters) for n in range(len(PREDICTIONS)))
                size = int(of_kind.sum()), clusters.count
                effects.append(Effect(name, where, kind, *size, moved, float(norm[of_kind].mean()), following, own))
    return effects


def _change(before: Floats, after: Floats, clusters: Clusters) -> Change:
    """before [anchors, 1], after [anchors, 1 + random directions]."""
    change = after - before
    means = np.abs(change.mean(axis=0))
    probe, random = change[:, 0], change[:, 1:].mean(axis=1)
    return Change(
        before=clusters.mean(before[:, 0]),
        probe=clusters.mean(probe),
        random=clusters.mean(random),
        difference=clusters.mean(probe - random),
        beyond=int((means[1:] >= means[0]).sum()),
    )


def _components(
    target: Target, site: str, texts: Sequence[AnchoredText], unit: torch.Tensor, tell: Callable[[int], None]
) -> tuple[Floats, Floats]:
    """Each anchor's component along the direction, and the norm of its state."""
    components, norms = [], []
    for text in texts:
        with target.read([site]) as reader:
            target.hidden(torch.tensor([text.ids], device=target.device), KVCache(1, capacity=len(text.ids)))
        (states,) = reader.states.values()
        here = states[0, [a.position for a in text.anchors]].float()
        components.append((here @ unit).double().cpu().numpy())
        norms.append(here.norm(dim=1).double().cpu().numpy())
        tell(len(text.ids))
    return np.concatenate(components), np.concatenate(norms)


def _goals(anchors: Sequence[Anchor], component: Floats, seed: int) -> dict[Intervention, Floats]:
    """What each anchor's component becomes."""
    rng = np.random.default_rng(seed)
    genuine = np.array([a.genuine for a in anchors])
    length = np.array([a.match_length for a in anchors])
    ablate, interchange = np.empty(len(anchors)), np.empty(len(anchors))
    for row in range(len(anchors)):
        others = np.flatnonzero(genuine != genuine[row])
        gap = np.abs(length[others] - length[row])
        ablate[row] = component[others].mean()
        interchange[row] = component[rng.choice(others[gap == gap.min()])]
    return {"ablate": ablate, "interchange": interchange}


def _branches(
    target: Target,
    writer: SiteWriter,
    cache: KVCache,
    text: AnchoredText,
    job: _Job,
    unit: torch.Tensor,
    lines: torch.Tensor,
    goals: torch.Tensor,
) -> Floats:
    """Margins [branches, predictions] of one anchor: unchanged, then each goal along each line [lines, width]."""
    size, here = job.size, job.anchor.position - job.start
    count = 1 + len(goals) * len(lines)
    along = torch.cat([torch.zeros_like(lines[:1]), *[lines] * len(goals)])[:, None]  # [branches, 1, width]
    goal = torch.cat([goals.new_zeros(1), goals.repeat_interleave(len(lines))])[:, None]
    edited = torch.zeros(count, size, 1, dtype=torch.bool, device=unit.device)
    edited[1:, slice(here, here + 1) if job.where == "anchor" else slice(None)] = True

    def edit(state: torch.Tensor) -> torch.Tensor:
        apart = state.view(count, size, -1)
        whole = apart.to(unit)
        moved = whole + (goal - whole @ unit)[..., None] * along
        return torch.where(edited.to(state.device), moved.to(state), apart).view_as(state)

    device = target.device
    tokens = torch.tensor([text.ids[job.start : job.start + size] * count], device=device)
    chain = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    ancestors = torch.block_diag(*[chain] * count).bool()[None]
    depths = torch.arange(size, device=device).repeat(count)[None]
    with writer.writing(edit):
        hidden = target.hidden(tokens, cache, ancestors, depths)[0].view(count, size, -1)
    asked = {"next": (size - 1, job.anchor.candidate), "own": (here, text.ids[job.anchor.position + 1])}
    found = [margins(target.logits(hidden[:, at]), [token] * count) for at, token in (asked[p] for p in PREDICTIONS)]
    return torch.stack(found, dim=1).double().cpu().numpy()
