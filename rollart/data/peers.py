"""The calling side of workers that call workers, past the driver (the answering side: `listener.py`).

Invariant: every call ends; with WorkerDied once the connection has. What this file leaves out: calls from the driver
(`runtime.py`), and who connects to whom (`rollart/shard.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import Any, cast

from rollart.data.channel import STREAM_LIMIT, Channel
from rollart.data.listener import UNIX
from rollart.errors import WorkerDied, WorkerError
from rollart.protocols import WorkerHandle

RAY = "ray:"


async def connect(name: str, address: str) -> WorkerHandle:
    """A handle of the worker `name` at `address`. Raises WorkerDied when nobody listens there."""
    if address.startswith(RAY):
        runtime = importlib.import_module("rollart.data.ray_runtime")
        return cast(WorkerHandle, await runtime.connect(name, address.removeprefix(RAY)))
    if not address.startswith(UNIX):
        raise WorkerError(f"worker {name}: {address!r} is not an address of a worker")
    try:
        reader, writer = await asyncio.open_unix_connection(address.removeprefix(UNIX), limit=STREAM_LIMIT)
    except OSError as error:
        raise WorkerDied(f"worker {name} does not listen at {address}: {error.strerror or error}") from error
    return PeerWorker(name, reader, writer)


class PeerWorker:
    """Another worker of the run. Its death is the end of the stream."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._writer = writer
        self._channel = Channel(name, writer)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name=f"read {name}")

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the worker's object."""
        return await self._channel.call(method, *args, returns=returns)

    async def wait_dead(self) -> str:
        """The reason, once the stream has ended."""
        return await self._channel.wait_dead()

    async def stop(self) -> None:
        """Close the connection; the worker lives on."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        await self._channel.read(reader)
        self._channel.bury("its connection has ended")
