"""Engine `http` against a real `vllm serve` on the CPU, started as `docs/engines.md` says."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollart.data.http_inference import HTTPInference
from rollart.data.model import make_tiny
from rollart.errors import GenerationError
from rollart.types import GenRequest, Sampling, WeightManifest
from tests.data.serverless.invoke_engine import environ

ROOT = Path(__file__).parents[2]
START_S = 240
ENVIRON = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
WORDS = (
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(16 << 20), "--host", "127.0.0.1", "--logprobs-mode", "processed_logprobs"),
    *("--weight-transfer-config", json.dumps({"backend": "rollart"}), "--api-key", "secret"),
    *("--worker-extension-cls", "rollart.data.engines.vllm_weights.Extension", "--enable-prompt-tokens-details"),
)
Pairs = list[tuple[str, torch.Tensor]]


class Model:
    """A tiny model, other weights for it, and its own opinion of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        make_tiny(folder, initializer_range=0.2)
        self.folder, self.loaded = str(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
        self.versions = {1: self._pairs(), 2: [(name, _shaken(tensor)) for name, tensor in self._pairs()]}

    def _pairs(self) -> Pairs:
        return [(name, parameter.detach().clone()) for name, parameter in self.loaded.named_parameters()]

    @torch.no_grad()
    def score(self, tokens: list[int], version: int) -> list[float]:
        """Log-probability of each token but the first."""
        self.loaded.load_state_dict(dict(self.versions[version]), strict=False)
        table = self.loaded(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return table.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()


def _shaken(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))


class Shelf:
    """A weight store in memory."""

    def __init__(self, versions: dict[int, Pairs]) -> None:
        self.versions = versions

    def publish(self, version: int, tensors: Any) -> WeightManifest:
        raise NotImplementedError

    def fetch(self, version: int) -> Pairs:
        return self.versions[version]

    def num_bytes(self, version: int) -> int:
        return 0

    def latest(self) -> int | None:
        return max(self.versions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def url(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model.folder,
        "--port",
        str(port),
        *WORDS,
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **ENVIRON}, stdout=file, stderr=file)
        try:
            _until_it_answers(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import httpx2

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-5000:]
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-5000:])


def serve(scenario: Callable[[HTTPInference], Awaitable[None]], url: str, model: Model, place: Path) -> None:
    """Run a scenario against the server, which holds version 1 before and after; nothing is left of it."""

    async def main() -> None:
        options = {"max_model_tokens": 256, "seed": 3, "token_env": "VLLM_TOKEN", "weights_folder": str(place)}
        worker = HTTPInference(model.folder, Shelf(model.versions), url, "vllm", **options)  # type: ignore[arg-type]
        await worker.start()
        try:
            await worker.update(1)
            await asyncio.wait_for(scenario(worker), 120)
        finally:
            await worker.shutdown()

    with environ(VLLM_TOKEN="secret"):
        asyncio.run(main())
    assert list(place.iterdir()) == []


def ask(name: str, prompt: list[int], max_tokens: int = 20, **sampling: Any) -> GenRequest:
    return GenRequest(name, f"t-{name}", prompt, Sampling(max_tokens=max_tokens, **sampling))


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-3)


def test_tokens_come_with_the_log_probabilities_of_a_plain_forward_pass(url: str, model: Model, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference) -> None:
        prompts = [[5 + i, 17, 200 + i] for i in range(6)]
        requests = [ask(str(i), prompt, temperature=i % 2) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(worker.generate(request) for request in requests))
        for prompt, result in zip(prompts, results, strict=True):
            assert (result.versions, result.finish_reason) == ([1] * 20, "length")
            assert result.logprobs == close(model.score(prompt + result.tokens, 1)[2:])
        again = await asyncio.gather(*(worker.generate(request) for request in requests))
        assert [result.tokens for result in again] == [result.tokens for result in results]
        assert await worker.logprobs([3, 1, 4, 1, 5]) == close(model.score([3, 1, 4, 1, 5], 1))
        stats = await worker.stats()
        assert (stats.generated_tokens, stats.prefilled_tokens, stats.version) == (240, 36, 1)

    serve(scenario, url, model, tmp_path)


def test_stop_tokens_and_stop_strings_end_a_request_at_the_same_token_as_everywhere(
    url: str, model: Model, tmp_path: Path
) -> None:
    async def scenario(worker: HTTPInference) -> None:
        free = await worker.generate(ask("free", [9, 8], temperature=0))
        stop = free.tokens[4]
        result = await worker.generate(ask("a", [9, 8], temperature=0, stop_token_ids=(stop,)))
        assert result.tokens == free.tokens[: free.tokens.index(stop) + 1]
        assert result.finish_reason == "stop"
        text = worker._tokenizer.decode(free.tokens[:1], skip_special_tokens=False)  # type: ignore[union-attr]
        result = await worker.generate(ask("b", [9, 8], temperature=0, stop=(text,)))
        assert (result.tokens, result.finish_reason) == (free.tokens[:1], "stop")

    serve(scenario, url, model, tmp_path)


def test_the_next_turn_finds_its_prefix(url: str, model: Model, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference) -> None:
        prompt = [(7 * i) % 300 for i in range(70)]
        assert (await worker.generate(ask("a", prompt, 2))).cached_tokens == 0
        assert (await worker.generate(ask("b", [*prompt, 1, 2], 2))).cached_tokens == 64
        await worker.forget()
        assert (await worker.generate(ask("c", prompt, 2))).cached_tokens == 0

    serve(scenario, url, model, tmp_path)


def test_weights_change_under_requests_in_flight_and_every_token_tells_its_version(
    url: str, model: Model, tmp_path: Path
) -> None:
    async def scenario(worker: HTTPInference) -> None:
        prompts = [[5 + i, 17, 200 + i] for i in range(6)]
        requests = [ask(str(i), prompt, 120) for i, prompt in enumerate(prompts)]
        tasks = [asyncio.create_task(worker.generate(request)) for request in requests]
        await worker.prefetch(2)
        await asyncio.sleep(0.3)
        await worker.suspend()
        assert (await worker.stats()).running == 0
        assert await worker.logprobs([3, 1, 4]) == close(model.score([3, 1, 4], 1))
        assert await worker.update(2) == 2
        await worker.resume()
        assert await worker.logprobs([3, 1, 4]) == close(model.score([3, 1, 4], 2))
        results = await asyncio.gather(*tasks)
        for prompt, result in zip(prompts, results, strict=True):
            scores = {version: model.score(prompt + result.tokens, version)[2:] for version in (1, 2)}
            expected = [scores[version][place] for place, version in enumerate(result.versions)]
            assert len(result.tokens) == 120
            assert result.logprobs == close(expected)
        assert {version for result in results for version in result.versions} == {1, 2}

    serve(scenario, url, model, tmp_path)


def test_abort_gives_the_tokens_so_far_and_leaves_the_others_alone(url: str, model: Model, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference) -> None:
        tasks = [asyncio.create_task(worker.generate(ask(name, [1, 2, 3], 200))) for name in "ab"]
        await asyncio.sleep(0.3)
        await worker.abort(["a"])
        aborted = await tasks[0]
        assert aborted.finish_reason == "abort"
        assert 0 < len(aborted.tokens) < 200
        assert len((await tasks[1]).tokens) == 200

    serve(scenario, url, model, tmp_path)


def test_what_the_server_refuses_is_said(url: str, model: Model, tmp_path: Path) -> None:
    async def scenario(worker: HTTPInference) -> None:
        with pytest.raises(GenerationError, match=r"answered 400 .*temperature"):
            await worker.generate(ask("a", [1], temperature=3.0))

    serve(scenario, url, model, tmp_path)
