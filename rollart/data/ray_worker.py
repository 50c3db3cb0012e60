"""A worker on Ray as its callers see it: one actor behind a `WorkerHandle`. Imports no Ray: it is handed the module.

Invariants: a call returns, raises what the object raised, or raises WorkerDied once the actor is gone; an actor that
Ray only cannot reach for a moment is not dead. What this file leaves out: where actors run (`ray_runtime.py`), and
their inside (`ray_actor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollart import __version__
from rollart.data.handshake import check_greeting
from rollart.data.ray_actor import Order
from rollart.data.runtime import last_output
from rollart.data.wire import Answer, encode
from rollart.errors import ResourceError, WorkerDied, WorkerError

BULK_BYTES = 64 << 10
"""Larger arguments go through the object store."""
STOP_TIMEOUT_S = 5.0
UNSURE_S = 60.0
"""How long an actor may be out of reach, all in all, before it counts as dead without a word of Ray's."""
UNSURE_LOOK_S = 0.5
BEGINNING = "creation task"
"""In Ray's words for an actor whose constructor failed."""


class RayWorker:
    """One actor, seen from the driver that owns it, or from another worker.

    ray: the module, connected. actor: its handle. unique: its name in the cluster. log: where its output goes, if that
    is known here. give_back: gives its place back.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        actor: Any,
        unique: str,
        log: Path | None,
        give_back: Callable[[], None] = lambda: None,
        owned: bool = True,
    ) -> None:
        self.name = name
        self._unique = unique
        self._owned = owned
        self._ray = ray
        self._actor = actor
        self._call = actor.call.remote
        self._log = log
        self._give_back = give_back
        self._lost = ray.exceptions.RayError
        self._raised = ray.exceptions.RayTaskError
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[str] = loop.create_future()
        self._watching = loop.create_task(self._watch(), name=f"watch {name}")

    async def greet(self, node: str) -> None:
        """Hear which rollart the actor is of. Raises ResourceError when it is another one, or none; WorkerDied."""
        try:
            theirs = await self._actor.hello.remote()
        except self._lost as error:
            if isinstance(error, self._raised) or BEGINNING in str(error):
                raise ResourceError(
                    f"worker {self.name}: {node} cannot begin it ({_last_line(error)}); has it the rollart "
                    f"{__version__} of this process, with its packages?"
                ) from error
            raise WorkerDied(f"worker {self.name}, first call: {self._described(error)}") from error
        check_greeting(theirs, f"worker {self.name}: {node}")

    async def build(self, order: Order) -> None:
        """Build the object. Raises what that raised."""
        await self._answer("__build__", self._actor.build.remote(encode(order)))

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the object in the actor."""
        if self._death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {self._death.result()}")
        payload: Any = encode(args)
        if len(payload) > BULK_BYTES:
            payload = await asyncio.to_thread(self._ray.put, payload)
        return msgspec.msgpack.decode(await self._answer(method, self._call(method, payload)), type=returns)

    async def address(self) -> str:
        """Where other workers reach it, by `peers.connect`."""
        return f"ray:{self._unique}"

    async def wait_dead(self) -> str:
        """The reason, once the actor is gone."""
        return await asyncio.shield(self._death)

    def bury(self, reason: str) -> None:
        """It is dead, or will be."""
        if not self._death.done():
            self._death.set_result(reason)

    async def stop(self, lost: bool = False) -> None:
        """Ask the object to close, then end the actor and give its place back.

        Who does not own it only lets go, as does everybody when there is nobody left to ask: the cluster is lost.
        """
        if not self._owned or lost:
            self._watching.cancel()
            self.bury("the connection was closed")
            return
        if not self._death.done():
            await self._end()
            self.bury("it was stopped")
        await asyncio.wait({self._watching}, timeout=STOP_TIMEOUT_S)
        self._watching.cancel()
        give_back, self._give_back = self._give_back, lambda: None
        give_back()

    # ------------------------------------------------------------------------------------------------------ inside
    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError, self._lost):
            await asyncio.wait_for(self._actor.close.remote(), STOP_TIMEOUT_S)
        self._ray.kill(self._actor)

    async def _answer(self, method: str, reference: Any) -> msgspec.Raw:
        """What an actor answered. Raises what it raised, or WorkerDied."""
        try:
            reply = msgspec.msgpack.decode(await reference, type=Answer)
        except self._raised as error:
            raise WorkerError(f"worker {self.name}, call {method}: {error}") from error
        except self._lost as error:
            raise WorkerDied(f"worker {self.name}, call {method}: {self._described(error)}") from error
        if reply.failure is not None:
            raise reply.failure.raised_by(self.name, method)
        return reply.result

    async def _watch(self) -> None:
        """Wait for the end of a call that fails with the actor, or returns when its object cannot go on.

        Out of reach is not dead yet: Ray fails the calls, and says a second later whether the actor's node is gone.
        """
        doubted = 0.0
        while True:
            try:
                self.bury(await self._actor.park.remote())
                if self._owned:
                    await self._end()
            except self._ray.exceptions.ActorUnavailableError as error:
                doubted += UNSURE_LOOK_S
                if doubted < UNSURE_S:
                    await asyncio.sleep(UNSURE_LOOK_S)
                    continue
                if self._owned:
                    self._ray.kill(self._actor)
                self.bury(self._described(error))
            except self._lost as error:
                self.bury(self._described(error))
            return

    def _described(self, error: BaseException) -> str:
        """Ray's words in short, and the last ones of the actor."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[:3] if len(lines) < 8 else [*lines[:2], lines[-1]]) + (
            last_output(self._log) if self._log else ""
        )


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
