"""A barrier whose membership changes: environments of a batch step together (schedule "sync", paper section 7).

Invariant: `wait` lets everybody go once every member waits; a member that leaves, for whatever reason, never holds up
the others. What it leaves out: who the members are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Lockstep:
    """Members are named; joining and leaving twice is harmless."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._empty: list[asyncio.Future[None]] = []

    def join(self, member: str) -> None:
        """From now on the others wait for this one."""
        self._members.add(member)

    def leave(self, member: str) -> None:
        """The others no longer wait for this one."""
        self._members.discard(member)
        self._waiting.pop(member, None)
        self._let_go()

    async def wait(self, member: str) -> None:
        """Return when all members wait."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[member] = future
        self._let_go()
        try:
            await future
        finally:
            if self._waiting.get(member) is future:
                del self._waiting[member]

    async def all_left(self) -> None:
        """Return when there is no member."""
        if self._members:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._empty.append(future)
            await future

    def _let_go(self) -> None:
        if len(self._waiting) == len(self._members):
            _resolve(self._waiting.values())
            self._waiting = {}
        if not self._members:
            _resolve(self._empty)
            self._empty = []


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
