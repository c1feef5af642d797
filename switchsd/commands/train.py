"""`switchsd train`: a probe, an EAGLE-3 head, or a draft model, from capture stores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoding.draft.training import DraftTrainConfig
from decoding.eagle.training import EagleTrainConfig
from decoding.lengths import LengthTrainConfig
from probes.study import StudyConfig
from probes.train import TrainConfig
from switchsd.loading import LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, notes, out

if TYPE_CHECKING:
    from activations.target import Target


def eagle(
    stores: Annotated[
        list[Path], typer.Argument(help="Capture stores, as `switchsd write` makes them; one given twice counts twice.")
    ],
    config: EagleTrainConfig,
    loading: LoadConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the head goes; by default where `generate` finds it.")
    ] = None,
    continue_from: Annotated[
        Path | None,
        typer.Option(help="Begin from this head. With a larger --draft-vocabulary it gets more tokens, and keeps its."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on text that the target wrote; on several devices under `accelerate launch`."""
    from activations.target import load_target
    from decoding.eagle.formats import read_config
    from decoding.eagle.training import train
    from decoding.eagle.workers import Workers
    from switchsd.artifacts import cached

    if continue_from is not None:
        read_config(continue_from)

    if folder is not None:
        check_folder(folder)
    check_texts(stores)  # a wrong one is told before the model is loaded
    workers = Workers()
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    check_writer(stores, model)
    where = folder or cached("eagle", model.name)
    record: dict[str, object] = {}
    try:
        with bar("training rows", config.tokens) as progress:
            for record in train(model, stores, where, config, continue_from, workers):
                progress.to(min(int(str(record["rows"])), config.tokens))
                notes.print(" ".join(f"{k}={v}" for k, v in record.items()))
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last state in {where / 'run'}")
        raise
    if not workers.leads:
        return
    if json:
        as_json({"folder": str(where), **record})
        return
    out.print(f"{where}: loss {record.get('loss')}, agreement with the target by draft step {record.get('agreement')}")


def draft(
    stores: Annotated[
        list[Path], typer.Argument(help="Capture stores, as `switchsd write` makes them; one given twice counts twice.")
    ],
    config: DraftTrainConfig,
    loading: LoadConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the draft model goes; by default where `generate` finds it.")
    ] = None,
    cut: Annotated[
        str | None, typer.Option(help="The target's blocks to begin from, by number: 0,29. Default: --blocks of them.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Train a draft model, a few of the target's own blocks, on text that the target wrote."""
    from activations.target import load_target
    from decoding.draft.training import train
    from switchsd.artifacts import cached

    chosen = None if cut is None else block_numbers(cut)
    if folder is not None:
        check_folder(folder)
    check_texts(stores)
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    check_writer(stores, model)
    where = folder or cached("draft", model.name)
    record: dict[str, object] = {}
    try:
        with bar("training rows", config.tokens) as progress:
            for record in train(model, stores, where, config, chosen):
                progress.to(min(int(str(record["rows"])), config.tokens))
                notes.print(" ".join(f"{k}={v}" for k, v in record.items()))
    except KeyboardInterrupt:
        notes.print(f"\nstopped; run the same command again to go on from the last state in {where / 'run'}")
        raise
    if json:
        as_json({"folder": str(where), **record})
        return
    told = ", ".join(f"{name} {record.get(name)}" for name in ("agreement", "acceptance", "cross_entropy"))
    out.print(f"{where}: with the target over its whole vocabulary: {told}")


def block_numbers(text: str) -> list[int]:
    """`0,29` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--cut {text!r} is no list of block numbers: write 0,29") from None


def check_texts(stores: list[Path]) -> None:
    """Refuse stores that do not hold whole texts, or are damaged."""
    from activations.store import CaptureStore

    for store in stores:
        opened = CaptureStore.open(store)
        if opened.manifest.get("selection") != "all":
            raise UsageError(
                f"{store} does not hold whole texts, which a drafter learns from: make one with `switchsd write`"
            )
        with bar(f"checking {store}"):
            opened.verify()


def check_writer(stores: list[Path], target: Target) -> None:
    """Refuse stores that another target wrote."""
    from activations.store import CaptureStore
    from activations.target import Fingerprint

    for store in stores:
        difference = target.fingerprint.mismatch(Fingerprint(**CaptureStore.open(store).manifest["target"]))
        if difference:
            raise UsageError(
                f"the text in {store} was written by another target than {target.name} ({'; '.join(difference)}): "
                "name that target, or another store"
            )


def probe(
    store: Annotated[Path, typer.Argument(help="A capture store, as `switchsd capture` makes it.")],
    config: TrainConfig,
    study: StudyConfig,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the probes go; by default where `generate` finds them.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Fit a probe at every captured site, and keep the best one and the serving one."""
    from probes.train import train
    from switchsd.artifacts import cached, shipped
    from switchsd.commands.evaluate import open_store, show

    if folder is not None:
        check_folder(folder)
    opened = open_store(store)
    with bar("reading the store", 1) as progress:

        def tell(done: int, total: int, what: str) -> None:
            progress.say(what)
            progress.to(done, total)

        result = train(opened, config, tell, study)
    where = folder or cached("probe", result.target_name)
    result.save(where)
    if json:
        as_json({"folder": str(where), **result.report.to_dict()})
        return
    show(result.report)
    out.print(f"Probes and all tables: {where}; as a page: switchsd report {where}", markup=False, soft_wrap=True)
    if folder is None:
        back = any(shipped("probe", result.target_name).glob("*/config.json"))
        more = f": delete {where} to go back to the shipped probe" if back else ""
        notes.print(f"`generate` and `bench` take {where / 'best'} from now on{more}")


def lengths(
    store: Annotated[Path, typer.Argument(help="A capture store of all anchors, as `switchsd capture` makes it.")],
    config: LengthTrainConfig,
    log: Annotated[
        Path | None, typer.Option(help="Replay log of a drafter; without one the head knows copies alone.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts that the store was captured from; default: the embedded ones.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the head goes; by default where `generate` finds it.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Fit a length head: how far the target will follow each drafter, for the cost gate."""
    from activations.corpus import load_corpus, read_prompts
    from activations.target import load_target
    from decoding.lengths import stored_texts, train_lengths
    from decoding.replay_log import read_log
    from switchsd.artifacts import cached
    from switchsd.commands.evaluate import open_store

    if folder is not None:
        check_folder(folder)
    opened = open_store(store)
    logged = read_log(log) if log is not None else []
    name = opened.manifest["target_name"]
    with bar(f"loading {name}"):
        target = load_target(name)
    asked = read_prompts(prompts) if prompts is not None else load_corpus()
    with bar("fitting"):
        texts = list(stored_texts(opened, asked, target.encode_messages))
        head = train_lengths(opened, texts, logged, config)
    head.check_target(target.fingerprint, target.name)
    where = folder or cached("lengths", name)
    head.save_pretrained(where)
    if json:
        as_json({"folder": str(where), "split": head.config.split, "metrics": head.config.metrics})
        return
    told = ", ".join(f"{k} {v}" for k, v in head.config.split.items())
    out.print(f"{where}: {told}", markup=False, soft_wrap=True)
    for drafter, found in head.config.metrics.items():
        out.print(f"{drafter}: " + ", ".join(f"{k} {v}" for k, v in found.items()), markup=False, soft_wrap=True)


SUBCOMMANDS = (probe, eagle, draft, lengths)
