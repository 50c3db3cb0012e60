"""Results of other threads on their way to an event loop: many arrive with one wake-up.

A thread that wakes the loop for each result hands over the interpreter lock in the middle of its work, and with
hundreds of threads that costs more than their work. Invariant: every result arrives once, in the order of completion.
What this file leaves out: the threads (`tasks/lane.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Arrivals:
    """For one event loop."""

    def __init__(self) -> None:
        self._done: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._is_called = False

    async def wait(self, future: Future[T]) -> T:
        """The result of `future`; whoever is cancelled here cancels it, if it has not begun."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: self._arrive(loop, waiter, done))
        try:
            return await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _arrive(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        """In any thread. What is appended before `_take` lowers the flag, `_take` finds; later ones call it again."""
        self._done.append((waiter, done))
        if not self._is_called and not loop.is_closed():
            self._is_called = True
            loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_called = False
        while self._done:
            waiter, done = self._done.popleft()
            if waiter.done():
                continue
            try:
                waiter.set_result(done.result())
            except CancelledError:
                waiter.cancel()
            except BaseException as error:
                waiter.set_exception(error)
