"""The inside of a Ray actor: the same object and the same bytes as in a local worker process.

Its output goes to the run's log folder where the node has it (one machine, or a shared file system), else to Ray's own
log folder on that node. Invariants: what user code raises travels home inside the answer, never as Ray's exception, so
that an exception of Ray always means a fault of the actor; the constructor takes nothing and `hello` is the first call,
whatever the version, so that an actor of any rollart can say which it is of. What this file leaves out: the driver's
side (`ray_runtime.py`). It imports no Ray: an actor is an ordinary class.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rollart.data.handshake import greeting
from rollart.data.wire import Answer, Call, Failure, encode
from rollart.data.worker import Host, answer, build


class Order(Struct):
    """What an actor is to build: `target` and `kwargs` as of `Runtime.spawn`.

    folder: the driver's, from which targets are imported and relative paths count. log: the worker's log file.
    environ: variables to set before the object is built.
    """

    target: str
    kwargs: dict[str, Any]
    folder: str
    log: str
    environ: dict[str, str]


class Actor:
    """Holds a worker's object; its methods run on the actor's event loop."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._built = asyncio.Event()

    async def hello(self) -> bytes:
        """The greeting of this node's rollart (`handshake.py`)."""
        return greeting()

    async def build(self, encoded: bytes) -> bytes:
        """Build the object of an encoded `Order`; an encoded `Answer`."""
        order = msgspec.msgpack.decode(encoded, type=Order)
        os.environ.update(order.environ)
        enter(order.folder)
        _write_to(order.log)
        try:
            host = Host(await asyncio.to_thread(build, order.target, order.kwargs))
            await host.start()
        except Exception as error:
            return encode(Answer(0, failure=Failure.of(error)))
        self._host = host
        self._built.set()
        return encode(Answer(0))

    async def call(self, method: str, arguments: bytes) -> bytes:
        """One call: a list of arguments in, an `Answer` out, both encoded."""
        assert self._host is not None, "called before it was built"
        values = msgspec.msgpack.decode(arguments, type=list[msgspec.Raw])
        return encode(await answer(self._host, Call(0, method, values)))

    async def close(self) -> None:
        """Let the object close what it holds."""
        if self._host is not None:
            await self._host.close()
        sys.stdout.flush()
        sys.stderr.flush()

    async def park(self) -> str:
        """Why the object cannot go on, once it says so; else the call fails when the actor is gone."""
        await self._built.wait()
        assert self._host is not None
        return await self._host.lost()


def enter(folder: str) -> None:
    """Work where the driver works, as far as this machine has that place."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _write_to(log: str) -> None:
    """Send output to the run's log, as a local worker does; another machine may not have the folder."""
    if not Path(log).parent.is_dir():
        return
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
