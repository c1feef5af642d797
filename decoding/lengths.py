"""Fits a length head: copies from a capture store's texts, the neural drafts from a replay log.

A decoder asks a gate only where its last draft has ended; most positions of a text lie inside copies that are already
drafted. Rows count by how often simple walks over the text would ask there, and a little everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from activations.corpus import Prompt, prompts_hash
from activations.matching.match import MatchConfig
from activations.provenance import provenance
from activations.store import CaptureStore
from activations.target import Fingerprint
from decoding.budgets import FixedBudget
from decoding.drafters import CopyDrafter
from decoding.gates import COPY
from decoding.joint import AGREE, ALONE, BESIDE, CASES, DEPTHS, PASSED_OVER, odds
from decoding.replay import EAGLE, LoggedDrafter, follow
from decoding.replay_log import LoggedText
from decoding.request import Request
from decoding.tree import ROOT, DraftTree
from probes.artifact import ProbeError
from probes.length import LengthProbe
from probes.length_head import LengthConfig, LengthHead
from probes.surface import FEATURES, sureness, surface

Floats = NDArray[np.float64]
WALKS = ((1, 2), (2, 2), (3, 2), (5, 2), (8, 2), (2, 3))
"""(shortest match that is copied, tokens of any other step) of the walks that tell where a decoder asks."""
ELSEWHERE = 0.15
"""Weight of a row at which no walk asks; 1 where half of them do."""
FEATURE_SCALE = 3.0
"""Features are scaled to this standard deviation: the penalty is meant for the many entries of the state."""
NEURAL_L2 = 10.0
"""The penalty for the neural drafts over that for copies: a log has fewer texts than a store."""
JOINT_BUDGET = FixedBudget(15, 4)
"""The head's tree beside which copies are looked at."""
NEURAL_BUDGET = FixedBudget(7, 3)
"""The head's tree whose accepted length is fitted."""


SHORT = 5
"""Matches longer than this are hardly ever copied beside the head's tree, and count little in the joint table."""
FEWEST = 20
"""Outcomes of each kind that a model of the joint table is fitted from."""


@dataclass(frozen=True)
class LengthTrainConfig:
    """How a length head is fitted."""

    sites: tuple[str, ...] = ("resid_mid.20",)
    """Where the anchor's states are read; none fits the features alone."""
    depth: int = 20
    """Longest copy, in tokens."""
    hazards: int = 6
    """Hazards of a copy; the last one stands for all later tokens too."""
    kappa: int = 1
    """Shortest suffix match that counts as a candidate."""
    candidates: int = 10
    """Most candidates that the features look at."""
    l2: float = 1e-2
    """Weight of the penalty."""

    def __post_init__(self) -> None:
        if not 2 <= self.hazards <= self.depth:
            raise ValueError(f"hazards is {self.hazards}; it must lie between 2 and depth ({self.depth})")
        if self.l2 <= 0:
            raise ValueError(f"l2 is {self.l2}; it must be above 0")
        _ = self.match

    @property
    def match(self) -> MatchConfig:
        return MatchConfig(self.kappa, self.candidates, self.depth, max_length=max(32, self.kappa))


@dataclass(frozen=True)
class DraftRows:
    """Rows to fit: one draft at each position of texts."""

    features: Floats
    """[rows, FEATURES]"""
    accepted: NDArray[np.integer]
    """[rows]: accepted length of the draft there."""
    censored: NDArray[np.bool_]
    """[rows]: the text was cut while the draft was still followed."""
    weight: Floats
    """[rows]: about how often a decoder asks there."""

    @classmethod
    def join(cls, parts: Sequence[DraftRows]) -> DraftRows:
        return cls(
            *(np.concatenate([getattr(p, n) for p in parts]) for n in ("features", "accepted", "censored", "weight"))
        )

    def __getitem__(self, keep: NDArray[np.bool_]) -> DraftRows:
        return DraftRows(self.features[keep], self.accepted[keep], self.censored[keep], self.weight[keep])


def copy_rows(
    ids: Sequence[int], prompt: int, stopped: bool, summaries: NDArray[np.floating], match: MatchConfig
) -> DraftRows:
    """A row for each generated token of a text: the copy of the longest match there. `summaries` [rows, 3] are of the
    anchors' logits; rows may end before the text does."""
    drafter = CopyDrafter(match)
    request = Request(0, list(ids[:prompt]), max_new_tokens=len(ids), tokens=list(ids[:prompt]))
    drafter.start(request, None)
    n = len(summaries)
    features = np.zeros((n, len(FEATURES)))
    accepted, censored, longest = np.zeros(n, np.int64), np.zeros(n, bool), np.zeros(n, np.int64)
    for row in range(n):
        at = prompt + row + 1
        request.tokens.append(ids[at - 1])
        drafter.observe(request, None)
        matches, candidates = drafter.match(request), drafter.candidates(request)
        features[row] = (*surface(matches, candidates, prompt), *sureness(*summaries[row].tolist()))
        longest[row] = matches.longest
        if candidates:
            ahead = ids[at : at + len(candidates[0])]
            same = [a == b for a, b in zip(candidates[0], ahead, strict=False)]
            accepted[row] = same.index(False) if False in same else len(same)
            censored[row] = not stopped and accepted[row] == len(ahead) < len(candidates[0])
    return DraftRows(features, accepted, censored, asked(longest, accepted))


def asked(longest: NDArray[np.integer], accepted: NDArray[np.integer]) -> Floats:
    """Weights [rows] of a text's rows, of match lengths `longest` [rows] and accepted lengths `accepted` [rows]: about
    how often decoders of several settings would begin a step there."""
    times = np.zeros(len(longest))
    for least, step in WALKS:
        at = 0
        while at < len(longest):
            times[at] += 1
            at += 1 + int(accepted[at]) if longest[at] >= least else step
    weights: Floats = ELSEWHERE + np.minimum(times * 2 / len(WALKS), 1.0)
    return weights


def neural_rows(text: LoggedText, match: MatchConfig) -> DraftRows:
    """A row for each position of a logged text: the head's tree of NEURAL_BUDGET."""
    copies = copy_rows(text.ids, text.prompt, text.stopped, text.summary.numpy(), match)
    logged = LoggedDrafter(text)
    accepted, censored = np.zeros(text.steps, np.int64), np.zeros(text.steps, bool)
    for position in range(text.steps):
        tree, _ = logged.grow(position, NEURAL_BUDGET, NEURAL_BUDGET.depth)
        assert tree is not None
        ahead = text.ids[text.context(position) : text.context(position) + NEURAL_BUDGET.depth]
        accepted[position] = len(follow(tree, ahead))
        censored[position] = not text.stopped and accepted[position] == len(ahead) < NEURAL_BUDGET.depth
    return DraftRows(copies.features, accepted, censored, copies.weight)


@dataclass(frozen=True)
class StoredText:
    """A text of a capture store, whose rows are `rows` of the store."""

    split: str
    """Of its prompt."""
    ids: list[int]
    """Prompt and completion."""
    prompt: int
    """Tokens of the prompt."""
    stopped: bool
    """It ends at a stop token, not at a limit."""
    rows: NDArray[np.bool_]
    """Mask [rows of the store]."""


def stored_texts(
    store: CaptureStore, prompts: Sequence[Prompt], encode: Callable[[Any], list[int]]
) -> Iterator[StoredText]:
    """The texts of a store of anchors; the prompts are those it was captured from, in order.

    Raises ProbeError for other prompts, and for a store that does not hold every anchor.
    """
    if store.manifest.get("prompts") != prompts_hash(prompts):
        raise ProbeError(f"{store.folder} was captured from other prompts: name those")
    if store.manifest.get("selection") != "anchors":
        raise ProbeError(f"{store.folder} does not hold every anchor: capture with selection anchors")
    rows = store.rows()
    for number in np.unique(rows["document"]):
        mine = rows["document"] == number
        prompt = encode(prompts[number].messages)
        ids = [*prompt, *rows["pending"][mine].tolist()]
        yield StoredText(str(rows["split"][mine][0]), ids, len(prompt), bool(rows["span_0"][mine][-1] >= 0), mine)


def fit_draft(states: torch.Tensor, rows: DraftRows, longest: int, hazards: int, l2: float) -> dict[str, torch.Tensor]:
    """Tensors of one drafter, for states [rows, entries] (which may have no entries)."""
    wide = states.float().numpy()
    rms = float(np.sqrt(np.mean(wide**2))) if wide.size else 1.0
    mean, scale = rows.features.mean(0), rows.features.std(0)
    scale = np.where(scale > 1e-6, scale, 1.0) / FEATURE_SCALE
    x = np.hstack([wide / max(rms, 1e-12), (rows.features - mean) / scale]).astype(np.float32)
    probe = LengthProbe(m_max=longest, steps=min(hazards - 1, longest - 1) or 1, l2=l2)
    probe.fit(x, np.minimum(rows.accepted, longest), rows.censored, sample_weight=rows.weight)
    weights, entries = probe.coef_.astype(np.float64), wide.shape[1]
    features = weights[:, entries:] / scale
    bias = probe.intercept_ - features @ mean
    made = {"state": weights[:, :entries] / max(rms, 1e-12), "features": features, "bias": bias}
    return {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in made.items()}


def train_lengths(
    store: CaptureStore,
    texts: Sequence[StoredText],
    log: Sequence[LoggedText],
    config: LengthTrainConfig,
    split: str = "train",
) -> LengthHead:
    """A length head of the texts of one split; without a log it knows copies alone.

    Raises ProbeError if the split has no texts.
    """
    columns = store.rows()
    summaries = np.stack([columns[n] for n in ("max_prob", "entropy", "margin")], axis=1)

    def copies(of: Callable[[StoredText], bool]) -> tuple[torch.Tensor, DraftRows, int]:
        """States, rows and number of the chosen texts, where something can be copied."""
        chosen = [t for t in texts if of(t)]
        if not chosen:
            return torch.zeros(0, 0), _no_rows(), 0
        made = [copy_rows(t.ids, t.prompt, t.stopped, summaries[t.rows], config.match) for t in chosen]
        rows = DraftRows.join(made)
        matched = rows.features[:, 0] > 0
        at = torch.from_numpy(np.concatenate([np.flatnonzero(t.rows) for t in chosen])[matched])
        return _side_by_side([store.states(s)[at] for s in config.sites], len(at)), rows[matched], len(chosen)

    def drafts_of(of: Callable[[LoggedText], bool]) -> tuple[torch.Tensor, DraftRows, list[LoggedText]]:
        """The same of the logged texts, at every position."""
        chosen = [t for t in log if of(t)]
        if not chosen:
            return torch.zeros(0, 0), _no_rows(), chosen
        rows = DraftRows.join([neural_rows(t, config.match) for t in chosen])
        states = [torch.cat([t.states[s] for t in chosen]) for s in config.sites]
        return _side_by_side(states, len(rows.accepted)), rows, chosen

    states, rows, count = copies(lambda t: t.split == split)
    if not count:
        raise ProbeError(f"{store.folder} has no texts of the {split} split")
    held: dict[str, tuple[torch.Tensor, DraftRows]] = {COPY: copies(lambda t: t.split != split)[:2]}
    fitted = fit_draft(states, rows, config.depth, config.hazards, config.l2)
    tensors = {f"{COPY}.{k}": v for k, v in fitted.items()}
    drafts, parts = {COPY: config.depth}, {"copy texts": count, "copy rows": len(rows.accepted)}
    states, rows, neural = drafts_of(lambda t: t.source == split)
    if neural:
        depth = NEURAL_BUDGET.depth
        hazards = fitted["bias"] + torch.from_numpy(rows.features).float() @ fitted["features"].T
        hazards += states.float() @ fitted["state"].T
        made = fit_draft(states, rows, depth, depth, NEURAL_L2 * config.l2)
        tensors |= {f"{EAGLE}.{k}": v for k, v in made.items()}
        tensors[f"{EAGLE}.joint"] = fit_joint(neural, hazards, config.match)
        drafts[EAGLE] = depth
        parts |= {"neural texts": len(neural), "neural rows": len(rows.accepted)}
        held[EAGLE] = drafts_of(lambda t: t.source == "validation")[:2]
    target: Mapping[str, Any] = store.manifest["target"]
    made_config = LengthConfig(
        sites=config.sites, width=int(target["width"]), drafts=drafts, features=FEATURES, kappa=config.kappa,
        target=Fingerprint(**target), target_name=store.manifest["target_name"], split={"fitted": split, **parts},
        metrics={}, provenance=provenance(),
    )  # fmt: skip
    head = LengthHead(made_config, tensors)
    metrics = {name: judge(head, name, *found) for name, found in held.items() if len(found[1].accepted)}
    return LengthHead(replace(made_config, metrics=metrics), tensors)


def judge(head: LengthHead, drafter: str, states: torch.Tensor, rows: DraftRows) -> dict[str, float]:
    """On rows weighted as a decoder asks: mean log-likelihood of the accepted length in nats, its mean, what was
    expected, and the mean gap between the two over the ten tenths of the expected (calibration). `states` are
    [rows, sites * width]."""
    start, stop = head.columns(drafter)
    weights = head.tensors[f"{drafter}.features"]
    z = head.tensors[f"{drafter}.bias"] + torch.from_numpy(rows.features).float() @ weights.T
    z = (z + head.project(states)[:, start:stop]).double()
    longest = head.config.drafts[drafter]
    hazards = torch.sigmoid(torch.cat([z, z[:, -1:].expand(-1, longest - z.shape[1])], dim=1)).numpy()
    alive = np.cumprod(hazards, axis=1)
    accepted = np.minimum(rows.accepted, longest)
    known = np.hstack([np.ones((len(alive), 1)), alive, np.zeros((len(alive), 1))])
    row = np.arange(len(alive))
    law = np.where(rows.censored, known[row, accepted], known[row, accepted] - known[row, accepted + 1])
    weight, sure = rows.weight, ~rows.censored
    expected = alive.sum(1)
    order = np.argsort(expected[sure], kind="stable")
    gaps = [
        abs(np.average((expected - accepted)[sure][part], weights=weight[sure][part]))
        for part in np.array_split(order, 10)
        if len(part)
    ]
    return {
        "log_likelihood": round(float(np.average(np.log(np.maximum(law, 1e-9)), weights=weight)), 4),
        "accepted": round(float(np.average(accepted[sure], weights=weight[sure])), 3),
        "expected": round(float(np.average(expected[sure], weights=weight[sure])), 3),
        "calibration_gap": round(float(np.mean(gaps)), 3),
        "rows": len(alive),
    }


def _no_rows() -> DraftRows:
    return DraftRows(np.zeros((0, len(FEATURES))), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0))


def fit_joint(texts: Sequence[LoggedText], hazards: torch.Tensor, match: MatchConfig) -> torch.Tensor:
    """The joint table float32 [CASES, DEPTHS, 3] of logged texts; `hazards` [rows, hazards] are the copy's log-odds at
    all their positions."""
    seen: dict[tuple[int, int], list[tuple[float, float, bool, float]]] = {}
    odds_of = hazards.tolist()
    row = 0
    for text in texts:
        drafter, logged = CopyDrafter(match), LoggedDrafter(text)
        request = Request(0, text.ids[: text.prompt], max_new_tokens=len(text.ids), tokens=text.ids[: text.prompt])
        drafter.start(request, None)
        for position in range(text.steps):
            at = text.context(position)
            request.tokens.append(text.ids[at - 1])
            drafter.observe(request, None)
            candidates = drafter.candidates(request)
            tree, _ = logged.grow(position, JOINT_BUDGET, JOINT_BUDGET.depth)
            assert tree is not None
            weight = ELSEWHERE if drafter.match(request).longest > SHORT else 1.0
            ahead = text.ids[at : at + JOINT_BUDGET.depth]
            for case, depth, copy, head, came in meetings(
                tree, candidates[0] if candidates else (), odds_of[row], ahead
            ):
                seen.setdefault((case, depth), []).append((copy, head, came, weight))
            row += 1
    table = torch.zeros(CASES, DEPTHS, 3)
    for case in range(CASES):
        for depth in range(DEPTHS):
            table[case, depth] = _logistic(seen.get((case, depth), []), case)
    return table


def meetings(
    tree: DraftTree, candidate: Sequence[int], hazards: Sequence[float], ahead: Sequence[int]
) -> Iterator[tuple[int, int, float, float, bool]]:
    """Case, depth (up to DEPTHS - 1), the copy's and the head's log-odds and the outcome, of the tokens that follow
    the path that a text takes through the head's tree."""
    node, copying = ROOT, True
    for k, token in enumerate(ahead):
        children = {t: q for (parent, t), i in tree.children.items() if parent == node for q in (tree.logq[i],)}
        if not children:
            return
        depth = min(k, DEPTHS - 1)
        speaks = copying and k < len(candidate)
        copy = hazards[min(k, len(hazards) - 1)] if speaks else 0.0
        if speaks and candidate[k] not in children:
            yield PASSED_OVER, depth, copy, odds(max(children.values())), candidate[k] == token
        for child, logq in children.items():
            case = ALONE if not speaks else AGREE if child == candidate[k] else BESIDE
            yield case, depth, copy, odds(logq), child == token
        copying = speaks and candidate[k] == token
        if token not in children:
            return
        node = tree.children[node, token]


def _logistic(rows: Sequence[tuple[float, float, bool, float]], case: int) -> torch.Tensor:
    """Weights of the copy's odds, the head's odds and 1; what a drafter says alone where too little was seen."""
    from sklearn.linear_model import LogisticRegression

    came = [r[2] for r in rows]
    if min(sum(came), len(came) - sum(came)) < FEWEST:
        return torch.tensor([1.0, 0.0, 0.0] if case in (AGREE, PASSED_OVER) else [0.0, 1.0, 0.0])
    x = np.array([(copy, head) for copy, head, _, _ in rows])
    fitted = LogisticRegression(C=10.0).fit(x, came, sample_weight=[r[3] for r in rows])
    return torch.tensor([*fitted.coef_[0].tolist(), float(fitted.intercept_[0])])


def _side_by_side(states: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    return torch.cat(list(states), dim=-1) if states else torch.zeros(rows, 0)
