"""The command loop around one engine, and the handle through which control reaches it (paper section 4).

A worker runs everything in one thread: a step is never interrupted, so every command (ADD, ABORT, SUSPEND, UPDATE,
RESUME) is handled exactly between two steps. With nothing to do it waits for a command and burns no time.

Invariants: every accepted `generate` ends exactly once: with its result, with its partial result after an abort, or
with GenerationError after an engine fault or at the close. Weights are read from the store while generation goes on,
in a thread of their own unless that is quick; an engine is given only a version that is whole, verified, of its own
model and no older than the one it holds.
Left out: choosing a worker (control) and starting its process (the runtime).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from rollart.data.engines import EngineFactory, create_engine
from rollart.errors import GenerationError, WeightsError, boundary
from rollart.protocols import FrozenTensors, WeightStore, WorkerHandle
from rollart.types import EngineStats, GenRequest, GenResult, Handoff, ParameterInfo

TURNS_BEFORE_STEP = 8
"""Turns of the event loop: a command passes through as many until its reply has left, and each costs microseconds. With
fewer it takes several steps, while a trainer waits for it; and the first step takes along what comes with a burst."""


class InferenceWorker:
    """What lives in an inference process. `engine`: a name of `data.engines`, or a factory of the caller's own.

    Raises ConfigError or GenerationError when the engine cannot be built.
    """

    def __init__(
        self, model_folder: str, engine: str | EngineFactory, engine_options: Mapping[str, Any], store: WeightStore
    ) -> None:
        self._engine = create_engine(engine, model_folder, engine_options)
        self._store = store
        self._model: list[ParameterInfo] | None = None
        self._futures: dict[str, asyncio.Future[GenResult]] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._fetching: tuple[int, asyncio.Task[FrozenTensors]] | None = None

    async def start(self) -> None:
        """Begin to step."""
        self._loop_task = asyncio.create_task(self._run(), name="engine steps")

    async def shutdown(self) -> None:
        """Stop stepping and fail whatever is still running."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        self._fail_all("the inference worker is closing")

    # -------------------------------------------------------------------------------------------------- commands
    async def generate(self, request: GenRequest) -> GenResult:
        """ADD; returns when the request has finished or was aborted. Raises GenerationError."""
        self._engine.add(request)
        return await self._outcome(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests; each `generate` returns its partial result. Unknown ids are ignored."""
        for request_id in request_ids:
            self._abort(request_id)

    async def release(self, trajectory_ids: list[str]) -> None:
        """Forget what the engine keeps of these trajectories between their turns."""
        for trajectory_id in trajectory_ids:
            self._engine.release(trajectory_id)

    async def suspend(self) -> None:
        """No step advances until `resume`."""
        self._engine.suspend()

    async def resume(self) -> None:
        """Let steps advance again."""
        self._engine.resume()
        self._wake.set()

    async def prefetch(self, version: int) -> None:
        """Read a published version into memory while generation goes on. Raises WeightsError."""
        await self._fetched(version)

    async def update(self, version: int) -> int:
        """Load a version, prefetched or not; the version that the engine says it holds then.

        Raises WeightsError, and before anything reached the engine the old weights stay.
        """
        held = self._engine.stats().version
        if version < held:
            raise WeightsError(f"version {version} is older than version {held}, which this engine holds")
        tensors = await self._fetched(version)
        self._fetching = None
        self._engine.update(version, tensors)
        self._updated()
        return self._engine.stats().version

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first, without any cache."""
        return self._engine.logprobs(tokens)

    async def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes that `update` expects."""
        return self._engine.parameters()

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats()

    # ------------------------------------------------------------------------------------------------------ loop
    async def _outcome(self, request_id: str) -> GenResult:
        """Of a request that the engine was just given; it is aborted when nobody waits for it any more."""
        future: asyncio.Future[GenResult] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._abort(request_id)
            raise

    def _updated(self) -> None:
        """The engine has just loaded a version."""

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            while self._engine.has_work():
                for _ in range(TURNS_BEFORE_STEP):
                    await asyncio.sleep(0)
                if self._engine.has_work():
                    self._step()
            await self._wake.wait()

    def _step(self) -> None:
        try:
            with boundary(GenerationError, "engine step"):
                results = self._engine.step()
        except GenerationError as error:
            self._fail_all(str(error))
            return
        for result in results:
            self._resolve(result)

    def _resolve(self, result: GenResult) -> None:
        future = self._futures.pop(result.request_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    def _abort(self, request_id: str) -> None:
        result = self._engine.abort(request_id)
        if result is not None:
            self._resolve(result)

    def _fail_all(self, cause: str) -> None:
        failed, self._futures = self._futures, {}
        for future in failed.values():
            if not future.done():
                future.set_exception(GenerationError(cause))
        for request_id in failed:
            self._engine.abort(request_id)

    # --------------------------------------------------------------------------------------------------- weights
    async def _fetched(self, version: int) -> FrozenTensors:
        """The tensors of a version: those being read already, or read now."""
        if self._fetching is None or self._fetching[0] != version:
            self._fetching = version, asyncio.create_task(self._fetch(version), name=f"fetch weights {version}")
        task = self._fetching[1]
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._fetching is not None and self._fetching[1] is task:
                self._fetching = None
            raise

    async def _fetch(self, version: int) -> FrozenTensors:
        """Beside the engine's steps; between two of them what is read sooner than a thread gets its turn."""
        model = self._model = self._model or self._engine.parameters()
        if self._store.quick(version):
            return FrozenTensors(self._store.fetch(version, model))
        return await asyncio.to_thread(lambda: FrozenTensors(self._store.fetch(version, model)))


class RemoteInference:
    """`protocols.InferenceHandle` over a running worker."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._worker.name

    async def generate(self, request: GenRequest) -> GenResult:
        """ADD; returns when the request has finished or was aborted."""
        return cast(GenResult, await self._worker.call("generate", request, returns=GenResult))

    async def decode(self, request: GenRequest, handoff: Handoff) -> GenResult:
        """ADD what another worker has read; as `generate`."""
        return cast(GenResult, await self._worker.call("decode", request, handoff, returns=GenResult))

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests; each `generate` returns its partial result."""
        await self._worker.call("abort", request_ids)

    async def release(self, trajectory_ids: list[str]) -> None:
        """Forget what is kept of trajectories between their turns."""
        await self._worker.call("release", trajectory_ids)

    async def suspend(self) -> None:
        """No step advances until `resume`."""
        await self._worker.call("suspend")

    async def prefetch(self, version: int) -> None:
        """Read a published version into memory while generation goes on."""
        await self._worker.call("prefetch", version)

    async def update(self, version: int) -> int:
        """Load a version; the one that the engine then holds."""
        return cast(int, await self._worker.call("update", version, returns=int))

    async def resume(self) -> None:
        """Let steps advance again."""
        await self._worker.call("resume")

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first."""
        return cast(list[float], await self._worker.call("logprobs", tokens, returns=list[float]))

    async def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes that `update` expects."""
        return cast(list[ParameterInfo], await self._worker.call("parameters", returns=list[ParameterInfo]))

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return cast(EngineStats, await self._worker.call("stats", returns=EngineStats))

    async def stop(self) -> None:
        """End the worker."""
        await self._worker.stop()


class RemotePrefill(RemoteInference):
    """`protocols.PrefillHandle` over a running worker."""

    async def prefill(self, request: GenRequest, so_far: GenResult, have: int) -> Handoff:
        """ADD for the next token; returns when there is one, or the request was aborted."""
        return cast(Handoff, await self._worker.call("prefill", request, so_far, have, returns=Handoff))
