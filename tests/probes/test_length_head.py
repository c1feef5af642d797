"""The length head: surface features, the artifact, and what it says, against plain numpy."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig
from activations.target import Fingerprint
from probes.artifact import ChoiceError, ProbeError
from probes.length_head import JOINT, LengthConfig, LengthHead
from probes.surface import FEATURES, NOTHING, SURFACE, sureness, surface

TARGET = Fingerprint("LlamaForCausalLM", 6, 4, "0123456789abcdef", "aaaa")


def make(sites: tuple[str, ...] = ("resid_mid.2",), seed: int = 0) -> LengthHead:
    config = LengthConfig(
        sites=sites, width=6, drafts={"copy": 9, "eagle": 3}, features=FEATURES, kappa=1, target=TARGET,
        target_name="small", split={"copy rows": 3}, metrics={}, provenance={"seed": 0},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {"eagle.joint": torch.randn(JOINT, generator=generator)}
    for name, hazards in (("copy", 4), ("eagle", 2)):
        shapes = {"state": (hazards, 6 * len(sites)), "features": (hazards, len(FEATURES)), "bias": (hazards,)}
        tensors |= {f"{name}.{k}": torch.randn(shape, generator=generator) * 0.3 for k, shape in shapes.items()}
    return LengthHead(config, tensors)


# -- features -----------------------------------------------------------------------------------------


def test_features_have_names_and_are_nothing_without_a_match() -> None:
    assert len(set(FEATURES)) == len(FEATURES)
    assert surface(None, (), 3) == NOTHING
    index = SuffixIndex(MatchConfig(kappa=2), [1, 2, 3])
    assert surface(index.find(), [], 3) == NOTHING


def test_features_of_a_context_by_hand() -> None:
    tokens = [7, 1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 6, 0, 1, 2]  # 1 2 stands before 5, 5 and 6; three matches of length 2
    index = SuffixIndex(MatchConfig(kappa=1, depth=3), tokens)
    matches = index.find()
    candidates = index.candidates(matches)
    found = dict(zip(SURFACE, surface(matches, candidates, prompt=12), strict=True))
    assert [found[f"length>={n}"] for n in (1, 2, 3)] == [1.0, 1.0, 0.0]
    assert found["count"] == pytest.approx(math.log(4)) and found["single"] == 0
    assert found["distance"] == pytest.approx(math.log1p(len(tokens) - 11))  # the most recent of equals
    assert found["from_prompt"] == 1 and found["ties"] == pytest.approx(math.log1p(3)) and found["gap"] == 0
    assert found["share"] == pytest.approx(1 / 3) and found["distinct"] == pytest.approx(math.log(2))
    assert found["share*length"] == pytest.approx(math.log(3) / 3)
    later = dict(zip(SURFACE, surface(matches, candidates, prompt=5), strict=True))
    assert later["from_prompt"] == 0 and later["prompt*length"] == 0


def test_sureness_is_bounded() -> None:
    assert sureness(1.0, 0.0, 9.0)[0] == pytest.approx(math.log((1 - 1e-4) / 1e-4))
    assert sureness(0.5, 0.7, 0.0) == (0.0, 0.7, 0.0)


# -- what it says -------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(-2, 2))
def test_chances_are_products_of_hazards(seed: int, dtype: torch.dtype, shift: float) -> None:
    head = make(("resid_mid.2", "resid_post.1"), seed)
    generator = torch.Generator().manual_seed(seed + 100)
    states = torch.randn(3, 12, generator=generator).to(dtype)
    features = torch.randn(len(FEATURES), generator=generator).tolist()
    for row, readings in enumerate(head.project(states).tolist()):
        for name, longest in head.config.drafts.items():
            weights = {k: head.tensors[f"{name}.{k}"].double().numpy() for k in ("state", "features", "bias")}
            z = weights["state"] @ states[row].double().numpy() + weights["features"] @ np.array(features)
            z = z + weights["bias"] + shift
            hazards = 1 / (1 + np.exp(-np.concatenate([z, np.repeat(z[-1:], longest - len(z))])))
            said = head.chances(name, head.hazards(name, readings, features, shift))
            np.testing.assert_allclose(said, np.cumprod(hazards), rtol=2e-4, atol=1e-9)
            assert all(a >= b for a, b in itertools.pairwise(said)) and len(said) == longest


def test_states_of_another_width_are_refused() -> None:
    with pytest.raises(ProbeError, match=r"reads 6 entries \(resid_mid.2\), got \(2, 5\)"):
        make().project(torch.zeros(2, 5))


# -- the artifact -------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    head = make()
    other = LengthHead.from_pretrained(head.save_pretrained(tmp_path / "a" / "head"))
    assert other.config == head.config and other.digest == head.digest
    states = torch.randn(4, 6)
    assert torch.equal(other.project(states), head.project(states))
    assert other.joint("eagle") == head.joint("eagle")
    assert sorted(f.name for f in (tmp_path / "a" / "head").iterdir()) == ["lengths.json", "lengths.safetensors"]
    assert make(seed=1).digest != head.digest


def test_another_target_is_refused(tmp_path: Path) -> None:
    head = make()
    head.check_target(TARGET)
    with pytest.raises(ChoiceError, match=r"trained on small and does not fit big; they differ in width: 6 and 8"):
        head.check_target(replace(TARGET, width=8), "big")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError, match="no length head at"):
        LengthHead.from_pretrained(tmp_path / "none")
    folder = make().save_pretrained(tmp_path / "head")
    good = json.loads((folder / "lengths.json").read_text())
    bad: list[tuple[dict[str, object], str]] = [
        ({"kind": "linear"}, "is of kind 'linear', and a length head is wanted"),
        ({"version": 9}, "format version 9"),
        ({"features": ["a"]}, "its features are not the ones"),
        ({"drafts": {"copy": 0}}, "drafts is"),
        ({"sites": ["resid_mid.9"]}, "is damaged"),
        ({"more": 1}, r"has unknown \['more'\]"),
    ]
    for change, message in bad:
        (folder / "lengths.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(ProbeError, match=message):
            LengthHead.from_pretrained(folder)
    (folder / "lengths.json").write_text("[")
    with pytest.raises(ProbeError, match="cannot read"):
        LengthHead.from_pretrained(folder)
    (folder / "lengths.json").write_text(json.dumps(asdict(make().config)))
    tensors = load_file(folder / "lengths.safetensors")
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"copy.bias": torch.zeros(10)}, "copy has 10 hazards for drafts of 9 tokens"),
        ({"copy.state": torch.zeros(4, 5)}, r"copy.state has shape \[4, 5\], expected \[4, 6\]"),
        ({"eagle.joint": torch.zeros(3, 3)}, r"eagle.joint has shape"),
        ({"copy.bias": torch.full((4,), torch.nan)}, "copy.bias has values that are not finite"),
        ({"extra": torch.zeros(1)}, "has tensors"),
    ]
    for broken, message in changes:
        save_file({**tensors, **broken}, folder / "lengths.safetensors")
        with pytest.raises(ProbeError, match=message):
            LengthHead.from_pretrained(folder)
    (folder / "lengths.safetensors").write_bytes(b"no")
    with pytest.raises(ProbeError, match="cannot read"):
        LengthHead.from_pretrained(folder)
