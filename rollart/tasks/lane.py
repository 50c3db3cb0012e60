"""A lane: one daemon thread that makes calls into user code, one at a time, so that nobody else waits for them.

Invariant: a call's outcome is a result or an exception of the asked kind, whatever the user's code does, including
`sys.exit`. A lane whose call never returns is abandoned; being a daemon it does not hold up the process's exit.
A process that user code forked never gets past the call that forked it: it ends there, as at the end of a script.
An environment keeps its lane for life, so libraries that insist on one thread (SQLite, browsers) work.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollart.errors import RollartError, said

T = TypeVar("T")


class Lane:
    """One thread, started at once, ended by `end`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._has_ended = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, kind: type[RollartError], what: str, call: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a call. Its exceptions become `kind`, saying `what` was done, the cause and where it was raised."""
        future: Future[T] = Future()
        if self._has_ended:
            future.set_exception(kind(f"{what}: its thread has ended"))
            return future
        self._calls.put(lambda: _resolve(future, kind, what, call, args))
        return future

    def end(self) -> None:
        """Let the thread finish after the calls queued so far."""
        self._has_ended = True
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            if os.getpid() != self._process:
                os._exit(0)
            del call


def _resolve(
    future: Future[T], kind: type[RollartError], what: str, call: Callable[..., T], args: tuple[Any, ...]
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*args)
    except kind as error:
        future.set_exception(error)
    except BaseException as error:
        wrapped = kind(f"{what}: {type(error).__name__}: {said(error)}{_origin(error)}")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_result(result)


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without this file's own frame
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
