"""Takes calls from other workers of the run, past the driver, on a unix socket.

Invariants: who connects is of the same user, as the socket lies in a private folder of the run; when a caller goes
away, what still runs for it is cancelled. What this file leaves out: the object that is called (`worker.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rollart.data.channel import STREAM_LIMIT
from rollart.data.wire import Answer, Call, FrameWriter, encode, frames

UNIX = "unix:"


class Listener:
    """`answer` answers a call; it never raises."""

    def __init__(self, answer: Callable[[Call], Awaitable[Answer]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def open(self, path: str) -> str:
        """Listen; the address. The second call only tells it."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, path, limit=STREAM_LIMIT)
            self._path = Path(path)
        return f"{UNIX}{self._path}"

    def close(self) -> None:
        """Listen no more. The folder goes with the last socket in it, also when the driver is gone."""
        if self._server is None or self._path is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller, until it goes away."""
        running: set[asyncio.Task[None]] = set()
        answers = FrameWriter(writer)
        try:
            async for frame in frames(reader):
                call = msgspec.msgpack.decode(frame, type=Call)
                task = asyncio.get_running_loop().create_task(self._reply(call, answers))
                running.add(task)
                task.add_done_callback(running.discard)
        except ConnectionError:
            pass
        finally:
            for task in running:
                task.cancel()
            writer.close()

    async def _reply(self, call: Call, answers: FrameWriter) -> None:
        reply = await self._answer(call)
        with contextlib.suppress(ConnectionError):
            answers.write(encode(reply))
            await answers.drain()
