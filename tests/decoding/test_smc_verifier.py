"""One round of particles: what weighs, what is kept, who goes on from whom."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_smc_law import STOP, World, commit, drafts, groups_of, logits_of, write

from activations.sampling import Sampling, choose
from decoding.request import Request
from decoding.smc.lookahead import Lookahead
from decoding.smc.verifier import ParticleVerifier
from decoding.tree import DraftTree
from decoding.verifier import Verdict

VOCABULARY = 6
SAMPLINGS = (Sampling(1.0), Sampling(0.7, seed=4), Sampling(1.3, top_k=4, seed=1), Sampling(0.9, top_p=0.8, seed=2))


def chain(tokens: list[int], law: torch.Tensor) -> DraftTree:
    tree = DraftTree.chain(tokens, "draft")
    return DraftTree(tree.tokens, tree.parents, tree.source, tree.logq, law)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Request], list[DraftTree], torch.Tensor, float]:
    """Groups of three particles whose texts and drafts have any lengths; some have ended, some are near their limit."""
    rows, trees = [], []
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    for number in range(draw(st.integers(1, 3))):
        sampling = draw(st.sampled_from(SAMPLINGS))
        group = Request(number, [1, 2], draw(st.integers(1, 8)), sampling, tokens=[1, 2])
        for row in group.split(3):
            text = draw(st.lists(st.integers(1, VOCABULARY - 1), max_size=group.max_new_tokens - 1))
            row.tokens, row.ended = [1, 2, *text], draw(st.booleans())
            n = 0 if row.ended else draw(st.integers(0, 4))
            law = sampling.process(torch.randn(n, VOCABULARY, generator=generator) * 2)
            tokens = [int(torch.multinomial(one.softmax(-1), 1, generator=generator)) for one in law]
            rows.append(row)
            trees.append(chain(tokens, law) if n else DraftTree((), (), (), ()))
    width = 1 + max(map(len, trees)) + draw(st.integers(0, 1))
    logits = torch.randn(len(rows), width, VOCABULARY, generator=generator) * 2
    return rows, trees, logits, draw(st.sampled_from([1.0, 1.0, 2.0]))


def expected(
    row: Request, tree: DraftTree, logits: torch.Tensor, power: float
) -> tuple[list[int], int | None, float, bool]:
    """By a plain loop: path, next token (None where it is drawn from a power), log weight, ended."""
    gain, path, left = 0.0, [], row.max_new_tokens - len(row.generated)
    for i, token in enumerate(tree.tokens):
        if left == 1:
            break
        p = row.sampling.process(logits[i]).double().softmax(-1)[token]
        q = tree.q_logits[i].double().softmax(-1)[token]
        gain += power * math.log(p) - math.log(q) if p else -math.inf
        if token == STOP:
            return path, STOP, gain, True
        path.append(i)
        left -= 1
    slot = len(path)
    if power != 1:
        gain += math.log(float((row.sampling.process(logits[slot]).double().softmax(-1) ** power).sum()))
        return path, None, gain, left == 1
    token = int(choose([row.sampling], logits[slot][None], [row.key], [len(row.tokens) + slot]))
    return path, token, gain, left == 1 or token == STOP


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["systematic", "multinomial"]))
def test_a_round_is_what_a_plain_loop_says(
    case: tuple[list[Request], list[DraftTree], torch.Tensor, float], resampling: str
) -> None:
    rows, trees, logits, power = case
    wanted = [expected(row, tree, logits[i], power) for i, (row, tree) in enumerate(zip(rows, trees, strict=True))]
    had_ended = [row.ended for row in rows]
    verifier = ParticleVerifier(3, [STOP], power=power, resampling=resampling)
    verdicts = verifier.accept(trees, logits, rows)
    for start in range(0, len(rows), 3):
        members = range(start, start + 3)
        gains = [0.0 if had_ended[i] else wanted[i][2] for i in members]
        if all(gain == -math.inf for gain in gains):
            assert verifier.clouds[rows[start].group].underflows == 1
            assert all(verdicts[i].path == [] and verdicts[i].ancestor is None for i in members)
            assert power != 1 or all(verdicts[i].log_weight == 0 for i in members)
            continue
        weights = np.exp(np.array(gains) - max(gains))
        ess = weights.sum() ** 2 / (weights**2).sum()
        for i, gain in zip(members, gains, strict=True):
            verdict, row, (path, token, _, ended) = verdicts[i], rows[i], wanted[i]
            assert verdict.log_weight == pytest.approx(gain, abs=1e-4)
            assert verdict.ess == pytest.approx(ess, rel=1e-4)
            assert verdict.rests == had_ended[i]
            if had_ended[i]:
                assert verdict.path == [] and row.ended
                continue
            assert verdict.path == path
            assert token is None or verdict.pending == token
            assert row.ended == (ended or verdict.pending == STOP)
        came_from = [v.ancestor for v in verdicts[start : start + 3]]
        if abs(ess - 1.5) > 1e-3:
            left = verifier.clouds[rows[start].group].log_weights
            assert (ess < 1.5) == (verifier.clouds[rows[start].group].resamplings == 1)
            assert left.tolist() == [0, 0, 0] if ess < 1.5 else came_from == [None] * 3
        for i, ancestor in zip(members, came_from, strict=True):
            source = i if ancestor is None else ancestor
            assert source in members and (gains[source - start] > -math.inf or ancestor is None)
    commit(rows, trees, verdicts)
    assert all(len(row.generated) <= row.max_new_tokens for row in rows)


def test_nothing_weighs_behind_the_first_stop_token() -> None:
    """The stop token's own column does. What is drafted behind it changes nothing."""
    world = World.random(4, apart=1.0)
    p, q = world.target.double().log_softmax(-1), world.draft.double().log_softmax(-1)
    for tail in ([2, 3], [3, 1]):
        [group] = groups_of(1, 2, 20, Sampling(1.0))
        trees = [chain([2, STOP, *tail], world.draft[[1, 2, STOP, tail[0]]]) for _ in range(2)]
        verifier = ParticleVerifier(2, [STOP])
        verdicts = verifier.accept(trees, logits_of(world, group.rows, trees), group.rows)
        weight = float((p - q)[1, 2] + (p - q)[2, STOP])
        assert [(v.path, v.pending) for v in verdicts] == [([0], STOP)] * 2
        assert [v.log_weight for v in verdicts] == [pytest.approx(weight, abs=1e-5)] * 2
        commit(group.rows, trees, verdicts)
        assert verifier.pick(group) in group.rows and group.rows[0].generated == [2, STOP]


def test_drafts_past_the_limit_are_cut_and_weigh_nothing() -> None:
    world = World.random(4, apart=1.0)
    [group] = groups_of(1, 3, 3, Sampling(1.0))
    trees = [chain([2, 3, 2, 3], world.draft[[1, 2, 3, 2]]) for _ in range(3)]
    verifier = ParticleVerifier(3, [STOP])
    verdicts = verifier.accept(trees, logits_of(world, group.rows, trees), group.rows)
    p, q = world.target.double().log_softmax(-1), world.draft.double().log_softmax(-1)
    for row, verdict in zip(group.rows, verdicts, strict=True):
        assert verdict.path == [0, 1] and row.ended
        assert verdict.log_weight == pytest.approx(float((p - q)[1, 2] + (p - q)[2, 3]), abs=1e-5)


def likely(token: int, by: float = 30.0) -> torch.Tensor:
    """A law [4] that is nearly certain of a token."""
    law = torch.zeros(4)
    law[token] = by
    return law


def test_a_particle_that_has_ended_is_gone_on_from_and_goes_on_from_others() -> None:
    """First one ends with nearly all the weight, and all others end with it; then one that has ended has none."""
    [group] = groups_of(1, 4, 10, Sampling(1.0))
    laws = torch.zeros(1, 4)
    trees = [chain([STOP if i == 2 else 3], laws) for i in range(4)]
    logits = likely(STOP)[None, None].expand(4, 2, 4)  # the target wants the stop token
    verifier = ParticleVerifier(4, [STOP])
    verdicts = verifier.accept(trees, logits, group.rows)
    assert [v.ancestor for v in verdicts] == [2, 2, None, 2]
    commit(group.rows, trees, verdicts)
    assert all(row.ended and row.generated == [STOP] for row in group.rows)
    assert verifier.pick(group) in group.rows

    [group] = groups_of(1, 4, 10, Sampling(1.0))
    group.rows[1].ended, group.rows[1].tokens = True, [1, STOP]
    empty = DraftTree((), (), (), ())
    trees = [empty if i == 1 else chain([3], laws - likely(3, 5.0)) for i in range(4)]  # the draft hardly gave it
    verifier = ParticleVerifier(4, [STOP])
    verdicts = verifier.accept(trees, likely(3)[None, None].expand(4, 2, 4), group.rows)
    rests = verdicts[1]
    assert rests.rests and rests.ess is not None and rests.ess < 3.1 and rests.ancestor is None  # above the threshold
    group.rows[1].ended = True
    commit(group.rows, trees, verdicts)
    assert group.rows[1].generated == [STOP] and group.rows[0].generated == [3, 3]
    eager = ParticleVerifier(4, [STOP], threshold=0.9)
    [again] = groups_of(1, 4, 10, Sampling(1.0))
    again.rows[1].ended, again.rows[1].tokens = True, [1, STOP]
    verdicts = eager.accept(trees, likely(3)[None, None].expand(4, 2, 4), again.rows)
    assert verdicts[1].rests and verdicts[1].ancestor in (0, 2, 3)
    commit(again.rows, trees, verdicts)
    assert not again.rows[1].ended and again.rows[1].generated == [3, 3]
    assert eager.pick(again) is None


def test_without_any_weight_each_particle_takes_one_exact_token() -> None:
    """The target keeps two tokens, and all particles drafted another: drafts are dropped, weights stay as they were."""
    sampling = Sampling(1.0, top_k=2)
    [group] = groups_of(1, 3, 10, sampling)
    logits = torch.tensor([0.0, 5.0, 5.5, 1.0]).expand(3, 3, 4)
    law = torch.tensor([[0.0, 5.0, 5.0, 6.0]]).expand(2, 4)
    verifier = ParticleVerifier(3, [STOP])
    good = [chain([token, token], law) for token in (1, 2, 1)]
    commit(group.rows, good, verifier.accept(good, logits, group.rows))
    before, texts = verifier.clouds[group].log_weights.copy(), [list(row.tokens) for row in group.rows]
    assert len(set(before)) == 2
    bad = [chain([3, 1], law), chain([1, 3], law), chain([3, 3], law)]
    verdicts = verifier.accept(bad, logits, group.rows)
    assert verifier.clouds[group].underflows == 1
    assert verifier.clouds[group].log_weights.tolist() == before.tolist()
    for row, text, verdict in zip(group.rows, texts, verdicts, strict=True):
        assert verdict.path == [] and verdict.pending in (1, 2) and not verdict.rests
        assert verdict.pending == int(choose([sampling], logits[0, :1], [row.key], [len(text)]))
    commit(group.rows, bad, verdicts)
    assert [row.tokens[:-1] for row in group.rows] == texts
    mixed = [good[0], bad[1], bad[2]]  # one keeps weight: the others go on from it
    verdicts = verifier.accept(mixed, logits, group.rows)
    assert [v.ancestor for v in verdicts] == [None, 0, 0] and verdicts[1].log_weight == -math.inf


def test_a_target_that_gives_no_numbers_is_an_underflow() -> None:
    [group] = groups_of(1, 2, 10, Sampling(1.0))
    trees = [chain([2], torch.zeros(1, 4)) for _ in range(2)]
    logits = torch.zeros(2, 2, 4)
    logits[:, 0, 2] = math.nan
    verifier = ParticleVerifier(2, [STOP])
    verdicts = verifier.accept(trees, logits, group.rows)
    assert verifier.clouds[group].underflows == 1
    assert [v.path for v in verdicts] == [[], []]


def test_first_tokens_weigh_nothing_and_are_each_particles_own() -> None:
    """At admission each row is judged by itself, behind the one state that all share."""
    world = World.random(4, apart=1.0)
    for power in (1.0, 2.0):
        verifier = ParticleVerifier(8, [STOP], power=power)
        [group] = groups_of(1, 8, 10, Sampling(1.0))
        empty = DraftTree((), (), (), ())
        verdicts = [verifier.accept([empty], world.target[torch.tensor([[1]])], [row])[0] for row in group.rows]
        cloud = verifier.clouds[group]
        assert len(set(cloud.log_weights.tolist())) == 1 and cloud.resamplings == 0 and cloud.rounds == 0
        assert len({v.pending for v in verdicts}) > 1
        assert all(row.ended == (v.pending == STOP) for row, v in zip(group.rows, verdicts, strict=True))


def own_drafts(world: World, rows: list[Request], k: int) -> list[DraftTree]:
    """Each row's draft depends on its key and position alone."""
    return [
        drafts(world, [row], k, np.random.default_rng([row.key, len(row.tokens)]))[0] if not row.ended
        else DraftTree((), (), (), ())
        for row in rows
    ]  # fmt: skip


def decoded(world: World, groups: list[Request], k: int) -> list[tuple[list[int], list[list[Verdict]]]]:
    verifier = ParticleVerifier(4, [STOP], threshold=0.8)
    history: dict[Request, list[list[Verdict]]] = {group: [] for group in groups}
    running = list(groups)
    while running:
        rows = [row for group in running for row in group.rows]
        trees = own_drafts(world, rows, k)
        verdicts = verifier.accept(trees, logits_of(world, rows, trees), rows)
        commit(rows, trees, verdicts)
        for at, group in enumerate(running):
            history[group].append(verdicts[4 * at : 4 * at + 4])
        running = [group for group in running if verifier.pick(group) is None]
    texts = []
    for group in groups:
        particle = verifier.pick(group)
        assert particle is not None
        texts.append((particle.generated, history[group]))
    return texts


def test_a_request_alone_and_beside_others_writes_the_same() -> None:
    world = World.random(5, apart=1.0)
    lengths = (12, 5, 9, 12, 7)

    def made(number: int) -> Request:
        [group] = groups_of(1, 4, lengths[number], SAMPLINGS[number % 4], first=number)
        return group

    together = decoded(world, [made(n) for n in range(5)], 3)
    resampled = 0
    for number, (text, history) in enumerate(together):
        [(alone, own)] = decoded(world, [made(number)], 3)
        assert alone == text
        assert [[v.log_weight for v in round] for round in own] == [[v.log_weight for v in r] for r in history]
        resampled += any(v.ancestor is not None for round in own for v in round)
    assert resampled, "no group was resampled"


def test_groups_are_forgotten() -> None:
    world = World.random(3, apart=0.5)
    verifier = ParticleVerifier(2, [STOP], lookahead=Lookahead(2, 4))
    groups = groups_of(3, 2, 4, Sampling(1.0))
    write(world, verifier, groups, 2)
    assert set(verifier.clouds) == set(groups)
    for group in groups:
        verifier.close(group)
        verifier.close(group)
    assert not verifier.clouds and verifier.lookahead is not None and not verifier.lookahead._seen


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"particles": 0}, "particles is 0"),
        ({"resampling": "residual"}, "unknown resampling 'residual': use systematic or multinomial"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"power": 0.0}, "power is 0.0"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParticleVerifier(**{"particles": 2, "stop_ids": [STOP], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_low_temperatures_are_refused(temperature: float) -> None:
    verifier = ParticleVerifier(2, [STOP])
    with pytest.raises(ValueError, match=r"use a temperature of 0\.1 or more"):
        verifier.check(Sampling(temperature))
    verifier.check(Sampling(0.1))


def test_drafts_without_a_law_and_trees_are_refused() -> None:
    [group] = groups_of(1, 2, 10, Sampling(1.0))
    verifier = ParticleVerifier(2, [STOP])
    with pytest.raises(ValueError, match="without the law"):
        verifier.accept([DraftTree.chain([2], "copy")] * 2, torch.zeros(2, 2, 4), group.rows)
    fork = DraftTree([2, 3], [-1, -1], ["draft"] * 2, [0.0] * 2, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="drafted in chains"):
        verifier.accept([fork] * 2, torch.zeros(2, 3, 4), group.rows)


def test_a_group_draws_for_itself_alone() -> None:
    """Groups with the same weights are resampled and picked from differently, and again in the same way."""
    world = World.random(5, apart=1.0)

    def drawn(seed: int) -> tuple[list[list[int | None]], list[int]]:
        verifier = ParticleVerifier(6, [STOP], resampling="multinomial", threshold=1.0)
        groups = groups_of(20, 6, 2, Sampling(1.0, seed=seed))
        trees = [chain([token], world.draft[[1]]) for token in (1, 2, 3, 4, 2, 3)] * 20
        rows = [row for group in groups for row in group.rows]
        verdicts = verifier.accept(trees, logits_of(world, rows, trees), rows)
        origins = [[v.ancestor if v.ancestor is None else v.ancestor - 6 * i for v in verdicts[6 * i : 6 * i + 6]]
                   for i in range(20)]  # fmt: skip
        picked = [verifier.pick(group) for group in groups]
        return origins, [p.particle for p in picked if p is not None]

    origins, picked = drawn(1)
    assert len({tuple(o) for o in origins}) > 5 and len(set(picked)) > 3
    assert drawn(1) == (origins, picked) != drawn(2)
