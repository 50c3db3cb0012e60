"""What is particular to the embedded engine: its invariants under random events, eviction, models it must refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.engines.sampling import uniform
from rollart.data.stores.files import FileShelf
from rollart.data.weights import BucketStore
from rollart.errors import ConfigError, GenerationError, WeightsError
from rollart.protocols import FrozenTensors
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.tiny_models import SHAPE, VOCABULARY, TinyModel

TOLERANCE = 1e-4


def tokens(draw: random.Random, shortest: int, longest: int) -> list[int]:
    return [draw.randrange(len(VOCABULARY)) for _ in range(draw.randint(shortest, longest))]


class Life:
    """Throws random events at an engine and checks every result against the weights that it says it used."""

    def __init__(self, model: TinyModel, seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)
        self.engine = EmbeddedEngine(
            model.folder, slots=6, max_model_tokens=80, prefill_tokens=32, kept_tokens=200, seed=seed
        )
        self.begin = tokens(self.draw, 18, 18)
        self.histories = [self.prompt() for _ in range(10)]
        self.requests: dict[str, tuple[int, GenRequest]] = {}
        self.version = self.count = self.num_results = 0

    def prompt(self) -> list[int]:
        """Half of them begin alike, some are equal."""
        return self.draw.choice([tokens(self.draw, 1, 20), self.begin + tokens(self.draw, 0, 3)])

    def event(self) -> None:
        kinds = {"step": 60, "add": 25, "abort": 4, "release": 4, "suspend": 2, "resume": 4, "update": 2}
        getattr(self, self.draw.choices(list(kinds), list(kinds.values()))[0])()
        self.engine.check()

    def step(self) -> None:
        for result in self.engine.step():
            self.take(result)

    def add(self) -> None:
        busy = {index for index, _ in self.requests.values()}
        index = self.draw.choice([index for index in range(len(self.histories)) if index not in busy] or [0])
        if index in busy:
            return
        sampling = Sampling(self.draw.choice([0.0, 1.0]), max_tokens=self.draw.randint(1, 9))
        request = GenRequest(f"r{self.count}", f"t{index}", list(self.histories[index]), sampling)
        self.count += 1
        self.requests[request.request_id] = index, request
        self.engine.add(request)

    def abort(self) -> None:
        if self.requests:
            result = self.engine.abort(self.draw.choice(list(self.requests)))
            assert result is not None
            assert result.finish_reason == "abort"
            self.take(result)

    def release(self) -> None:
        self.engine.release(f"t{self.draw.randrange(10)}")

    def suspend(self) -> None:
        self.engine.suspend()

    def resume(self) -> None:
        self.engine.resume()

    def update(self) -> None:
        self.version += 1
        self.engine.update(self.version, self.model.weights(other=self.version % 2 == 1))

    def take(self, result: GenResult) -> None:
        index, request = self.requests.pop(result.request_id)
        assert result.finish_reason in ("length", "abort")
        scores = [self.model.score(request.prompt, result.tokens, other) for other in (False, True)]
        expected = [scores[version % 2][i] for i, version in enumerate(result.versions)]
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert result.versions == sorted(result.versions)
        self.num_results += 1
        history = [*request.prompt, *result.tokens, *tokens(self.draw, 1, 5)]
        self.histories[index] = history if len(history) < 70 else self.prompt()

    def end(self) -> Iterator[GenResult]:
        self.engine.resume()
        while self.engine.has_work():
            yield from self.engine.step()


@pytest.mark.parametrize("seed", range(3))
def test_random_events_leak_no_slot_and_every_logprob_is_that_of_its_version(
    tiny_models: dict[str, TinyModel], seed: int
) -> None:
    life = Life(tiny_models[("llama", "qwen3")[seed % 2]], seed)
    for _ in range(250):
        life.event()
    for result in life.end():
        life.take(result)
    assert not life.requests
    assert life.num_results > 20
    for index in range(10):
        life.engine.release(f"t{index}")
    stats = life.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
    assert stats.cached_tokens > 0


def test_an_evicted_trajectory_is_computed_again(tiny_models: dict[str, TinyModel]) -> None:
    model, draw = tiny_models["qwen3"], random.Random(0)
    engine = EmbeddedEngine(model.folder, slots=2, max_model_tokens=64, kept_tokens=40)
    first, second = tokens(draw, 20, 20), tokens(draw, 20, 20)
    for name, prompt in (("a", first), ("b", second)):
        engine.add(GenRequest(name, name, prompt, Sampling(0, max_tokens=4)))
        while engine.has_work():
            engine.step()
    assert engine.stats().kv_tokens == 23
    cached = []
    for name, prompt in (("b", second), ("a", first)):
        engine.add(GenRequest(name, name, prompt, Sampling(0, max_tokens=4)))
        while engine.has_work():
            for result in engine.step():
                assert result.logprobs == pytest.approx(model.score(prompt, result.tokens), abs=TOLERANCE)
                cached.append(result.cached_tokens)
    assert cached == [19, 0]


def test_memory_is_taken_as_it_is_needed(tiny_models: dict[str, TinyModel]) -> None:
    engine = EmbeddedEngine(tiny_models["llama"].folder, slots=64, max_model_tokens=512)
    engine.add(GenRequest("a", "a", [1, 2, 3], Sampling(max_tokens=4)))
    while engine.has_work():
        engine.step()
    assert engine.allocated_tokens <= 2 * 64


def test_stop_strings_need_a_tokenizer(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(tiny_models["llama"].folder) / name).read_bytes())
    engine = EmbeddedEngine(str(tmp_path), max_model_tokens=32)
    with pytest.raises(GenerationError, match=r"tokenizer\.json"):
        engine.add(GenRequest("a", "a", [1], Sampling(stop=("x",))))


SMALL = {**SHAPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64)), "sliding window of 64"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "softcap"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=72, hidden_size=32, n_layer=2, n_head=4)), "differ"),
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
            ),
            "dynamic",
        ),
    ],
    ids=["sliding window", "softcap", "alibi", "dynamic positions"],
)
def test_a_model_out_of_reach_is_refused(build: type[PreTrainedModel], message: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(tmp_path)
    with pytest.raises(GenerationError, match=message):
        EmbeddedEngine(str(tmp_path), max_model_tokens=256)


def test_a_window_wider_than_the_longest_sequence_is_no_obstacle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64)).save_pretrained(tmp_path)
    assert not EmbeddedEngine(str(tmp_path), max_model_tokens=64).has_work()


def test_weights_that_are_not_finite_are_refused_at_the_start(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(GenerationError, match="not finite"):
        EmbeddedEngine(str(tmp_path), max_model_tokens=64)


def test_what_cannot_work_is_said_before_anything_runs(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    folder = tiny_models["llama"].folder
    with pytest.raises(ConfigError, match=r"no config\.json"):
        EmbeddedEngine(str(tmp_path))
    with pytest.raises(ConfigError, match="513 is more than the model's 512 positions"):
        EmbeddedEngine(folder, max_model_tokens=513)
    with pytest.raises(ConfigError, match="slots"):
        EmbeddedEngine(folder, slots=0)
    with pytest.raises(ConfigError, match="dtype"):
        EmbeddedEngine(folder, dtype="float33")


def test_random_numbers_are_even_and_independent_of_key_and_position() -> None:
    keys_R1 = torch.arange(-500, 500)[:, None] * 7919
    drawn_RN = uniform(keys_R1, torch.arange(200)[None, :])
    assert float(drawn_RN.min()) >= 0
    assert float(drawn_RN.max()) < 1
    counts = torch.histc(drawn_RN, 100, 0, 1)
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert chi_square < 150  # 99 degrees of freedom: 149 is exceeded once in a thousand
    for shifted in (drawn_RN.roll(1, 0), drawn_RN.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack([drawn_RN.flatten(), shifted.flatten()]))[0, 1])) < 0.01


def test_what_a_trajectory_says_does_not_depend_on_its_neighbours_or_its_worker(
    tiny_models: dict[str, TinyModel],
) -> None:
    folder = str(tiny_models["llama"].folder)
    sampling = Sampling(max_tokens=40)

    def said(*ids: str, slots: int) -> dict[str, list[int]]:
        engine = EmbeddedEngine(folder, slots=slots, max_model_tokens=64, seed=3)
        for each in ids:
            engine.add(GenRequest(f"{each}-t0", each, [5 + int(each), 6, 7], sampling))
        found = {}
        while engine.has_work():
            found |= {result.request_id: result.tokens for result in engine.step()}
        return found

    together = said("0", "1", "2", "3", slots=4)
    assert len(set(map(tuple, together.values()))) == 4
    assert said("3", "2", "0", "1", slots=2) == together
    assert said("1", slots=1)["1-t0"] == together["1-t0"]


# ------------------------------------------------------------------------------------------------------------- weights
def test_tensors_that_nobody_changes_are_kept_and_all_others_copied(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["qwen3"]
    prompt = list(range(12))
    expected = [model.score(prompt[:1], prompt[1:], other) for other in (False, True)]
    engine = EmbeddedEngine(model.folder, slots=2, max_model_tokens=32)
    for kind, kept in ((list, False), (iter, False), (FrozenTensors, True)):
        given = model.weights(other=True)
        engine.update(1, kind(given))  # type: ignore[arg-type]
        assert engine.logprobs(prompt) == pytest.approx(expected[1], abs=TOLERANCE)
        for (_, tensor), (_, before) in zip(given, model.weights(), strict=True):
            tensor.copy_(before)
        assert engine.logprobs(prompt) == pytest.approx(expected[not kept], abs=TOLERANCE)


def test_kept_tensors_that_do_not_fit_change_nothing(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["llama"]
    engine = EmbeddedEngine(model.folder, slots=2, max_model_tokens=32)
    before = engine.logprobs([1, 2, 3])
    *others, (name, last) = model.weights(other=True)
    with pytest.raises(WeightsError, match=f"{name} is float32"):
        engine.update(1, FrozenTensors([*others, (name, last[:-1])]))
    assert engine.logprobs([1, 2, 3]) == before
    assert engine.stats().version == 0


def test_weights_kept_in_shared_memory_outlive_their_version(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["qwen3"]
    engine = EmbeddedEngine(model.folder, slots=2, max_model_tokens=32)
    store = BucketStore(FileShelf(tmp_path, mapped=True), 4096, 2)
    store.publish(0, model.weights(other=True))
    engine.update(1, FrozenTensors(store.fetch(0)))
    for version in (1, 2, 3):
        store.publish(version, model.weights())
    prompt = list(range(12))
    assert engine.logprobs(prompt) == pytest.approx(model.score(prompt[:1], prompt[1:], other=True), abs=TOLERANCE)
