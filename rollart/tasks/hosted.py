"""An environment object with the lane it lives on: every call returns a future at once.

Invariant: all calls to the object, its constructor and `close` included, come from one thread, one at a time, and each
future ends in a checked reply or an `EnvError`. What this file leaves out: waiting, time limits and reuse, which differ
between a worker (`data/environment.py`) and warm-up play (`warmup.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from rollart.errors import EnvError
from rollart.protocols import Env, SupportsWarmup
from rollart.tasks.lane import Lane
from rollart.tasks.replies import reset_reply, step_reply
from rollart.types import EnvReply

T = TypeVar("T")


class HostedEnv:
    """One environment of task `task`, built by `make` at its first reset."""

    def __init__(self, task: str, make: Callable[[], Env]) -> None:
        self.task = task
        self._make = make
        self._env: Env | None = None
        self._lane = Lane(f"environment of {task}")
        self._last: Future[Any] | None = None
        self.cpu_s = 0.0
        """CPU seconds that its calls took in its thread, up to the last one that ended."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is running or queued."""
        return self._last is not None and not self._last.done()

    def reset(self, seed: int) -> Future[EnvReply]:
        """Begin the episode of `seed`."""
        what = f"reset of task {self.task!r}"
        return self._submit(what, lambda: reset_reply(self._built().reset(seed), what))

    def step(self, action: str) -> Future[EnvReply]:
        """Apply an action."""
        what = f"step of task {self.task!r}"
        return self._submit(what, lambda: step_reply(self._built().step(action), what))

    def sample_action(self, rng: random.Random) -> Future[str]:
        """A random action of an environment that supports it."""
        what = f"sample_action of task {self.task!r}"
        return self._submit(what, lambda: str(cast(SupportsWarmup, self._built()).sample_action(rng)))

    def retire(self) -> Future[None]:
        """Close the environment after what is still running; without waiting, a hung one is thereby abandoned."""
        closing = self._submit(f"close of task {self.task!r}", self._close)
        self._lane.end()
        return closing

    def _submit(self, what: str, call: Callable[[], T]) -> Future[T]:
        future = self._lane.submit(EnvError, what, self._timed, call)
        self._last = future
        return future

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return call()
        finally:
            self.cpu_s += time.thread_time() - began

    def _built(self) -> Env:
        if self._env is None:
            self._env = self._make()
        return self._env

    def _close(self) -> None:
        close = getattr(self._env, "close", None)
        if callable(close):
            close()
