"""`switchsd serve`: vLLM's server with the switch in it."""

from __future__ import annotations

import hashlib
import json as json_module
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from switchsd.engine import environment, find_engine, option
from switchsd.loading import AUTO, check_made_for, first_fitting
from switchsd.options import UsageError
from switchsd.show import AsJson, as_json, bar, notes

if TYPE_CHECKING:
    from activations.target import Target
    from probes.artifact import Probe

NONE = "none"
COPYING = "decoding.serving.vllm.copying.CopyProposer"
METRICS = "PROMETHEUS_MULTIPROC_DIR"
OURS = ("--speculative-config", "-sc", "--additional-config", "--model")


def serve(
    model: Annotated[str, typer.Argument(help="An alias, a hub id or a folder.")],
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Passed on, after a double dash.")
    ] = None,
    probe: Annotated[
        str, typer.Option(help="Folder, shipped name or hub id of a probe at a block boundary; auto: one that fits.")
    ] = AUTO,
    drafter: Annotated[
        str, typer.Option(help="Folder or hub id of an EAGLE-3 head; auto: one that fits; none: copies alone.")
    ] = AUTO,
    speculative_tokens: Annotated[int, typer.Option(help="Most tokens drafted in a step.")] = 8,
    tau: Annotated[float | None, typer.Option(help="Copy intent from which a copy is drafted; by default the probe's.")]
    = None,
    kappa: Annotated[
        int | None, typer.Option(help="Shortest suffix match that is copied from; by default the probe's, or 5.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM takes it: auto, bfloat16, float16, float32.")] = None,
    vllm_python: Annotated[
        str, typer.Option(help="The Python of an environment with vllm and switchsd; by default this program's own.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and run nothing.")] = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Serve a target with vLLM, and let its state choose between copying and its EAGLE-3 head."""
    rest = list(extra or ())
    if model.startswith("-"):
        raise UsageError(f"the target is missing: switchsd serve MODEL -- {model} ...")
    if json and not dry_run:
        raise UsageError("--json is for --dry-run: a server prints its log")
    if speculative_tokens < 1:
        raise UsageError(f"--speculative-tokens is {speculative_tokens}; it must be 1 or more")
    _check_extra(rest, dtype)
    with bar("looking for vLLM"):
        engine = find_engine(vllm_python, drafter != NONE)
    if drafter == NONE:
        source, speculative, additional, about = _copying(model, probe, tau, kappa)
    else:
        source, speculative, additional, about = _switching(model, probe, drafter, tau, kappa)
    speculative["num_speculative_tokens"] = speculative_tokens
    command = [engine.python, "-m", *engine.server, source]
    if source != model and "--served-model-name" not in map(option, rest):
        command += ["--served-model-name", model]
    command += ["--dtype", dtype] if dtype is not None else []
    command += ["--speculative-config", json_module.dumps(speculative)]
    command += ["--additional-config", json_module.dumps(additional)] if additional else []
    command += rest
    settings = environment(engine, rest)
    if dry_run:
        fresh = METRICS not in os.environ
        line = shlex.join([*(f"{name}={value}" for name, value in settings.items()), *command])
        line = f'{METRICS}="$(mktemp -d)" {line}' if fresh else line
        as_json({"command": command, "environment": settings, "shell": line}) if json else print(line)
        return
    notes.print(f"starting vLLM {engine.version} for {model}: {about}, at most {speculative_tokens} tokens a step")
    notes.print("it compiles first, and is ready at 'Application startup complete'")
    raise typer.Exit(_run(command, settings))


# -- what is drafted --------------------------------------------------------------------------------

Parts = tuple[str, dict[str, Any], dict[str, Any], str]
"""What vLLM loads, its speculative and additional configurations, and what is told of them."""


def _copying(model: str, probe: str, tau: float | None, kappa: int | None) -> Parts:
    from activations.target import target_source

    if probe != AUTO or tau is not None:
        raise UsageError("--drafter none copies wherever it can and reads no state: leave out --probe and --tau")
    if kappa is not None and kappa < 1:
        raise UsageError(f"--kappa is {kappa}; it must be 1 or more")
    additional = {"switchsd": {"kappa": kappa}} if kappa is not None else {}
    return target_source(model), {"method": "custom_class", "model": COPYING}, additional, "copies alone"


def _switching(model: str, probe: str, drafter: str, tau: float | None, kappa: int | None) -> Parts:
    from activations.target import target_source, unloaded_target
    from decoding.serving.config import SwitchConfig

    with bar(f"looking at {model}"):
        target = unloaded_target(model)
    name, chosen = serving_probe(probe, target)
    try:
        config = SwitchConfig(name, tau, kappa)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    head = _head(drafter, target)
    threshold, shortest = config.rule(chosen.config)
    about = (
        f"probe at {chosen.config.site}, copies from a copy intent of {threshold:.2f} and a suffix match of "
        f"{shortest}, else the head {head} drafts"
    )
    return target_source(model), {"method": "eagle3", "model": head}, config.to_additional(), about


def serving_probe(asked: str, target: Target) -> tuple[str, Probe]:
    """A probe of this target that vLLM can feed, and the name to find it by. Raises UsageError or ProbeError."""
    from decoding.serving.vllm.columns import layer_of
    from probes.artifact import Probe
    from switchsd.artifacts import candidates, made_for

    def obstacle(probe: Probe) -> str:
        try:
            layer_of(probe.config.site, target.blocks)
        except ValueError as error:
            return str(error)
        return ""

    if asked != AUTO:
        probe = Probe.from_pretrained(asked)
        probe.check_target(target.fingerprint, target.name)
        if reason := obstacle(probe):
            raise UsageError(f"--probe {asked}: {reason}")
        return os.path.abspath(asked) if Path(asked).is_dir() else asked, probe
    mine = target.fingerprint.to_dict()
    for folder in candidates("probe", target.name):
        if made_for(folder) == mine and not obstacle(probe := Probe.from_pretrained(folder)):
            return str(folder.absolute()), probe
    raise UsageError(
        f"no probe of {target.name} at a block boundary is found, and vLLM hands out nothing else: make one with "
        f"`switchsd adapt {target.name} --no-head`, or name one with --probe"
    )


def _head(asked: str, target: Target) -> str:
    """What vLLM loads as its head: a folder or a hub id. Raises UsageError or HeadError."""
    from switchsd.artifacts import made_for

    folder = first_fitting("eagle", target) if asked == AUTO else Path(asked)
    if folder is None:
        raise UsageError(
            f"no EAGLE-3 head of {target.name} is found: make one with `switchsd adapt {target.name}`, name one with "
            "--drafter, or copy alone with --drafter none"
        )
    if folder.is_dir():
        check_made_for("head", made_for(folder), target, folder, "--drafter none")
        return str(exported(folder, target))
    if asked.count("/") != 1 or asked.startswith((".", "/", "~")):
        raise UsageError(f"--drafter {asked}: no such folder; a head is a folder or a hub id")
    return asked


def exported(folder: Path, target: Target) -> Path:
    """The head in the format of speculators, in which vLLM is told every setting; written once, into the cache.

    Of other formats vLLM guesses some: which states the head reads, and that it ends at 2048 tokens, behind which a
    whole batch would draft nothing.
    """
    from activations.packaged import cache_dir
    from decoding.eagle.export import export_head
    from decoding.eagle.formats import load_head, read_config, weight_files
    from decoding.eagle.head import HeadError
    from switchsd.artifacts import slug

    raw = read_config(folder)
    if raw.get("speculators_model_type") is not None:
        return folder.absolute()
    digest = hashlib.sha256(json_module.dumps([raw, target.max_length]).encode())
    for file in weight_files(folder):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    place = cache_dir() / "serving" / f"{slug(target.name)}-{digest.hexdigest()[:16]}"
    if (place / "config.json").is_file():
        return place
    head = load_head(folder, target.vocab_size)
    if (head.config.rope_scaling or {}).get("rope_type") != "yarn":  # whose angles follow from it
        head.config = replace(head.config, max_position_embeddings=target.max_length)
    try:
        export_head(head, place, "speculators", target)
    except HeadError as error:
        raise UsageError(f"vLLM cannot load the head in {folder}: {error}") from error
    return place


# -- running ----------------------------------------------------------------------------------------


def _run(command: Sequence[str], settings: dict[str, str]) -> int:
    """Its exit code. The folder through which workers hand their counters to the endpoint ends with it."""
    from switchsd.child import run

    try:
        if METRICS in os.environ:
            return run(command, {**os.environ, **settings})
        with tempfile.TemporaryDirectory(prefix="switchsd-metrics-", ignore_cleanup_errors=True) as metrics:
            return run(command, {**os.environ, **settings, METRICS: metrics})
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error


def _check_extra(rest: Sequence[str], dtype: str | None) -> None:
    for argument in rest:
        name = option(argument)
        if name.split(".")[0] in OURS:
            raise UsageError(f"{name} is what `switchsd serve` makes: leave it out, or run `vllm serve` by hand")
        if name == "--dtype" and dtype is not None:
            raise UsageError("--dtype is given twice: leave one out")
