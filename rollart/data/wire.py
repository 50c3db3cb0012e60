"""The frames between a driver and a worker process: length-prefixed MessagePack, no pickle.

    driver -> worker   [call id, method, [argument, ...]]
    worker -> driver   [call id, result, None]  or  [call id, nil, Failure]  or, before it ends by itself,
                       [LAST_WORDS, nil, Failure]

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
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from rollart.errors import RollartError, WorkerError, by_name, said

HEADER = struct.Struct("!Q")
MAX_FRAME_BYTES = 1 << 34
SMALL_BYTES = 1 << 16
"""Up to here one write of a copy is cheaper than two writes."""
READ_BYTES = 1 << 20
LAST_WORDS = -1
"""Instead of a call id: why the worker ends."""


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


async def frames(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> AsyncIterator[bytes]:
    """All frames, until ConnectionError says that the stream has ended. Raises WorkerError for one beyond `max_bytes`.

    What arrived together is taken apart without going back to the event loop: with many small calls under way that
    costs less than the calls.
    """
    buffer, begin = bytearray(), 0
    while True:
        while len(buffer) - begin >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, begin)
            if length > max_bytes:
                raise WorkerError(f"a frame of {length:,} bytes is beyond the limit of {max_bytes:,}")
            end = begin + HEADER.size + length
            if len(buffer) < end:
                break
            yield bytes(memoryview(buffer)[begin + HEADER.size : end])
            begin = end
        del buffer[:begin]
        begin = 0
        if not (chunk := await reader.read(READ_BYTES)):
            raise ConnectionError("the other end of the stream is gone")
        buffer += chunk


class FrameWriter:
    """Frames that are written in one turn of the event loop leave with one system call.

    Waking the process at the other end is the dearest part of a small call, and calls come in bursts.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: list[bytes] = []

    def write(self, payload: bytes) -> None:
        """Queue one frame; `await drain()` to wait for room."""
        header = HEADER.pack(len(payload))
        if len(payload) > SMALL_BYTES:  # joining it to others would copy it
            self.flush()
            self._writer.write(header)
            self._writer.write(payload)
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting += (header, payload)

    def flush(self) -> None:
        """Send what waits, now."""
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the other end has taken enough. Raises ConnectionError when it is gone."""
        await self._writer.drain()
