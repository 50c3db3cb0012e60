"""`local://module:function`: an elastic pool of processes on this machine, from none to a limit and back to none.

A call takes the process that ended its last call most recently, so that the others grow idle and end; without a free
one a process is started, up to the limit; beyond it calls wait in order. Invariants: a process serves one call at a
time; one that is dying or dead is never counted as capacity; a call that is cancelled or out of time ends its process
and what that started; `close` leaves nothing behind. What this file leaves out: the inside of a process (`child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable

import msgspec
import psutil

from rollart.data.serverless.endpoint import REPLY_BYTES, Answer, Capacity, EndpointOptions, Media
from rollart.errors import EndpointError, FunctionError, FunctionTimeout
from rollart.resource.devices import detect

HEADER = struct.Struct("!Q")
START_TIMEOUT_S = 60.0
"""Python, and the imports of the function's module."""

encode = msgspec.msgpack.encode


class LocalPool:
    """`Endpoint` over processes of this machine."""

    media: Media = "msgpack"
    remote = False

    def __init__(self, url: str, options: EndpointOptions) -> None:
        target = url.removeprefix("local://")
        self.concurrency = options.max_concurrency or detect().num_cores
        self._first = encode(
            {
                "target": target,
                "options": options.arguments,
                "path": [entry or os.getcwd() for entry in sys.path],
                "memory_bytes": options.memory_bytes,
            }
        )
        self._idle_s = options.idle_s
        self._target = target
        self._free: deque[_Process] = deque()
        self._waiting: deque[asyncio.Future[_Process]] = deque()
        self._processes: set[_Process] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._ended_s = 0.0
        self._closed = False

    def capacity(self) -> Capacity:
        """What is alive, and the seconds of all that ever was."""
        now = asyncio.get_running_loop().time()
        alive = sum(now - process.born for process in self._processes)
        return Capacity(len(self._processes), self._ended_s + alive)

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:  # noqa: ARG002 - delivered once anyway
        """Run one call; the time limit begins when a process takes it."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        process = await self._take()
        began, cold, healthy = loop.time(), not process.calls, False
        process.calls += 1
        try:
            async with asyncio.timeout(timeout_s):
                reply = await process.call(encode((timeout_s, msgspec.Raw(body))))
            healthy = True
        except TimeoutError:
            raise FunctionTimeout(
                f"{self._target} did not answer within {timeout_s:g} s; its process was ended"
            ) from None
        finally:
            self._give_back(process, healthy)
        return Answer(reply, cold, began - asked, run := loop.time() - began, run)

    async def close(self) -> None:
        """End all processes; calls that wait fail."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        for future in self._waiting:
            if not future.done():
                future.set_exception(EndpointError(f"{self._target}: its pool was closed"))
        for process in list(self._processes):
            process.kill()
        while self._processes or self._starting:
            await asyncio.wait([*self._starting, *(process.death for process in self._processes)])

    # ---------------------------------------------------------------------------------------------------- who is free
    async def _take(self) -> _Process:
        if self._closed:
            raise EndpointError(f"{self._target}: its pool was closed")
        while self._free:
            process = self._free.pop()
            process.rest()
            if process.alive:
                return process
        future: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._grow()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result(), healthy=True)  # handed over in the same moment
            raise

    def _give_back(self, process: _Process, healthy: bool) -> None:
        if not healthy:
            process.kill()
        elif process.alive and not self._closed:
            self._offer(process)
        self._grow()

    def _offer(self, process: _Process) -> None:
        while self._waiting:
            if not (future := self._waiting.popleft()).done():
                future.set_result(process)
                return
        self._free.append(process)
        process.tire(self._idle_s, self._retire)

    def _retire(self, process: _Process) -> None:
        """Nobody needed it for a while."""
        with contextlib.suppress(ValueError):  # it was taken in the same moment
            self._free.remove(process)
            process.kill()

    def _grow(self) -> None:
        """Start processes for those who wait, up to the limit."""
        alive = sum(process.alive for process in self._processes)
        room = self.concurrency - alive - len(self._starting)
        if self._closed or room <= 0:
            return  # before counting who waits, as a burst may be long
        waiting = sum(not future.done() for future in self._waiting)
        for _ in range(min(waiting - len(self._starting), room)):
            task = asyncio.create_task(self._start(), name=f"start {self._target}")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        process: _Process | None = None
        try:
            process = await _Process.launch(self._died)
            self._processes.add(process)
            async with asyncio.timeout(START_TIMEOUT_S):
                fault = await process.call(self._first)
            if fault:
                raise FunctionError(f"{self._target} cannot be loaded: {fault.decode()}")
        except (EndpointError, FunctionError, OSError, TimeoutError) as error:
            if process is not None:
                process.kill()
            self._fail_one(error)
        except asyncio.CancelledError:
            if process is not None:
                process.kill()
            raise
        else:
            self._offer(process)

    def _fail_one(self, error: Exception) -> None:
        """A process that could not start costs the call that waits longest, which may try again."""
        if not isinstance(error, EndpointError | FunctionError):
            error = EndpointError(f"{self._target}: no process could be started: {type(error).__name__}: {error}")
        while self._waiting:
            if not (future := self._waiting.popleft()).done():
                future.set_exception(error)
                return

    def _died(self, process: _Process) -> None:
        self._processes.discard(process)
        self._ended_s += asyncio.get_running_loop().time() - process.born
        if process in self._free:
            self._free.remove(process)
        self._grow()


class _Process:
    """One process: alive until it is killed here or seen to be dead."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lifeline: int,
    ) -> None:
        self.calls = 0
        self.alive = True
        self.born = asyncio.get_running_loop().time()
        self.death: asyncio.Task[None]
        self._process = process
        self._reader = reader
        self._writer = writer
        self._lifeline = lifeline
        self._tired: asyncio.TimerHandle | None = None

    @classmethod
    async def launch(cls, died: Callable[[_Process], None]) -> _Process:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        their_lifeline, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollart.data.serverless.child", str(theirs.fileno()), str(their_lifeline)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), their_lifeline],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path_of_this_package()},
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(their_lifeline)
        reader, writer = await asyncio.open_connection(sock=ours)
        made = cls(process, reader, writer, lifeline)
        made.death = asyncio.create_task(made._watch(died), name=f"function process {process.pid}")
        return made

    async def call(self, request: bytes) -> bytes:
        """One frame there, one back. Raises EndpointError when the process dies under it."""
        try:
            self._writer.write(HEADER.pack(len(request)) + request)
            await self._writer.drain()
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > REPLY_BYTES:
                raise FunctionError(f"a reply of {size:,} bytes is not read; the limit is {REPLY_BYTES:,}")
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            self.kill()
            raise EndpointError(
                f"its process {self._process.pid} ended under the call ({await self._last_words()})"
            ) from None

    def tire(self, idle_s: float, then: Callable[[_Process], None]) -> None:
        """From now on it does nothing."""
        self._tired = asyncio.get_running_loop().call_later(idle_s, then, self)

    def rest(self) -> None:
        """It works again."""
        if self._tired is not None:
            self._tired.cancel()

    def kill(self) -> None:
        """End it with all that it started. No capacity any more, from this moment on."""
        if self.alive:
            self._over()
            kill_tree(self._process.pid)

    def _over(self) -> None:
        self.alive = False
        self.rest()

    async def _watch(self, died: Callable[[_Process], None]) -> None:
        await self._process.wait()
        self._over()
        kill_group(self._process.pid)  # what it started may live on; its own number may be another's by now
        os.close(self._lifeline)
        self._writer.close()
        died(self)

    async def _last_words(self) -> str:
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def kill_tree(pid: int) -> None:
    """End a process' group and all its descendants, whatever session they have made for themselves.

    It is a subreaper (`child.py`), so what lost its parent is among them.
    """
    with contextlib.suppress(psutil.Error):
        for descendant in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                descendant.kill()
    kill_group(pid)


def kill_group(pid: int) -> None:
    """End what is left of a process' group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _path_of_this_package() -> str:
    import rollart

    ours = os.path.dirname(os.path.dirname(os.path.abspath(rollart.__file__)))
    theirs = os.environ.get("PYTHONPATH")
    return f"{ours}{os.pathsep}{theirs}" if theirs else ours
