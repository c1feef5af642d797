"""Policies: what they compute, their files, and the targets and drafters that they refuse."""

from __future__ import annotations

import itertools
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from activations.target import Fingerprint
from decoding.policies import policy as module
from decoding.policies.policy import CONFIG, WEIGHTS, Policy, PolicyArtifact, PolicyError, differences

PRINT = Fingerprint("LlamaForCausalLM", 64, 2, "abc", "r1")
TARGET: Any = SimpleNamespace(fingerprint=PRINT, name="small")


class Head:
    """All that a policy asks of a drafter."""

    name = "eagle"

    def __init__(self, **more: Any) -> None:
        self.more = more

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "top_k": 4, "sites": ("resid_pre.1",), **self.more}


def sequential(*sizes: int, activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        modules += ([activation()] if i else []) + [nn.Linear(a, b)]
    return nn.Sequential(*modules)


def artifact(**more: Any) -> PolicyArtifact:
    standard = torch.randn(6), torch.rand(6) + 0.5
    networks = {"depth": Policy.of(sequential(6, 5, 2), *standard), "size": Policy.of(sequential(4, 3))}
    values: dict[str, Any] = {
        "kind": "ltd",
        "target": PRINT.to_dict(),
        "drafter": Head().describe(),
        "networks": networks,
        "settings": {"sizes": [4, 8, 16], "depth": 6},
        "record": {"reward": 0.25},
    }
    return PolicyArtifact(**{**values, **more})


# -- what a policy computes ------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    activation=st.sampled_from([nn.Tanh, nn.ReLU]),
    rows=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_logits_are_those_of_the_network(sizes: list[int], activation: type[nn.Module], rows: int, seed: int) -> None:
    network = sequential(*sizes, activation=activation, seed=seed)
    mean, scale = torch.randn(sizes[0]), torch.rand(sizes[0]) + 0.2
    policy = Policy.of(network, mean, scale)
    observations = torch.randn(rows, sizes[0])
    wanted = network((observations - mean) / scale)
    torch.testing.assert_close(policy(observations), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert policy(torch.randn(sizes[0])).shape == (sizes[-1],)
    assert (policy.features, list(policy.hidden), policy.actions) == (sizes[0], sizes[1:-1], sizes[-1])


def test_without_standardisation_nothing_is_rounded() -> None:
    network = sequential(200, 256, 2)
    observations = torch.randn(3, 200)
    assert torch.equal(Policy.of(network)(observations), network(observations).detach())


def test_a_call_leaves_no_gradient_and_shares_no_memory() -> None:
    network = sequential(3, 4, 2)
    policy = Policy.of(network)
    before = policy(torch.ones(1, 3))
    with torch.no_grad():
        network[0].weight.mul_(2)
    assert torch.equal(policy(torch.ones(1, 3)), before)
    assert not policy(torch.ones(1, 3, requires_grad=True)).requires_grad


def test_what_was_moved_computes_with_what_was_moved() -> None:
    policy = Policy.of(sequential(3, 4, 2))
    before = policy(torch.ones(1, 3))
    with torch.no_grad():
        policy.weight_0.zero_()
    assert torch.equal(policy.to("cpu")(torch.ones(1, 3)), policy(torch.zeros(1, 3)))
    assert not torch.equal(policy(torch.ones(1, 3)), before)


def test_a_call_costs_little() -> None:
    policy = Policy.of(sequential(200, 256, 2), torch.zeros(200), torch.ones(200))
    observations = torch.randn(1, 200)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        policy(observations)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 4] < 60e-6  # a quarter: others may be using the processor


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ([], "a policy needs a layer"),
        ([nn.Linear(2, 3), nn.Linear(3, 2)], "Linear cannot be part 1 of a policy"),
        ([nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2)], "GELU cannot be part 1"),
        ([nn.Linear(2, 3), nn.Tanh()], "a policy of 1 layers has one kind of activation"),
        ([nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)], r"not \['tanh', 'relu'\]"),
        ([nn.Linear(2, 3), nn.Tanh(), nn.Linear(4, 1)], r"layer 1 of a policy has weights \[1, 4\]"),
    ],
)
def test_networks_that_are_no_policy(modules: list[nn.Module], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        Policy.of(modules)


@pytest.mark.parametrize(
    ("layers", "more", "told"),
    [
        ([(torch.zeros(2), torch.zeros(2))], {}, r"layer 0 of a policy has weights \[2\]"),
        ([(torch.tensor(1.0), torch.zeros(2))], {}, r"layer 0 of a policy has weights \[\]"),
        ([(torch.zeros(2, 3), torch.zeros(3))], {}, r"biases \[3\]: it takes 3 inputs, so that they must be \[units"),
        ([(torch.zeros(0, 3), torch.zeros(0))], {}, "layer 0"),
        ([(torch.zeros(2, 3), torch.zeros(2))], {"activation": "gelu"}, "activation is 'gelu': choose one of tanh"),
        ([(torch.zeros(2, 3), torch.zeros(2))], {"mean": torch.zeros(2)}, "it takes 2 inputs"),
        ([(torch.zeros(2, 3), torch.zeros(2))], {"scale": torch.ones(2)}, r"are \[3\] and \[2\]: both must be"),
        ([(torch.zeros(2, 3), torch.zeros(2))], {"scale": torch.zeros(3)}, "scale of a policy is 0 somewhere"),
        ([(torch.ones(2, 3), torch.zeros(2))], {"scale": torch.full((3,), 1e-44)}, "leaves float32"),
        ([(torch.full((2, 3), torch.nan), torch.zeros(2))], {}, "weight_0 of a policy has 6 values that are not"),
        ([(torch.zeros(2, 3), torch.tensor([0.0, torch.inf]))], {}, "bias_0 of a policy has 1 values that are not"),
    ],
)
def test_tensors_that_are_no_policy(
    layers: list[tuple[torch.Tensor, torch.Tensor]], more: dict[str, Any], told: str
) -> None:
    with pytest.raises(PolicyError, match=told):
        Policy(layers, **more)


# -- files -----------------------------------------------------------------------------------------------


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    made = artifact()
    folder = made.save(tmp_path / "a" / "policy")
    read = PolicyArtifact.load(folder)
    assert (read.kind, read.target, read.settings, read.record) == ("ltd", made.target, made.settings, made.record)
    assert read.origin == str(folder)
    for name, network in made.networks.items():
        observations = torch.randn(7, network.features)
        assert torch.equal(read.networks[name](observations), network(observations))
    read.check("ltd", TARGET, Head())
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert folder.joinpath(CONFIG).read_bytes() == read.save(tmp_path / "again").joinpath(CONFIG).read_bytes()


def test_one_network_is_enough_and_relu_is_kept(tmp_path: Path) -> None:
    network = Policy.of(sequential(3, 4, 4, 2, activation=nn.ReLU))
    folder = artifact(networks={"size": network}, drafter=None).save(tmp_path)
    read = PolicyArtifact.load(folder)
    assert list(read.networks) == ["size"] and read.networks["size"].activation == "relu"
    read.check("ltd", TARGET)  # any drafter, or none
    read.check("ltd", TARGET, Head())


def test_a_policy_replaces_another_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact(record={"run": 1}).save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    write = Path.write_bytes

    def full(file: Path, content: bytes) -> int:
        if file.name.startswith(CONFIG):
            raise OSError(28, "No space left on device", str(file))
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PolicyError, match=r"cannot write the policy to .*No space left.*: free some space"):
        artifact(record={"run": 2}, networks={"size": Policy.of(sequential(3, 2))}).save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    PolicyArtifact.load(tmp_path)


def test_a_mixture_of_two_policies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact().save(tmp_path)
    replace = os.replace

    def stopped(source: Path, target: Path) -> None:
        if Path(target).name == CONFIG:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        artifact(networks={"depth": Policy.of(sequential(6, 5, 2, seed=3))}).save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(PolicyError, match=r"is not the file that policy.json was written for .*train the policy again"):
        PolicyArtifact.load(tmp_path)


def test_what_is_no_json_is_not_saved(tmp_path: Path) -> None:
    for record, told in (({"x": torch.zeros(1)}, "not JSON serializable"), ({"x": float("nan")}, "not JSON compliant")):
        with pytest.raises(PolicyError, match=rf"settings or record of the ltd policy are no JSON .*{told}"):
            artifact(record=record).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_place_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match=r"cannot write the policy to .*choose another folder"):
        artifact().save(tmp_path / "file" / "policy")


def edited(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: {**config, **values}


def network_of(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(config: dict[str, Any]) -> dict[str, Any]:
        config["networks"]["depth"].update(values)
        return config

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda config: [config], r"policy.json is not a JSON object: train the policy again with"),
        (edited(version=2), "has format version 2; this switchsd reads 1: use the switchsd that wrote it"),
        (edited(version=None), "has format version None"),
        (edited(more=1), "policy.json has unknown more"),
        (lambda config: {k: v for k, v in config.items() if k not in ("settings", "record")}, "lacks record, settings"),
        (edited(networks=[]), r"is damaged \(networks is \[\], and must be an object\)"),
        (edited(target="x" * 200), r"is damaged \(target is 'x{76}\.\.\., and must be an object\)"),
        (edited(target={"width": 1}), "has a target that is no fingerprint"),
        (edited(drafter=3), r"is damaged \(drafter is 3"),
        (edited(kind=["ltd"]), r"is damaged \(kind is \['ltd'\], and must be a name\)"),
        (edited(kind="depth"), "is of the kind 'depth': this switchsd knows ltd, cospec"),
        (edited(kind="cospec"), "has a network 'depth': cospec is made of arbitration"),
        (edited(weights="0" * 64), r"is not the file .* not 000000000000\)"),
        (edited(weights=None), "is not the file that policy.json was written for"),
        (edited(networks={}), "policy.safetensors has an unknown 'depth.layers.0.bias'"),
        (network_of(hidden=[5, 5]), "policy.safetensors lacks 'depth.layers.2.bias'"),
        (network_of(hidden=[10**15]), r"shape \[5, 6\], expected torch.float32 \[1000000000000000, 6\]"),
        (network_of(hidden="5"), r"network 'depth': its sizes are \[6, '5', 2\], and must be counts"),
        (network_of(features=True), "its sizes are"),
        (network_of(actions=0), "its sizes are"),
        (network_of(hidden=None), "is damaged"),
        (network_of(activation="exec"), "activation is 'exec': tanh, relu are known"),
        (network_of(activation=[]), "is damaged"),
        (network_of(extra=1), "its keys are"),
    ],
)
def test_a_wrong_json(tmp_path: Path, edit: Callable[[dict[str, Any]], Any], told: str) -> None:
    file = artifact().save(tmp_path) / CONFIG
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    with pytest.raises(PolicyError, match=told):
        PolicyArtifact.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_what_is_no_json_at_all(tmp_path: Path, content: bytes) -> None:
    (artifact().save(tmp_path) / CONFIG).write_bytes(content)
    with pytest.raises(PolicyError, match=r"(cannot read .*policy\.json|not a JSON object)"):
        PolicyArtifact.load(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Other weights, to which the checksum fits."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    seal(folder)


def seal(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["weights"] = module.hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("size.mean"), "lacks 'size.mean'"),
        (lambda t: t.update(more=torch.zeros(1)), "has an unknown 'more'"),
        (lambda t: t.update({"depth.mean": torch.zeros(7)}), r"depth.mean is torch.float32 of shape \[7\], expected"),
        (lambda t: t.update({"depth.mean": torch.zeros(6, dtype=torch.float16)}), "depth.mean is torch.float16"),
        (lambda t: t["depth.layers.0.weight"].fill_(torch.nan), "network depth: weight_0 of a policy has 30 values"),
        (lambda t: t["size.scale"].fill_(-1), "network size: scale of a policy is -1 somewhere"),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], told: str) -> None:
    rewrite(artifact().save(tmp_path), change)
    with pytest.raises(PolicyError, match=told):
        PolicyArtifact.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-3],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: struct.pack("<Q", 2**62) + content[8:],
    ],
)
def test_a_truncated_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = artifact().save(tmp_path) / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(PolicyError, match=r"is not the file that policy\.json was written for"):
        PolicyArtifact.load(tmp_path)
    seal(tmp_path)
    with pytest.raises(PolicyError, match=r"cannot read .*policy\.safetensors"):
        PolicyArtifact.load(tmp_path)


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_missing_file(tmp_path: Path, missing: str) -> None:
    (artifact().save(tmp_path) / missing).unlink()
    with pytest.raises(PolicyError, match=f"is no policy \\({missing} is missing\\): give a folder that `switchsd"):
        PolicyArtifact.load(tmp_path)
    (tmp_path / missing).mkdir()
    with pytest.raises(PolicyError, match="is no policy"):
        PolicyArtifact.load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_escape_as_other_errors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = artifact(networks={"size": Policy.of(sequential(2, 2))}).save(tmp_path_factory.mktemp("p"))
    name = data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    if name == WEIGHTS:
        seal(folder)
    try:
        read = PolicyArtifact.load(folder)
    except PolicyError as error:
        assert str(folder) in str(error)
    else:
        assert read.networks["size"](torch.zeros(2)).shape == (2,)


# -- where it may be used ---------------------------------------------------------------------------------


def test_another_target_or_drafter_or_kind_is_refused(tmp_path: Path) -> None:
    policy = PolicyArtifact.load(artifact().save(tmp_path))
    other: Any = SimpleNamespace(fingerprint=Fingerprint("GPT2LMHeadModel", 64, 2, "abc", "r2"), name="gpt2")
    with pytest.raises(PolicyError) as refused:
        policy.check("ltd", other, Head())
    assert str(refused.value) == (
        f"the policy in {tmp_path} was trained for another target than gpt2 (architecture: LlamaForCausalLM and "
        "GPT2LMHeadModel; revision: r1 and r2): choose the one that was made for it, or train one with `switchsd "
        "train-policy ltd`"
    )
    with pytest.raises(PolicyError) as refused:
        policy.check("ltd", TARGET, Head(top_k=8, window=3))
    assert str(refused.value) == (
        f"the policy in {tmp_path} was trained with another drafter than this eagle (top_k: 4 and 8; window: None and "
        "3): choose the one that was made for it, or train one with `switchsd train-policy ltd`"
    )
    with pytest.raises(PolicyError, match="trained with the drafter 'eagle', and there is none: load it as well"):
        policy.check("ltd", TARGET)
    with pytest.raises(PolicyError, match=r"is of the kind ltd, and cospec is asked for: .*`switchsd train-policy cos"):
        policy.check("cospec", TARGET, Head())


def test_differences_are_those_of_the_json() -> None:
    assert differences({"a": (1, 2), "b": 1.5}, {"b": 1.5, "a": [1, 2]}) == []
    assert differences({"a": 1}, {"a": "x" * 100, "c": 0}) == [f"a: 1 and '{'x' * 76}...", "c: None and 0"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"kind": "sd"}, "the policy is of the kind 'sd'"),
        ({"networks": {}}, "the policy has no network: ltd is made of depth and size"),
        ({"networks": {"arbitration": None}}, "the policy has a network 'arbitration'"),
        ({"target": {}}, "no fingerprint"),
    ],
)
def test_artifacts_that_cannot_be(more: dict[str, Any], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        artifact(**more)
