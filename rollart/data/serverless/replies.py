"""Calls by their idempotency key: each is executed once while it runs and as long as its answer is kept.

Invariants: what is kept is bounded in number and in bytes, and what still runs is never forgotten; a call that the
function did not get to answer (no place, a dead process) is forgotten at once, so that another delivery runs it.
What this file leaves out: how a call runs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from msgspec import Struct

from rollart.data.serverless.endpoint import Answer
from rollart.errors import FunctionTimeout

KEYS_KEPT = 8192
BYTES_KEPT = 64 << 20


class Call(Struct, frozen=True):
    """The event as MessagePack, the key of the call ("": none), and its time limit."""

    event: bytes
    key: str
    timeout_s: float


class Refused(Exception):
    """A call that is turned away: the status, a word for programs, a sentence, headers."""

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})


class Replies:
    """The tasks of calls, by key."""

    def __init__(self, execute: Callable[[Call], Coroutine[Any, Any, Answer]]) -> None:
        self._execute = execute
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._bytes = 0

    def task(self, call: Call) -> asyncio.Task[Answer]:
        """The call's execution: a new one, or the one that its key has. Raises Refused."""
        if not call.key:
            return asyncio.create_task(self._execute(call))
        digest = hashlib.sha256(call.event).digest()
        if (known := self._known.get(call.key)) is not None:
            if known.digest != digest:
                raise Refused(409, "KeyReused", "this Idempotency-Key came with another event before")
            self._known.move_to_end(call.key)
            return known.task
        task = asyncio.create_task(self._execute(call))
        self._known[call.key] = known = _Known(digest, task)
        task.add_done_callback(lambda _: self._ended(call.key, known))
        return task

    def _ended(self, key: str, known: _Known) -> None:
        error = None if known.task.cancelled() else known.task.exception()
        if known.task.cancelled() or (error is not None and not isinstance(error, FunctionTimeout)):
            del self._known[key]
            return
        known.size = len(key) + (len(known.task.result().body) if error is None else 0)
        self._bytes += known.size
        self._forget()

    def _forget(self) -> None:
        for key, known in list(self._known.items()) if self._crowded() else []:
            if not self._crowded():
                break
            if known.task.done():
                del self._known[key]
                self._bytes -= known.size

    def _crowded(self) -> bool:
        return len(self._known) > KEYS_KEPT or self._bytes > BYTES_KEPT


class _Known(Struct):
    digest: bytes
    task: asyncio.Task[Answer]
    size: int = 0
