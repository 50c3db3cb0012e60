"""An inference worker in front of a server: what is in flight, what breaks, what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.http_inference import HTTPInference
from rollart.errors import ConfigError, GenerationError, ServerAway, WeightsError, WorkerDied
from rollart.types import GenRequest, Sampling, WeightManifest
from tests.data.fake_sglang import FakeSGLang
from tests.data.fake_vllm import FakeVLLM
from tests.data.serverless.invoke_engine import Reply, Request, environ, serving
from tests.data.tiny_models import TinyModel

Scenario = Callable[[HTTPInference, FakeSGLang], Awaitable[None]]
SERVERS = {"sglang": FakeSGLang, "vllm": FakeVLLM}


class Shelf:
    """A weight store in memory."""

    def __init__(self, versions: dict[int, list[tuple[str, Any]]]) -> None:
        self.versions = versions

    def publish(self, version: int, tensors: Any) -> WeightManifest:
        self.versions[version] = list(tensors)
        return WeightManifest(version, (), ())

    def fetch(self, version: int) -> list[tuple[str, Any]]:
        if version not in self.versions:
            raise WeightsError(f"version {version} is missing")
        return self.versions[version]

    def num_bytes(self, version: int) -> int:
        return 0

    def latest(self) -> int | None:
        return max(self.versions, default=None)


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["llama"]


def ask(name: str, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> GenRequest:
    return GenRequest(name, f"t-{name}", list(prompt), Sampling(0, max_tokens=max_tokens))


def serve(
    scenario: Scenario,
    model: TinyModel,
    place: Path,
    answer: Callable[[FakeSGLang, Request], Awaitable[Reply]] = lambda server, request: server.answer(request),
    versions: dict[int, list[tuple[str, Any]]] | None = None,
    **options: Any,
) -> None:
    """Run a scenario against a server that answers so. Afterwards nothing is left in its place."""

    async def main() -> None:
        server = SERVERS[options.get("kind", "sglang")](EmbeddedEngine(model.folder, slots=4, max_model_tokens=256))
        async with serving(lambda request: answer(server, request)) as address:
            given = {"url": f"http://{address}", "kind": "sglang", "weights_folder": str(place)}
            shelf = Shelf(versions or {})
            worker = HTTPInference(model.folder, shelf, **{**given, "max_model_tokens": 256, **options})
            try:
                await worker.start()
                await asyncio.wait_for(scenario(worker, server), 60)
            finally:
                await worker.shutdown()

    asyncio.run(main())
    assert list(place.iterdir()) == []


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (lets the loop run on, step by step)
        await asyncio.sleep(0)


def test_weights_change_under_requests_in_flight_and_every_token_tells_its_version(
    model: TinyModel, tmp_path: Path
) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        tasks = [asyncio.create_task(worker.generate(ask(str(i), 60, (i, 5, 9)))) for i in range(6)]
        await until(lambda: server.engine.stats().generated_tokens >= 40)
        await worker.prefetch(1)
        await worker.suspend()
        assert (await worker.stats()).running == 0
        await worker.update(1)
        await worker.resume()
        results = await asyncio.gather(*tasks)
        for i, result in enumerate(results):
            scores = [model.score([i, 5, 9], result.tokens, other) for other in (False, True)]
            expected = [scores[version][place] for place, version in enumerate(result.versions)]
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
        assert {version for result in results for version in result.versions} == {0, 1}
        assert server.log == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]

    serve(scenario, model, tmp_path, versions={1: model.weights(other=True)})


def test_an_update_of_an_engine_that_is_not_suspended_goes_on_by_itself(model: TinyModel, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 100)))
        await until(lambda: server.engine.stats().generated_tokens >= 5)
        await worker.update(1)
        assert sorted(set((await task).versions)) == [0, 1]
        with pytest.raises(WeightsError, match="version 2 is missing"):
            await worker.update(2)
        assert (await worker.stats()).version == 1

    serve(scenario, model, tmp_path, versions={1: model.weights()})


def test_a_caller_that_goes_away_frees_its_request(model: TinyModel, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        task = asyncio.create_task(worker.generate(ask("a", 200)))
        await until(lambda: server.engine.stats().generated_tokens >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.open)
        assert server.engine.stats().running == 0
        assert (await worker.stats()).running == 0

    serve(scenario, model, tmp_path)


def test_closing_ends_what_is_still_running(model: TinyModel, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        tasks = [asyncio.create_task(worker.generate(ask(str(i), 200))) for i in range(3)]
        await until(lambda: server.engine.stats().generated_tokens >= 2)
        await worker.shutdown()
        for task in tasks:
            with pytest.raises(GenerationError, match="closing"):
                await task

    serve(scenario, model, tmp_path, slots=2)


def test_a_server_that_fails_to_load_generates_nothing_until_it_has_loaded_others(
    model: TinyModel, tmp_path: Path
) -> None:
    async def answer(server: FakeSGLang, request: Request) -> Reply:
        if request.path == "/update_weights_from_disk" and b'/1"' in request.body:
            return Reply(msgspec.json.encode({"success": False, "message": "no such file"}), 400)
        return await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        with pytest.raises(WeightsError, match=r"may not hold the weights of one version.*no such file"):
            await worker.update(1)
        with pytest.raises(GenerationError, match="may not hold the weights of one version"):
            await worker.generate(ask("a"))
        await worker.update(2)
        assert (await worker.generate(ask("a"))).versions == [2] * 8

    serve(scenario, model, tmp_path, answer, versions={1: model.weights(), 2: model.weights()})


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("others", ["default", "1", "rollart-00000000/1"])
def test_a_server_that_holds_other_weights_is_lost_also_with_those_of_the_same_step_of_another_run(
    others: str, kind: str, model: TinyModel, tmp_path: Path
) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        await worker.generate(ask("a"))
        await worker.update(1)
        await worker.generate(ask("b"))
        server.weights, ours = others, server.weights
        reason = f"generated with weights '{others}', not '{ours}'; was it started again, or does another run use it"
        with pytest.raises(WorkerDied, match=reason):
            await worker.generate(ask("c"))
        assert reason in await worker.wait_lost()

    serve(scenario, model, tmp_path, versions={1: model.weights()}, kind=kind)


def test_an_update_that_nobody_finished_is_ended_before_the_next_one(model: TinyModel, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        assert isinstance(server, FakeVLLM)
        server.pause({"mode": "abort"})
        server.begin({})
        server.add({"update_info": {"file": f"{model.folder}/model.safetensors"}})
        await worker.update(1)
        result = await worker.generate(ask("a"))
        assert result.logprobs == pytest.approx(model.score([1, 2, 3], result.tokens, True), abs=1e-4)

    serve(scenario, model, tmp_path, versions={1: model.weights(other=True)}, kind="vllm")


def test_closing_in_an_update_leaves_a_server_that_serves_others(model: TinyModel, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        if request.path == "/update_weights":
            begun.set()
            await asyncio.Event().wait()
        return await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        assert isinstance(server, FakeVLLM)
        await worker.suspend()
        updating = asyncio.create_task(worker.update(1))
        await begun.wait()
        assert server.update == []
        assert server.paused
        await worker.shutdown()
        assert server.update is None
        assert not server.paused
        assert server.weights == "rollart: an update that was broken off"
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)

    serve(scenario, model, tmp_path, answer, versions={1: model.weights()}, kind="vllm")


@pytest.mark.parametrize("call", ["generate", "suspend", "resume", "logprobs", "update", "forget"])
def test_a_server_that_is_gone_is_lost_whatever_it_was_asked(call: str, model: TinyModel, tmp_path: Path) -> None:
    is_gone = False

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        return Reply(b"", 503) if is_gone else await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        nonlocal is_gone
        await worker.suspend()
        waiting = asyncio.create_task(worker.generate(ask("waits")))
        if call == "generate":
            await worker.resume()
            await waiting
        is_gone = True
        arguments: dict[str, Any] = {"generate": ask("a"), "logprobs": [1, 2, 3], "update": 1}
        with pytest.raises(WorkerDied, match="answered 503"):
            await getattr(worker, call)(*([arguments[call]] if call in arguments else []))
        assert "answered 503" in await worker.wait_lost()
        if call != "generate":
            with pytest.raises(WorkerDied, match="answered 503"):
                await waiting

    serve(scenario, model, tmp_path, answer, versions={1: model.weights()})


def test_a_server_that_fails_but_answers_is_not_lost(model: TinyModel, tmp_path: Path) -> None:
    async def answer(server: FakeSGLang, request: Request) -> Reply:
        return Reply(b"", 503) if request.path == "/generate" else await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        with pytest.raises(GenerationError, match="answered 503"):
            await worker.generate(ask("a"))
        await worker.suspend()

    serve(scenario, model, tmp_path, answer)


def test_a_start_waits_for_a_server_that_is_away(model: TinyModel, tmp_path: Path) -> None:
    looks: list[str] = []

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        looks.append(request.path)
        return Reply(b"", 503) if len(looks) < 3 else await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        assert looks == ["/health"] * 3

    serve(scenario, model, tmp_path, answer, away_s=60.0)


def test_a_server_that_does_not_answer_holds_up_neither_suspend_nor_abort(model: TinyModel, tmp_path: Path) -> None:
    arrived: list[Request] = []

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        if request.path == "/generate":
            arrived.append(request)
            await asyncio.Event().wait()
        return await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        tasks = [asyncio.create_task(worker.generate(ask(name))) for name in "ab"]
        await until(lambda: len(arrived) == 2)
        await worker.abort(["a", "never seen"])
        assert (await tasks[0]).finish_reason == "abort"
        await worker.suspend()
        assert ((await worker.stats()).running, (await worker.stats()).waiting) == (0, 1)
        await worker.abort(["b"])
        assert (await tasks[1]).tokens == []

    serve(scenario, model, tmp_path, answer, patience_s=0.05)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b"out of memory", "answered 500 .*out of memory"),
        (404, b"", "answered 404 .*was it started as docs/engines.md says"),
        (200, b'{"meta_info": {}}', "the answer of .*KeyError: 'finish_reason'"),
        (200, b"<html>", "the answer of .*TypeError"),
    ],
)
def test_a_server_that_fails_or_answers_nonsense_fails_the_request_with_its_cause(
    status: int, body: bytes, message: str, model: TinyModel, tmp_path: Path
) -> None:
    async def answer(server: FakeSGLang, request: Request) -> Reply:
        return Reply(body, status) if request.path == "/generate" else await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        with pytest.raises(GenerationError, match=message):
            await worker.generate(ask("a"))
        assert (await worker.stats()).running == 0

    serve(scenario, model, tmp_path, answer)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "ended", "message"),
    [
        ([100000], [-1.0], "length", "100000 is no token of the model's vocabulary of"),
        ([-5], [-1.0], "length", "-5 is no token"),
        ([38.5], [-1.0], "length", "38.5 is no token"),
        (["38"], [-1.0], "length", "'38' is no token"),
        ([True], [-1.0], "length", "True is no token"),
        ([38], [1.5], "length", "1.5 is no log-probability"),
        ([38], ["-1"], "length", "'-1' is no log-probability"),
        ([38], [], "length", "1 tokens with 0 log-probabilities"),
        ([38] * 9, [-1.0] * 9, "length", "9 tokens with 9 log-probabilities; asked for were 8"),
        ([38], [-1.0], "weird", "it ended as 'weird' after 1 tokens"),
        ([], [], "stop", "it ended as 'stop' after 0 tokens"),
    ],
)
def test_an_answer_that_no_server_can_mean_fails_the_request_and_names_the_server(
    tokens: list[Any], logprobs: list[Any], ended: str, message: str, model: TinyModel, tmp_path: Path
) -> None:
    async def answer(server: FakeSGLang, request: Request) -> Reply:
        if request.path != "/v1/completions":
            return await server.answer(request)
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": ended}
        return Reply(msgspec.json.encode({"choices": [choice], "usage": {}}))

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        with pytest.raises(GenerationError, match=f"the answer of http://127.*: ValueError: {message}"):
            await worker.generate(ask("a"))

    serve(scenario, model, tmp_path, answer, kind="vllm")


def test_a_server_that_ends_a_request_again_and_again_unasked_fails_it(model: TinyModel, tmp_path: Path) -> None:
    calls: list[str] = []

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        if request.path != "/generate":
            return await server.answer(request)
        calls.append(request.path)
        return Reply(b'{"meta_info": {"finish_reason": {"type": "abort"}}}')

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        with pytest.raises(GenerationError, match="ended request a 4 times in a row without a token, though nobody"):
            await worker.generate(ask("a"))
        assert len(calls) == 4

    serve(scenario, model, tmp_path, answer)


def test_a_token_is_sent_and_a_server_that_is_away_is_named(model: TinyModel, tmp_path: Path) -> None:
    seen: list[str] = []

    async def answer(server: FakeSGLang, request: Request) -> Reply:
        seen.append(request.headers.get("authorization", ""))
        return await server.answer(request)

    async def scenario(worker: HTTPInference, server: FakeSGLang) -> None:
        await worker.generate(ask("a", 1))

    with environ(INFERENCE_TOKEN="abc"):
        serve(scenario, model, tmp_path, answer, token_env="INFERENCE_TOKEN")
    assert seen == ["Bearer abc"] * 2
    with pytest.raises(ServerAway, match=r"http://127.0.0.1:9/health cannot be reached"):
        serve(scenario, model, tmp_path, url="http://127.0.0.1:9", away_s=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sgland"}, "engine_options.kind: 'sgland' is no kind of server; did you mean 'sglang'"),
        ({"url": "ftp://x"}, "engine_options.urls: 'ftp://x': write it as http://host:port"),
        ({"url": "http://a:b@c:1"}, "a token goes into token_env"),
        ({"url": "http://c:99999"}, "engine_options.urls: 'http://c:99999'"),
        ({"token_env": "NOT_SET"}, "engine_options.token_env: NOT_SET is not set"),
        ({"weights_folder": "/nowhere"}, "engine_options.weights_folder: no folder '/nowhere'"),
        ({"max_model_tokens": 513}, "more than the model's 512 positions"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], message: str, model: TinyModel, tmp_path: Path) -> None:
    given = {"url": "http://127.0.0.1:9", "kind": "sglang", "max_model_tokens": 64, "weights_folder": str(tmp_path)}
    with environ(NOT_SET=None), pytest.raises(ConfigError, match=message):
        HTTPInference(model.folder, Shelf({}), **given | options)
