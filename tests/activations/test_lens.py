"""TransformerLens beside the hooks: the same states up to rounding, and errors that are told from rounding."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from activations import lens
from activations.cache import KVCache
from activations.heads import induction_scores, previous_token_scores, repeated_tokens
from activations.lens import Difference, Lens, Parity, _Double, compare, hook_name, parity, readable_sites, verdict
from activations.sites import KINDS, Site
from activations.target import Target, TargetError

TEXTS = [[5, 9, 3, 17, 22, 5, 9, 3, 40, 41, 5, 9, 3], [7], [30, 1, 30, 1, 30]]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.12,
}  # fmt: skip
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "neox, one branch after the other": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, use_parallel_residual=False)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=0.5)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
}


def other_target(family: str) -> Target:
    torch.manual_seed(0)
    return Target(OTHERS[family](), None, f"small-{family}", None)  # type: ignore[arg-type]


@pytest.fixture(params=["llama", "qwen3", "gemma3", *OTHERS])
def target(request: pytest.FixtureRequest, small_target: Callable[..., Target]) -> Target:
    return other_target(request.param) if request.param in OTHERS else small_target(request.param)


def test_it_is_imported_only_when_it_is_used() -> None:
    script = "import sys, activations.lens, switchsd.commands.parity; print('transformer_lens' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_names() -> None:
    assert hook_name(Site("embed")) == "embed.hook_out"
    assert hook_name(Site.parse("resid_mid.3")) == "blocks.3.hook_resid_mid"


# -- the two readers -----------------------------------------------------------------------------------


def hooks(target: Target) -> int:
    """How many there are: transformers leaves some of its own on a model that was asked for hidden states."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())


def test_the_bridge_reads_the_same_states_and_leaves_the_target_alone(target: Target) -> None:
    tokens = torch.tensor([TEXTS[0], TEXTS[0][::-1]])
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    attention, hooked = target.config._attn_implementation, hooks(target)
    sites = readable_sites(target)
    parallel = getattr(target.config, "use_parallel_residual", False)
    assert {s.kind for s in sites} == {"embed", *KINDS} - ({"resid_mid"} if parallel else set())
    with target.read(sites) as reader:
        final = target.hidden(tokens, KVCache(2, 16))
    wrapped = Lens(target)
    assert all(map(wrapped.has, sites))
    read = wrapped.states(tokens, [str(s) for s in sites])
    assert list(read) == sites
    for site in sites:
        assert read[site].shape == (2, len(TEXTS[0]), target.width)
        torch.testing.assert_close(read[site], reader.states[site], atol=2e-5, rtol=2e-5)
    assert target.config._attn_implementation == attention
    after = target.model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(target.hidden(tokens, KVCache(2, 16)), final)
    assert hooks(target) == hooked


def test_they_agree_up_to_rounding(target: Target) -> None:
    report = parity(target, TEXTS)
    assert [p.site for p in report] == [str(s) for s in readable_sites(target)]
    assert {p.rows for p in report} == {sum(map(len, TEXTS))}
    assert {p.verdict for p in report} == {"equal", "rounding"}
    at = {p.site: p for p in report}
    assert at["embed"].verdict == "equal" and at["embed"].float32 == Difference(0.0, 0.0, True)
    worst = max(report, key=lambda p: p.float32.relative)
    assert 1e-8 < worst.float32.relative < 1e-4
    assert worst.float64.relative < 1e-12  # narrowed to float32 on the way, it would be 1e-8


def test_a_site_read_at_the_wrong_place_is_an_error(
    small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"resid_mid.1": "blocks.1.hook_resid_pre", "attn_out.2": "blocks.2.hook_mlp_out"}
    monkeypatch.setattr(lens, "hook_name", lambda site: wrong.get(str(site)) or hook_name(site))
    report = parity(small_target(), TEXTS)
    assert {p.site for p in report if p.verdict == "error"} == set(wrong)


def test_an_error_smaller_than_float32_rounding_is_found(
    small_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = Lens.states

    def slightly_off(self: Lens, tokens: torch.Tensor, sites: Iterable[str | Site]) -> dict[Site, torch.Tensor]:
        read = states(self, tokens, sites)
        return {s: v * (1 + 1e-9) if str(s) == "mlp_out.1" else v for s, v in read.items()}

    monkeypatch.setattr(Lens, "states", slightly_off)
    report = {p.site: p for p in parity(small_target(), TEXTS)}
    assert {s for s, p in report.items() if p.verdict == "error"} == {"mlp_out.1"}
    assert report["mlp_out.1"].float32.relative < 1e-5


# -- rounding or error ---------------------------------------------------------------------------------

sizes = st.floats(1e-9, 1.0)


@given(sizes, st.floats(0.0, 60.0))
def test_what_shrinks_as_the_epsilon_is_rounding(relative: float, factor: float) -> None:
    double = Difference(1.0, relative * 2.0**-29 * factor, False)
    assert verdict(Difference(1.0, relative, False), double) == "rounding"


@given(sizes, st.floats(0.001, 1000.0))
def test_what_stays_is_an_error(relative: float, factor: float) -> None:
    double = Difference(1.0, relative * factor, False)
    assert verdict(Difference(1.0, relative, False), double) == "error"


@pytest.mark.parametrize(
    ("single", "double", "expected"),
    [
        (Difference(0.0, 0.0, True), Difference(0.0, 0.0, True), "equal"),
        (Difference(0.0, 0.0, True), Difference(1e-15, 1e-15, False), "rounding"),  # equal in float32 by luck
        (Difference(0.0, 0.0, True), Difference(1e-12, 1e-12, False), "error"),
        (Difference(1.0, 1e-6, False), Difference(0.0, 0.0, True), "rounding"),
        (Difference(1.0, 1e-6, False), Difference(math.nan, math.nan, False), "error"),
        (Difference(math.nan, math.nan, False), Difference(0.0, 0.0, True), "error"),
        (Difference(math.inf, math.inf, False), Difference(math.inf, math.inf, False), "error"),
    ],
)
def test_edges_of_the_rule(single: Difference, double: Difference, expected: str) -> None:
    assert verdict(single, double) == expected


def test_differences_are_measured_over_all_rows() -> None:
    mine = [torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0]])]
    theirs = [torch.tensor([[3.0, 4.5], [0.0, 0.0]]), torch.tensor([[1.0, 0.25]])]
    assert compare(mine, theirs) == Difference(0.5, 0.25, False)
    assert compare(mine, copy.deepcopy(mine)) == Difference(0.0, 0.0, True)
    for bad in (theirs[1] * math.nan, torch.ones(2, 2)):  # not a number; of another shape
        found = compare(mine, [theirs[0], bad])
        assert math.isnan(found.relative) and not found.equal


def test_float64_stays_and_float32_is_left_alone() -> None:
    wide, narrow = torch.rand(3, dtype=torch.float64), torch.rand(3)
    with _Double():
        for made in (
            wide.to(torch.float32),
            wide.to(dtype=torch.float32),
            wide.float(),
            torch.softmax(wide, dim=-1, dtype=torch.float32),
            torch.nn.functional.softmax(wide, dim=-1, dtype=torch.float32),
        ):
            assert made.dtype == torch.float64
        assert narrow.to(torch.float32).dtype == narrow.float().dtype == torch.float32
        assert narrow.to(torch.bfloat16).dtype == torch.bfloat16
    assert wide.float().dtype == torch.float32


# -- what cannot be done -------------------------------------------------------------------------------


def test_a_family_without_an_adapter_is_named() -> None:
    model = HeliumForCausalLM(HeliumConfig(**SMALL, head_dim=8, num_key_value_heads=2))
    with pytest.raises(TargetError, match=r"cannot wrap small-helium \(HeliumForCausalLM\).*\n.*the default hooks"):
        Lens(Target(model, None, "small-helium", None))  # type: ignore[arg-type]


def test_a_site_that_the_bridge_lacks_is_named() -> None:
    wrapped = Lens(other_target("neox"))
    with pytest.raises(TargetError, match=r"has no resid_mid\.0, resid_mid\.1 in small-neox .*leave these sites out"):
        wrapped.states(torch.tensor([[1, 2]]), ["resid_pre.1", "resid_mid.*"])


def test_parity_needs_float32_and_text(small_target: Callable[..., Target]) -> None:
    target = small_target()
    for texts in ([], [[1, 2], []]):
        with pytest.raises(TargetError, match="at least one text, and none that is empty"):
            parity(target, texts)
    narrow = Target(copy.deepcopy(target.model).bfloat16(), target.tokenizer, "small-llama", None)
    with pytest.raises(TargetError, match=r"small-llama is in torch.bfloat16: load it in float32"):
        parity(narrow, TEXTS)


def test_the_report_is_plain_data() -> None:
    report = Parity("embed", 3, Difference(0.5, 0.25, False), Difference(math.inf, math.nan, False), "error")
    assert report.to_dict() == {
        "site": "embed",
        "rows": 3,
        "float32": {"absolute": 0.5, "relative": 0.25, "equal": False},
        "float64": {"absolute": None, "relative": None, "equal": False},
        "verdict": "error",
    }


def test_head_scores_are_shares_of_attention(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    tokens = repeated_tokens(target, length=10, rows=1)
    mine = previous_token_scores(target, tokens)
    found = Lens(target).head_scores(tokens[0].tolist(), "previous")
    assert found.shape == mine.shape
    torch.testing.assert_close(
        found, mine * 19 / 20, rtol=1e-4, atol=1e-5
    )  # of 20 queries the first has nothing before
    induction = Lens(target).head_scores(tokens[0].tolist(), "induction")
    best = induction_scores(target, tokens)
    assert float(torch.corrcoef(torch.stack([induction.flatten(), best.flatten()]))[0, 1]) > 0.9
