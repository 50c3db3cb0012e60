"""The contract of all engines through HTTP, to a server that speaks SGLang's wire format over the embedded engine.

The server steps when the test steps: first everything that was sent has arrived there, then one step is made, then
what ended in it is back. SGLang itself is not run here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.http_inference import HTTPInference
from rollart.errors import GenerationError
from rollart.protocols import Engine, Tensors
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo, Sampling, WeightManifest
from tests.data.engine_contract import *  # noqa: F403
from tests.data.engine_contract import Kind, MakeEngine, ask, prompts
from tests.data.fake_sglang import FakeSGLang
from tests.data.serverless.invoke_engine import serving
from tests.data.tiny_models import TinyModel

T = TypeVar("T")


class Shelf:
    """A weight store in memory, whose newest version is that which the test gives."""

    def __init__(self) -> None:
        self.tensors: Tensors = []

    def publish(self, version: int, tensors: Tensors) -> WeightManifest:
        self.tensors = tensors
        return WeightManifest(version, (), ())

    def fetch(self, version: int) -> list[tuple[str, Any]]:
        return self.tensors  # type: ignore[return-value]

    def num_bytes(self, version: int) -> int:
        return 0

    def latest(self) -> int | None:
        return 0


class Stepped:
    """An `Engine` over a server that steps by hand, on an event loop of its own."""

    def __init__(
        self, folder: str, weights: Path, slots: int, max_model_tokens: int, seed: int = 0, **options: Any
    ) -> None:
        self._loop, self._opened = asyncio.new_event_loop(), contextlib.AsyncExitStack()
        self._store, self._tasks = Shelf(), dict[str, asyncio.Task[GenResult]]()
        self._server = FakeSGLang(EmbeddedEngine(folder, slots, max_model_tokens, **options), by_hand=True)
        address = self._do(self._opened.enter_async_context(serving(self._server.answer)))
        self._worker = HTTPInference(
            folder,
            self._store,
            url=f"http://{address}",
            kind="sglang",
            slots=slots,
            max_model_tokens=max_model_tokens,
            seed=seed,
            weights_folder=str(weights),
        )
        self._do(self._worker.start())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, 60))

    def add(self, request: GenRequest) -> None:
        self._do(self._add(request))

    async def _add(self, request: GenRequest) -> None:
        task = asyncio.create_task(self._worker.generate(request))
        await asyncio.sleep(0)
        if task.done():
            task.result()
        self._tasks[request.request_id] = task

    def abort(self, request_id: str) -> GenResult | None:
        return self._do(self._abort(request_id)) if request_id in self._tasks else None

    async def _abort(self, request_id: str) -> GenResult:
        await self._arrive()
        await self._worker.abort([request_id])
        return await self._tasks.pop(request_id)

    def step(self) -> list[GenResult]:
        return self._do(self._step()) if self.has_work() else []

    async def _step(self) -> list[GenResult]:
        await self._arrive()
        return [await self._tasks.pop(name) for name in self._server.step()]

    async def _arrive(self) -> None:
        """Until the server has all that was sent."""
        await asyncio.sleep(0)
        while len(self._server.open) < (await self._worker.stats()).running:  # noqa: ASYNC110  (the loop runs on)
            await asyncio.sleep(0)

    def has_work(self) -> bool:
        return bool(self._tasks) and not self.stats().suspended

    def release(self, trajectory_id: str) -> None:
        self._do(self._worker.release([trajectory_id]))

    def forget(self) -> None:
        self._do(self._worker.forget())

    def suspend(self) -> None:
        self._do(self._suspend())

    async def _suspend(self) -> None:
        await self._arrive()
        await self._worker.suspend()

    def resume(self) -> None:
        self._do(self._worker.resume())

    def update(self, version: int, tensors: Tensors) -> None:
        self._store.tensors = tensors
        self._do(self._update(version))

    async def _update(self, version: int) -> None:
        await self._arrive()
        await self._worker.update(version)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return self._do(self._worker.logprobs(list(tokens)))

    def parameters(self) -> list[ParameterInfo]:
        return self._do(self._worker.parameters())

    def stats(self) -> EngineStats:
        return self._do(self._worker.stats())

    def close(self) -> None:
        assert not self._tasks
        self._do(self._worker.shutdown())
        self._do(self._opened.aclose())
        self._loop.close()


@pytest.fixture(params=["qwen3"])
def model(request: pytest.FixtureRequest, tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models[request.param]


@pytest.fixture
def kind() -> Kind:
    return Kind(
        "http",
        keeps="SGLang evicts what was not used for longest; what trajectories leave behind counts as free at once",
        unfiltered="SGLang's log-probabilities are those before top-k and top-p, which are therefore refused",
        counts_calls=True,
        forget=lambda engine, _: engine.forget(),
    )


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Stepped] = []

    def make(folder: str, **options: Any) -> Engine:
        made.append(Stepped(folder, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_top_k_and_top_p_are_refused(engine: Engine) -> None:
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.5)):
        with pytest.raises(GenerationError, match="before top_k and top_p; switch both off"):
            engine.add(ask("a", prompts(1)[0], sampling))
