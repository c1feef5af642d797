"""States of mismatches: always finite, in the order of their names, each what its name says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.cospec.state import FLOOR, STATE, STOP, Mismatches, states, token_classes

VOCABULARY = 90


def mismatches(p: torch.Tensor, q: torch.Tensor, target: list[int], draft: list[int], **counts: int) -> Mismatches:
    rest = {"block": 2, "answer": 5, "asked": 3, "kept": 1, "last": -1, "drafted": 8, "matched": 4, **counts}
    m = len(target)
    return Mismatches(
        p, q, torch.tensor(target), torch.tensor(draft), torch.zeros(m, dtype=torch.long),
        **{name: torch.full((m,), value) for name, value in rest.items()},
    )  # fmt: skip


def named(row: torch.Tensor) -> dict[str, float]:
    return dict(zip(STATE, row.tolist(), strict=True))


CLASSES = torch.zeros(VOCABULARY, 4, dtype=torch.bool)
CLASSES[7, 0] = CLASSES[8, 1] = CLASSES[0, 2] = CLASSES[9, STOP] = True


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_feature_is_finite_whatever_the_logits(data: st.DataObject) -> None:
    seed, m = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(seed)
    laws = []
    for wide in (0, 3):
        scale = data.draw(st.sampled_from([0.0, 1e-30, 1.0, 40.0, 1e4, 1e37]))
        law = torch.randn(m, VOCABULARY + wide, generator=g) * scale
        share = data.draw(st.sampled_from([0.0, 0.5, 0.99]))
        hidden = torch.rand(m, VOCABULARY + wide, generator=g) < share
        hidden[:, 5] = False  # something is left
        laws.append(law.masked_fill(hidden, -torch.inf))
    kind = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tokens = torch.randint(VOCABULARY, (2, m), generator=g).tolist()
    counts = {name: data.draw(st.integers(0, 10**6)) for name in ("block", "answer", "asked", "drafted")}
    found = states(mismatches(laws[0].to(kind), laws[1], *tokens, **counts), CLASSES)
    assert found.shape == (m, len(STATE)) and found.dtype == torch.float32
    assert found.isfinite().all()
    log = found[:, :4]
    assert (log >= FLOOR).all() and (log <= 1e-6).all()
    assert (found[:, 10] >= 0).all() and (found[:, 10] <= math.log(2) + 1e-6).all()


def test_each_feature_is_what_its_name_says() -> None:
    g = torch.Generator().manual_seed(1)
    p, q = torch.randn(1, VOCABULARY, generator=g) * 2, torch.randn(1, VOCABULARY, generator=g)
    q[:, 70:] = -torch.inf
    found = named(states(mismatches(p, q, [9], [7]), CLASSES)[0])
    log_p, log_q = p.double().log_softmax(-1)[0], q.double().log_softmax(-1)[0]
    sorted_p = log_p.sort(descending=True).values
    a, b = log_p.exp(), log_q.exp()
    mean = (a + b) / 2
    both = torch.zeros(VOCABULARY, dtype=torch.bool)
    both[log_p.topk(64).indices] = both[log_q.topk(64).indices] = True

    def entropy(x: torch.Tensor) -> float:
        whole = torch.cat([x[both], x[~both].sum()[None]])
        return float(torch.special.entr(whole).sum())

    wanted = {
        "target_logp_target": log_p[9], "target_logp_draft": log_p[7],
        "draft_logp_draft": log_q[7], "draft_logp_target": log_q[9],
        "target_entropy": torch.special.entr(a).sum(), "draft_entropy": torch.special.entr(b).sum(),
        "target_rank_draft": math.log1p(int((log_p > log_p[7]).sum())),
        "draft_rank_target": math.log1p(int((log_q > log_q[9]).sum())),
        "target_margin": sorted_p[0] - sorted_p[1],
        "draft_margin": (s := log_q.sort(descending=True).values)[0] - s[1],
        "divergence": entropy(mean) - (entropy(a) + entropy(b)) / 2,
        "block_position": 2 / 8, "answer_position": math.log(6), "mismatches": math.log(4), "keep_rate": 1 / 4,
        "last_keep": -1, "acceptance": 5 / 10,
        "target_digit": 0, "target_letter": 0, "target_space": 0, "target_stop": 1,
        "draft_digit": 1, "draft_letter": 0, "draft_space": 0, "draft_stop": 0,
        "before_digit": 0, "before_letter": 0, "before_space": 1,
    }  # fmt: skip
    assert list(wanted) == list(STATE)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), abs=1e-4), name
    unproposed = named(states(mismatches(p, q, [80], [7]), CLASSES)[0])
    assert unproposed["draft_logp_target"] == FLOOR
    assert unproposed["draft_rank_target"] == pytest.approx(math.log1p(70))


def test_rows_do_not_depend_on_one_another() -> None:
    p, q = torch.randn(5, VOCABULARY), torch.randn(5, VOCABULARY)
    whole = states(mismatches(p, q, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), CLASSES)
    for i in range(5):
        alone = states(mismatches(p[i : i + 1], q[i : i + 1], [1 + i], [6 + i]), CLASSES)
        assert torch.allclose(whole[i], alone[0], atol=1e-6)


def test_what_tokens_are(small_target) -> None:  # type: ignore[no-untyped-def]
    """One character a token, "0" to "o", of which the last is the stop."""
    classes = token_classes(small_target("llama"))
    letters = [chr(ord("0") + i) for i in range(64)]
    assert classes[:, 0].tolist() == [c.isdigit() for c in letters]
    assert classes[:, 1].tolist() == [c.isalpha() for c in letters]
    assert classes[:, STOP].nonzero().tolist() == [[63]]
    assert token_classes(small_target("llama")) is classes
