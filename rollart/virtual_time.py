"""An event loop whose time jumps to the next timer: hours of sleeping pass at once, and always in the same order.

Invariants: nothing but a timer moves the clock; callbacks that are due at one moment run in the order in which they
were asked for; nothing outside the loop is waited for, and what is handed to a thread is done at once, within no time.
So the same program gives the same order of events, bit for bit. Libraries that fake time for tests (such as looptime)
let threads and sockets have real time, which is not repeatable, and simloop wants a newer Python: hence this file.
What this file leaves out: pipes, sockets and subprocesses, which would need real time.

It stands on private parts of `asyncio.BaseEventLoop`: the queue `_ready`, and `_run_once`, which `run_forever` calls
until `_stopping` is set.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

FEW = 100
"""Cancelled timers that are not worth clearing out."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the program would hang."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when everybody sleeps."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_asked = 0
        self._num_cancelled = 0

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As of any loop."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As of any loop; of two timers of one moment the one that was asked for first goes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # on the heap, as asyncio's own loops say it
        self._num_asked += 1
        heappush(self._timers, (when, self._num_asked, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As of any loop."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a timer that is cancelled. Most never ring: they are limits of calls that end in time."""
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._num_cancelled += 1
        if self._num_cancelled > FEW + len(self._timers) // 2:
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapify(self._timers)
            self._num_cancelled = 0

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Any,  # noqa: ARG002
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Do it now, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """What is ready; when nothing is, what the next timers make ready."""
        ready = self._ready
        if not ready:
            self._jump()
        while ready and not self._stopping:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        """To the next timer that counts, and everything else of its moment."""
        timers, ready = self._timers, self._ready
        while timers and (not ready or timers[0][0] <= self._now):
            when, _, timer = heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._num_cancelled -= 1
            else:
                self._now = max(self._now, when)
                ready.append(timer)
        if not ready:
            raise Deadlock("every task waits, and no timer is set")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
