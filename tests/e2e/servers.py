"""An inference server in a thread of the test, which runs in other processes can reach: killed, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from rollart.data.engines.embedded import EmbeddedEngine
from tests.data.fake_vllm import FakeVLLM
from tests.data.serverless.invoke_engine import serving

PATIENCE_S = 60.0


class Place:
    """Where servers of one model run, one after the other, at one address."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._opened = contextlib.AsyncExitStack()
        self.address = ""
        self.server: FakeVLLM
        self._thread.start()

    def start(self, paused: bool = False) -> FakeVLLM:
        """A new server, which holds the weights of the model; at the address of the one before."""
        self.renew()
        self._do(self._open(paused))
        return self.server

    def renew(self) -> None:
        """A new server in place of the one that runs, so fast that nobody sees that it was away."""
        self.server = FakeVLLM(EmbeddedEngine(str(self._model), slots=32, max_model_tokens=512))

    def kill(self) -> None:
        """Every connection ends, and nobody answers any more."""
        self._do(self._opened.aclose())

    def close(self) -> None:
        """For fixtures."""
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, paused: bool) -> None:
        if paused:
            self.server.pause({"mode": "abort"})
        port = int(self.address.rpartition(":")[2] or 0)
        self.address = await self._opened.enter_async_context(
            serving(lambda request: self.server.answer(request), port)
        )

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)  # type: ignore[arg-type]


@contextlib.contextmanager
def places(model: Path, number: int = 1) -> Iterator[list[Place]]:
    """As many servers."""
    made = [Place(model) for _ in range(number)]
    try:
        for each in made:
            each.start()
        yield made
    finally:
        for each in made:
            each.close()


def words(made: list[Place]) -> tuple[str, ...]:
    """What a run is told of them."""
    urls = json.dumps([f"http://{each.address}" for each in made])
    return ("engine=http", "engine_options.kind=vllm", f"engine_options.urls={urls}")
