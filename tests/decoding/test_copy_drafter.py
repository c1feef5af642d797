"""The copy drafter: the matcher's candidates as a trie, and what a shared store adds."""

from __future__ import annotations

import pytest

from activations.matching.match import MatchConfig
from activations.matching.shared import SharedConfig, SharedStore
from decoding.budgets import FixedBudget
from decoding.decoder import Decoder
from decoding.drafters import CopyDrafter
from decoding.gates import Always, Choice
from decoding.modes import Plan
from decoding.request import Request
from decoding.tree import DraftTree

KAPPA = MatchConfig(kappa=2, depth=4)


def request(prompt: list[int], generated: list[int], number: int = 0) -> Request:
    return Request(number, prompt, max_new_tokens=99, tokens=prompt + generated)


def propose(drafter: CopyDrafter, one: Request, nodes: int = 16, depth: int = 4) -> DraftTree | None:
    [tree] = drafter.propose([one], [FixedBudget(nodes, depth)])
    return tree


def test_the_longest_match_comes_first_and_reaches_beyond_the_end() -> None:
    drafter = CopyDrafter(KAPPA)
    one = request([1, 2, 3, 7, 7, 2, 3, 5, 1], [2, 3])
    drafter.start(one, None)
    tree = propose(drafter, one)
    assert tree is not None
    assert tree.tokens[:4] == [7, 7, 2, 3]  # after 1 2 3, although 2 3 stands more recently
    assert [[tree.tokens[i] for i in path] for path in tree.paths] == [[7, 7, 2, 3], [5, 1, 2, 3]]
    assert drafter.match(one).in_prompt
    loop = request([4, 5], [4, 5])
    drafter.start(loop, None)
    tree = propose(drafter, loop)
    assert tree is not None and tree.tokens == [4, 5, 4, 5]  # the context holds but two of them


def test_a_shared_store_helps_where_the_context_does_not() -> None:
    store = SharedStore(SharedConfig(kappa=2, depth=4))
    drafter = CopyDrafter(KAPPA, store)
    first = request([9, 9], [1, 2, 3, 4, 5, 6])
    drafter.start(first, None)
    second = request([8], [1, 2, 3], number=1)
    drafter.start(second, None)
    assert propose(drafter, second) is None  # nothing of a request is seen before it has ended
    assert drafter.match(second).longest == 0
    drafter.close(first)
    drafter.close(first)
    assert len(store) == 6  # once, and not the prompt
    second.tokens.append(4)
    drafter.observe(second, None)
    assert (drafter.match(second).longest, drafter.match(second).starts) == (4, ())
    tree = propose(drafter, second)
    assert tree is not None and tree.tokens == [5, 6] and set(tree.source) == {"copy"}


def test_the_longer_match_comes_first_and_the_other_stays() -> None:
    store = SharedStore(SharedConfig(kappa=2, depth=4))
    store.add([1, 2, 3, 7, 7])
    drafter = CopyDrafter(KAPPA, store)
    one = request([5, 2, 3, 8, 8, 1], [2, 3])
    drafter.start(one, None)
    tree = propose(drafter, one)
    assert drafter.match(one).longest == 3
    assert tree is not None and tree.tokens[:3] == [7, 7, 8]
    store.reset()
    one.tokens += [8, 8]
    drafter.observe(one, None)
    assert drafter.match(one).shared == 0
    tree = propose(drafter, one)
    assert tree is not None and tree.tokens[0] == 1


@pytest.mark.parametrize("shared", [None, SharedConfig(kappa=2)])
def test_output_is_the_targets_own(small_target, shared, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    store = None if shared is None else SharedStore(shared)
    drafter = CopyDrafter(MatchConfig(kappa=2), store)
    plan = Plan(Always(Choice(drafter.name, FixedBudget(16, 16))), (drafter,))
    plain, copying = Decoder(target), Decoder(target)
    monkeypatch.setattr(copying, "plan", lambda mode, settings=None: plan)
    for prompt in ([1, 2, 3, 4, 9, 8, 3, 4], [1, 2, 3, 4, 9, 8, 3, 4], [7, 7, 7]):
        expected, found = (d.generate(prompt, mode=m, max_new_tokens=60) for d, m in ((plain, "ar"), (copying, "copy")))
        assert found.tokens == expected.tokens
    assert "copy" in found.sources
    assert store is None or len(store) == 3 * 60


def test_a_decoder_keeps_its_finished_texts_only_if_asked(small_target) -> None:  # type: ignore[no-untyped-def]
    from decoding.decoder import Decoder

    decoder = Decoder(small_target("llama"))
    options = {"mode": "copy", "kappa": 2, "max_new_tokens": 24}
    first = decoder.generate([1, 2, 3], **options)
    assert decoder.shared is None
    assert decoder.generate([1, 2, 3], shared_tokens=1000, **options).tokens == first.tokens
    again = decoder.generate([1, 2, 3], shared_tokens=1000, **options)
    assert again.tokens == first.tokens and again.steps < first.steps  # the same text again is copied
    assert decoder.shared is not None
    decoder.shared.reset()
    assert decoder.generate([1, 2, 3], shared_tokens=1000, **options).steps == first.steps
    store = decoder.shared
    decoder.generate([1, 2, 3], shared_tokens=500, **options)  # other settings, another store
    assert decoder.shared is not store
