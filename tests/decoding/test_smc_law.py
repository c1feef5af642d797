"""What particles write, against the exact law of a small Markov chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from activations.sampling import Sampling
from decoding.request import Request
from decoding.smc.verifier import ParticleVerifier
from decoding.smc.weights import log_mean, normalized
from decoding.tree import DraftTree
from decoding.verifier import Verdict

Text = tuple[int, ...]
STOP = 0
START = 1


@dataclass
class World:
    """Two Markov chains over a small vocabulary, the target's and the draft model's; token 0 ends a text."""

    target: torch.Tensor  # logits [V, V]: of the next token after a token
    draft: torch.Tensor

    @classmethod
    def random(cls, vocabulary: int, apart: float, seed: int = 0) -> World:
        """`apart`: how far the draft model's logits are from the target's."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(vocabulary, vocabulary, generator=generator)
        return cls(target, target + apart * torch.randn(vocabulary, vocabulary, generator=generator))

    def law(self, length: int, power: float = 1.0) -> dict[Text, float]:
        """The exact law of texts after START, by enumeration: at most `length` tokens, fewer where one stops."""
        p = self.target.double().log_softmax(-1).mul(power).exp().tolist()
        found: dict[Text, float] = {}
        for text in product(range(len(p)), repeat=length):
            if STOP in text:
                text = text[: text.index(STOP) + 1]
            weight, before = 1.0, START
            for token in text:
                weight, before = weight * p[before][token], token
            found[text] = weight
        total = sum(found.values())
        return {text: weight / total for text, weight in found.items()}

    def chi2(self) -> NDArray[np.float64]:
        """Of the target's law of the next token against the draft model's, by the token before [V]."""
        p, q = self.target.double().softmax(-1), self.draft.double().softmax(-1)
        return ((p**2 / q).sum(-1) - 1).numpy()


def groups_of(count: int, particles: int, length: int, sampling: Sampling, first: int = 0) -> list[Request]:
    """Requests that are about to write their first token."""
    made = []
    for number in range(first, first + count):
        group = Request(number, [START], length, sampling, tokens=[START])
        for row in group.split(particles):
            row.tokens, row.sources = [START], []
        made.append(group)
    return made


def drafts(world: World, rows: Sequence[Request], k: int, rng: np.random.Generator) -> list[DraftTree]:
    """A chain of k tokens a row, drawn from the draft model, with its law."""
    q = world.draft.softmax(-1).cumsum(-1).numpy()
    before = np.array([row.tokens[-1] for row in rows])
    tokens, laws = [], []
    for _ in range(k):
        laws.append(world.draft[before])
        before = (rng.random((len(rows), 1)) > q[before]).sum(-1).clip(max=q.shape[-1] - 1)
        tokens.append(before)
    chains, law = np.stack(tokens, 1).tolist(), torch.stack(laws, 1).unbind(0)
    parents, source = list(range(-1, k - 1)), ["draft"] * k
    return [DraftTree(chain, parents, source, [0.0] * k, own) for chain, own in zip(chains, law, strict=True)]


def logits_of(world: World, rows: Sequence[Request], trees: Sequence[DraftTree]) -> torch.Tensor:
    """What the target says after the pending token and after each drafted one [B, 1 + k, V]."""
    width = 1 + max(map(len, trees))
    seen = [
        [row.tokens[-1], *tree.tokens, *[0] * (width - 1 - len(tree))] for row, tree in zip(rows, trees, strict=True)
    ]
    return world.target[torch.tensor(seen)]


def commit(rows: Sequence[Request], trees: Sequence[DraftTree], verdicts: Sequence[Verdict]) -> None:
    """What an engine does with verdicts."""
    for row, tree, verdict in zip(rows, trees, verdicts, strict=True):
        if not verdict.rests:
            row.tokens = [*row.tokens, *(tree.tokens[i] for i in verdict.path), verdict.pending]
    states = [(row.tokens, row.ended) for row in rows]
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.ancestor is not None:
            row.tokens, row.ended = states[verdict.ancestor]


def write(
    world: World, verifier: ParticleVerifier, groups: Sequence[Request], k: int, seed: int = 0
) -> list[list[Verdict]]:
    """Decode groups to their ends, all of them together; the verdicts of every round."""
    rng = np.random.default_rng(seed)
    history = []
    running = list(groups)
    while running:
        rows = [row for group in running for row in group.rows]
        trees = drafts(world, rows, k, rng)
        verdicts = verifier.accept(trees, logits_of(world, rows, trees), rows)
        commit(rows, trees, verdicts)
        history.append(verdicts)
        running = [group for group in running if verifier.pick(group) is None]
    return history


def weighted(verifier: ParticleVerifier, group: Request) -> list[tuple[Text, float]]:
    """The texts of a group's particles and their weights."""
    weights = normalized(verifier.clouds[group].log_weights)
    return [(tuple(row.generated), float(w)) for row, w in zip(group.rows, weights, strict=True)]


def estimates(verifier: ParticleVerifier, groups: Sequence[Request], cells: Sequence[Text]) -> NDArray[np.float64]:
    """Each group's estimate of the law of whole texts [groups, cells]."""
    place = {text: i for i, text in enumerate(cells)}
    out = np.zeros((len(groups), len(cells)))
    for i, group in enumerate(groups):
        for text, weight in weighted(verifier, group):
            out[i, place[text]] += weight
    return out


def alone(world: World, length: int, k: int) -> dict[Text, float]:
    """The law of one particle: k tokens of the draft model, then one of the target, and so on."""
    p, q = world.target.double().softmax(-1).tolist(), world.draft.double().softmax(-1).tolist()
    found = {}
    for text in world.law(length):
        weight, before = 1.0, START
        for at, token in enumerate(text):
            exact = at % (k + 1) == k or at == length - 1
            weight, before = weight * (p if exact else q)[before][token], token
        found[text] = weight
    return found


# -- the tests ----------------------------------------------------------------------------------------

SAMPLING = Sampling(1.0, seed=3)
CHUNK = 400


def gap(
    world: World, particles: int, count: int, length: int, k: int, f: NDArray[np.float64], **options: float
) -> tuple[float, float]:
    """Mean of a function f [texts] under what particles write, less its exact mean; and the standard error."""
    law = world.law(length, options.get("power", 1.0))
    cells, exact = list(law), np.array(list(law.values()))
    found = []
    for first in range(0, count, CHUNK):
        verifier = ParticleVerifier(particles, [STOP], **options)  # type: ignore[arg-type]
        groups = groups_of(min(CHUNK, count - first), particles, length, SAMPLING, first)
        write(world, verifier, groups, k, seed=first + particles)
        found.append(estimates(verifier, groups, cells) @ f)
    means = np.concatenate(found)
    return float(means.mean() - exact @ f), float(means.std() / np.sqrt(count))


def overrated(
    world: World, length: int, k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Which texts [texts] a single particle writes too often (0 or 1): the function on which the laws differ most, by
    their total variation distance. And the two laws, exact and of one particle."""
    law, one = world.law(length), alone(world, length, k)
    exact, single = np.array(list(law.values())), np.array([one[text] for text in law])
    return (single > exact).astype(float), exact, single


def test_the_error_falls_as_one_over_n() -> None:
    """Without resampling the error is that of weighted samples: for 1 and 2 particles known exactly, for more c / N
    with a known c, and a term of the next order that 2 particles show."""
    world = World.random(3, apart=0.7)
    f, exact, single = overrated(world, 6, 2)
    w, mean = exact / single, exact @ f
    c = -(single * w**2 * (f - mean)).sum()
    pairs = (w * f)[:, None] + (w * f), w[:, None] + w
    known = {1: np.abs(single - exact).sum() / 2, 2: single @ (pairs[0] / pairs[1]) @ single - mean}
    d = (known[2] - c / 2) * 4
    counts = {1: 2500, 2: 2500, 4: 2500, 8: 1500, 16: 800, 32: 500}
    found = {n: gap(world, n, count, 6, 2, f, threshold=0.0) for n, count in counts.items()}
    for n, (error, spread) in found.items():
        assert error == pytest.approx(known.get(n, c / n + d / n**2), abs=3.5 * spread), n
    assert found[32][0] + 2 * found[32][1] < found[1][0] / 8


def test_resampling_keeps_the_law() -> None:
    """Laws so far apart that one round in three ends in resampling; many particles still come near the exact law."""
    world = World.random(4, apart=1.0)
    f, exact, single = overrated(world, 6, 2)
    (few, few_spread), (many, spread) = (gap(world, n, count, 6, 2, f) for n, count in ((2, 2000), (48, 400)))
    verifier = ParticleVerifier(48, [STOP])
    groups = groups_of(30, 48, 6, SAMPLING)
    write(world, verifier, groups, 2)
    assert sum(verifier.clouds[g].resamplings for g in groups) >= 10
    assert few - 3 * few_spread > 3 * abs(many)
    assert abs(many) < 0.05 * np.abs(single - exact).sum() + 3 * spread


def counted(texts: Sequence[Text], law: dict[Text, float]) -> float:
    """p-value of chi-square; texts expected fewer than 5 times are taken together."""
    place = {text: i for i, text in enumerate(law)}
    seen = np.bincount([place[text] for text in texts], minlength=len(law)).astype(float)
    wanted = np.array(list(law.values())) * len(texts)
    rare = wanted < 5
    seen, wanted = (np.append(x[~rare], x[rare].sum()) for x in (seen, wanted))
    keep = wanted > 0
    return float(chisquare(seen[keep], wanted[keep] * seen[keep].sum() / wanted[keep].sum()).pvalue)


def picked(verifier: ParticleVerifier, groups: Sequence[Request]) -> list[Text]:
    out = []
    for group in groups:
        particle = verifier.pick(group)
        assert particle is not None
        assert particle is verifier.pick(group)  # the draw is keyed
        out.append(tuple(particle.generated))
    return out


def test_one_particle_follows_the_draft_model_with_exact_tokens_between() -> None:
    world = World.random(3, apart=1.0)
    verifier = ParticleVerifier(1, [STOP])
    groups = groups_of(3000, 1, 5, SAMPLING)
    write(world, verifier, groups, 2)
    texts = picked(verifier, groups)
    assert counted(texts, alone(world, 5, 2)) > 1e-3
    assert counted(texts, world.law(5)) < 1e-6, "it cannot tell the laws apart"


def test_equal_laws_are_never_resampled_and_exact() -> None:
    world = World.random(3, apart=0.0)
    verifier = ParticleVerifier(4, [STOP], threshold=1.0 - 1e-9)
    groups = groups_of(2500, 4, 4, SAMPLING)
    history = write(world, verifier, groups, 2)
    assert all(v.ess == pytest.approx(4) and v.ancestor is None for round in history for v in round)
    assert counted(picked(verifier, groups), world.law(4)) > 1e-3


def test_particles_are_picked_by_their_weights() -> None:
    """With many particles for two tokens, the picked texts have nearly the exact law; unweighted ones have not."""
    world = World.random(3, apart=1.0)
    verifier = ParticleVerifier(24, [STOP], threshold=0.0)
    groups = groups_of(2000, 24, 2, SAMPLING)
    write(world, verifier, groups, 1)
    assert counted(picked(verifier, groups), world.law(2)) > 1e-4
    assert counted([tuple(g.particles[0].generated) for g in groups], world.law(2)) < 1e-9


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_weights_average_to_the_sum_over_all_texts(power: float) -> None:
    """E[weight] = 1; of power sampling it is the sum of p^power over all texts, which no normalized token has."""
    world = World.random(3, apart=0.5)
    p = world.target.double().softmax(-1)
    exact = 0.0
    for text in world.law(4):
        weight, before = 1.0, START
        for token in text:
            weight, before = weight * float(p[before, token]) ** power, token
        exact += weight
    verifier = ParticleVerifier(8, [STOP], power=power, threshold=0.7)
    groups = groups_of(1500, 8, 4, SAMPLING)
    write(world, verifier, groups, 2)
    clouds = [verifier.clouds[g] for g in groups]
    found = np.exp([cloud.log_evidence + log_mean(cloud.log_weights) for cloud in clouds])
    assert found.mean() == pytest.approx(exact, abs=3.5 * found.std() / np.sqrt(len(groups)))
    assert found.std() / np.sqrt(len(groups)) < 0.05 * exact
    assert any(cloud.resamplings for cloud in clouds) and not any(cloud.underflows for cloud in clouds)


def test_power_sampling_follows_the_power_of_the_texts_law() -> None:
    world = World.random(3, apart=0.3)
    length, power = 4, 2.0
    law, plain = world.law(length, power), world.law(length)
    exact = np.array(list(law.values()))
    hotter = World(world.target * power, world.draft).law(length)  # each token's law sharpened by itself
    for other in (plain, hotter):
        f = (np.array([other[text] for text in law]) > exact).astype(float)
        apart = float(np.array([other[text] for text in law]) @ f - exact @ f)
        error, spread = gap(world, 24, 500, length, 2, f, power=power)
        assert abs(error) < 0.25 * apart + 3 * spread < 0.6 * apart


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_effective_size_is_the_divergences_power(k: int) -> None:
    """ESS / N -> (1 + chi2)^-K where every token has the same two laws; the exact token after them costs nothing."""
    row = torch.tensor([[0.0, 1.0, 0.3, -0.5]]), torch.tensor([[0.4, 0.5, 0.0, 0.1]])
    world = World(row[0].expand(4, 4).contiguous(), row[1].expand(4, 4).contiguous())
    verifier = ParticleVerifier(4000, [], threshold=0.0)
    [group] = groups_of(1, 4000, k + 1, SAMPLING)
    [verdicts] = write(world, verifier, [group], k)
    assert verdicts[0].ess is not None
    assert verdicts[0].ess / 4000 == pytest.approx((1 + world.chi2()[0]) ** -k, rel=0.06)
    assert (1 + world.chi2()[0]) ** -k < 0.9
