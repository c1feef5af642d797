"""A program that takes this one's place, and something to clear up after it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end and return its exit code, 128 + n where signal n ended it. What asks this program to
    end asks it instead. Raises OSError where it cannot be started. For the main thread only."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        # In a group of its own, or Ctrl-C would reach it twice, and the second one means: at once.
        child = subprocess.Popen(command, env=environment, process_group=0)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
