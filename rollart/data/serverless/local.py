"""`local://module:function`: an elastic pool of processes on this machine, from none to a limit and back to none.

A call takes the process that ended its last call most recently, so that the others grow idle and end; without a free
one a process is started, up to the limit; beyond it calls wait in order. Calls that are so short that waking a process
costs more than they do are given to a process several at a time; it serves them one by one.
Invariants: one that is dying or dead is never counted as capacity; a call that had not begun when its process died
goes to another; `close` leaves nothing behind. What this file leaves out: a process (`function_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque

import msgspec

from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.function_process import FunctionProcess, NotBegun
from rollart.errors import EndpointError, FunctionError, FunctionTimeout
from rollart.resource.devices import detect

START_TIMEOUT_S = 60.0
"""Python, and the imports of the function's module."""
MOST_AT_ONCE = 16
AT_ONCE_S = 0.005
"""A process is given as many calls at once as take about so long, MOST_AT_ONCE at most, and always one."""
SMOOTHING = 0.2
"""Weight of a new call in the average of what calls take."""

encode = msgspec.msgpack.encode


class LocalPool:
    """`Endpoint` over processes of this machine."""

    media: Media = "msgpack"
    remote = False

    def __init__(self, url: str, options: EndpointOptions) -> None:
        target = url.removeprefix("local://")
        self.max_processes = options.max_concurrency or detect().num_cores
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
        self._free: deque[FunctionProcess] = deque()
        self._waiting: deque[asyncio.Future[FunctionProcess]] = deque()
        self._processes: set[FunctionProcess] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._ended_s = 0.0
        self._run_s: float | None = None
        self._closed = False

    @property
    def concurrency(self) -> int:
        """Calls that may be with the processes at once."""
        return self.max_processes * self._at_once

    @property
    def _at_once(self) -> int:
        return 1 if self._run_s is None else max(1, min(MOST_AT_ONCE, int(AT_ONCE_S / self._run_s)))

    def capacity(self) -> Capacity:
        """What is alive, and the seconds of all that ever was."""
        now = asyncio.get_running_loop().time()
        alive = sum(now - process.born for process in self._processes)
        return Capacity(len(self._processes), self._ended_s + alive)

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:  # noqa: ARG002 - delivered once anyway
        """Run one call; the time limit begins with its turn on a process."""
        loop = asyncio.get_running_loop()
        asked, request = loop.time(), encode((timeout_s, msgspec.Raw(body)))
        while True:
            process = await self._take()
            cold, process.calls = not process.calls, process.calls + 1
            try:
                reply = await process.call(request, timeout_s)
                break
            except NotBegun:
                continue
            except TimeoutError:
                raise FunctionTimeout(
                    f"{self._target} did not answer within {timeout_s:g} s; its process was ended"
                ) from None
            finally:
                self._give_back(process)
        self._run_s = reply.run_s if self._run_s is None else self._run_s + SMOOTHING * (reply.run_s - self._run_s)
        return Answer(reply.body, cold, reply.began - asked, reply.run_s, reply.run_s)

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
    async def _take(self) -> FunctionProcess:
        if self._closed:
            raise EndpointError(f"{self._target}: its pool was closed")
        while self._free:
            process = self._free.pop()
            process.rest()
            if process.alive:
                process.load += 1
                return process
        future: asyncio.Future[FunctionProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._grow()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # handed over in the same moment
            raise

    def _give_back(self, process: FunctionProcess) -> None:
        process.load -= 1
        if process.alive and not self._closed and process.load <= self._at_once // 2:
            self._offer(process)
        self._grow()

    def _offer(self, process: FunctionProcess) -> None:
        """Give it its share of the calls that wait, or none and it is free."""
        share = min(self._at_once, -(-len(self._waiting) // self.max_processes))
        while self._waiting and process.load < max(1, share):
            if not (future := self._waiting.popleft()).done():
                process.load += 1
                future.set_result(process)
        if not process.load:
            self._free.append(process)
            process.tire(self._idle_s, self._retire)

    def _retire(self, process: FunctionProcess) -> None:
        """Nobody needed it for a while."""
        with contextlib.suppress(ValueError):  # it was taken in the same moment
            self._free.remove(process)
            process.kill()

    def _grow(self) -> None:
        """Start processes for those who wait, up to the limit."""
        alive = sum(process.alive for process in self._processes)
        room = self.max_processes - alive - len(self._starting)
        if self._closed or room <= 0:
            return  # before counting who waits, as a burst may be long
        waiting = sum(not future.done() for future in self._waiting)
        for _ in range(min(waiting - len(self._starting), room)):
            task = asyncio.create_task(self._start(), name=f"start {self._target}")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        process: FunctionProcess | None = None
        try:
            process = await FunctionProcess.launch(self._died)
            self._processes.add(process)
            fault = (await process.call(self._first, START_TIMEOUT_S)).body
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

    def _died(self, process: FunctionProcess) -> None:
        self._processes.discard(process)
        self._ended_s += asyncio.get_running_loop().time() - process.born
        if process in self._free:
            self._free.remove(process)
        self._grow()
