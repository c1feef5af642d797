"""`switchsd train-policy`: the policies of the learned modes, trained by PPO."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoding.cospec.training import CoSpecConfig
from decoding.ltd.training import FEWEST, LTDConfig
from switchsd.commands.train import terminable
from switchsd.loading import AUTO, LoadConfig
from switchsd.options import UsageError, check_folder
from switchsd.show import LINE_SECONDS, AsJson, as_json, bar, counted, notes, out, table

if TYPE_CHECKING:
    from activations.corpus import Prompt
    from decoding.answers import Question
    from decoding.policies.policy import PolicyArtifact

Record = dict[str, Any]
Training = Generator[Record, None, "PolicyArtifact"]
TABLED = ("replay", "threshold")
"""Stages whose records are shown as a table in the end."""
QUESTIONS = 101
"""Seed of the questions: a draft model that was trained on some has seen those of its own seed, 0 by default."""
SLOW = 20.0
"""Seconds after which it is said how long a stage will take."""


def ltd(
    config: LTDConfig,
    loading: LoadConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Folder of an EAGLE-3 head; auto: one that fits.")] = AUTO,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the policies go; by default where `generate` finds them.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Prompts as JSONL, a text file or a dataset; by default the embedded ones. Repeatable."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Train how deep an EAGLE tree is drafted, and how much of it is verified (Learning to Draft)."""
    from decoding.ltd.training import stages, train
    from decoding.policies.training import check_installed
    from switchsd.artifacts import own
    from switchsd.loading import chosen_prompts, load

    check_installed()
    if folder is not None:
        check_folder(folder)
    asked: dict[str, list[Prompt]] = {}
    for source in prompts or ():
        asked.setdefault(Path(source).stem, []).extend(chosen_prompts(source, None))
    asked = asked or {"train": chosen_prompts(None, "train")}
    if (given := sum(map(len, asked.values()))) < FEWEST:
        raise UsageError(f"{counted(given, 'prompt')} {'is' if given == 1 else 'are'} too few: give {FEWEST} or more")
    with bar(f"loading {target}"):
        decoder = load(target, None, drafter, draft=None, policy=None, **asdict(loading))
        head: Any = decoder.neural.get("eagle")
    name = decoder.target.name
    if head is None:
        raise UsageError(
            f"mode ltd grows trees with an EAGLE head, and there is none for {name}: make one (switchsd train eagle), "
            "or name one (--drafter)"
        )
    if not decoder.costs_known("eagle"):
        notes.print("measuring what a step costs on this machine, once: the clock of the training")
    with bar("measuring what a step costs"):
        costs = decoder.costs("eagle")
    where = folder or own("ltd", name, decoder.target.fingerprint.to_dict())
    check_kind(where, "ltd")
    each, count = stages(config), sum(map(len, asked.values()))
    decisions = sum(timesteps_of(config, stage.name) for stage in each)
    notes.print(
        f"{counted(count, 'prompt')}: an answer to each, of up to {config.max_new_tokens} tokens, and its trees are "
        f"logged; then PPO learns from {decisions} decisions in {len(each)} stages. All of it is kept in {where}"
    )
    training = train(decoder.target, head, costs, asked, where, config)
    last, artifact = follow(training, where, lambda stage: timesteps_of(config, stage))
    if json:
        as_json({"folder": str(where), **last, "record": artifact.record})
        return
    heads = ["replayed, tokens/s", "trained on", "chosen on", "held back", "over the best fixed tree", "tokens a step"]
    rows = [
        (r["name"], r["trained"], r["selected"], r["reported"], "x {} [{}, {}]".format(r["over_fixed"], *r["interval"]),
         r["tokens_per_step"])
        for r in (artifact.record["grid"], *artifact.record["stages"], artifact.record["oracle"])
    ]  # fmt: skip
    out.print(table(heads, rows))
    out.print(f"{where}: {last['name']}, the fastest on the texts that the choice was made on", soft_wrap=True)
    if last["over_fixed"] < 1:
        best = artifact.settings
        notes.print(
            "On the texts that were held back it is slower than the best fixed tree: train on more prompts, or use "
            f"--neural-tree fixed --neural-nodes {best['fixed_nodes']} --neural-depth {best['fixed_depth']}"
        )
    out.print(f"To use it: {use(target, 'ltd', folder)}", soft_wrap=True)


def timesteps_of(config: LTDConfig, stage: str) -> int:
    """Decisions of a stage of Learning to Draft, by its name."""
    return config.ppo(stage.partition("-")[0]).timesteps


def cospec(
    config: CoSpecConfig,
    loading: LoadConfig,
    target: Annotated[str, typer.Option(help="An alias, a hub id or a folder.")] = "smollm2",
    draft: Annotated[
        str,
        typer.Option(help="A draft model: a folder, or any model with the target's tokenizer; auto: one that fits."),
    ] = AUTO,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the policy goes; by default where `generate` finds it.")
    ] = None,
    count: Annotated[int, typer.Option(help="Questions to make, of the side that is never tested on.")] = 2000,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Kinds of them, with a level each: sum:1,sum:2,lookup. Default: what small models partly do."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Questions from a JSONL file in GSM8K's format (question, answer), instead of made ones."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Train when mode cospec keeps a drafted token that the target would not write."""
    from decoding.cospec.training import train
    from decoding.policies.training import check_installed
    from switchsd.artifacts import own
    from switchsd.loading import load

    check_installed()
    if folder is not None:
        check_folder(folder)
    if prompts is not None and kinds is not None:
        raise UsageError("--prompts and --kinds were both given: questions are read, or made")
    asked = read_questions(prompts) if prompts is not None else made_questions(kinds, count, QUESTIONS + config.seed)
    with bar(f"loading {target}"):
        decoder = load(target, None, None, draft=draft, policy=None, **asdict(loading))
        drafter: Any = decoder.neural.get("draft")
    name = decoder.target.name
    if drafter is None:
        raise UsageError(
            f"mode cospec drafts with a draft model, and there is none for {name}: make one (switchsd train draft), or "
            "name one (--draft)"
        )
    where = folder or own("cospec", name, decoder.target.fingerprint.to_dict())
    check_kind(where, "cospec")
    notes.print(
        f"{counted(len(asked), 'question')}: the target and the draft answer each, and up to {config.first} other ways "
        f"are tried; then PPO learns from {config.timesteps} decisions. All of it is kept in {where}"
    )
    last, artifact = follow(train(decoder.target, drafter, asked, where, config), where, lambda stage: config.timesteps)
    if json:
        as_json({"folder": str(where), "lossless": False, **last})
        return
    heads = ["on validation questions", "threshold", "right", "drafts kept", "tokens per forward"]
    rows = [
        (f"policy of {r['policy']}", r["threshold"], *(f"{r[name]:.1%}" for name in ("right", "kept")),
         f"{r['tokens_per_forward']:.3f}")
        for r in artifact.record["thresholds"]
    ]  # fmt: skip
    out.print(table(heads, rows))
    out.print(f"{where}: the policy of {last['policy']} at threshold {last['threshold']}", soft_wrap=True)
    out.print(f"To use it (what it writes is not the target's text): {use(target, 'cospec', folder)}", soft_wrap=True)


def use(target: str, mode: str, folder: Path | None) -> str:
    """A command that decodes with a policy; what was put into the cache is found by itself."""
    named = f" --policy {folder}" if folder is not None else ""
    return f"switchsd generate --target {target} --mode {mode}{named}"


def read_questions(file: Path) -> list[Question]:
    """The questions of a file in GSM8K's format. Raises UsageError."""
    from decoding.answers import read_gsm8k

    try:
        found = read_gsm8k(file)
    except OSError as error:
        raise UsageError(f"cannot read the questions in {file}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no UTF-8 text ({error}): name another file") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not found:
        raise UsageError(f"{file} holds no question: name another file")
    return found


def made_questions(kinds: str | None, count: int, seed: int) -> list[Question]:
    """Questions of the training side. Raises UsageError."""
    from decoding.answers import MIX, questions

    levels: Mapping[str, Any] = MIX if kinds is None else kinds_of(kinds)
    try:
        return questions(levels, count, seed, split="train")
    except ValueError as error:
        raise UsageError(str(error)) from error


def kinds_of(text: str) -> dict[str, tuple[int, ...]]:
    """`sum:1,sum:2,lookup` as levels by kind; a kind without one is at level 1."""
    levels: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        kind, _, level = part.strip().partition(":")
        try:
            levels[kind] = (*levels.get(kind, ()), int(level or 1))
        except ValueError:
            raise UsageError(f"--kinds {part.strip()!r}: {level!r} is no level; write sum:1,sum:2,lookup") from None
    return levels


def check_kind(where: Path, kind: str) -> None:
    """Refuse a folder that holds a policy of the other kind, which would be lost."""
    from decoding.policies.policy import CONFIG, PolicyArtifact

    if (where / CONFIG).is_file() and (there := PolicyArtifact.load(where).kind) != kind:
        raise UsageError(f"{where} holds a policy of the kind {there}: choose another folder (--out)")


def follow(training: Training, where: Path, timesteps: Callable[[str], int]) -> tuple[Record, PolicyArtifact]:
    """Run a training to its end, showing where it is; `timesteps` are those of a stage of PPO, by name. Returns the
    last record and the artifact. Says what an interrupted training left."""
    last: Record = {}
    with terminable(), keeping(where), bar("preparing", 1) as progress:
        clock, told = Clock(), Teller()
        while True:
            try:
                last = next(training)
            except StopIteration as end:
                return last, end.value
            stage = str(last.get("stage", "training"))
            done, total = done_of(last, timesteps(stage) if "timesteps" in last else 0)
            if total:
                progress.say(stage)
                progress.to(done, total)
                clock.tell(stage, done, total)
            told.tell(last, over=done >= total)


def done_of(record: Mapping[str, Any], timesteps: int) -> tuple[float, float]:
    """How much of its stage a record tells of, and of how much; of nothing where it does not say."""
    if timesteps:
        return min(float(record["timesteps"]), float(timesteps)), float(timesteps)
    of, done = record.get("of"), record.get("questions", record.get("texts", 0))
    return (float(done), float(of)) if isinstance(of, int) else (0.0, 0.0)


class Clock:
    """Says once a stage how long it will take, where that is long."""

    def __init__(self) -> None:
        self._stage = ""
        self._told = False

    def tell(self, stage: str, done: float, total: float) -> None:
        """Hear how far a stage is; print the minutes that are left of a long one."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._told, self._began, self._first = stage, False, now, done
            return
        gained, spent = done - self._first, now - self._began
        if self._told or spent < SLOW or not gained:
            return
        self._told = True
        minutes = spent / gained * (total - done) / 60
        left = f"about {counted(round(minutes), 'minute')}" if minutes >= 1 else "less than a minute"
        notes.print(f"{stage}: {left} to go")


class Teller:
    """Prints records, a line each: of those that come often only the last one of a stage, and one now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def tell(self, record: Mapping[str, Any], over: bool) -> None:
        """Print a record, if it is time for one; `over` says that its stage has ended."""
        now = time.monotonic()
        if record.get("stage") == "shares":
            notes.print(shares_table(record))
        elif record.get("stage") in TABLED:
            return
        elif over or ("timesteps" in record and now - self._last > LINE_SECONDS):
            notes.print(" ".join(f"{k}={_brief(v)}" for k, v in record.items()))
            self._last = now


def shares_table(record: Mapping[str, Any]) -> Any:
    """Who answers how much right."""
    rows = (
        ("both", "both"), ("only the draft", "only_draft"), ("only the target", "only_target"), ("neither", "neither"),
        ("the target", "target"), ("the draft, wherever it may speak", "draft"), ("the best of what was tried", "best"),
    )  # fmt: skip
    title = f"{record.get('of')}: {counted(int(record.get('questions', 0)), 'question')}"
    return table(["right", "share"], [(label, f"{record[key]:.1%}") for label, key in rows if key in record], title)


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def keeping(where: Path) -> Iterator[None]:
    """Say what an interrupted training left."""
    try:
        yield
    except KeyboardInterrupt:
        if where.is_dir() and any(where.iterdir()):
            notes.print(f"\nstopped; run the same command again to go on from what is in {where}")
        else:
            notes.print("\nstopped before anything was done: the same command begins anew")
        raise


SUBCOMMANDS = (ltd, cospec)
