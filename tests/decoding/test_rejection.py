"""Rejection sampling: the target's law, whatever the drafts were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from activations.sampling import Sampling
from decoding.rejection import RejectionVerifier
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verifier import Verdict, Verifier

VOCAB = 6
N = 6_000


def table(seed: int, spread: float = 1.2) -> torch.Tensor:
    """Logits [V, V, V] of the next token after two others."""
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


P, Q = table(4), table(9)


def missing(logits: torch.Tensor) -> torch.Tensor:
    """Without the support of tokens 2 and 3, which the target may well choose."""
    law = logits.clone()
    law[..., 2:4] = -torch.inf
    return law


def chains(requests: Sequence[Request], law: torch.Tensor | None, depth: int, seed: int) -> list[DraftTree]:
    """Chains drawn from a law [V, V, V], which they tell; without one, certain tokens (a copy)."""
    draw = torch.Generator().manual_seed(seed)
    texts = torch.tensor([r.tokens[-2:] for r in requests])
    laws = []
    for _ in range(depth):
        if law is None:
            token = (texts[:, -1] + texts[:, -2]) % VOCAB
        else:
            here = law[texts[:, -2], texts[:, -1]]
            laws.append(here)
            token = torch.multinomial(here.softmax(-1), 1, generator=draw)[:, 0]
        texts = torch.cat([texts, token[:, None]], 1)
    made = [DraftTree.chain(row[2:], "draft") for row in texts.tolist()]
    if law is None:
        return made
    told = torch.stack(laws, 1)
    return [replace(tree, q_logits=told[i]) for i, tree in enumerate(made)]


def logits_of(requests: Sequence[Request], trees: Sequence[DraftTree], p: torch.Tensor) -> torch.Tensor:
    """Logits [B, 1 + depth, V] of the pending token and the nodes of equally long chains."""
    texts = torch.tensor([[*r.tokens[-2:], *t.tokens] for r, t in zip(requests, trees, strict=True)])
    return torch.stack([p[texts[:, i], texts[:, i + 1]] for i in range(texts.shape[1] - 1)], 1)


def three_tokens(sampling: Sampling, q: torch.Tensor | None, told: torch.Tensor | None = None) -> torch.Tensor:
    """Counts [V^3] of three tokens after (0, 0), decoded with chains of two."""
    requests = [Request(i, [0, 0], sampling=sampling, tokens=[0, 0]) for i in range(N)]
    running, rounds = requests, 0
    while running:
        trees = chains(running, q, 2, seed=rounds)
        if told is not None:
            trees = [replace(t, q_logits=told.expand(2, -1)) for t in trees]
        verdicts = RejectionVerifier().accept(trees, logits_of(running, trees, P), running)
        for request, tree, verdict in zip(running, trees, verdicts, strict=True):
            request.tokens = [*request.tokens, *(tree.tokens[i] for i in verdict.path), verdict.pending]
        running = [r for r in running if len(r.tokens) < 5]
        rounds += 1
    found = torch.tensor([r.tokens[2:5] for r in requests])
    return torch.bincount(found[:, 0] * VOCAB**2 + found[:, 1] * VOCAB + found[:, 2], minlength=VOCAB**3)


def p_value(counts: torch.Tensor, sampling: Sampling) -> float:
    """Chi-square against the exact joint law; cells expected fewer than 5 times are taken together."""
    p = sampling.process(P).double().softmax(-1)
    wanted = (p[0, 0][:, None, None] * p[0][:, :, None] * p).flatten() * N
    assert int(counts[wanted == 0].sum()) == 0, "a token that is excluded was written"
    rare = wanted < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    filled = expected > 0
    return float(chisquare(seen[filled].numpy(), expected[filled].numpy()).pvalue)


PLAIN, NARROW, TOP_P = Sampling(1.0, seed=1), Sampling(0.7, 4, 0.9, 2), Sampling(1.2, 0, 0.7, 3)


@pytest.mark.parametrize(
    ("sampling", "q"),
    [(PLAIN, Q), (TOP_P, P), (NARROW, table(2, 3.0)), (PLAIN, missing(Q)), (NARROW, missing(Q)), (TOP_P, None)],
    ids=["other", "same", "sharp", "missing", "both miss", "copy"],
)
def test_three_tokens_have_the_targets_joint_law(sampling: Sampling, q: torch.Tensor | None) -> None:
    assert p_value(three_tokens(sampling, q), sampling) > 1e-3


def test_a_wrong_law_is_found_out() -> None:
    """Drafts that were not drawn from what they tell."""
    sampling = Sampling(1.0, seed=1)
    assert p_value(three_tokens(sampling, Q, told=torch.zeros(VOCAB)), sampling) < 1e-6


@pytest.mark.parametrize("q", [Q, missing(Q), table(2, 3.0)])
def test_as_many_are_accepted_as_the_laws_have_in_common(q: torch.Tensor) -> None:
    sampling = Sampling(0.8, 0, 0.9, seed=5)
    requests = [Request(i, [0, 0], sampling=sampling, tokens=[0, 1]) for i in range(N)]
    trees = chains(requests, q, 1, 0)
    found = RejectionVerifier().accept(trees, logits_of(requests, trees, P), requests)
    wanted = float(torch.minimum(sampling.process(P)[0, 1].softmax(-1), q[0, 1].softmax(-1)).sum())
    assert 0.1 < wanted < 0.9
    rate = sum(len(v.path) for v in found) / N
    assert rate == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / N) ** 0.5)


def test_the_same_law_is_always_accepted() -> None:
    sampling = Sampling(0.9, 3, seed=5)
    requests = [Request(i, [0, 0], sampling=sampling, tokens=[0, 1]) for i in range(500)]
    trees = chains(requests, sampling.process(P), 4, 0)
    found = RejectionVerifier().accept(trees, logits_of(requests, trees, P), requests)
    assert all(v.path == [0, 1, 2, 3] for v in found)
    assert len({v.pending for v in found}) > 1


def mixed(count: int) -> tuple[list[Request], list[DraftTree], torch.Tensor]:
    """Requests of several samplings with ragged chains, some certain, some empty."""
    kinds = [Sampling(), Sampling(1.0, seed=3), Sampling(0.8, 4, 0.9, seed=8), Sampling(1.0, seed=4)]
    requests, trees = [], []
    generator = torch.Generator().manual_seed(2)
    for i in range(count):
        request = Request(i, [0], sampling=kinds[i % 4], tokens=[1] * (2 + i % 3))
        [tree] = chains([request], None if i % 5 == 0 else Q, 4, i)
        requests.append(request)
        trees.append(tree.part(range(i % 5)))
    return requests, trees, torch.randn(count, 6, VOCAB, generator=generator)


def test_the_outcome_does_not_depend_on_the_batch() -> None:
    requests, trees, logits = mixed(40)
    together = RejectionVerifier().accept(trees, logits, requests)
    for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
        [alone] = RejectionVerifier().accept([tree], logits[i : i + 1, : 1 + len(tree)], [request])
        assert alone == together[i]
    backwards = RejectionVerifier().accept(trees[::-1], logits.flip(0), requests[::-1])
    assert backwards[::-1] == together
    assert len({len(v.path) for v in together}) > 2


def test_greedy_requests_are_judged_as_always() -> None:
    requests, trees, logits = mixed(40)
    for request in requests:
        request.sampling = Sampling()
    for i in range(0, 40, 2):  # chains that are followed for a while
        followed = logits[i].argmax(-1)[: len(trees[i])].tolist()
        trees[i] = DraftTree.chain(followed, "draft")
    found = RejectionVerifier().accept(trees, logits, requests)
    assert found == Verifier().accept(trees, logits, requests)
    assert any(len(v.path) > 2 for v in found)


def test_what_is_read_at_the_anchor() -> None:
    requests, trees, logits = mixed(8)

    def read(slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([slots / 10, slots + 1.0], 1)

    found: list[Verdict] = RejectionVerifier().accept(trees, logits, requests, read)
    for verdict in found:
        assert verdict.intent == pytest.approx(len(verdict.path) / 10)
        assert verdict.readings == (len(verdict.path) + 1,)


def test_a_tree_that_branches_is_refused() -> None:
    tree = DraftTree([1, 2], [-1, -1], ["draft"] * 2, [0.0] * 2)
    with pytest.raises(ValueError, match="branches"):
        RejectionVerifier().accept([tree], torch.zeros(1, 3, VOCAB), [Request(0, [1], tokens=[1, 2])])
