"""Messages between two processes of one machine: a JSON object and tensors, over a socket.

8 bytes    length of the JSON
JSON       the message; under "tensors" dtype and shape of each one
bytes      the tensors, one after the other
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch

HEAD = struct.Struct("<Q")
LONGEST = 1 << 26
"""Bytes of JSON that a message has at most; more is no message."""


class WireError(Exception):
    """The other side has gone, is silent, or says something that is no message."""


def send(
    sock: socket.socket,
    message: dict[str, Any],
    tensors: Sequence[torch.Tensor] = (),
    seconds: float | None = None,
) -> None:
    """Send a message and tensors of any shape [...].

    Raises WireError where the other side does not take it within so many seconds (None: waits).
    """
    flat = [tensor.detach().contiguous().cpu() for tensor in tensors]
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat]
    text = json.dumps({**message, "tensors": shapes}).encode()
    parts: list[Any] = [HEAD.pack(len(text)) + text]
    parts += [t.reshape(-1).view(torch.uint8).numpy().data for t in flat if t.numel()]
    deadline = None if seconds is None else monotonic() + seconds
    try:
        for part in parts:
            sock.settimeout(_left(deadline))
            sock.sendall(part)
    except OSError as error:
        raise WireError(_told(error, seconds)) from error


def receive(sock: socket.socket, seconds: float | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The next message and its tensors, each in the shape [...] that it was sent in.

    Raises WireError where none has come after so many seconds (None: waits for ever).
    """
    deadline = None if seconds is None else monotonic() + seconds
    try:
        (length,) = HEAD.unpack(_read(sock, HEAD.size, deadline))
        if length > LONGEST:
            raise WireError(f"it announced a message of {length} bytes")
        message = json.loads(_read(sock, length, deadline))
        tensors = [_tensor(sock, dtype, shape, deadline) for dtype, shape in message.pop("tensors")]
    except OSError as error:
        raise WireError(_told(error, seconds)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"it said something that is no message ({error!r})") from error
    return message, tensors


def _tensor(sock: socket.socket, dtype: str, shape: list[int], deadline: float | None) -> torch.Tensor:
    kind = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    if not size:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(_read(sock, size, deadline), dtype=kind).view(shape)


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        sock.settimeout(_left(deadline))
        got = sock.recv_into(view)
        if not got:
            raise WireError("it has ended")
        view = view[got:]
    return data


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - monotonic(), 1e-3)


def _told(error: OSError, seconds: float | None) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return "it has ended" if isinstance(error, (BrokenPipeError, ConnectionResetError)) else str(error)
