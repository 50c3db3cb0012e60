"""vLLM itself, where the contract of all engines says nothing: its weight interface, its memory, its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from rollart.data.inference import InferenceWorker
from rollart.errors import ConfigError, GenerationError, WeightsError
from rollart.types import GenRequest, Sampling, WeightManifest
from tests.data.engine_contract import GREEDY, ask, close, finish, prompts, run, steps
from tests.data.tiny_models import TinyModel
from tests.production.conftest import Cores

Pairs = list[tuple[str, torch.Tensor]]


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models[request.param]


def through_one_buffer(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in the same memory, which the next one overwrites."""
    buffer = torch.empty(max(tensor.numel() for _, tensor in pairs))
    for name, tensor in pairs:
        view = buffer[: tensor.numel()].view(tensor.shape)
        yield name, view.copy_(tensor)


def test_weights_may_come_through_memory_that_is_used_again(cores: Cores, model: TinyModel) -> None:
    engine = cores.engine(model.folder, slots=8, max_model_tokens=128)
    pairs = model.weights(other=True)
    for order in (pairs, pairs[::-1]):  # a fused layer's parts lie next to each other, or far apart
        engine.update(1, through_one_buffer(order))
        prompt = prompts(1, shortest=20)[0]
        (result,) = run(engine, ask("a", prompt))
        assert result.logprobs == close(model.score(prompt, result.tokens, other=True))
        engine.update(2, model.weights())
        (result,) = run(engine, ask("a", prompt))
        assert result.logprobs == close(model.score(prompt, result.tokens))


@pytest.mark.parametrize("parts", [1, 5, 12])
def test_after_weights_that_broke_off_the_next_ones_are_whole(cores: Cores, model: TinyModel, parts: int) -> None:
    engine = cores.engine(model.folder, slots=8, max_model_tokens=128)
    prompt = prompts(1, shortest=20)[0]
    engine.add(ask("a", prompt))
    steps(engine, 3)
    with pytest.raises(WeightsError, match="is missing"):
        engine.update(1, iter(model.weights(other=True)[:parts]))
    with pytest.raises(GenerationError, match="no longer whole"):
        engine.step()
    engine.update(2, iter(model.weights(other=True)))
    result = finish(engine)["a"]
    assert result.versions == [0] * 3 + [2] * 9
    assert result.logprobs[3:] == close(model.score(prompt, result.tokens, other=True)[3:])


def test_more_requests_than_its_memory_holds_all_finish_and_are_right(cores: Cores, model: TinyModel) -> None:
    """Three sequences of full length fit; vLLM sets others back and computes them again."""
    per_token = 2 * 2 * 2 * 32 * 4
    engine = cores.engine(model.folder, slots=8, max_model_tokens=128, kv_cache_memory_bytes=16 * 32 * per_token)
    requests = [ask(str(i), prompt, Sampling(0, max_tokens=90)) for i, prompt in enumerate(prompts(8, shortest=20))]
    for request, result in zip(requests, run(engine, *requests), strict=True):
        assert len(result.tokens) == 90
        assert result.logprobs == close(model.score(request.prompt, result.tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilisation": 0.5},
            "engine_options.gpu_memory_utilisation: .*did you mean 'gpu_memory_utilization'",
        ),
        ({"logprobs_mode": "raw_logprobs"}, "engine_options.logprobs_mode: rollart sets it itself"),
        ({"dtype": "float33"}, "engine_options.dtype: 'float33' is not a choice; did you mean 'float32'"),
        ({"quantization": "none"}, "vLLM refuses the model in .* with these engine_options: .*quantization"),
        ({"tensor_parallel_size": 3}, r"attention heads \(4\) must be divisible by tensor parallel size \(3\)"),
        ({"pipeline_parallel_size": 2}, "engine_options.pipeline_parallel_size: rollart drives vLLM without pipelines"),
        ({"device": "cuda"}, "the pool says 'cuda', but the vLLM that is installed computes on 'cpu'"),
    ],
)
def test_options_that_cannot_be_are_named(
    cores: Cores, tiny_models: dict[str, TinyModel], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cores.engine(tiny_models["llama"].folder, slots=2, max_model_tokens=64, **options)


def test_a_cache_too_small_for_one_sequence_is_refused_at_the_start(
    cores: Cores, tiny_models: dict[str, TinyModel]
) -> None:
    with pytest.raises(GenerationError, match="starting vLLM with the model in"):
        cores.engine(tiny_models["llama"].folder, slots=2, max_model_tokens=512, kv_cache_memory_bytes=32 << 10)


class Shelf:
    """A weight store in memory."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def publish(self, version: int, tensors: object) -> WeightManifest:
        raise NotImplementedError

    def rescue(self, version: int, tensors: object) -> WeightManifest:
        raise NotImplementedError

    def fetch(self, version: int, model: object = None) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.pairs)

    def quick(self, version: int) -> bool:
        return True


def test_behind_the_command_loop_weights_switch_in_flight(cores: Cores, model: TinyModel) -> None:
    async def main() -> None:
        worker = InferenceWorker(
            model.folder,
            lambda folder, **options: cores.engine(folder, **options),
            {"slots": 4, "max_model_tokens": 256},
            Shelf(model.weights(other=True)),
        )
        await worker.start()
        requests = [GenRequest(str(i), f"t{i}", [i, 5, 9], Sampling(max_tokens=60)) for i in range(6)]
        tasks = [asyncio.create_task(worker.generate(request)) for request in requests]
        while (await worker.stats()).generated_tokens < 40:  # noqa: ASYNC110  (lets the loop run on)
            await asyncio.sleep(0)
        await worker.prefetch(1)
        await worker.suspend()
        canary = await worker.logprobs([1, 2, 3])
        assert canary == close(model.score([1], [2, 3]))
        await worker.update(1)
        await worker.resume()
        assert await worker.logprobs([1, 2, 3]) == close(model.score([1], [2, 3], other=True))
        results = await asyncio.gather(*tasks)
        await worker.shutdown()
        for request, result in zip(requests, results, strict=True):
            scores = [model.score(request.prompt, result.tokens, other) for other in (False, True)]
            expected = [scores[version][place] for place, version in enumerate(result.versions)]
            assert result.logprobs == close(expected)
        assert {version for result in results for version in result.versions} == {0, 1}

    asyncio.run(main())


def test_a_sequence_of_full_length_is_scored_beside_others(cores: Cores, model: TinyModel) -> None:
    engine = cores.engine(model.folder, slots=8, max_model_tokens=128)
    tokens = prompts(1, shortest=128, longest=128)[0]
    engine.add(ask("a", prompts(1)[0], GREEDY))
    steps(engine, 1)
    assert engine.logprobs(tokens) == close(model.score(tokens[:1], tokens[1:]))
    assert list(finish(engine)) == ["a"]
