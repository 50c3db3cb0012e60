"""What the vLLM engine does around vLLM, over a core that counts; over vLLM itself: `tests/production`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rollart.data.engines import create_engine
from rollart.data.engines.vllm import VLLMEngine
from rollart.data.engines.vllm_seam import News, Parcel
from rollart.errors import ConfigError, GenerationError, WeightsError
from rollart.protocols import Payload
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.tiny_models import VOCABULARY, TinyModel


class Counting:
    """Generates the number of tokens that a request has; keeps a log of what it was told."""

    def __init__(self, model_folder: str, **arguments: Any) -> None:
        self.arguments, self.vocabulary = arguments, len(VOCABULARY)
        self.block_tokens, self.block_bytes = 4, 40
        self.parcels: dict[str, list[Parcel | None]] = {}
        self.leaving: set[str] = set()
        self.running: dict[str, list[int]] = {}
        self.seeds: dict[str, list[int]] = {}
        self.scored: str = ""
        self.log: list[str] = []
        self.logprob, self.ends, self.fault = -1.0, "", False

    @property
    def num_requests(self) -> int:
        return len(self.running)

    def add(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        max_tokens: int,
        seed: int,
        leaves: bool = False,
        parcel: Parcel | None = None,
    ) -> None:
        if 13 in sampling.stop_token_ids:
            raise ValueError("13 brings bad luck")
        self.running[request_id] = tokens
        self.parcels.setdefault(request_id, []).append(parcel)
        self.leaving |= {request_id} if leaves else set()
        self.seeds.setdefault(request_id, []).append(seed)

    def score(self, request_id: str, tokens: list[int]) -> None:
        self.scored, self.running[request_id] = request_id, tokens

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> list[News]:
        self.log.append(f"step {sorted(self.running)}")
        return [self._advance(request_id, tokens) for request_id, tokens in self.running.items()]

    def _advance(self, request_id: str, tokens: list[int]) -> News:
        if request_id == self.scored:
            return News(request_id, [0], [-1.0], 0, "length", [-0.5] * (len(tokens) - 1), [])
        tokens.append(len(tokens))
        return News(request_id, tokens[-1:], [self.logprob], 0, self.ends, [], [5, 6] * (request_id in self.leaving))

    def cached(self, tokens: list[int]) -> list[int]:
        return []

    def read(self, block_ids: Sequence[int]) -> Payload:
        return bytes(len(block_ids) * self.block_bytes)

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        assert not self.running
        self.log.append(f"load {len(list(tensors))}")
        if self.fault:
            raise ZeroDivisionError("a fault in vLLM")

    def forget(self, clean: bool = False) -> None:
        assert not self.running
        self.log.append("clean" if clean else "forget")

    def sleep(self) -> None:
        assert not self.running
        self.log.append("sleep")

    def wake(self, weights_only: bool = False) -> None:
        self.log.append("wake weights" if weights_only else "wake")


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["qwen3"]


@pytest.fixture
def cores() -> list[Counting]:
    return []


@pytest.fixture
def engine(model: TinyModel, cores: list[Counting]) -> Iterator[VLLMEngine]:
    made = make(model, cores)
    yield made
    made.check()


def make(model: TinyModel, cores: list[Counting], **options: Any) -> VLLMEngine:
    def start(*args: Any, **kwargs: Any) -> Counting:
        cores.append(Counting(*args, **kwargs))
        return cores[-1]

    return VLLMEngine(model.folder, **{"slots": 2, "max_model_tokens": 64, "start": start, **options})


def ask(name: str, max_tokens: int = 8, **sampling: Any) -> GenRequest:
    return GenRequest(name, f"t-{name}", [1, 2, 3], Sampling(max_tokens=max_tokens, **sampling))


def finish(engine: VLLMEngine) -> dict[str, GenResult]:
    results: dict[str, GenResult] = {}
    while engine.has_work():
        results |= {result.request_id: result for result in engine.step()}
    return results


def test_vllm_is_given_no_more_requests_than_slots(engine: VLLMEngine, cores: list[Counting]) -> None:
    for i in range(5):
        engine.add(ask(str(i), 2 + i))
    results = finish(engine)
    assert [results[str(i)].tokens for i in range(5)] == [list(range(3, 5 + i)) for i in range(5)]
    assert max(len(line.split(",")) for line in cores[0].log) == 2
    assert {key: cores[0].arguments[key] for key in ("max_requests", "max_tokens", "device", "dtype")} == {
        "max_requests": 3,
        "max_tokens": 65,
        "device": "cpu",
        "dtype": "float32",
    }


def test_an_update_happens_while_nothing_runs_and_the_requests_go_on_from_what_they_have(
    engine: VLLMEngine, model: TinyModel, cores: list[Counting]
) -> None:
    for i in range(3):
        engine.add(ask(str(i)))
    for _ in range(4):
        engine.step()
    engine.update(5, model.weights())
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_tokens) == (0, 3, 0)
    results = finish(engine)
    assert results["0"].tokens == list(range(3, 11))
    assert [results[name].versions for name in "012"] == [[0] * 4 + [5] * 4, [0] * 4 + [5] * 4, [5] * 8]
    assert cores[0].log[4:6] == [f"load {len(model.weights())}", "forget"]
    assert cores[0].log[6] == "step ['0', '1']"
    first, second = cores[0].seeds["0"]
    assert first != second


def test_weights_that_break_off_leave_an_engine_that_generates_nothing_until_others_come(
    engine: VLLMEngine, model: TinyModel, cores: list[Counting]
) -> None:
    engine.add(ask("a"))
    engine.step()
    pairs = model.weights()
    with pytest.raises(WeightsError, match=f"is missing; .* and {len(pairs) - 4} more"):
        engine.update(1, iter([pairs[0]]))
    assert engine.stats().version == 0
    with pytest.raises(GenerationError, match="no longer whole, since version 1 was not"):
        engine.step()
    with pytest.raises(GenerationError, match="no longer whole"):
        engine.logprobs([1, 2])
    cores[0].fault = True
    with pytest.raises(WeightsError, match="loading version 2 into vLLM: ZeroDivisionError: a fault in vLLM"):
        engine.update(2, iter(pairs))
    cores[0].fault = False
    engine.update(3, iter(pairs))
    assert finish(engine)["a"].versions == [0] + [3] * 7


@pytest.mark.parametrize("lazy", [False, True])
def test_a_first_tensor_that_does_not_fit_changes_nothing(
    engine: VLLMEngine, model: TinyModel, cores: list[Counting], lazy: bool
) -> None:
    engine.add(ask("a"))
    engine.step()
    pairs = [("model.surprise", torch.zeros(2)), *model.weights()]
    with pytest.raises(WeightsError, match=r"model.surprise is unknown"):
        engine.update(1, iter(pairs) if lazy else pairs)
    assert engine.stats().running == 1
    assert finish(engine)["a"].versions == [0] * 8
    assert "forget" not in cores[0].log


def test_with_sleep_mode_the_memory_is_free_while_suspended(model: TinyModel, cores: list[Counting]) -> None:
    engine = make(model, cores, enable_sleep_mode=True)
    engine.add(ask("a"))
    engine.step()
    engine.suspend()
    engine.update(1, model.weights())
    engine.resume()
    assert finish(engine)["a"].versions == [0] + [1] * 7
    assert cores[0].log[1:6] == ["sleep", "wake weights", f"load {len(model.weights())}", "forget", "wake"]
    engine.suspend()
    engine.suspend()
    engine.logprobs([1, 2])
    engine.resume()
    engine.resume()
    assert cores[0].log[-5:] == ["sleep", "wake", f"step ['{cores[0].scored}']", "sleep", "wake"]


def test_logprobs_are_scored_in_between_and_what_ends_meanwhile_is_not_lost(
    engine: VLLMEngine, cores: list[Counting]
) -> None:
    engine.add(ask("a", 2))
    engine.step()
    assert engine.logprobs([1, 2, 3]) == [-0.5, -0.5]
    assert engine.has_work()
    assert [result.tokens for result in engine.step()] == [[3, 4]]
    assert engine.logprobs([1]) == []
    engine.add(ask("b", 2))
    engine.step()
    engine.suspend()
    engine.logprobs([1, 2, 3])
    assert cores[0].log[-1] == f"step ['{cores[0].scored}']"
    engine.resume()
    assert finish(engine)["b"].tokens == [3, 4]
    for tokens, message in (([], "no tokens"), ([1, 1000], "vocabulary"), ([1] * 65, "vLLM takes 64 at most")):
        with pytest.raises(GenerationError, match=message):
            engine.logprobs(tokens)


def test_a_request_that_vllm_gives_up_or_makes_no_sense_of_fails(engine: VLLMEngine, cores: list[Counting]) -> None:
    engine.add(ask("a"))
    engine.step()
    cores[0].ends = "abort"
    result = finish(engine)["a"]
    assert (result.finish_reason, result.error) == ("error", "vLLM ended the request: abort")
    cores[0].abort(["a"])
    cores[0].ends, cores[0].logprob = "", math.nan
    engine.add(ask("b"))
    result = finish(engine)["b"]
    assert (result.finish_reason, result.tokens) == ("error", [])
    assert "not finite" in result.error
    assert "clean" not in cores[0].log
    cores[0].logprob = -1.0
    engine.add(ask("c"))
    assert finish(engine)["c"].finish_reason == "length"
    assert cores[0].log.count("clean") == 1


def test_a_request_that_vllm_refuses_fails_alone(engine: VLLMEngine) -> None:
    engine.add(ask("a", 2))
    engine.add(ask("b", stop_token_ids=(13,)))
    results = finish(engine)
    assert results["a"].finish_reason == "length"
    assert (results["b"].finish_reason, results["b"].error) == (
        "error",
        "vLLM refuses the request: 13 brings bad luck",
    )


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(engine: VLLMEngine, temperature: float) -> None:
    with pytest.raises(GenerationError, match=r"vLLM takes 0, or 0.01 to 2"):
        engine.add(ask("a", temperature=temperature))


def test_more_tokens_than_positions_are_refused(model: TinyModel, cores: list[Counting]) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_model_tokens: 513 is more than the model's 512 positions"):
        make(model, cores, max_model_tokens=513)
    assert make(model, cores, max_model_tokens=512).parameters()
    assert cores[0].arguments["max_tokens"] == 512


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_where_vllm_is_not_installed_the_error_says_how_it_gets_there(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"engine: 'vllm' is not installed; .*make env-production"):
        create_engine("vllm", model.folder, {"max_model_tokens": 64})


# ------------------------------------------------------------------------------------------- reading, decoding apart
def read(request: GenRequest) -> GenResult:
    """What another engine made of a request."""
    return GenResult(request.request_id, [7], [-0.5], [0], "handoff")


def long(name: str) -> GenRequest:
    return GenRequest(name, f"t-{name}", list(range(1, 11)), Sampling(max_tokens=8))


def test_what_a_request_leaves_can_be_had_until_the_next_step(engine: VLLMEngine, cores: list[Counting]) -> None:
    request = long("a")
    engine.add_prefill(request, GenResult("a", [], [], [], "handoff"))
    engine.add(ask("b"))
    (result,) = engine.step()
    assert (result.tokens, result.finish_reason) == ([10], "handoff")
    for start, num_blocks in ((0, 2), (4, 1)):
        payload = engine.payload(request, result, start)
        assert payload is not None
        assert len(payload) == 40 * num_blocks
    engine.step()
    assert engine.payload(request, result, 0) is None
    assert cores[0].leaving == {"a"}


@pytest.mark.parametrize(("num_blocks", "end"), [(3, 10), (2, 8), (1, 4)])
def test_what_arrives_goes_to_vllm_once_as_far_as_it_reaches(
    engine: VLLMEngine, cores: list[Counting], num_blocks: int, end: int
) -> None:
    request = long("a")
    engine.add_decode(request, read(request), 0, bytes(40 * num_blocks))
    assert finish(engine)["a"].tokens == [7, *range(11, 18)]
    assert cores[0].parcels == {"a": [Parcel(0, end, bytearray(40 * num_blocks))]}


def test_what_arrived_is_forgotten_with_the_weights_that_it_was_computed_with(
    engine: VLLMEngine, model: TinyModel, cores: list[Counting]
) -> None:
    for name in "abc":
        engine.add_decode(long(name), read(long(name)), 8, bytes(40))
    engine.step()
    assert [cores[0].parcels[name][0] for name in "ab"] == [Parcel(8, 10, bytearray(40))] * 2
    engine.update(1, model.weights())
    assert finish(engine)["c"].received_tokens == 0
    assert [cores[0].parcels[name][-1] for name in "abc"] == [None] * 3


def test_an_abort_takes_what_arrived_along(engine: VLLMEngine, cores: list[Counting]) -> None:
    engine.add_decode(long("a"), read(long("a")), 0, bytes(120))
    aborted = engine.abort("a")
    assert aborted is not None
    assert (aborted.tokens, aborted.finish_reason) == ([7], "abort")
    engine.add(long("a"))
    finish(engine)
    assert cores[0].parcels == {"a": [None]}


@pytest.mark.parametrize(("start", "num_bytes"), [(0, 41), (3, 40), (0, 160), (8, 80)])
def test_what_cannot_be_blocks_of_the_request_is_refused(engine: VLLMEngine, start: int, num_bytes: int) -> None:
    with pytest.raises(GenerationError, match=r"but a block of 4 tokens has 40: .* another model or dtype"):
        engine.add_decode(long("a"), read(long("a")), start, bytes(num_bytes))
    assert not engine.has_work()
