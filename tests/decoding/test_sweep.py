"""Sweeps: one setting at several values in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from activations.corpus import PromptError, load_corpus
from activations.target import Target
from decoding.bench import Bench, BenchConfig, references, unequal
from decoding.decoder import Decoder
from decoding.suite import SuitePrompt, at_lengths, load_suite
from decoding.sweep import Sweep
from decoding.tables import sweep_table

TEXTS = ("ABABABAB", "abcabcabc", "list:0;1;2;")
SUITE = [SuitePrompt(f"s:{i}", "qa", False, ({"role": "user", "content": t},)) for i, t in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def decoder(small_target: Callable[..., Target]) -> Decoder:
    return Decoder(small_target("llama"))


def bench(decoder: Decoder, folder: Path, **config: object) -> Bench:
    fields: dict = {"modes": ("ar", "copy"), "baselines": ("hf",), "max_new_tokens": 24, **config}
    return Bench(decoder, SUITE, BenchConfig(**fields), folder)


def test_only_modes_that_the_setting_touches_are_varied(decoder: Decoder, tmp_path: Path) -> None:
    run = bench(decoder, tmp_path, sweep="kappa=1,5", modes=("ar", "copy", "copy/kappa=3/depth=4", "copy/depth=2"))
    assert list(run.columns) == [
        "hf", "ar", "copy/kappa=1", "copy/kappa=5", "copy/kappa=3/depth=4",
        "copy/depth=2/kappa=1", "copy/depth=2/kappa=5",
    ]  # fmt: skip
    for _ in run.run():
        pass
    result = run.result()
    points = {(p["mode"], p["value"]): p for p in result["sweep"]["points"]}
    assert {m for m, _ in points} == {"hf", "ar", "copy", "copy/kappa=3/depth=4", "copy/depth=2"}
    assert points["ar", "1"]["tokens_per_second"] == points["ar", "5"]["tokens_per_second"]
    overall = {r["mode"]: r for r in result["summary"] if r["group"] == "overall"}
    for value in ("1", "5"):
        assert points["copy", value]["tokens_per_step"] == overall[f"copy/kappa={value}"]["tokens_per_step"]
        assert points["copy/depth=2", value]["column"] == f"copy/depth=2/kappa={value}"
    assert points["copy", "1"]["copy_steps"] > (points["copy", "5"]["copy_steps"] or 0)
    heads, rows = sweep_table(result["sweep"])
    assert heads == ["mode", "kappa=1", "kappa=5"]
    assert all(len(row) == 3 for row in rows)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert "## kappa" in (tmp_path / "table.md").read_text()


def test_sampled_texts_are_those_of_the_target_alone(decoder: Decoder, tmp_path: Path) -> None:
    run = bench(decoder, tmp_path, sweep="temperature=0,0.8", modes=("ar", "copy/kappa=1"))
    rows = {(r.key, r.mode): r for r in run.run()}
    assert references(run.columns) == {
        "ar/temperature=0": "hf", "copy/kappa=1/temperature=0": "hf",
        "copy/kappa=1/temperature=0.8": "ar/temperature=0.8",
    }  # fmt: skip
    for prompt in SUITE:
        sampled = rows[prompt.key, "ar/temperature=0.8"].tokens
        assert sampled == rows[prompt.key, "copy/kappa=1/temperature=0.8"].tokens
        assert sampled != rows[prompt.key, "hf"].tokens
    result = run.result()
    assert unequal(result) == []
    warm = next(r for r in result["summary"] if r["mode"] == "copy/kappa=1/temperature=0.8" and r["group"] == "overall")
    plain = next(r for r in result["summary"] if r["mode"] == "ar/temperature=0.8" and r["group"] == "overall")
    assert warm["over_ar"]["estimate"] == pytest.approx(warm["tokens_per_second"] / plain["tokens_per_second"])


def test_a_sampled_difference_is_judged_with_its_noise(decoder: Decoder, tmp_path: Path) -> None:
    run = bench(decoder, tmp_path, modes=("ar/temperature=1", "copy/temperature=1"), baselines=())
    list(run.run())
    wrong = next(r for r in run.rows if r.mode == "copy/temperature=1")
    right = wrong.tokens[4]
    wrong.tokens[4] = (right + 1) % 64
    [found] = run.equality()["modes"]["copy/temperature=1"]["differences"]
    assert found["gap"] > 0, "the drawn token has the highest score, noise included"
    wrong.tokens[4] = right
    assert run.equality()["modes"]["copy/temperature=1"]["differences"] == []


def test_contexts_are_filled_up_to_their_lengths(decoder: Decoder, tmp_path: Path) -> None:
    filled = at_lengths(SUITE, decoder.target, [40, 90], 24)
    assert [p.group for p in filled] == ["context 40"] * 3 + ["context 90"] * 3
    assert len({p.key for p in filled}) == 6
    for prompt in filled:
        own = SUITE[int(prompt.key[2])].messages[-1]["content"]
        assert prompt.messages[-1]["content"].endswith(own)
        length = len(decoder.target.encode_messages(prompt.messages))
        assert int(prompt.group.split()[1]) - 10 <= length <= int(prompt.group.split()[1])
    with pytest.raises(PromptError, match="no room for 24"):
        at_lengths(SUITE, decoder.target, [250], 24)
    with pytest.raises(PromptError, match="as short as 2 tokens"):
        at_lengths(SUITE, decoder.target, [2], 24)
    run = bench(decoder, tmp_path, sweep="context=40,90")
    assert run.total == 2 * 3 * 3
    list(run.run())
    result = run.result()
    assert {(p["mode"], p["value"]) for p in result["sweep"]["points"]} == {
        (m, v) for m in ("hf", "ar", "copy") for v in ("40", "90")
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("luck=1,2", "sweep over 'luck'"),
        ("kappa", "at least two"),
        ("kappa=3", "at least two"),
        ("kappa=3,3", "at least two"),
        ("context=1k,2k", "number of tokens"),
    ],
)
def test_bad_sweeps_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sweep.parse(text)
    with pytest.raises(ValueError, match=message):
        BenchConfig(sweep=text)


def test_decoys_are_held_out_prompts() -> None:
    decoys = load_suite(["decoys"])
    training = {p.id for p in load_corpus("train")}
    expected = [p.id for p in load_corpus("validation") if p.decoy]
    assert [p.key for p in decoys] == [f"decoys:{i}" for i in expected]
    assert len(decoys) >= 20
    assert not training & {p.key.partition(":")[2] for p in decoys}
    assert len(load_suite(["decoys", "validation"], limit=4)) == 8
