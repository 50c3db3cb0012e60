"""The inside of a worker process: one object whose methods are called over a socket.

Coroutine methods run on the process' event loop, concurrently; plain methods run in order on one thread, so that the
loop stays free. When the driver goes away (end of stream) the process ends at once, whatever hangs in it, with all that
user code started: no process outlives its run. An object that has lost what it depends on ends it too, with last words.
What this file leaves out: which object (`roles.py`) and who starts the process (`runtime.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from rollart.data.channel import STREAM_LIMIT
from rollart.data.handshake import check_greeting
from rollart.data.listener import Listener
from rollart.data.serverless.registry import attach
from rollart.data.targets import named
from rollart.data.wire import LAST_WORDS, Answer, Call, Failure, FrameWriter, decode_arguments, encode, frames
from rollart.errors import WorkerDied
from rollart.protocols import Losable


def build(target: str, kwargs: Mapping[str, Any]) -> Any:
    """Call `module:name` with keyword arguments. Raises ConfigError when there is no such name."""
    made = named(target)(**kwargs)
    attach(made)
    return made


class Host:
    """Calls methods of one object: coroutines on the loop, plain functions in order on one thread."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    async def start(self) -> None:
        """Run the object's `start`, where it has one."""
        if hasattr(self.subject, "start"):
            await self.subject.start()

    async def lost(self) -> str:
        """Why the object cannot go on, once it says so."""
        if isinstance(self.subject, Losable):
            return await self.subject.wait_lost()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Run the object's `shutdown`, where it has one."""
        if hasattr(self.subject, "shutdown"):
            await self.subject.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def call(self, name: str, arguments: list[msgspec.Raw]) -> bytes:
        """The encoded result of one call."""
        method = getattr(self.subject, name, None)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"{type(self.subject).__name__} has no method {name!r}")
        values = decode_arguments(method, arguments)
        if inspect.iscoroutinefunction(method):
            return encode(await method(*values))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _run_and_encode, method, values)


def _run_and_encode(method: Callable[..., Any], values: list[Any]) -> bytes:
    return encode(method(*values))


async def answer(host: Host, call: Call) -> Answer:
    """Run one call; whatever it raises becomes part of the answer."""
    try:
        return Answer(call.number, msgspec.Raw(await host.call(call.method, call.arguments)))
    except Exception as error:
        return Answer(call.number, failure=Failure.of(error))


async def serve(connection: socket.socket) -> None:
    """Build the object that the first frame names, then answer calls until the stream ends."""
    reader, stream = await asyncio.open_connection(sock=connection, limit=STREAM_LIMIT)
    calls, writer = frames(reader), FrameWriter(stream)
    first = msgspec.msgpack.decode(await anext(calls), type=Call)
    target, kwargs, hello = (msgspec.msgpack.decode(raw) for raw in first.arguments)
    try:
        check_greeting(hello, "the driver")
        host = Host(build(target, kwargs))
        await host.start()
    except Exception as error:
        await _say(writer, Answer(first.number, failure=Failure.of(error)))
        return
    await _say(writer, Answer(first.number))
    with contextlib.closing(Listener(partial(answer, host))) as listener:
        obeying = asyncio.ensure_future(_obey(host, listener, calls, writer))
        losing = asyncio.ensure_future(host.lost())
        await asyncio.wait({obeying, losing}, return_when=asyncio.FIRST_COMPLETED)
        if obeying.done():
            obeying.result()
            return
        await _say(writer, Answer(LAST_WORDS, failure=Failure.of(WorkerDied(losing.result()))))
        await host.close()


async def _obey(host: Host, listener: Listener, calls: AsyncIterator[bytes], writer: FrameWriter) -> None:
    running: set[asyncio.Task[None]] = set()

    async def reply(work: Awaitable[Answer]) -> None:
        writer.write(encode(await work))
        await writer.drain()

    async for frame in calls:
        call = msgspec.msgpack.decode(frame, type=Call)
        if call.method == "__stop__":
            listener.close()
            await host.close()
            await _say(writer, Answer(call.number))
            return
        work = _listen(listener, call) if call.method == "__listen__" else answer(host, call)
        task = asyncio.create_task(reply(work))
        running.add(task)
        task.add_done_callback(running.discard)


async def _say(writer: FrameWriter, said: Answer) -> None:
    """At once."""
    writer.write(encode(said))
    writer.flush()
    await writer.drain()


async def _listen(listener: Listener, call: Call) -> Answer:
    """Begin to take calls of other workers at the path in the call; the address."""
    try:
        (path,) = (msgspec.msgpack.decode(raw, type=str) for raw in call.arguments)
        return Answer(call.number, msgspec.Raw(encode(await listener.open(path))))
    except Exception as error:
        return Answer(call.number, failure=Failure.of(error))


def main() -> None:
    """Entry of a worker process: `python -m rollart.data.worker FD`."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    code = 0
    try:
        asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
    except ConnectionError:
        code = 3
    except Exception:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    if code == 3 and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # nobody else is left to end what environments started
    os._exit(code)  # threads that hang in an environment must not keep the process


if __name__ == "__main__":
    main()
