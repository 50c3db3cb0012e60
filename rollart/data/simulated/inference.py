"""SimulatedInference: the command loop around a simulated engine, in virtual time; and prefill on other devices.

It sleeps until the engine's next event and wakes for commands. What arrives at one moment is planned together.

With `prefill_peers` (prefill-decode disaggregation; paper section 6, and Zhong et al., DistServe, OSDI 2024) a request
    1  is read on a peer, which gives its first token: the peer that keeps the trajectory's earlier prompts, else the
       one with the least to read;
    2  crosses the "kv" link: all KV that is not kept here from the trajectory's last turn, each device its shard, one
       request after the other;
    3  is decoded here. What loses its KV, by an update or for want of room, begins again at 1 with what it has.
Peers are workers of their own, to which weights and suspensions come as to all others. Without a living peer the
engine does both itself.

Invariants: every accepted `generate` ends exactly once: with its result, with its partial result after an abort, or
with the error that the worker died of. `suspend` returns when no step is under way.
What this file leaves out: choosing a worker (control), and the engine's work (`engines/simulated`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from rollart.data.engines.simulated import SimulatedEngine
from rollart.data.simulated.device import Pace
from rollart.data.simulated.profile import Link
from rollart.data.simulated.store import SimulatedStore
from rollart.data.simulated.timeline import Timeline
from rollart.errors import ConfigError, RollartError, WorkerDied
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo


class SimulatedInference:
    """Has the methods of `data.inference.InferenceWorker`. `timeline` gets a track `name`.

    `links` needs "kv" where there are peers; otherwise ConfigError is raised with the first request.
    """

    def __init__(
        self,
        name: str,
        engine: SimulatedEngine,
        store: SimulatedStore,
        pace: Pace,
        links: Mapping[str, Link],
        prefill_peers: Sequence[SimulatedInference] = (),
        timeline: Timeline | None = None,
    ) -> None:
        self.name, self.engine = name, engine
        self.death: WorkerDied | None = None
        self.cut_tokens = 0
        """Generated for answers that nobody got: given up, or lost when this or a peer died."""
        self._store, self._pace, self._links, self._peers = store, pace, links, prefill_peers
        self._timeline = timeline
        if timeline is not None:
            engine.watch = partial(timeline.span, name)
        self._futures: dict[str, asyncio.Future[GenResult]] = {}
        self._still: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None
        self._awake = False
        self._fetching: tuple[int, asyncio.Task[None]] | None = None
        self._split: dict[str, SimulatedInference | None] = {}
        self._given_up: set[str] = set()
        self._peer_of: dict[str, SimulatedInference] = {}
        self._link_free_s = 0.0

    # -------------------------------------------------------------------------------------------------- commands
    async def generate(self, request: GenRequest) -> GenResult:
        """ADD; returns when the request has finished or was aborted. Raises GenerationError, WorkerDied."""
        if self._peers:
            return await self._generate_split(request)
        return await self.run(request)

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests; each `generate` returns its partial result. Unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self._split:
                self._given_up.add(request_id)
                if (peer := self._split[request_id]) is not None:
                    peer.cancel(request_id)
            self.cancel(request_id)

    async def release(self, trajectory_ids: list[str]) -> None:
        """Forget what is kept of these trajectories between their turns, here and at their peers."""
        now = asyncio.get_running_loop().time()
        for trajectory_id in trajectory_ids:
            self.engine.release(trajectory_id, now)
            if (peer := self._peer_of.pop(trajectory_id, None)) is not None:
                peer.engine.release(trajectory_id, now)

    async def suspend(self) -> None:
        """No step begins until `resume`; returns when the one under way has ended."""
        self.engine.suspend(asyncio.get_running_loop().time())
        await self._stillness()

    async def resume(self) -> None:
        """Let steps begin again."""
        self.engine.resume(asyncio.get_running_loop().time())
        self._wake()

    async def prefetch(self, version: int) -> None:
        """Pull a published version into host memory while generation goes on. Raises WeightsError."""
        await self._fetched(version)

    async def update(self, version: int) -> int:
        """Load a version, prefetched or not, and say it; no step runs meanwhile. Raises WeightsError: the old stay."""
        await self._fetched(version)
        self._fetching = None
        suspended = self.engine.suspended
        await self.suspend()
        await self._store.load(self._pace.num_devices)
        now = asyncio.get_running_loop().time()
        for result in self.engine.update(version, now):
            self._resolve(result)
        if not suspended:
            await self.resume()
        return self.engine.stats(now).version

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Zeros, as the simulated trainer answers."""
        return [0.0] * (len(tokens) - 1)

    async def parameters(self) -> list[ParameterInfo]:
        """None, as the simulated trainer holds."""
        return []

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats(asyncio.get_running_loop().time())

    def die(self, error: WorkerDied) -> None:
        """The process is gone: nothing ends any more, and all that waits is told so."""
        self.death = error
        if self._timer is not None:
            self._timer.cancel()
        now = asyncio.get_running_loop().time()
        for request_id, future in self._futures.items():
            result = self.engine.abort(request_id, now)
            self.cut_tokens += len(result.tokens) if result is not None else 0
            if not future.done():
                future.set_exception(error)
        for still in self._still:
            if not still.done():
                still.set_exception(error)
        self._futures.clear()
        self._still.clear()

    # ------------------------------------------------------------------------------------------------- one engine
    async def run(self, request: GenRequest, received: int = 0) -> GenResult:
        """One request on this engine, with `received` tokens of KV from another."""
        if self.death is not None:
            raise self.death
        loop = asyncio.get_running_loop()
        self.engine.add(request, loop.time(), received)
        future: asyncio.Future[GenResult] = loop.create_future()
        self._futures[request.request_id] = future
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.cut_tokens += len(future.result().tokens)
            self.cancel(request.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Abort one request on this engine, if it is there."""
        result = self.engine.abort(request_id, asyncio.get_running_loop().time())
        if result is not None:
            self._resolve(result)
            self._wake()

    def _resolve(self, result: GenResult) -> None:
        future = self._futures.pop(result.request_id, None)
        if future is not None and not future.done():
            future.set_result(result)
        else:
            self.cut_tokens += len(result.tokens)

    def _wake(self) -> None:
        """Look at the engine again when all commands of this moment are in."""
        if not self._awake and self.death is None:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Sleep until the engine's next event."""
        self._awake = False
        due_s = None if self.death is not None else self.engine.next_event()
        if due_s != self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s = due_s
            self._timer = None if due_s is None else asyncio.get_running_loop().call_at(due_s, self._tick)

    def _tick(self) -> None:
        """The engine's next event is there. Timers may be early by the clock's resolution."""
        assert self._due_s is not None
        now, self._due_s, self._timer = max(self._due_s, asyncio.get_running_loop().time()), None, None
        for result in self.engine.advance(now):
            self._resolve(result)
        for future in self._still:
            if not future.done():
                future.set_result(None)
        self._still.clear()
        if self._timeline is not None:
            stats = self.engine.stats(now)
            self._timeline.counter(f"{self.name} requests", {"running": stats.running, "waiting": stats.waiting}, now)
        self._look()

    async def _stillness(self) -> None:
        """Until the step under way, if any, has ended."""
        self._look()
        if self._due_s is not None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._still.append(future)
            await future

    async def _fetched(self, version: int) -> None:
        """Until a version is here: one that is on its way, or it is pulled now."""
        if self._fetching is None or self._fetching[0] != version:
            pulling = self._store.fetch(version, self._pace.num_devices)
            self._fetching = version, asyncio.create_task(pulling, name=f"fetch weights {version}")
        task = self._fetching[1]
        try:
            await asyncio.shield(task)
        except RollartError:
            if self._fetching is not None and self._fetching[1] is task:
                self._fetching = None
            raise

    # ----------------------------------------------------------------------------------------- prefill elsewhere
    async def _generate_split(self, request: GenRequest) -> GenResult:
        """Steps 1 to 3 of the life of a request with peers."""
        parts: list[GenResult] = []
        name, self._split[request.request_id] = request.request_id, None
        try:
            while True:
                part, peer = await self._prefill(_rest(request, parts))
                parts.append(part)
                if peer is None or part.finish_reason != "length" or self._complete(request, parts):
                    break
                version = peer.engine.version
                moved = await self._transfer(request, parts)
                if name in self._given_up:
                    parts.append(GenResult(name, [], [], [], "abort"))
                    break
                if version != self.engine.version:
                    continue
                parts.append(await self.run(_rest(request, parts), moved))
                if parts[-1].finish_reason != "abort" or name in self._given_up:
                    break
            if self.death is not None:
                raise self.death
            return _joined(parts)
        except (WorkerDied, asyncio.CancelledError):
            self.cut_tokens += sum(len(part.tokens) for part in parts)
            raise
        finally:
            del self._split[name]
            self._given_up.discard(name)

    def _complete(self, request: GenRequest, parts: Sequence[GenResult]) -> bool:
        """Whether nothing is left to generate, or there is no room for more."""
        made, size = sum(len(part.tokens) for part in parts), len(request.prompt)
        most = min(request.prompt[-1], request.sampling.max_tokens, self.engine.max_model_tokens - size)
        return made >= most

    async def _prefill(self, request: GenRequest) -> tuple[GenResult, SimulatedInference | None]:
        """The first token, and the peer that gave it; the whole answer, and None, when there is no peer left."""
        while (peer := self._choose_peer(request.trajectory_id)) is not None:
            self._split[request.request_id] = self._peer_of[request.trajectory_id] = peer
            try:
                return await peer.run(replace(request, sampling=replace(request.sampling, max_tokens=1))), peer
            except WorkerDied:
                continue
            finally:
                self._split[request.request_id] = None
        return await self.run(request), None

    def _choose_peer(self, trajectory_id: str) -> SimulatedInference | None:
        """The living peer that keeps most for the trajectory, else that with the least to read."""
        known = self._peer_of.get(trajectory_id)
        if known is not None and known.death is None and known.engine.kept_tokens(trajectory_id):
            return known
        living = [peer for peer in self._peers if peer.death is None]
        current = [peer for peer in living if peer.engine.version == self.engine.version]
        return min(current or living, key=lambda peer: peer.engine.unread_tokens, default=None)

    async def _transfer(self, request: GenRequest, parts: Sequence[GenResult]) -> int:
        """Move the KV of a request that is not kept here; how many tokens that was."""
        link = self._links.get("kv")
        if link is None:
            raise ConfigError("profile: links.kv is missing; prefill on other devices needs it")
        tokens = len(request.prompt) + sum(len(part.tokens) for part in parts) - 1
        moved = max(1, tokens - self.engine.kept_tokens(request.trajectory_id))
        now = asyncio.get_running_loop().time()
        num_bytes = moved * self._pace.model.kv_bytes_per_token / self._pace.num_devices
        self._link_free_s = max(now, self._link_free_s) + num_bytes / link.bytes_per_s
        await asyncio.sleep(self._link_free_s + link.latency_s - now)
        return moved


def _rest(request: GenRequest, parts: Sequence[GenResult]) -> GenRequest:
    """What is still to be generated, after the tokens that there are."""
    made = sum(len(part.tokens) for part in parts)
    if not made:
        return request
    prompt = [0] * (len(request.prompt) + made - 1)
    prompt.append(request.prompt[-1] - made)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - made)
    return replace(request, prompt=prompt, sampling=sampling)


def _joined(parts: Sequence[GenResult]) -> GenResult:
    """The parts of one answer as one: times add up, and what was found kept counts for the prompt as it came."""
    return GenResult(
        request_id=parts[0].request_id,
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        versions=[version for part in parts for version in part.versions],
        finish_reason=parts[-1].finish_reason,
        cached_tokens=parts[0].cached_tokens,
        queue_s=sum(part.queue_s for part in parts),
        prefill_s=sum(part.prefill_s for part in parts),
        decode_s=sum(part.decode_s for part in parts),
    )
