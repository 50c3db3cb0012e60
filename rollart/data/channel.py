"""The calling side of one stream to a worker: many calls at once, each with its own answer.

Invariant: every call ends, with its answer or, once `bury` was called, with WorkerDied. What this file leaves out: who
is at the other end, and how its death is noticed (`runtime.py`, `peers.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rollart.data.wire import LAST_WORDS, Answer, Call, FrameWriter, encode, frames
from rollart.errors import WorkerDied, WorkerError

STREAM_LIMIT = 1 << 22


class Channel:
    """`name` of the worker, for errors; `writer` leads to it."""

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._writer = FrameWriter(writer)
        self._pending: dict[int, tuple[str, asyncio.Future[msgspec.Raw]]] = {}
        self._number = 0
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_dead(self) -> bool:
        """Whether `bury` was called."""
        return self._death.done()

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the worker's object."""
        if self._death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {self._death.result()}")
        self._number += 1
        number = self._number
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._pending[number] = (method, future)
        frame = encode(Call(number, method, [msgspec.Raw(encode(argument)) for argument in args]))
        try:
            self._writer.write(frame)
            raw = await future
        finally:
            self._pending.pop(number, None)
        return msgspec.msgpack.decode(raw, type=returns)

    async def wait_dead(self) -> str:
        """The reason, once it is buried."""
        return await asyncio.shield(self._death)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the stream ends or is damaged."""
        try:
            async for frame in frames(reader):
                self._take(msgspec.msgpack.decode(frame, type=Answer))
        except (ConnectionError, msgspec.MsgspecError, WorkerError):
            return

    def bury(self, reason: str) -> None:
        """The worker is gone. Harmless when that is known."""
        if self._death.done():
            return
        self._death.set_result(reason)
        for method, future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied(f"worker {self.name}, call {method}: {reason}"))

    def _take(self, reply: Answer) -> None:
        if reply.number == LAST_WORDS and reply.failure is not None:
            self.bury(reply.failure.message)
            return
        method, future = self._pending.get(reply.number, ("", None))
        if future is None or future.done():
            return
        if reply.failure is None:
            future.set_result(reply.result)
        else:
            future.set_exception(reply.failure.raised_by(self.name, method))
