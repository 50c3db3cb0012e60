"""`ray://module:function`: each call is a task of a Ray cluster, on one core of whichever node has it free.

A task answers twice: once when it has a process, which is when its time limit begins, and once with the reply.
Invariants: a call that is cancelled or out of time ends its task, by force; the cluster is the one of RAY_ADDRESS, or
the one that this process uses already, and is left as it was found; tasks carry MessagePack bytes, and Ray moves them.
What this file leaves out: the connection (`data/ray_runtime.py`); how many processes there are, and the end of what a
function has started besides, which are Ray's affair.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from rollart.data.ray_actor import enter
from rollart.data.ray_runtime import BULK_BYTES, Connection
from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.handler import Handler, make_handler
from rollart.data.targets import named
from rollart.errors import ConfigError, EndpointError, FunctionError, FunctionTimeout, ResourceError

CONCURRENCY = 256
"""Tasks at once, running or waiting for a core."""

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


class RayEndpoint:
    """`Endpoint` over Ray tasks. Raises ConfigError without ray.

    `memory_bytes` is what Ray's accounting sets aside for each task.
    """

    media: Media = "msgpack"
    remote = True

    def __init__(self, url: str, options: EndpointOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError('ray:// needs the extra: pip install "rollart[ray]"')
        self.concurrency = options.max_concurrency or CONCURRENCY
        self._target = url.removeprefix("ray://")
        self._arguments = encode(options.arguments)
        self._memory = {"memory": options.memory_bytes} if options.memory_bytes else {}
        self._opening: asyncio.Task[None] | None = None
        self._ray: Any = None
        self._task: Any = None

    def capacity(self) -> Capacity:
        """Nothing of its own: the cluster's cores are its own before and after a call."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:  # noqa: ARG002 - delivered once anyway
        """Run one task; the time limit begins when a process takes it."""
        await self._opened()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        payload = await asyncio.to_thread(self._ray.put, body) if len(body) > BULK_BYTES else body
        answers, finished = self._task.remote(self._target, self._arguments, os.getcwd(), payload), False
        try:
            cold = await self._next(answers)
            began = loop.time()
            async with asyncio.timeout(timeout_s):
                fault, reply = await self._next(answers)
            finished = True
        except TimeoutError:
            raise FunctionTimeout(f"{self._target} did not answer within {timeout_s:g} s; its task was ended") from None
        finally:
            if not finished:
                self._ray.cancel(answers, force=True)
        if fault:
            raise FunctionError(f"{self._target} cannot be loaded: {fault}")
        return Answer(reply, cold, began - asked, loop.time() - began)

    async def close(self) -> None:
        """Let go of the cluster. One that this process started ends with its last user."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._ray is not None:
            ray, self._ray = self._ray, None
            await asyncio.to_thread(Connection.leave, ray)

    # ------------------------------------------------------------------------------------------------------ inside
    async def _opened(self) -> None:
        """Connect with the first call. Raises EndpointError when the cluster cannot be reached."""
        if self._opening is None or (self._opening.done() and self._ray is None):
            self._opening = asyncio.create_task(asyncio.to_thread(self._open), name="connect to Ray")
        try:
            await asyncio.shield(self._opening)
        except ResourceError as error:
            raise EndpointError(f"{self._target}: {error}") from error

    def _open(self) -> None:
        ray = Connection.enter()
        options = {"num_cpus": 1, "max_retries": 0, "num_returns": "streaming", **self._memory}
        self._task = ray.remote(**options)(run).options(name=self._target)
        self._ray = ray

    async def _next(self, answers: Any) -> Any:
        """The task's next answer. Raises EndpointError when it died."""
        try:
            return await (await anext(answers))
        except self._ray.exceptions.RayTaskError as error:
            raise FunctionError(f"{self._target} cannot be run there: {_short(error)}") from error
        except (self._ray.exceptions.RayError, StopAsyncIteration) as error:
            raise EndpointError(f"its task ended under the call: {_short(error)}") from error


def run(target: str, arguments: bytes, folder: str, body: bytes) -> Iterator[Any]:
    """The task: whether its process is new, then why it cannot serve, or nothing, with the encoded reply."""
    yield not _handler.cache_info().currsize
    try:
        handler = _handler(target, arguments, folder)
    except BaseException as error:  # a module may do anything, sys.exit included
        yield f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode(), b""
        return
    yield "", encode(handler(decode(body), None))


@functools.cache
def _handler(target: str, arguments: bytes, folder: str) -> Handler:
    """Made once per process, which serves many tasks."""
    enter(folder)
    return make_handler(named(target, "reward"), decode(arguments))


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
