"""An engine in virtual time at the pace of a device class: batches as a real one, and says what each request took."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.errors import WorkerDied
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo

Pace = Callable[[int, int], float]
"""Seconds of a step, from its prompt tokens and its decoding requests."""


@dataclass
class _Job:
    request: GenRequest
    done: asyncio.Future[GenResult]
    added_s: float
    cached: int = 0
    tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class PacedEngine:
    """Implements `protocols.InferenceHandle`. `num_tokens`: length of an answer. Setting `dead` kills it."""

    name: str
    pace: Pace
    num_tokens: Callable[[GenRequest], int]
    slots: int = 16
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[str] = field(default_factory=list)
    _waiting: deque[_Job] = field(default_factory=deque)
    _cached: dict[str, int] = field(default_factory=dict)
    _loop: asyncio.Task[None] | None = None

    async def generate(self, request: GenRequest) -> GenResult:
        loop = asyncio.get_running_loop()
        job = _Job(request, loop.create_future(), loop.time())
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = loop.create_task(self._steps())
        dying = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait({job.done, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            raise WorkerDied(f"{self.name} was killed")
        return job.done.result()

    async def _steps(self) -> None:
        running: list[_Job] = []
        loop = asyncio.get_running_loop()
        while running or self._waiting:
            fresh = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.slots - len(running)))]
            for job in fresh:
                job.queue_s = loop.time() - job.added_s
                job.cached = self._cached.get(job.request.trajectory_id, 0)
            tokens = sum(len(job.request.prompt) - job.cached for job in fresh)
            seconds = self.pace(tokens, len(running))
            await asyncio.sleep(seconds)
            decode_s = min(seconds, self.pace(0, len(running))) if running else 0.0
            for job in running:
                job.decode_s += decode_s
            for job in fresh:
                job.prefill_s += (seconds - decode_s) * (len(job.request.prompt) - job.cached) / tokens
            running = [job for job in running + fresh if not self._ended(job)]

    def _ended(self, job: _Job) -> bool:
        job.tokens += 1
        if job.tokens < self.num_tokens(job.request):
            return False
        request, tokens = job.request, [7] * job.tokens
        self._cached[request.trajectory_id] = len(request.prompt) + job.tokens - 1
        self.served.append(request.tag)
        result = GenResult(
            request.request_id,
            tokens,
            [-1.0] * job.tokens,
            [0] * job.tokens,
            "stop",
            cached_tokens=job.cached,
            queue_s=job.queue_s,
            prefill_s=job.prefill_s,
            decode_s=job.decode_s,
        )
        if not job.done.done():
            job.done.set_result(result)
        return True

    async def abort(self, request_ids: list[str]) -> None: ...

    async def release(self, trajectory_ids: list[str]) -> None:
        for each in trajectory_ids:
            self._cached.pop(each, None)

    async def suspend(self) -> None: ...

    async def prefetch(self, version: int) -> None: ...

    async def update(self, version: int) -> int:
        return version

    async def stop(self) -> None: ...

    async def resume(self) -> None: ...

    async def logprobs(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def parameters(self) -> list[ParameterInfo]:
        return []

    async def stats(self) -> EngineStats:
        return EngineStats()
