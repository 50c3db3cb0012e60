"""Blocking calls from an event loop: each on a thread of its own, which serves again once its call has ended.

Invariant: nobody waits for a thread; one whose call outlives its time limit or its caller is abandoned, and ends with
that call. Being daemons, threads do not hold up the process's exit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rollart.errors import FunctionError, FunctionTimeout
from rollart.tasks.lane import Lane

T = TypeVar("T")


class Lanes:
    """As many threads as calls at once, and no fewer afterwards. `what` stands in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._idle: list[Lane] = []

    async def run(self, timeout_s: float, call: Callable[..., T], *args: Any) -> T:
        """The call's value. Raises FunctionError (its kinds as the call raised them), FunctionTimeout."""
        lane = self._idle.pop() if self._idle else Lane("function")
        future = lane.submit(FunctionError, self._what, call, *args)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except FunctionTimeout:
            raise
        except TimeoutError:
            raise FunctionTimeout(
                f"{self._what} did not answer within {timeout_s:g} s; its thread is abandoned"
            ) from None
        finally:
            if future.done():
                self._idle.append(lane)
            else:
                lane.end()

    def end(self) -> None:
        """Let the idle threads finish."""
        for lane in self._idle:
            lane.end()
        self._idle.clear()
