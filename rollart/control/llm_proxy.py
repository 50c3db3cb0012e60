"""LLMProxy: the gateway between trajectories and inference workers (paper section 4).

Invariants: between `suspend` and `resume` no new request reaches a worker, and those in flight keep their tokens;
`version` is what every worker says that it holds, and never goes back; a worker that does not answer in time is ended;
a request that its caller gives up is aborted in the engine; a request whose worker dies goes to another, from the
tokens that its trajectory has, and waits where there is none. Where prompts are read by workers of their own, `prefill`
has each request read before its worker decodes it. What engines say of each request feeds `affinity`, whose decisions
reach the router, and `say`, one line each.
What it leaves out: restarting a dead worker (`join` takes the new one). An error of one request stays with its
trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rollart.control.background import Background
from rollart.control.prefill import Prefill
from rollart.errors import RollartError, WeightsError, WeightsLost, WorkerDied
from rollart.protocols import Followers, InferenceHandle, Reads
from rollart.resource.affinity import Affinity, AffinityReport, Change
from rollart.resource.routing import Router
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo

T = TypeVar("T")


class _Flight(Struct):
    """One request: at the gate while `worker` is empty, then on a worker, or read for it by another.

    `so_far`: what it has when it goes to a worker; `left`: whether its KV may lie where nobody takes it.
    """

    trajectory_id: str
    so_far: GenResult
    given_up: bool = False
    left: bool = False
    gate: asyncio.Future[bool] | None = None
    worker: str = ""


class LLMProxy:
    """`classes` gives a worker's device class for `router`; `answer_timeout_s`: longest that a worker may take to load
    weights, or to answer anything else but a request.

    The driver's proxy moves the weights, and tells `followers`. One in a shard only holds and lets go when it is told,
    by `hold` and `let_go`, and its `version` is set. `on_workers` hears how many workers there are, at each change.
    """

    def __init__(
        self,
        workers: Sequence[InferenceHandle],
        *,
        router: Router | None = None,
        classes: Mapping[str, str] | None = None,
        background: Background | None = None,
        version: int = 0,
        affinity: Affinity | None = None,
        say: Callable[[str], None] | None = None,
        answer_timeout_s: float | None = None,
    ) -> None:
        self.version = version
        self._answer_timeout_s = answer_timeout_s
        self._router = router or Router()
        self._affinity = affinity or Affinity(self._router.affinity)
        self._say = say
        self._workers: dict[str, InferenceHandle] = {}
        self._background = background or Background()
        self._suspended = False
        self._has_weights = False
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self.followers: Followers | None = None
        self.on_workers: Callable[[int], None] = lambda _: None
        self._flights: dict[str, _Flight] = {}
        self._by_trajectory: dict[str, set[str]] = {}
        self._ended: dict[str, list[str]] = {}
        self.prefill = Prefill(say)
        for worker in workers:
            self._add(worker, (classes or {}).get(worker.name, "default"))

    @property
    def num_in_flight(self) -> int:
        """Requests that wait at the gate or run on a worker."""
        return len(self._flights)

    # ------------------------------------------------------------------------------------------------ trajectories
    async def generate(self, request: GenRequest) -> GenResult:
        """One turn. Waits while suspended, and while there is no worker. Raises GenerationError."""
        flight = _Flight(request.trajectory_id, GenResult(request.request_id, [], [], [], "handoff"))
        self._enter(request, flight)
        try:
            while True:
                if not await self._pass_gate(flight):
                    return replace(flight.so_far, finish_reason="abort")
                try:
                    result = await self._on_worker(request, flight)
                except WorkerDied:
                    self.lost(flight.worker)
                    flight.worker = ""
                    continue
                if result.finish_reason != "handoff":
                    return result
                self._set_back(request, flight, result)
        finally:
            self._leave(request, flight)

    def abort(self, trajectory_id: str) -> None:
        """End its requests; `generate` then returns with finish_reason 'abort' and the tokens so far."""
        for request_id in self._by_trajectory.get(trajectory_id, ()):
            flight = self._flights[request_id]
            flight.given_up = True
            if flight.worker:
                self._abort_on_workers(flight, request_id)
            elif flight.gate is not None and not flight.gate.done():
                flight.gate.set_result(False)

    def release(self, trajectory_id: str) -> None:
        """The trajectory has ended: its worker may forget its KV."""
        for name in (self._router.forget(trajectory_id), self.prefill.forget(trajectory_id)):
            if name and self._handle(name):
                ended = self._ended.setdefault(name, [])
                ended.append(trajectory_id)
                if len(ended) == 1:
                    self._background.spawn(self._release(name, ended), f"release on {name}")

    # ----------------------------------------------------------------------------------------------------- workers
    def lost(self, name: str) -> None:
        """A worker is dead: its requests go elsewhere. Harmless when that is known."""
        if not self.prefill.lost(name) and self._workers.pop(name, None) is not None:
            device_class = self._router.class_of(name)
            self._router.remove(name)
            if not self._router.is_reserved(device_class):
                self._adopt(self._affinity.left(device_class))
            self.on_workers(self.num_workers)
            self._tell_changed()

    async def join(self, worker: InferenceHandle, device_class: str = "default") -> None:
        """A new worker: it loads the weights that the others hold, then takes requests. Raises what its calls raise.

        Where these weights are lost it waits for the next ones, as long as there are others.
        """
        while not await self._joined(worker, device_class):
            await self._changed.wait()
        self._open_gate()

    async def _joined(self, worker: InferenceHandle, device_class: str) -> bool:
        async with self._changing:
            if self._suspended:
                await worker.suspend()
            try:
                if self._has_weights:
                    what = f"update to version {self.version}"
                    await self._in_time(worker, self._updated(worker, self.version), what)
            except WeightsLost:
                if not self._workers:
                    raise
                return False
            self._add(worker, device_class)
            return True

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed.clear()

    def add(self, worker: InferenceHandle, device_class: str = "default") -> None:
        """A worker that holds the weights already. Harmless when it is known."""
        if self._handle(worker.name) is None:
            self._add(worker, device_class)
            self._open_gate()

    async def give_up(self, trajectory_ids: list[str], request_ids: list[str]) -> None:
        """End requests that another process began, and free their KV; unknown ids are nothing to do."""
        await self._all(lambda worker: worker.abort(request_ids), "abort")
        await self._all(lambda worker: worker.release(trajectory_ids), "release")

    @property
    def num_workers(self) -> int:
        """Workers that decode and are alive, as far as is known."""
        return len(self._workers)

    # ----------------------------------------------------------------------------------------------------- weights
    def hold(self) -> None:
        """Close the gate: no new request reaches a worker."""
        self._suspended = True

    def let_go(self) -> None:
        """Open the gate."""
        self._suspended = False
        self._open_gate()

    async def suspend(self) -> None:
        """Step 2 of the protocol: close the gate, stop all engines between two steps."""
        async with self._changing:
            self.hold()
            if self.followers is not None:
                await self.followers.suspend()
            await self._all(lambda worker: worker.suspend(), "suspend")

    async def prefetch(self, version: int) -> None:
        """Let all workers read a published version while generation goes on."""
        await self._all(lambda worker: worker.prefetch(version), f"prefetch of version {version}")

    async def update(self, version: int) -> None:
        """Step 3: all workers load `version` and say so. Raises WeightsError naming the worker."""
        async with self._changing:
            if self._has_weights and version < self.version:
                raise WeightsError(f"update to version {version}: the inference workers hold version {self.version}")
            await self._all(lambda worker: self._updated(worker, version), f"update to version {version}")
            if self.followers is not None:
                await self.followers.update(version)
            self.version = version
            self._has_weights = True
        self._tell_changed()

    async def _updated(self, worker: InferenceHandle, version: int) -> None:
        """One worker loads `version`. Raises WeightsError when it holds another then."""
        held = await worker.update(version)
        if held != version:
            raise WeightsError(f"it holds version {held} after it was given version {version}")

    async def resume(self) -> None:
        """Step 4: engines go on, the gate opens."""
        async with self._changing:
            await self._all(lambda worker: worker.resume(), "resume")
            if self.followers is not None:
                await self.followers.resume()
        self.let_go()

    async def logprobs(self, tokens: list[int]) -> dict[str, list[float]]:
        """Per worker, the log-probability of each token given those before it."""
        return await self._all(lambda worker: worker.logprobs(tokens), "logprobs")

    async def parameters(self) -> dict[str, list[ParameterInfo]]:
        """Per worker, what `update` expects."""
        return await self._all(lambda worker: worker.parameters(), "parameters")

    async def stats(self) -> dict[str, EngineStats]:
        """Per worker, its engine's counters."""
        return await self._all(lambda worker: worker.stats(), "stats")

    def affinity(self) -> AffinityReport:
        """Which class generates for which task, why, and how often another stood in."""
        return self._affinity.report({str(kind): count for kind, count in self._router.fallbacks.items()})

    # ------------------------------------------------------------------------------------------------------ inside
    def _enter(self, request: GenRequest, flight: _Flight) -> None:
        self._flights[request.request_id] = flight
        self._by_trajectory.setdefault(request.trajectory_id, set()).add(request.request_id)

    def _leave(self, request: GenRequest, flight: _Flight) -> None:
        del self._flights[request.request_id]
        siblings = self._by_trajectory[request.trajectory_id]
        siblings.discard(request.request_id)
        if not siblings:
            del self._by_trajectory[request.trajectory_id]
        if flight.worker:
            self._router.finished(flight.worker, _cost(request))
        if flight.left:
            self._abort_on_worker(next(iter(self._everyone()), ""), request.request_id)

    def _set_back(self, request: GenRequest, flight: _Flight, result: GenResult) -> None:
        """It has lost its KV by an update, and goes through the gate again with the tokens that it has."""
        self._router.finished(flight.worker, _cost(request))
        flight.worker, flight.so_far = "", result

    def _everyone(self) -> dict[str, InferenceHandle]:
        return {**self._workers, **self.prefill.workers}

    def _handle(self, name: str) -> InferenceHandle | None:
        return self._workers.get(name) or self.prefill.workers.get(name)

    def _add(self, worker: InferenceHandle, device_class: str) -> None:
        if isinstance(worker, Reads):
            self.prefill.add(worker)
            return
        self._router.add(worker.name, device_class)
        self._workers[worker.name] = worker
        self.on_workers(self.num_workers)
        if not self._router.is_reserved(device_class):
            self._adopt(self._affinity.joined(device_class))

    def _adopt(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self._router.set_affinity(self._affinity.mapping)
        if self._say is not None:
            for change in changes:
                self._say(str(change))

    def _open_gate(self) -> None:
        for flight in self._flights.values():
            if flight.gate is not None and not flight.gate.done():
                flight.gate.set_result(True)

    async def _pass_gate(self, flight: _Flight) -> bool:
        """True when a worker may be asked; False when the request was aborted meanwhile."""
        if flight.given_up:
            return False
        while self._suspended or not self._workers:
            flight.gate = asyncio.get_running_loop().create_future()
            if not await flight.gate:
                return False
        return True

    async def _on_worker(self, request: GenRequest, flight: _Flight) -> GenResult:
        flight.worker = self._choose(request)
        device_class = self._router.class_of(flight.worker)
        try:
            result, measured = await self._generate(request, flight, self._workers[flight.worker])
        except asyncio.CancelledError:
            self._abort_on_workers(flight, request.request_id)
            raise
        now_s = asyncio.get_running_loop().time()
        num_prompt_tokens, in_flight = len(request.prompt), self.num_in_flight
        if measured is not None:
            changes = self._affinity.observe(request.tag, device_class, num_prompt_tokens, measured, in_flight, now_s)
            self._adopt(changes)
        return result

    async def _generate(
        self, request: GenRequest, flight: _Flight, worker: InferenceHandle
    ) -> tuple[GenResult, GenResult | None]:
        """The result, and what of it `worker` itself did, if anything."""
        if not self.prefill.apart:
            with _naming(worker.name, "generate"):
                result = await worker.generate(request)
            return result, result
        handoff = await self.prefill.read(request, flight.so_far, worker.name, self.version)
        flight.so_far, flight.left = handoff.result, handoff.in_file
        if flight.given_up:
            return replace(handoff.result, finish_reason="abort"), None
        if handoff.result.finish_reason != "handoff":
            return handoff.result, None
        with _naming(worker.name, "decode"):
            result = await worker.decode(request, handoff)
        flight.left = False
        return result, self.prefill.decoded(request, handoff, worker.name, result)

    def _choose(self, request: GenRequest) -> str:
        wish = None if self._router.knows(request.trajectory_id) else self._affinity.wish(request.tag)
        return self._router.choose(request.trajectory_id, request.tag, _cost(request), wish)

    async def _release(self, name: str, ended: list[str]) -> None:
        """One call for all that end in the same turn of the event loop, or until the call before has returned."""
        try:
            while ended and (worker := self._handle(name)):
                ids = ended.copy()
                await worker.release(ids)
                del ended[: len(ids)]
        finally:
            ended.clear()

    def _abort_on_workers(self, flight: _Flight, request_id: str) -> None:
        for name in (flight.worker, self.prefill.reads(request_id)):
            self._abort_on_worker(name, request_id)

    def _abort_on_worker(self, name: str, request_id: str) -> None:
        if worker := self._handle(name):
            self._background.spawn(worker.abort([request_id]), f"abort on {name}")

    async def _all(self, call: Callable[[InferenceHandle], Awaitable[T]], what: str) -> dict[str, T]:
        """Call every worker at once; when all have answered, raise the first error, naming its worker.

        A worker that dies is left out, as is one that does not answer; its successor catches up when it joins.
        """
        workers = self._everyone()
        calls = (self._in_time(worker, call(worker), what) for worker in workers.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        results: dict[str, T] = {}
        for name, answer in zip(workers, answers, strict=True):
            if isinstance(answer, WorkerDied):
                self.lost(name)
                continue
            if isinstance(answer, RollartError):
                raise _named(name, what, answer) from answer
            if isinstance(answer, BaseException):
                raise answer
            results[name] = answer
        return results

    async def _in_time(self, worker: InferenceHandle, work: Awaitable[T], what: str) -> T:
        """A worker that says nothing is ended; its death is then noticed like any other. Raises WorkerDied."""
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                return await work
        except TimeoutError:
            line = (
                f"inference worker {worker.name!r}, {what}: no answer within {self._answer_timeout_s:g} s "
                "(weights.update_timeout_s); it is ended and replaced"
            )
        if self._handle(worker.name) is not None:
            self.lost(worker.name)
            self._background.spawn(worker.stop(), f"end of {worker.name}")
            if self._say is not None:
                self._say(line)
        raise WorkerDied(line)


@contextlib.contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    """Errors of a call on a worker say which worker that was."""
    try:
        yield
    except RollartError as error:
        raise _named(name, what, error) from error


def _named(name: str, what: str, error: RollartError) -> RollartError:
    return type(error)(f"inference worker {name!r}, {what}: {error}")


def _cost(request: GenRequest) -> int:
    """Outstanding tokens of a request: what is read and what may be written."""
    return len(request.prompt) + request.sampling.max_tokens
