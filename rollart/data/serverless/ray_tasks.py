"""`ray://module:function`: each call is a task of a Ray cluster, on one core of whichever node has it free.

A task answers twice: once when it has a process, which is when its time limit begins, and once with the reply.
Invariants: a call that is cancelled or out of time ends its task, by force; the cluster is the one of RAY_ADDRESS, or
the one that this process uses already, and is left as it was found; tasks carry MessagePack bytes, and Ray moves them.
What this file leaves out: the connection (`data/ray_runtime.py`); how many processes there are, and the end of what a
function has started besides, which are Ray's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from rollart.data.handshake import check_greeting, greeting
from rollart.data.ray_actor import enter
from rollart.data.ray_runtime import Connection, address_of
from rollart.data.ray_worker import BULK_BYTES
from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.handler import Handler, make_handler
from rollart.data.targets import named
from rollart.errors import ConfigError, EndpointError, FunctionError, FunctionTimeout, ResourceError, to_install

CONCURRENCY = 256
"""Tasks at once, running or waiting for a core."""

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


class RayEndpoint:
    """`Endpoint` over Ray tasks. Raises ConfigError without ray, or for an address that cannot serve.

    `memory_bytes` is what Ray's accounting sets aside for each task.
    """

    media: Media = "msgpack"
    remote = True

    def __init__(self, url: str, options: EndpointOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"ray:// needs an extra; {to_install('ray')}")
        address_of(os.environ)
        self.concurrency = options.max_concurrency or CONCURRENCY
        self._target = url.removeprefix("ray://")
        self._arguments = encode(options.arguments)
        self._memory = {"memory": options.memory_bytes} if options.memory_bytes else {}
        self._opening: asyncio.Task[tuple[Any, Any]] | None = None

    def capacity(self) -> Capacity:
        """Nothing of its own: the cluster's cores are its own before and after a call."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:  # noqa: ARG002 - delivered once anyway
        """Run one task; the time limit begins when a process takes it."""
        ray, task = await self._opened()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        payload = await asyncio.to_thread(ray.put, body) if len(body) > BULK_BYTES else body
        answers = task.remote(greeting(), self._target, self._arguments, os.getcwd(), payload)
        finished = False
        try:
            cold = await self._next(ray, answers)
            began = loop.time()
            async with asyncio.timeout(timeout_s):
                fault, reply = await self._next(ray, answers)
            finished = True
        except TimeoutError:
            raise FunctionTimeout(f"{self._target} did not answer within {timeout_s:g} s; its task was ended") from None
        finally:
            if not finished:
                ray.cancel(answers, force=True)
        if fault:
            raise FunctionError(f"{self._target} cannot be loaded: {fault}")
        return Answer(reply, cold, began - asked, loop.time() - began)

    async def close(self) -> None:
        """Let go of the cluster. One that this process started ends with its last user."""
        opening, self._opening = self._opening, None
        if opening is not None:
            with contextlib.suppress(ResourceError):
                await asyncio.to_thread(Connection.leave, (await opening)[0])

    # ------------------------------------------------------------------------------------------------------ inside
    async def _opened(self) -> tuple[Any, Any]:
        """The module `ray` and the task, from the first call on. Raises EndpointError when there is no such cluster."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(asyncio.to_thread(self._open), name="connect to Ray")
        try:
            return await asyncio.shield(self._opening)
        except ResourceError as error:
            raise EndpointError(f"{self._target}: {error}") from error

    def _open(self) -> tuple[Any, Any]:
        ray = Connection.enter()
        task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming", **self._memory)(run)
        return ray, task.options(name=self._target)

    async def _next(self, ray: Any, answers: Any) -> Any:
        """The task's next answer. Raises EndpointError when it died."""
        try:
            return await (await anext(answers))
        except ray.exceptions.RayTaskError as error:
            raise FunctionError(f"{self._target} cannot be run there: {_short(error)}") from error
        except (ray.exceptions.RayError, StopAsyncIteration) as error:
            raise EndpointError(f"its task ended under the call: {_short(error)}") from error


def run(hello: bytes, target: str, arguments: bytes, folder: str, body: bytes) -> Iterator[Any]:
    """The task: whether its process is new, then why it cannot serve, or nothing, with the encoded reply.

    `hello`: the caller's greeting (`handshake.py`).
    """
    yield not _handler.cache_info().currsize
    try:
        check_greeting(hello, "the caller")
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
