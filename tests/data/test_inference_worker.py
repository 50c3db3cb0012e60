"""The command loop: commands fall between two steps, every request ends once, faults do not stop the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.inference import InferenceWorker, RemoteInference
from rollart.errors import GenerationError, WeightsError
from rollart.protocols import InferenceHandle, Tensors
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo, Sampling, WeightManifest
from tests.data.tiny_models import TinyModel


class CountingEngine:
    """Generates 0, 1, 2, ... and raises on demand; keeps a log of what it was told."""

    def __init__(self, model_folder: str, fault_at: int = -1) -> None:
        self.running: dict[str, tuple[GenRequest, list[int], list[int]]] = {}
        self.log: list[str] = [model_folder]
        self.fault_at, self.num_steps = fault_at, 0
        self.suspended, self.version = False, 0

    def add(self, request: GenRequest) -> None:
        if not request.prompt:
            raise GenerationError("empty prompt")
        self.running[request.request_id] = request, [], []

    def abort(self, request_id: str) -> GenResult | None:
        return self._result(request_id, "abort") if request_id in self.running else None

    def release(self, trajectory_id: str) -> None:
        self.log.append(f"release {trajectory_id}")

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def update(self, version: int, tensors: Tensors) -> None:
        self.version = version
        self.log.append(f"update {version} {[name for name, _ in tensors]}")

    def has_work(self) -> bool:
        return bool(self.running) and not self.suspended

    def step(self) -> list[GenResult]:
        self.num_steps += 1
        if self.num_steps == self.fault_at:
            raise ZeroDivisionError("a fault in the engine")
        for _, made, versions in self.running.values():
            made.append(len(made))
            versions.append(self.version)
        ended = [name for name, (request, made, _) in self.running.items() if len(made) == request.sampling.max_tokens]
        return [self._result(name, "length") for name in ended]

    def _result(self, request_id: str, reason: Any) -> GenResult:
        _, made, versions = self.running.pop(request_id)
        return GenResult(request_id, made, [0.0] * len(made), versions, reason)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    def parameters(self) -> list[ParameterInfo]:
        return [ParameterInfo("w", (1,), "float32")]

    def stats(self) -> EngineStats:
        return EngineStats(version=self.version, steps=self.num_steps, running=len(self.running))


class Shelf:
    """A weight store in memory; `fetched` lists what was read, `models` for which parameters."""

    def __init__(self, versions: dict[int, list[tuple[str, Any]]]) -> None:
        self.versions, self.fetched, self.is_quick = versions, list[int](), False
        self.threads: list[int] = []
        self.models: list[Any] = []

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest:
        self.versions[version] = list(tensors)
        return WeightManifest(version, (), ())

    def rescue(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest:
        raise WeightsError("nothing is lost in memory")

    def fetch(self, version: int, model: Sequence[ParameterInfo] | None = None) -> Iterator[tuple[str, Any]]:
        self.fetched.append(version)
        self.models.append(model)
        self.threads.append(threading.get_ident())
        if version not in self.versions:
            raise WeightsError(f"version {version} is missing")
        return iter(self.versions[version])

    def quick(self, version: int) -> bool:
        return self.is_quick


class DirectHandle:
    """A WorkerHandle that calls the worker's object in the same process."""

    name = "inference-0"

    def __init__(self, worker: InferenceWorker) -> None:
        self.worker = worker

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        return await getattr(self.worker, method)(*args)

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        await self.worker.shutdown()


def ask(name: str, max_tokens: int = 4, prompt: Sequence[int] = (1, 2)) -> GenRequest:
    return GenRequest(name, f"t-{name}", list(prompt), Sampling(0, max_tokens=max_tokens))


def serve(
    scenario: Callable[[InferenceHandle, Any, Shelf], Awaitable[None]],
    engine: Any = CountingEngine,
    folder: str = "folder",
    versions: dict[int, list[tuple[str, Any]]] | None = None,
    **options: Any,
) -> None:
    """Run a scenario against a worker; `scenario(handle, engine, store)`."""

    async def main() -> None:
        made: list[Any] = []

        def factory(*args: Any, **kwargs: Any) -> Any:
            made.append(engine(*args, **kwargs))
            return made[0]

        store = Shelf({1: [("w", 1.0)]} if versions is None else versions)
        worker = InferenceWorker(folder, factory, options, store)
        await worker.start()
        try:
            await scenario(RemoteInference(DirectHandle(worker)), made[0], store)
        finally:
            await worker.shutdown()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (lets the loop run on, step by step)
        await asyncio.sleep(0)


def test_requests_from_many_callers_run_together() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        results = await asyncio.gather(*(worker.generate(ask(str(i), 3 + i % 2)) for i in range(6)))
        assert [result.tokens for result in results] == [list(range(3 + i % 2)) for i in range(6)]
        assert engine.num_steps <= 6
        assert engine.log == ["folder"]

    serve(scenario)


def test_a_worker_without_work_does_not_step_and_wakes_for_the_next_request() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        await worker.generate(ask("a", 2))
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.num_steps == 2
        assert (await worker.generate(ask("b", 2))).tokens == [0, 1]

    serve(scenario)


def test_abort_returns_the_partial_result_and_unknown_ids_are_ignored() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        long, short = (asyncio.create_task(worker.generate(ask(name, 10**6))) for name in "ab")
        await until(lambda: engine.num_steps >= 5)
        await worker.abort(["a", "never seen"])
        result = await long
        assert result.finish_reason == "abort"
        assert 4 <= len(result.tokens) < 10**6
        assert not short.done()
        await worker.abort(["b"])
        await short
        assert engine.running == {}

    serve(scenario)


def test_a_caller_that_goes_away_frees_its_request() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 10**6)))
        await until(lambda: engine.num_steps >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == {}

    serve(scenario)


def test_suspend_stops_steps_and_resume_goes_on() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 40)))
        await until(lambda: engine.num_steps >= 3)
        await worker.suspend()
        seen = engine.num_steps
        late = asyncio.create_task(worker.generate(ask("late", 1)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.num_steps == seen
        await worker.resume()
        assert (await task).tokens == list(range(40))
        assert (await late).tokens == [0]

    serve(scenario)


def test_update_with_requests_in_flight_switches_their_versions() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 3000)))
        await until(lambda: engine.num_steps >= 3)
        await worker.prefetch(1)
        await worker.suspend()
        await worker.update(1)
        await worker.resume()
        result = await task
        assert sorted(set(result.versions)) == [0, 1]
        assert result.versions == sorted(result.versions)
        assert store.fetched == [1]
        assert engine.log[1:] == ["update 1 ['w']"]

    serve(scenario)


def test_a_command_is_answered_after_the_step_that_runs_and_its_answer_leaves_before_the_next_one() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 3000)))
        await until(lambda: engine.num_steps >= 3)
        for command in (worker.stats, lambda: worker.prefetch(1), worker.suspend, lambda: worker.update(1)):
            before = engine.num_steps
            await command()
            assert engine.num_steps <= before + 1
        before = engine.num_steps
        await worker.resume()
        assert engine.num_steps == before
        task.cancel()

    serve(scenario)


def test_weights_that_are_read_quickly_are_read_between_two_steps() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        store.is_quick = True
        await worker.prefetch(1)
        assert store.threads == [threading.get_ident()]
        store.is_quick = False
        store.versions[2] = store.versions[1]
        await worker.prefetch(2)
        assert store.threads[1] != threading.get_ident()

    serve(scenario)


def test_update_without_prefetch_reads_the_store_and_a_missing_version_changes_nothing() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        with pytest.raises(WeightsError, match="version 2 is missing"):
            await worker.prefetch(2)
        with pytest.raises(WeightsError, match="version 2 is missing"):
            await worker.update(2)
        assert (await worker.stats()).version == 0
        store.publish(2, [("w", 2.0)])
        await worker.update(2)
        assert (await worker.stats()).version == 2
        assert store.fetched == [2, 2, 2]

    serve(scenario)


def test_an_update_says_what_the_engine_holds_and_asks_the_store_for_its_own_model() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        assert await worker.update(1) == 1
        assert store.models == [[ParameterInfo("w", (1,), "float32")]]

    serve(scenario)


def test_an_engine_that_does_not_take_an_update_is_not_spoken_for() -> None:
    class Deaf(CountingEngine):
        def update(self, version: int, tensors: Tensors) -> None:
            self.log.append(f"ignored {version}")

    async def scenario(worker: InferenceHandle, engine: Deaf, store: Shelf) -> None:
        assert await worker.update(1) == 0
        assert engine.log[1:] == ["ignored 1"]

    serve(scenario, Deaf)


def test_an_engine_never_goes_back_to_an_older_version() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        await worker.update(2)
        with pytest.raises(WeightsError, match="version 1 is older than version 2, which this engine holds"):
            await worker.update(1)
        assert await worker.update(2) == 2
        assert store.fetched == [2, 2]

    serve(scenario, versions={1: [], 2: []})


def test_stopping_the_handle_ends_the_worker() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 10**6)))
        await until(lambda: engine.num_steps >= 2)
        await worker.stop()
        with pytest.raises(GenerationError, match="closing"):
            await task

    serve(scenario)


def test_a_newer_update_does_not_disturb_a_prefetch_that_someone_waits_for() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        first = asyncio.create_task(worker.prefetch(1))
        await asyncio.sleep(0)
        await worker.update(2)
        await first
        assert engine.version == 2

    serve(scenario, versions={1: [], 2: []})


def test_a_fault_in_a_step_fails_the_requests_in_flight_and_the_worker_goes_on() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        results = await asyncio.gather(*(worker.generate(ask(str(i), 8)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [GenerationError] * 3
        assert "ZeroDivisionError: a fault in the engine" in str(results[0])
        assert engine.running == {}
        assert (await worker.generate(ask("next"))).tokens == [0, 1, 2, 3]

    serve(scenario, fault_at=3)


def test_a_refused_request_raises_at_its_caller_alone() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        good, bad = await asyncio.gather(
            worker.generate(ask("a")), worker.generate(ask("b", prompt=())), return_exceptions=True
        )
        assert isinstance(good, GenResult)
        assert isinstance(bad, GenerationError)

    serve(scenario)


def test_closing_fails_what_is_still_running() -> None:
    async def main() -> None:
        worker = InferenceWorker("folder", CountingEngine, {}, Shelf({}))
        await worker.start()
        task = asyncio.create_task(worker.generate(ask("a", 10**6)))
        await asyncio.sleep(0)
        await worker.shutdown()
        with pytest.raises(GenerationError, match="closing"):
            await task

    asyncio.run(main())


def test_the_other_commands_reach_the_engine() -> None:
    async def scenario(worker: InferenceHandle, engine: CountingEngine, store: Shelf) -> None:
        assert worker.name == "inference-0"
        await worker.release(["x", "y"])
        assert engine.log[1:] == ["release x", "release y"]
        assert await worker.logprobs([1, 2, 3]) == [-1.0, -1.0]
        assert [info.name for info in await worker.parameters()] == ["w"]

    serve(scenario)


def test_the_embedded_engine_behind_the_loop_switches_weights_in_flight(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["qwen3"]

    async def scenario(worker: InferenceHandle, engine: EmbeddedEngine, store: Shelf) -> None:
        tasks = [asyncio.create_task(worker.generate(ask(str(i), 60, prompt=[i, 5, 9]))) for i in range(6)]
        await until(lambda: engine.stats().generated_tokens >= 40)
        await worker.prefetch(1)
        await worker.suspend()
        await worker.update(1)
        await worker.resume()
        results = await asyncio.gather(*tasks)
        for i, result in enumerate(results):
            scores = [model.score([i, 5, 9], result.tokens, other) for other in (False, True)]
            expected = [scores[version][place] for place, version in enumerate(result.versions)]
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
        assert {version for result in results for version in result.versions} == {0, 1}

    weights = {1: model.weights(other=True)}
    serve(scenario, EmbeddedEngine, model.folder, weights, slots=4, max_model_tokens=256)
