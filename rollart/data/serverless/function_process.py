"""One process of the elastic pool, seen from the pool: calls are sent to it at once and answered one by one, in order.

Invariants: a call's time runs from its turn, which is the end of the call before it; one that is cancelled in its turn
or out of time ends the process and what that started; when a process dies, the call whose turn it was fails and those
behind it have not begun. What this file leaves out: who gets which process (`local.py`), its inside (`child.py`).
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
from typing import NamedTuple

import psutil

from rollart.data.serverless.endpoint import REPLY_BYTES
from rollart.data.wire import FrameWriter, frames
from rollart.errors import EndpointError, FunctionError, WorkerError

SECONDS = struct.Struct("!d")
LAST_REPLIES_S = 1.0
"""What a dead process had written is read within this time; what it started may hold its stream open for ever."""


class NotBegun(EndpointError):
    """The process died before the call had its turn."""


class Reply(NamedTuple):
    """What a call came to, when it had its turn in the loop's time, and the seconds that the process took."""

    body: bytes
    began: float
    run_s: float


class _Call:
    __slots__ = ("began", "reply", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.began = 0.0
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()


class FunctionProcess:
    """Alive until it is killed here or seen to be dead. `load`, `calls`: given to it now, and ever; the pool counts."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lifeline: int,
    ) -> None:
        self.load = self.calls = 0
        self.alive = True
        self.born = asyncio.get_running_loop().time()
        self.death: asyncio.Task[None]
        self._process = process
        self._reader = reader
        self._writer = writer
        self._out = FrameWriter(writer)
        self._lifeline = lifeline
        self._calls: deque[_Call] = deque()
        self._clock: asyncio.TimerHandle | None = None
        self._tired: asyncio.TimerHandle | None = None

    @classmethod
    async def launch(cls, died: Callable[[FunctionProcess], None]) -> FunctionProcess:
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

    async def call(self, request: bytes, timeout_s: float) -> Reply:
        """One frame there, one back; its time limit begins with its turn.

        Raises NotBegun, TimeoutError, EndpointError when the process dies under it, FunctionError for a reply that is
        too large.
        """
        if not self.alive:
            raise NotBegun(f"its process {self._process.pid} has ended")
        call = _Call(timeout_s)
        self._calls.append(call)
        if len(self._calls) == 1:
            self._next()
        self._out.write(request)
        try:
            return await call.reply
        except asyncio.CancelledError:
            if self._calls and self._calls[0] is call:
                self.kill()
            raise

    def tire(self, idle_s: float, then: Callable[[FunctionProcess], None]) -> None:
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
        self._stop_clock()

    # ------------------------------------------------------------------------------------------------ whose turn it is
    def _next(self) -> None:
        """The first call that has no reply begins; also one that nobody waits for any more, as it is sent."""
        call, loop = self._calls[0], asyncio.get_running_loop()
        call.began = loop.time()
        self._clock = loop.call_at(call.began + call.timeout_s, self._end_turn, TimeoutError("it did not answer"))

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    def _end_turn(self, fault: Exception) -> None:
        """The call whose turn it is fails, and the process with it."""
        if self._calls and not (reply := self._calls[0].reply).done():
            reply.set_exception(fault)
        self.kill()

    def _answered(self, frame: bytes) -> None:
        self._stop_clock()
        call = self._calls.popleft()
        if not call.reply.done():
            call.reply.set_result(Reply(frame[SECONDS.size :], call.began, *SECONDS.unpack_from(frame)))
        if self._calls:
            self._next()

    async def _listen(self) -> None:
        try:
            async for frame in frames(self._reader, REPLY_BYTES):
                self._answered(frame)
        except WorkerError as error:
            self._end_turn(FunctionError(f"its reply is not read: {error}"))
        except (OSError, IndexError, struct.error):  # it has closed the stream, or says what nobody asked
            self.kill()

    def _fail(self, cause: str) -> None:
        """Nobody answers any more."""
        fault = EndpointError(f"its process {self._process.pid} ended under the call ({cause})")
        while self._calls:
            if not (reply := self._calls.popleft().reply).done():
                reply.set_exception(fault)
            fault = NotBegun(f"its process {self._process.pid} ended before its turn ({cause})")

    async def _watch(self, died: Callable[[FunctionProcess], None]) -> None:
        listening = asyncio.create_task(self._listen())
        code = await self._process.wait()
        self._over()
        kill_group(self._process.pid)  # what it started may live on; its own number may be another's by now
        await asyncio.wait([listening], timeout=LAST_REPLIES_S)
        listening.cancel()
        os.close(self._lifeline)
        self._writer.close()
        died(self)
        self._fail(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}")


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
