from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import probes.artifact as artifact
from activations.target import Fingerprint, Target
from probes.artifact import Probe, ProbeConfig, ProbeError

TARGET = Fingerprint("LlamaForCausalLM", 6, 4, "0123456789abcdef", "aaaa")


def make(bias: float = 0.25, scale: float = 0.5, calibration: tuple[float, float] = (2.0, -1.0)) -> Probe:
    config = ProbeConfig(
        site="resid_mid.2",
        width=6,
        label="span_t1",
        label_settings={"n": 5},
        threshold=0.4,
        threshold_rule="best F1 on the selection part",
        target=TARGET,
        target_name="small",
        store="00ff",
        split={"fit": {"documents": 3}, "note": "by group"},
        metrics={"roc_auc": {"estimate": 0.9, "lower": 0.85, "upper": 0.95}, "rows": 10, "none": None},
        provenance={"seed": 0, "versions": {"torch": "2"}},
    )
    weight = torch.randn(6, generator=torch.Generator().manual_seed(0))
    return Probe(config, weight, bias, scale, calibration)


def test_round_trip(tmp_path: Path) -> None:
    probe = make()
    folder = tmp_path / "a" / "probe"
    other = Probe.from_pretrained(probe.save_pretrained(folder))
    assert other.config == probe.config
    states = torch.randn(5, 6)
    assert torch.equal(other.score(states), probe.score(states))
    assert sorted(f.name for f in folder.iterdir()) == ["README.md", "config.json", "probe.safetensors"]
    card = (folder / "README.md").read_text()
    assert "0.9000 [0.8500, 0.9500]" in card and "resid_mid.2" in card and "span_t1" in card


@given(
    st.floats(-3, 3), st.floats(0.01, 4), st.floats(0.1, 3), st.floats(-3, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.sampled_from([(), (3,), (2, 4)]),
)  # fmt: skip
def test_score_is_the_calibrated_probability(
    bias: float, scale: float, a: float, b: float, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    probe = make(bias=bias, scale=scale, calibration=(a, b))
    state = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.randn(6, generator=torch.Generator().manual_seed(0))
    expected = torch.sigmoid(a * ((state.double() * scale) @ weight.double() + bias) + b)
    score = probe.score(state)
    assert score.shape == shape and score.dtype == torch.float32
    torch.testing.assert_close(score.double(), expected, atol=1e-5, rtol=1e-5)


def make_mlp(units: tuple[int, ...] = (5, 3), sites: str = "resid_mid.2+embed") -> Probe:
    draw = torch.Generator().manual_seed(2)
    config = replace(make().config, site=sites, kind="mlp")
    sizes = [6 * len(config.sites), *units]
    hidden = [
        (torch.randn(leaves, enters, generator=draw), torch.randn(leaves, generator=draw))
        for enters, leaves in pairwise(sizes)
    ]
    return Probe(config, torch.randn(units[-1], generator=draw), 0.25, 0.5, (2.0, -1.0), hidden)


@pytest.mark.parametrize("units", [(5,), (5, 3)])
@pytest.mark.parametrize("sites", ["resid_mid.2", "resid_mid.2+embed"])
def test_an_mlp_and_its_sites_come_back(tmp_path: Path, units: tuple[int, ...], sites: str) -> None:
    probe = make_mlp(units, sites)
    other = Probe.from_pretrained(probe.save_pretrained(tmp_path))
    assert other.config == probe.config and other.config.kind == "mlp"
    assert json.loads((tmp_path / "config.json").read_text())["sites"] == sites.split("+")
    assert all(f"`{site}`" in (tmp_path / "README.md").read_text() for site in sites.split("+"))
    states = torch.randn(4, 7, 6 * len(other.config.sites), generator=torch.Generator().manual_seed(3))
    x = states.double() * 0.5
    for n in range(len(units)):
        w, b = (probe.tensors[f"hidden.{n}.{part}"].double() for part in ("weight", "bias"))
        x = (x @ w.T + b).clamp_min(0)
    expected = torch.sigmoid(2 * (x @ probe.tensors["weight"].double() + 0.25) - 1)
    torch.testing.assert_close(other.score(states).double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ProbeError, match=r"this probe reads states of width 6.*, got shape \(2, 5\)"):
        other.score(torch.zeros(2, 5))


def test_a_linear_probe_of_two_sites(tmp_path: Path) -> None:
    config = replace(make().config, site="embed+resid_post.3")
    probe = Probe(config, torch.arange(12.0), scale=2.0)
    other = Probe.from_pretrained(probe.save_pretrained(tmp_path))
    assert other.config.sites == ("embed", "resid_post.3") and other.config == config
    torch.testing.assert_close(other.logit(torch.ones(12)), torch.tensor(2 * 66.0))


@pytest.mark.parametrize(("kind", "says"), [("linear", "has tensors .*hidden"), ("mlp", "has shape")])
def test_hidden_layers_that_do_not_fit(tmp_path: Path, kind: str, says: str) -> None:
    make_mlp().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"kind": kind, "sites": values["sites"][: 2 if kind == "linear" else 1]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ProbeError, match=says):
        Probe.from_pretrained(tmp_path)


def test_an_mlp_without_hidden_layers_is_refused() -> None:
    with pytest.raises(ProbeError, match=r"expected .*hidden\.0\.weight"):
        Probe(replace(make().config, kind="mlp"), torch.ones(6))


def test_version_1_reads_as_it_did_and_is_written_so(tmp_path: Path) -> None:
    """Files as the first format had them, with `site` and without `sites`."""
    probe = make()
    probe.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["sites"]
    old = {"site": "resid_mid.2", **values, "version": 1}
    (tmp_path / "config.json").write_text(json.dumps(old))
    read = Probe.from_pretrained(tmp_path)
    assert read.config == replace(probe.config, version=1) and read.config.sites == ("resid_mid.2",)
    assert read.config.to_dict() == old
    states = torch.randn(5, 6)
    assert torch.equal(read.score(states), probe.score(states))
    (tmp_path / "config.json").write_text(json.dumps({**old, "kind": "mlp"}))
    with pytest.raises(ProbeError, match="version 1 knows linear"):
        Probe.from_pretrained(tmp_path)


def test_score_of_a_state_that_needs_no_gradient() -> None:
    state = torch.ones(6, requires_grad=True)
    assert not make().score(state).requires_grad


def test_state_of_another_width() -> None:
    with pytest.raises(ProbeError, match=r"width 6, got shape \(2, 5\)"):
        make().score(torch.zeros(2, 5))


def test_another_target_is_refused_and_both_are_named() -> None:
    probe = make()
    probe.check_target(TARGET)
    other = replace(TARGET, blocks=9, revision="bbbb")
    with pytest.raises(ProbeError) as caught:
        probe.check_target(other, "large")
    text = str(caught.value)
    assert "small" in text and "large" in text and "blocks: 4 and 9" in text and "revision: aaaa and bbbb" in text
    assert "switchsd train" in text


def test_reading_for_a_target_checks_it(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    same = cast(Target, SimpleNamespace(fingerprint=TARGET, name="small"))
    other = cast(Target, SimpleNamespace(fingerprint=replace(TARGET, width=8), name="wide"))
    assert Probe.from_pretrained(tmp_path, same).config.width == 6
    with pytest.raises(ProbeError, match="does not fit wide"):
        Probe.from_pretrained(tmp_path, other)


def corrupt(folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "probe.safetensors"
    values: dict[str, Any] = json.loads(config.read_text())
    tensors = load_file(weights)
    weights.unlink()  # load_file maps the file
    match how:
        case "no config":
            config.unlink()
        case "half config":
            config.write_text(config.read_text()[:50])
        case "list":
            config.write_text("[]")
        case "version":
            config.write_text(json.dumps({**values, "version": 99}))
        case "lacks sites":
            config.write_text(json.dumps({k: v for k, v in values.items() if k != "sites"}))
        case "unknown key":
            config.write_text(json.dumps({**values, "colour": 1}))
        case "target":
            config.write_text(json.dumps({**values, "target": {"width": 6}}))
        case "width":
            config.write_text(json.dumps({**values, "width": 7}))
        case "nan":
            tensors["bias"] = torch.tensor(float("nan"))
        case "tensor":
            del tensors["scale"]
    if how == "half weights":
        save_file(tensors, weights)
        weights.write_bytes(weights.read_bytes()[:-3])
    elif how != "no weights":
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no config", "config.json is missing"),
        ("no weights", "probe.safetensors is missing"),
        ("half config", "cannot read .*config.json"),
        ("half weights", "cannot read .*probe.safetensors"),
        ("list", "not a JSON object"),
        ("version", "format version 99"),
        ("lacks sites", "lacks sites"),
        ("unknown key", "unknown colour"),
        ("target", "no fingerprint"),
        ("width", r"weight has shape \[6\], expected \[7\]"),
        ("nan", "bias has values that are not finite"),
        ("tensor", "has tensors"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong_and_what_to_do(tmp_path: Path, how: str, says: str) -> None:
    make().save_pretrained(tmp_path)
    corrupt(tmp_path, how)
    with pytest.raises(ProbeError, match=says) as caught:
        Probe.from_pretrained(tmp_path)
    assert "switchsd" in str(caught.value)


@pytest.mark.parametrize("name", ["", "nothing", "./nothing", "/no/such/folder", "a/b/c"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ProbeError, match="give a folder, a shipped probe"):
        Probe.from_pretrained(name)


def test_a_shipped_probe_is_found_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "SHIPPED", tmp_path)
    make().save_pretrained(tmp_path / "small" / "best")
    assert artifact.shipped_probes() == ["small/best"]
    assert Probe.from_pretrained("small/best").config.site == "resid_mid.2"


def test_a_full_disk_leaves_the_older_probe_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    write = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        if self.name.startswith("config.json"):
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return write(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ProbeError, match="No space left"):
        make(bias=1.0).save_pretrained(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("values", "text"),
    [({"sites": ["resid_mid.4"]}, "blocks 0 to 3"), ({"sites": ["x"]}, "unknown site"), ({"sites": []}, "a list of"),
     ({"sites": "embed"}, "a list of names"), ({"sites": ["embed", "embed"]}, "named twice"),
     ({"kind": "forest"}, "kind is 'forest'; version 2 knows linear, mlp"), ({"threshold": 2}, "threshold is 2"),
     ({"threshold": "x"}, "damaged")],
)  # fmt: skip
def test_a_config_that_cannot_be_meant(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    file = make().save_pretrained(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(ProbeError, match=f"config.json is damaged.*{text}|{text}"):
        Probe.from_pretrained(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProbeError, match="cannot write the probe"):
        make().save_pretrained(tmp_path / "file")


def test_push_to_hub_uploads_the_three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    sent: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            sent["token"] = token

        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> str:
            sent["private"] = private and exist_ok
            return f"https://hub/{repo_id}"

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
            sent["files"] = sorted(f.name for f in Path(folder_path).iterdir())

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert make().push_to_hub("me/probe", private=True, token="t") == "https://hub/me/probe"
    assert sent == {"token": "t", "private": True, "files": ["README.md", "config.json", "probe.safetensors"]}


def test_an_unreachable_hub_is_a_probe_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **options: object) -> str:
        raise OSError("no network\ndetails")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ProbeError, match=r"cannot be had from the hub: no network$"):
        Probe.from_pretrained("me/probe")


def test_reading_a_probe_needs_no_scikit_learn() -> None:
    heavy = ("sklearn", "pandas", "matplotlib", "datasets")
    code = f"import sys, probes.artifact; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
