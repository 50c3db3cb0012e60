"""The frames between a driver and a worker process: length-prefixed MessagePack, no pickle.

    driver -> worker   [call id, method, [argument, ...]]
    worker -> driver   [call id, result, None]  or  [call id, nil, Failure]

Invariant: arguments and results are converted by the worker's type hints and the caller's `returns`, so a value of the
wrong shape fails where it is received, with the method's name. What this file leaves out: processes and sockets
(`runtime.py`), the worker's side of a call (`worker.py`).
"""

from __future__ import annotations

import asyncio
import functools
import struct
import traceback
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from rollart.errors import RollartError, WorkerError, by_name, said

HEADER = struct.Struct("!Q")
MAX_FRAME_BYTES = 1 << 34
SMALL_BYTES = 1 << 16
"""Up to here one write of a copy is cheaper than two writes."""


class Failure(Struct, array_like=True):
    """An exception on its way home: class name, message, and where it was raised."""

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception. Always possible: its text may be broken, or not UTF-8."""
        return cls(type(error).__name__, *map(_utf8, (said(error), "".join(traceback.format_exception(error)))))

    def raised_by(self, worker: str, method: str) -> RollartError:
        """Our exception for it: the same class when it is ours, else WorkerError with the remote traceback."""
        error = by_name(self.kind, self.message)
        if type(error) is WorkerError:
            error = WorkerError(f"worker {worker}, call {method}: {self.kind}: {self.message}\n{self.trace}")
        else:
            error.add_note(f"raised in worker {worker}, call {method}:\n{self.trace}")
        return error


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class Call(Struct, array_like=True):
    """One request of the driver."""

    number: int
    method: str
    arguments: list[Raw]


class Answer(Struct, array_like=True):
    """One reply of a worker."""

    number: int
    result: Raw = Raw(b"\xc0")
    failure: Failure | None = None


encode = msgspec.msgpack.encode


def decode_arguments(method: Callable[..., Any], arguments: list[Raw]) -> list[Any]:
    """Decode each argument by the type hint of the parameter that takes it."""
    kinds = _kinds(getattr(method, "__func__", method))
    if len(arguments) > len(kinds):
        raise TypeError(f"{method.__qualname__} takes {len(kinds)} annotated arguments, got {len(arguments)}")
    return [msgspec.msgpack.decode(raw, type=kind) for raw, kind in zip(arguments, kinds, strict=False)]


@functools.lru_cache(4096)
def _kinds(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The annotations of a function's parameters; reading them anew would cost more than the rest of a call."""
    return tuple(kind for name, kind in typing.get_type_hints(function).items() if name != "return")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """One frame. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise WorkerError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}: the stream is damaged")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Queue one frame; `await writer.drain()` to wait for room."""
    header = HEADER.pack(len(payload))
    if len(payload) <= SMALL_BYTES:
        writer.write(header + payload)
    else:
        writer.write(header)
        writer.write(payload)
