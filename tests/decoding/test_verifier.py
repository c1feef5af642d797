"""The verifier: both of its ways agree, and it keeps the target's law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from activations.sampling import Sampling
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verifier import Verifier

VOCAB = 8


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 9))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    raw = DraftTree([draw(st.integers(0, 2)) for _ in range(n)], parents, ["x"] * n, [0.0] * n)
    return DraftTree.merge([raw, DraftTree((), (), (), ())])


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from([0.0, 1.0]), st.booleans())
def test_both_ways_descend_like_a_plain_loop(
    drafts: list[DraftTree], seed: int, temperature: float, mixed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = 1 + max(map(len, drafts)) + 1  # one slot of padding
    logits = torch.randn(len(drafts), q, 3, generator=generator)
    requests = []
    for i in range(len(drafts)):
        own = temperature if not mixed or i % 2 else 0.7
        requests.append(Request(i + 5, [0] * (i + 1), sampling=Sampling(own, seed=seed), tokens=[0] * (i + 3)))
    verifier = Verifier()

    def intent(slots: torch.Tensor) -> torch.Tensor:
        return slots.float() / 10

    lazily = verifier._accept_lazily(drafts, logits, requests, intent)
    at_once = verifier._accept_at_once(drafts, logits, requests, intent)
    for row, (tree, request) in enumerate(zip(drafts, requests, strict=True)):
        path: list[int] = []
        while True:
            slot = path[-1] + 1 if path else 0
            where = torch.tensor([len(request.tokens) + len(path)])
            token = int(request.sampling.next_tokens(logits[row, slot][None], torch.tensor([request.number]), where))
            above = path[-1] if path else -1
            below = [i for i in range(len(tree)) if tree.parents[i] == above and tree.tokens[i] == token]
            if not below:
                break
            path.append(below[0])
        for verdict in (lazily[row], at_once[row]):
            assert verdict.path == path
            assert verdict.pending == token
            assert verdict.intent == pytest.approx(slot / 10)


# -- the joint law of three successive tokens -------------------------------------------------------

N = 12_000
TREE = DraftTree.merge(
    [
        DraftTree.chain([1, 2, 3], "a"),
        DraftTree.chain([1, 0], "b"),
        DraftTree.chain([4, 4, 4], "c"),
        DraftTree.chain([6], "d"),
    ]
)


def law() -> torch.Tensor:
    """Log-probabilities [8, 8, 8, 8] of a Markov chain of order 2: of the next token after two others."""
    return (torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.2).double().log_softmax(-1)


def joint(table: torch.Tensor) -> torch.Tensor:
    """Probabilities [512] of three tokens after (0, 0)."""
    first = table[0, 0].exp()
    second = table[0].exp()
    third = table.exp()
    return (first[:, None, None] * second[:, :, None] * third).flatten()


Accept = Callable[[list[DraftTree], torch.Tensor, list[Request]], list[tuple[list[int], int]]]


def exact(trees: list[DraftTree], logits: torch.Tensor, requests: list[Request]) -> list[tuple[list[int], int]]:
    return [(v.path, v.pending) for v in Verifier()._accept_at_once(trees, logits, requests, None)]


def eager(trees: list[DraftTree], logits: torch.Tensor, requests: list[Request]) -> list[tuple[list[int], int]]:
    """Wrong on purpose: where the root's token was not drafted, it is drawn again once, so that drafted tokens
    come out too often."""
    out = exact(trees, logits, requests)
    again = [Request(r.number + N, r.prompt, sampling=r.sampling, tokens=r.tokens) for r in requests]
    retry = exact(trees, logits, again)
    return [mine if mine[0] else other for mine, other in zip(out, retry, strict=True)]


def three_tokens(accept: Accept) -> torch.Tensor:
    """Counts [512] over N requests that decode until each has three tokens, with the same tree at every step."""
    table = law()
    requests = [Request(i, [0, 0], sampling=Sampling(1.0, seed=1), tokens=[0, 0]) for i in range(N)]
    running = requests
    while running:
        # logits of [pending, nodes]: the law after the last two tokens of each node's own text
        logits = torch.empty(len(running), 1 + len(TREE), VOCAB, dtype=torch.double)
        last = torch.tensor([r.tokens[-2:] for r in running])
        for slot in range(1 + len(TREE)):
            drafted = [TREE.tokens[j] for j in TREE.ancestors[slot - 1]] if slot else []
            text = [last[:, 0], last[:, 1], *(torch.full((len(running),), t) for t in drafted)]
            logits[:, slot] = table[text[-2], text[-1]]
        for request, (path, pending) in zip(running, accept([TREE] * len(running), logits, running), strict=True):
            request.tokens = [*request.tokens, *(TREE.tokens[i] for i in path), pending]
        running = [r for r in running if len(r.tokens) < 5]
    found = torch.tensor([r.tokens[2:5] for r in requests])
    return torch.bincount(found[:, 0] * 64 + found[:, 1] * 8 + found[:, 2], minlength=512)


def p_value(counts: torch.Tensor) -> float:
    """Chi-square against the exact joint law; cells expected fewer than 5 times are taken together."""
    wanted = joint(law()) * N
    rare = wanted < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    return float(chisquare(seen.numpy(), torch.cat([wanted[~rare], wanted[rare].sum()[None]]).numpy()).pvalue)


def test_the_joint_law_of_three_tokens_is_the_targets() -> None:
    assert p_value(three_tokens(exact)) > 1e-3


def test_a_wrong_verifier_is_found_out() -> None:
    assert p_value(three_tokens(eager)) < 1e-6
