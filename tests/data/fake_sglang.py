"""A server that speaks SGLang's wire format, as far as we use it, over the embedded engine.

It steps by itself, or, with `by_hand`, only when it is told to. Like SGLang it gives log-probabilities before top-k and
top-p, draws by a request's seed and the position of the token, finds prefixes token by token, and writes null for a
number that is none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.errors import GenerationError, WeightsError
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.serverless.invoke_engine import Reply, Request


class FakeSGLang:
    """`answer` is what `invoke_engine.serving` serves. `log`: the calls that were made, without /generate."""

    def __init__(self, engine: EmbeddedEngine, by_hand: bool = False) -> None:
        self.engine, self.log = engine, list[str]()
        self.open: dict[str, asyncio.Future[GenResult]] = {}
        self.trajectories: set[str] = set()
        self.weights = "default"
        self._by_hand, self._go = by_hand, asyncio.Event()
        self._go.set()
        self._stepping: asyncio.Task[None] | None = None
        self._routes: dict[str, Callable[[Any], Any]] = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/update_weights_from_disk": self.load,
            "/flush_cache": self.flush,
        }

    async def answer(self, request: Request) -> Reply:
        """One call."""
        if request.path == "/health":
            return Reply()
        body = msgspec.json.decode(request.body)
        if request.path == "/generate":
            return await self.generate(body)
        self.log.append(request.path)
        if request.path not in self._routes:
            return Reply(b'{"detail":"Not Found"}', 404)
        answered = self._routes[request.path](body)
        return answered if isinstance(answered, Reply) else Reply(msgspec.json.encode(answered))

    async def generate(self, body: dict[str, Any]) -> Reply:
        """`/generate`."""
        await self._go.wait()
        tokens, options = body["input_ids"], body["sampling_params"]
        if body["logprob_start_len"] == 0:
            scores = [None, *self.engine.logprobs(tokens)]
            rows = [[score, token, None] for score, token in zip(scores, tokens, strict=True)]
            return Reply(msgspec.json.encode({"meta_info": {"input_token_logprobs": rows}}))
        try:
            result = await self._run(body["rid"], tokens, options)
        except GenerationError as error:
            return Reply(msgspec.json.encode({"error": {"message": str(error)}}), 400)
        meta = {**_meta(result), "weight_version": self.weights}
        return Reply(msgspec.json.encode({"output_ids": result.tokens, "meta_info": meta}))

    async def _run(self, name: str, tokens: list[int], options: dict[str, Any]) -> GenResult:
        sampling = Sampling(
            temperature=options["temperature"],
            max_tokens=options["max_new_tokens"],
            stop_token_ids=tuple(options["stop_token_ids"]),
            stop=tuple(options["stop"]),
        )
        trajectory = str(options["sampling_seed"])
        self.trajectories.add(trajectory)
        self.engine.add(GenRequest(name, trajectory, tokens, sampling))
        future = self.open[name] = asyncio.get_running_loop().create_future()
        if not self._by_hand and self._stepping is None:
            self._stepping = asyncio.create_task(self._step_on())
        try:
            return await future
        finally:
            self.engine.abort(name)
            self.open.pop(name, None)

    async def _step_on(self) -> None:
        while self.engine.has_work():
            self.step()
            await asyncio.sleep(0)
        self._stepping = None

    def step(self) -> list[str]:
        """One step of the engine; the requests that have ended."""
        ended = self.engine.step()
        for result in ended:
            future = self.open.pop(result.request_id)
            if not future.done():  # whoever asked may have gone
                future.set_result(result)
        return [result.request_id for result in ended]

    def abort(self, body: dict[str, Any]) -> Reply:
        """`/abort_request`."""
        for name in list(self.open) if body.get("abort_all") else [body["rid"]]:
            if (result := self.engine.abort(name)) is not None:
                self.open.pop(name).set_result(result)
        return Reply()

    def pause(self, body: dict[str, Any]) -> Reply:
        """`/pause_generation`: what is asked for from now on waits."""
        assert body["mode"] == "abort"
        self._go.clear()
        self.abort({"abort_all": True})
        return Reply()

    def go_on(self, body: dict[str, Any]) -> Reply:
        """`/continue_generation`."""
        self._go.set()
        return Reply()

    def load(self, body: dict[str, Any]) -> Reply | dict[str, Any]:
        """`/update_weights_from_disk`."""
        folder = Path(body["model_path"])
        assert (folder / "config.json").is_file()
        names = msgspec.json.decode((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
        files = [safetensors.torch.load_file(folder / name) for name in dict.fromkeys(names.values())]
        try:
            self.engine.update(self.engine.stats().version + 1, [pair for file in files for pair in file.items()])
        except WeightsError as error:
            return Reply(msgspec.json.encode({"success": False, "message": str(error)}), 400)
        self.weights = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def flush(self, body: dict[str, Any]) -> Reply:
        """`/flush_cache`."""
        for trajectory in self.trajectories:
            self.engine.release(trajectory)
        return Reply(b"Cache flushed.")


def _meta(result: GenResult) -> dict[str, Any]:
    """As SGLang describes a result; what was ended before its first token has no list of them."""
    tokens, logprobs = result.tokens, result.logprobs
    reason: str = result.finish_reason
    if reason == "error":
        tokens, logprobs, reason = [*tokens, 0], [*logprobs, math.nan], "length"
    meta = {
        "finish_reason": {"type": reason},
        "cached_tokens": result.cached_tokens,
        "output_token_logprobs": [
            [logprob if math.isfinite(logprob) else None, token, None]
            for token, logprob in zip(tokens, logprobs, strict=True)
        ],
    }
    if reason == "abort" and not tokens:
        del meta["output_token_logprobs"], meta["cached_tokens"]
    return meta
