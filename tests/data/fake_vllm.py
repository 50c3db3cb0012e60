"""A server that speaks the wire format of vLLM's completions and of its calls for weights, over the embedded engine.

Like vLLM it refuses to begin an update while another is open, and keeps the name of the newest weights apart from them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import safetensors.torch

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.errors import GenerationError, WeightsError
from rollart.types import GenResult
from tests.data.fake_sglang import FakeSGLang
from tests.data.serverless.invoke_engine import Reply, Request


class FakeVLLM(FakeSGLang):
    """As `FakeSGLang`. `update`: the tensors of an update that is open."""

    def __init__(self, engine: EmbeddedEngine, by_hand: bool = False) -> None:
        super().__init__(engine, by_hand)
        self.update: list[tuple[str, Any]] | None = None
        self._routes = {
            "/abort_requests": self.abort_all_of,
            "/pause": lambda _: self.pause({"mode": "abort"}),
            "/resume": self.go_on,
            "/start_weight_update": self.begin,
            "/update_weights": self.add,
            "/finish_weight_update": self.finish,
            "/reset_prefix_cache": lambda _: self.flush({}) and {"success": True},
        }

    @property
    def paused(self) -> bool:
        """Whether requests wait."""
        return not self._go.is_set()

    async def answer(self, request: Request) -> Reply:
        """One call."""
        if request.path == "/weight_info":
            return _json({"weight_version": self.weights})
        if request.path == "/v1/completions":
            return await self.complete(msgspec.json.decode(request.body))
        return await super().answer(request)

    async def complete(self, body: dict[str, Any]) -> Reply:
        """`/v1/completions`."""
        await self._go.wait()
        tokens = body["prompt"]
        if "prompt_logprobs" in body:
            scores = zip(tokens[1:], self.engine.logprobs(tokens), strict=True)
            rows = [None, *({str(token): {"logprob": score}} for token, score in scores)]
            return _json({"choices": [{"prompt_logprobs": rows}], "usage": {}})
        options = {**body, "max_new_tokens": body["max_tokens"], "sampling_seed": (body["seed"] or 0) - len(tokens)}
        try:
            return _json(_completion(await self._run(f"cmpl-{body['request_id']}-0", tokens, options)))
        except GenerationError as error:
            return _json({"error": {"message": str(error)}}, 400)

    def abort_all_of(self, body: dict[str, Any]) -> Reply:
        """`/abort_requests`."""
        for name in body["request_ids"]:
            self.abort({"rid": name})
        return Reply()

    def begin(self, _: dict[str, Any]) -> Reply:
        """`/start_weight_update`."""
        if self.update is not None:
            return _json({"error": "a weight update is already active. Call finish_weight_update first."}, 500)
        self.update = []
        return Reply()

    def add(self, body: dict[str, Any]) -> Reply:
        """`/update_weights`."""
        assert self.update is not None
        self.update += safetensors.torch.load_file(body["update_info"]["file"]).items()
        return Reply()

    def finish(self, body: dict[str, Any]) -> Reply:
        """`/finish_weight_update`."""
        if self.update is None:
            return _json({"error": "finish_weight_update called without a matching start_weight_update."}, 500)
        tensors, self.update = self.update, None
        try:
            if tensors:
                self.engine.update(self.engine.stats().version + 1, tensors)
        except WeightsError as error:
            return _json({"error": str(error)}, 500)
        self.weights = body.get("weight_version") or self.weights
        return Reply()


def _completion(result: GenResult) -> dict[str, Any]:
    choice = {
        "token_ids": result.tokens,
        "logprobs": {"token_logprobs": result.logprobs},
        "finish_reason": result.finish_reason,
    }
    return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": result.cached_tokens}}}


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(msgspec.json.encode(value), status)
