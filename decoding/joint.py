"""How likely each node of a merged tree is, once it is known what the head drafted beside the copy.

Where both drafters speak of the same place, each says something about the other: a copied token that the head drafted
too is likelier than its match alone says, one that the head passed over is less likely, and a token that the head
drafted beside a trusted copy is less likely than the head says. Four small logistic models say by how much, fitted
with the length head (`<drafter>.joint` [CASES, depths, (odds of the copy, odds of the head, 1)]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from decoding.gates import COPY
from decoding.tree import ROOT, DraftTree

AGREE, PASSED_OVER, BESIDE, ALONE = range(4)
"""The copied token, which the head drafted too; the copied token, where the head drafted only others (its odds are
those of its best); a token of the head beside a copied one; a token of the head where no copy speaks."""
CASES = 4
DEPTHS = 3
"""First, second, and later tokens."""
OTHER_COPY = -3.5
"""Log-odds of a token of another copy candidate than the first."""
Joint = Sequence[Sequence[Sequence[float]]]


def odds(logq: float) -> float:
    """Log-odds of a log-probability, kept within what a head can be trusted with."""
    logq = max(min(logq, -0.003), -8.0)
    return logq - math.log1p(-math.exp(logq))


def probability(z: float) -> float:
    """The probability whose log-odds are `z`, kept away from 0 and 1."""
    return 1 / (1 + math.exp(-max(min(z, 30.0), -30.0)))


def drafted(tree: DraftTree) -> dict[int, float]:
    """Parent -> the largest log-probability that the head gave one of its children."""
    best: dict[int, float] = {}
    for parent, source, logq in zip(tree.parents, tree.source, tree.logq, strict=True):
        if source != COPY:
            best[parent] = max(best.get(parent, -math.inf), logq)
    return best


def path_probabilities(
    tree: DraftTree, candidate: Sequence[int], hazards: Sequence[float], joint: Joint
) -> list[float]:
    """P(the target follows the whole path to a node) [nodes].

    The head's nodes are merged first, so that what both drafted counts as the head's and has its probability.
    `hazards` are the log-odds of the candidate's tokens, the last one standing for all later ones.
    """
    best = drafted(tree)
    copied = {ROOT: 0}  # node -> how many tokens of the candidate lead to it
    out: list[float] = []
    for i, (parent, token, source, logq) in enumerate(
        zip(tree.parents, tree.tokens, tree.source, tree.logq, strict=True)
    ):
        k = copied.get(parent)
        if k is not None and k < len(candidate):
            copy = hazards[min(k, len(hazards) - 1)]
            if token == candidate[k]:
                copied[i] = k + 1
                if source != COPY:
                    z = _case(joint, AGREE, k, copy, odds(logq))
                else:
                    z = _case(joint, PASSED_OVER, k, copy, odds(best[parent])) if parent in best else copy
            else:
                z = _case(joint, BESIDE, k, copy, odds(logq)) if source != COPY else OTHER_COPY
        else:
            z = _case(joint, ALONE, tree.depths[i] - 1, 0.0, odds(logq)) if source != COPY else OTHER_COPY
        out.append((out[parent] if parent >= 0 else 1.0) * probability(z))
    return out


def _case(joint: Joint, case: int, depth: int, copy: float, head: float) -> float:
    a, b, c = joint[case][min(depth, DEPTHS - 1)]
    return a * copy + b * head + c


def worthwhile(paths: Sequence[float], price: float, verify: Callable[[int], float]) -> list[int]:
    """The nodes whose expected tokens less the price of verifying them is largest, one at least.

    `price` is in tokens a millisecond; `verify(n)` is the milliseconds to verify a tree of n nodes. A node is never
    likelier than its parent, so what is kept is a tree.
    """
    order = sorted(range(len(paths)), key=lambda i: (-paths[i], i))
    best, count, total = -math.inf, 1, 0.0
    for n, i in enumerate(order, 1):
        total += paths[i]
        gain = total - price * verify(n)
        if gain > best:
            best, count = gain, n
    return sorted(order[:count])
