"""`switchsd train`: a probe, an EAGLE-3 head, or a draft model, from capture stores."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoding.draft.training import DraftTrainConfig
from decoding.eagle.training import EagleTrainConfig
from decoding.lengths import LengthTrainConfig
from probes.study import StudyConfig
from probes.train import TrainConfig
from switchsd.loading import LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import AsJson, as_json, bar, counted, notes, out

if TYPE_CHECKING:
    from activations.target import Target

OFTEN = 20
"""A run that reads its text more often than this says so."""


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
    from switchsd.artifacts import own

    if continue_from is not None:
        read_config(continue_from)

    if folder is not None:
        check_folder(folder)
    check_texts(stores)  # a wrong one is told before the model is loaded
    workers = Workers()
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    check_writer(stores, model)
    where = folder or own("eagle", model.name, model.fingerprint.to_dict())
    record: dict[str, object] = {}
    try:
        with bar("training tokens", config.tokens) as progress:
            for record in train(model, stores, where, config, continue_from, workers):
                progress.to(min(int(str(record["rows"])), config.tokens))
                tell(record)
    except KeyboardInterrupt:
        tell_stopped(where / "run")
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
    continue_from: Annotated[
        Path | None, typer.Option(help="Begin from this draft model: its blocks, and its frequent tokens.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Train a draft model, a few of the target's own blocks, on text that the target wrote, and, with --questions, on
    right answers to questions."""
    from activations.target import load_target
    from decoding.draft.model import read_draft
    from decoding.draft.training import train
    from decoding.training import rows_of_a_pass
    from switchsd.artifacts import own

    chosen = None if cut is None else block_numbers(cut)
    if continue_from is not None:
        read_draft(continue_from)
    if folder is not None:
        check_folder(folder)
    check_texts(stores)
    with bar(f"loading {target}"):
        model = load_target(target, **asdict(loading))
    check_writer(stores, model)
    check_blocks(config.blocks, chosen, model)
    where = folder or own("draft", model.name, model.fingerprint.to_dict())
    there = rows_of_a_pass(stores, [config.validation_documents] * len(stores))
    warned = False
    record: dict[str, object] = {}
    try:
        with terminable(), bar("training tokens", config.tokens) as progress:
            for record in train(model, stores, where, config, chosen, continue_from):
                done = int(str(record["rows"]))
                progress.to(min(done, config.tokens))
                tell(record)
                if not warned:  # how far a run of minutes gets is known when it is there
                    warned = tell_repetition(there, done if config.minutes else config.tokens, config.minutes)
    except KeyboardInterrupt:
        tell_stopped(where / "run")
        raise
    if json:
        as_json({"folder": str(where), **record})
        return
    told = ", ".join(f"{name} {record.get(name)}" for name in ("agreement", "acceptance", "cross_entropy"))
    out.print(f"{where}: with the target over its whole vocabulary: {told}")


def block_numbers(text: str) -> list[int]:
    """`0,29` as numbers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--cut {text!r} is no list of block numbers: write 0,29") from None
    if numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise UsageError(f"--cut {text!r} is no list of increasing block numbers: write 0,29")
    return numbers


def check_blocks(count: int, chosen: list[int] | None, target: Target) -> None:
    """Refuse blocks, so many or these, that the target lacks."""
    if chosen is None and count > target.blocks:
        raise UsageError(f"--blocks {count}: {target.name} has {target.blocks} blocks, choose 1 to {target.blocks}")
    if chosen is not None and chosen[-1] >= target.blocks:
        asked = ",".join(map(str, chosen))
        raise UsageError(f"--cut {asked}: the blocks of {target.name} have the numbers 0 to {target.blocks - 1}")


def tell(record: dict[str, Any]) -> None:
    """A training's record in a line; for people its rows are tokens."""
    notes.print(" ".join(f"{'tokens' if k == 'rows' else k}={v}" for k, v in record.items()))


def tell_repetition(there: int, tokens: int, minutes: float) -> bool:
    """Say so, and return True, where a run that trains on so many tokens reads its text very often."""
    if not 0 < OFTEN * there < tokens:
        return False
    less = (
        f"give it less time (--minutes, now {minutes:g})" if minutes else f"train on fewer (--tokens {OFTEN * there})"
    )
    notes.print(
        f"note: the stores hold {counted(there, 'token')} to train on, and this run reads them {tokens / there:.0f} "
        f"times: write more (switchsd write --tokens), or {less}"
    )
    return True


def tell_stopped(run: Path) -> None:
    """What an interrupted training left."""
    if (run / "state.json").is_file():
        notes.print(f"\nstopped; run the same command again to go on from the last state in {run}")
    else:
        notes.print("\nstopped, and there is no state to go on from yet: the same command begins anew")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does."""
    if current_thread() is not main_thread():  # where no handler can be set
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    from switchsd.artifacts import own, shipped
    from switchsd.commands.evaluate import open_store, show

    if folder is not None:
        check_folder(folder)
    opened = open_store(store)
    with bar("reading the store", 1) as progress:

        def tell(done: int, total: int, what: str) -> None:
            progress.say(what)
            progress.to(done, total)

        result = train(opened, config, tell, study)
    where = folder or own("probe", result.target_name, opened.manifest["target"])
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
    from switchsd.artifacts import own
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
    where = folder or own("lengths", name, target.fingerprint.to_dict())
    head.save_pretrained(where)
    if json:
        as_json({"folder": str(where), "split": head.config.split, "metrics": head.config.metrics})
        return
    told = ", ".join(f"{k} {v}" for k, v in head.config.split.items())
    out.print(f"{where}: {told}", markup=False, soft_wrap=True)
    for drafter, found in head.config.metrics.items():
        out.print(f"{drafter}: " + ", ".join(f"{k} {v}" for k, v in found.items()), markup=False, soft_wrap=True)


SUBCOMMANDS = (probe, eagle, draft, lengths)
