"""The `switchsd` command. Each subcommand lives in its own module, imported only when it is asked for."""

from __future__ import annotations

import atexit
import errno
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from switchsd.options import expand

COMMANDS = {
    "demo": "Capture, fit a probe and decode with it, in front of you.",
    "generate": "Write text; every token is coloured by who drafted it.",
    "chat": "Talk with a target; turns share what was computed.",
    "capture": "Store hidden states and copy labels of a target's own text.",
    "captures": "Check, describe, merge and export capture stores.",
    "train": "Fit a probe, or train an EAGLE-3 head or a draft model.",
    "train-policy": "Train what the learned modes decide by (Learning to Draft, CoSpec).",
    "head": "Check an EAGLE head against its target, and export it.",
    "evaluate": "Measure finished probes on a capture store.",
    "report": "Show evaluations as one HTML page.",
    "view": "Show a trace as one HTML page: who drafted what, and why.",
    "causality": "Test whether the target uses what a probe reads.",
    "write": "Let the target write bulk text for training drafters.",
    "adapt": "Make a probe and a head for a target of your own.",
    "serve": "Serve a target with vLLM and the switch in it.",
    "profile": "Measure what each part of a step costs on this machine.",
    "simulate": "Say what overlapping two batches (MineDraft) would bring, from measured or published times.",
    "bench": "Compare modes on prompts, beside Hugging Face generate and other engines.",
    "sites": "List where a target's hidden states can be read.",
    "parity": "Compare the hooks with TransformerLens, in float32 and float64.",
    "doctor": "Say what is installed, cached and missing.",
}
OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130


def application(asked: str | None) -> typer.Typer:
    """The app with the asked command complete and the others by name only, so that nothing heavy is imported."""
    app = typer.Typer(
        name="switchsd",
        help="Speculative decoding that listens to the model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_before)
    for name, text in COMMANDS.items():
        if name != asked:
            app.command(name, help=text)(_by_name_only)
            continue
        module = importlib.import_module(f"switchsd.commands.{name.replace('-', '_')}")
        if hasattr(module, "SUBCOMMANDS"):
            group = typer.Typer(help=text, no_args_is_help=True)
            for command in module.SUBCOMMANDS:
                group.command(command.__name__)(expand(command))
            app.add_typer(group, name=name)
        else:
            app.command(name)(expand(getattr(module, name)))
    return app


def _before(version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False) -> None:
    """Nothing: `main` answers --version before anything is made."""


def _by_name_only() -> None:
    raise AssertionError("only the asked command is ever called")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 for a failure, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((a for a in arguments if not a.startswith("-")), None)
    if arguments[:1] == ["--version"]:
        from switchsd import __version__

        print(f"switchsd {__version__}")
        return OK
    warnings.formatwarning = _format
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that the terminal lacks ends no command
    try:
        application(asked)(arguments, prog_name="switchsd")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else OK if done.code is None else FAILURE
    except KeyboardInterrupt:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # a second one would disturb the clearing up
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("SWITCHSD_DEBUG"):
            raise
        code, message = explain(error)
        print(f"error: {message}", file=sys.stderr)
        return code
    return OK


_usual = warnings.formatwarning


def _format(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Our own warnings in one line for people; others as Python shows them."""
    if category.__name__ == "HeadWarning":
        return f"warning: {message}\n"
    return _usual(message, category, *where, **more)


USAGE_ERRORS = ("UsageError", "TargetError", "PromptError", "DecodingError", "ChoiceError")
"""What was asked for cannot be done. By name, because their modules load torch."""
FAILURES = (
    "StoreError",
    "EngineError",
    "ProbeError",
    "HeadError",
    "DraftError",
    "CostError",
    "MissingModel",
    "PeerError",
    "RemoteError",
)
"""What was asked for is right, and something in the way."""


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and a message for people."""
    name = type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return FAILURE, f"the disk is full{where}: free some space and run the same command again"
    if "No space left on device" in str(error):  # a library's own exception around the same thing
        return FAILURE, f"the disk is full: free some space and run the same command again ({error})"
    if name in USAGE_ERRORS:
        return USAGE, str(error)
    if name in FAILURES:
        return FAILURE, str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return FAILURE, f"cannot use {error.filename}: {error.strerror.lower()}"
    if isinstance(error, (ValueError, OSError)):
        return FAILURE, str(error) or name
    return FAILURE, f"{name}: {error} (set SWITCHSD_DEBUG=1 to see where)"


if __name__ == "__main__":
    sys.exit(main())
