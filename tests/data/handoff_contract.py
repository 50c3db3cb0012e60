"""What an engine must do that reads requests for another, or goes on with what another has read, as tests over the
fixtures `kind` and `make_engine` of `engine_contract.py`, that the importing module defines.

Log-probabilities are compared with a tolerance of 1e-4.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rollart.errors import GenerationError
from rollart.protocols import HandsOver, Payload
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.engine_contract import (
    GREEDY,
    SAMPLED,
    Kind,
    MakeEngine,
    ask,
    assert_same,
    close,
    finish,
    long_prompts,
    prompts,
    run,
    steps,
    text,
)
from tests.data.tiny_models import TinyModel


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["qwen3"]


class Pair:
    """A reader, a writer, and an engine that does both, as a reference."""

    def __init__(self, make_engine: MakeEngine, model: TinyModel, **options: Any) -> None:
        options = {"slots": 8, "max_model_tokens": 128, **options}
        self.reader, self.writer, self.both = (make_engine(model.folder, **options) for _ in range(3))
        self._left: dict[str, tuple[int, bytearray]] = {}

    def read(self, *requests: GenRequest, so_far: GenResult | None = None) -> list[GenResult]:
        """Their results; what the writer lacks of each is taken as soon as it has been read."""
        for request in requests:
            self.reader.add_prefill(request, so_far or nothing(request))
        asked, results = {request.request_id: request for request in requests}, {}
        while self.reader.has_work():
            for result in self.reader.step():
                results[result.request_id] = result
                if result.finish_reason == "handoff":
                    self._take(asked[result.request_id], result)
        return [results[request.request_id] for request in requests]

    def _take(self, request: GenRequest, read: GenResult) -> None:
        start = self.writer.kept(request, read)
        assert start % self.reader.grain == 0
        self._left[request.request_id] = start, travelled(self.reader.payload(request, read, start))

    def carry(self, request: GenRequest, read: GenResult) -> None:
        """From the reader to the writer."""
        start, payload = self._left[request.request_id]
        self.writer.add_decode(request, read, start, bytearray(payload))

    def run(self, *requests: GenRequest) -> list[GenResult]:
        read = self.read(*requests)
        for request, result in zip(requests, read, strict=True):
            if result.finish_reason == "handoff":
                self.carry(request, result)
        written = finish(self.writer)
        return [written.get(result.request_id, result) for result in read]


@pytest.fixture
def pair(make_engine: MakeEngine, model: TinyModel) -> Pair:
    return Pair(make_engine, model)


def nothing(request: GenRequest) -> GenResult:
    return GenResult(request.request_id, [], [], [], "handoff")


def travelled(payload: Payload | None) -> bytearray:
    assert payload is not None
    return bytearray(payload)


# ----------------------------------------------------------------------------------------------------- correctness
def test_it_is_such_an_engine(pair: Pair) -> None:
    assert isinstance(pair.reader, HandsOver)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.4, top_k=9, top_p=0.9, max_tokens=20)])
def test_read_here_and_written_there_is_the_same_as_both_in_one_place(
    make_engine: MakeEngine, tiny_models: dict[str, TinyModel], family: str, sampling: Sampling, kind: Kind
) -> None:
    if kind.redraws and sampling.temperature:
        pytest.skip(kind.redraws)
    pair = Pair(make_engine, tiny_models[family])
    requests = [ask(str(i), prompt, sampling) for i, prompt in enumerate(prompts(6))]
    results = pair.run(*requests)
    assert_same(results, run(pair.both, *requests))
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length"
        assert result.versions == [0] * sampling.max_tokens
        assert result.received_tokens == len(request.prompt)
    num_tokens = sum(len(request.prompt) for request in requests)
    read, written = pair.reader.stats(), pair.writer.stats()
    assert (read.prefilled_tokens, read.generated_tokens) == (num_tokens, len(requests))
    assert (written.prefilled_tokens, written.received_tokens) == (0, num_tokens)


def test_more_requests_than_slots_on_either_side(make_engine: MakeEngine, model: TinyModel) -> None:
    pair = Pair(make_engine, model, slots=3, prefill_tokens=13)
    requests = [ask(str(i), prompt, Sampling(0, max_tokens=3 + i)) for i, prompt in enumerate(prompts(10))]
    assert_same(pair.run(*requests), run(pair.both, *requests))


def test_what_arrives_joins_those_that_are_read_here(pair: Pair) -> None:
    asked = prompts(6, shortest=20, longest=60)
    requests = [ask(str(i), prompt, GREEDY) for i, prompt in enumerate(asked)]
    read = pair.read(*requests[:3])
    pair.writer.add(requests[3])
    pair.carry(requests[0], read[0])
    pair.writer.step()
    pair.carry(requests[1], read[1])
    pair.writer.add(requests[4])
    pair.carry(requests[2], read[2])
    pair.writer.add(requests[5])
    results = finish(pair.writer)
    assert_same([results[request.request_id] for request in requests], run(pair.both, *requests))


def test_members_of_a_group_that_were_read_once_are_written_each_for_itself(pair: Pair, kind: Kind) -> None:
    prompt = long_prompts(kind, 1, shortest=25)[0]
    requests = [ask(str(i), prompt, kind.sampled) for i in range(5)]
    assert_same(pair.run(*requests), run(pair.both, *requests))
    unshared = len(prompt) - kind.whole(len(prompt) - 1)
    assert pair.reader.stats().prefilled_tokens == len(prompt) + 4 * unshared


# -------------------------------------------------------------------------------------------------- several turns
def test_later_turns_read_and_carry_only_what_is_new(pair: Pair, kind: Kind) -> None:
    histories = long_prompts(kind, 3, shortest=5)
    for turn in range(3):
        requests = [ask(f"{turn}{i}", history, GREEDY, f"t{i}") for i, history in enumerate(histories)]
        results = pair.run(*requests)
        assert_same(results, run(pair.both, *requests))
        for i, (request, result) in enumerate(zip(requests, results, strict=True)):
            # The writer has all but the last token written and four of the observation, the reader the last prompt.
            written, read = (len(request.prompt) - 5, len(request.prompt) - 4 - len(result.tokens)) if turn else (0, 0)
            assert result.received_tokens == len(request.prompt) - kind.whole(written)
            assert result.cached_tokens == kind.whole(read)
            histories[i] = [*request.prompt, *result.tokens, *prompts(1, seed=turn, shortest=4, longest=4)[0]]


def test_a_writer_that_has_forgotten_the_trajectory_takes_all_of_it(pair: Pair, kind: Kind) -> None:
    prompt = long_prompts(kind, 1)[0]
    (first,) = pair.run(ask("a", prompt, GREEDY, "t"))
    kind.forget(pair.writer, ask("a", prompt, GREEDY, "t"))
    request = ask("b", [*prompt, *first.tokens, 1, 2, 3], GREEDY, "t")
    (second,) = pair.run(request)
    assert second.received_tokens == len(request.prompt)
    assert_same([second], run(pair.both, request))


def test_without_keys_and_values_the_writer_reads(pair: Pair, kind: Kind) -> None:
    request = ask("a", long_prompts(kind, 1)[0])
    (read,) = pair.read(request)
    kind.forget(pair.reader, request)
    assert pair.reader.payload(request, read, 0) is None
    pair.writer.add_decode(request, read, 0, None)
    result = finish(pair.writer)["a"]
    assert_same([result], run(pair.both, request))
    assert result.received_tokens == 0


def test_a_payload_may_be_of_any_kind_of_bytes(pair: Pair) -> None:
    request = ask("a", prompts(1, shortest=20)[0])
    (read,) = pair.read(request)
    payload = pair.reader.payload(request, read, 0)
    assert payload is not None
    expected = run(pair.both, request)
    for kind in (bytes, bytearray, memoryview):
        pair.writer.release(request.trajectory_id)
        pair.writer.add_decode(request, read, 0, kind(bytearray(payload)))
        assert_same([finish(pair.writer)["a"]], expected)


def test_a_request_that_was_written_for_a_while_is_read_again_and_goes_on(pair: Pair, kind: Kind) -> None:
    request = ask("a", prompts(1, shortest=20)[0], kind.sampled)
    (read,) = pair.read(request)
    pair.carry(request, read)
    steps(pair.writer, 4)
    halfway = pair.writer.abort("a")
    assert halfway is not None
    (again,) = pair.read(request, so_far=replace(halfway, finish_reason="handoff"))
    assert again.tokens[:5] == halfway.tokens
    pair.carry(request, again)
    result = finish(pair.writer)["a"]
    assert_same([result], run(pair.both, request))
    assert len(result.versions) == len(result.tokens)


# --------------------------------------------------------------------------------------------------- when to stop
def test_a_request_that_ends_with_its_first_token_ends_where_it_is_read(pair: Pair) -> None:
    prompt = prompts(1)[0]
    (free,) = run(pair.both, ask("a", prompt))
    by_token, by_length, by_room = pair.read(
        ask("b", prompt, Sampling(0, max_tokens=9, stop_token_ids=(free.tokens[0],))),
        ask("c", prompt, Sampling(0, max_tokens=1)),
        ask("d", prompts(1, shortest=127, longest=127)[0]),
    )
    assert [each.finish_reason for each in (by_token, by_length, by_room)] == ["stop", "length", "length"]
    assert [len(each.tokens) for each in (by_token, by_length, by_room)] == [1, 1, 1]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_stop_string_may_begin_before_the_request_changes_hands(pair: Pair, start: int) -> None:
    prompt = prompts(1, seed=3)[0]
    (free,) = run(pair.both, ask("a", prompt, Sampling(0, max_tokens=20)))
    stop = text(free.tokens[start : start + 3])
    request = ask("b", prompt, Sampling(0, max_tokens=20, stop=("never!", stop)))
    (result,) = pair.run(request)
    assert_same([result], run(pair.both, request))
    assert result.finish_reason == "stop"


def test_nothing_follows_an_answer_that_has_its_length(pair: Pair) -> None:
    request = ask("a", [1, 2, 3], Sampling(0, max_tokens=2))
    (whole,) = run(pair.both, request)
    for add in (pair.reader.add_prefill, lambda *given: pair.writer.add_decode(*given, 0, None)):
        with pytest.raises(GenerationError, match="has its 2 tokens already"):
            add(request, whole)
    assert not pair.reader.has_work()
    assert not pair.writer.has_work()


# -------------------------------------------------------------------------------------------------- abort, update
def test_an_abort_on_either_side_frees_everything(pair: Pair) -> None:
    request = ask("a", prompts(1, shortest=20)[0])
    pair.reader.add_prefill(request, nothing(request))
    assert pair.reader.abort("a") == replace(nothing(request), finish_reason="abort", queue_s=0.0)
    (read,) = pair.read(request)
    pair.writer.suspend()
    pair.carry(request, read)
    waiting = pair.writer.abort("a")
    assert waiting is not None
    assert (waiting.tokens, waiting.finish_reason) == (read.tokens, "abort")
    pair.writer.resume()
    pair.carry(request, read)
    steps(pair.writer, 3)
    running = pair.writer.abort("a")
    assert running is not None
    assert len(running.tokens) == 4
    pair.reader.release(request.trajectory_id)
    assert (pair.reader.stats().kv_tokens, pair.writer.stats().kv_tokens) == (0, 0)


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_keys_and_values_of_older_weights_are_never_used(pair: Pair, model: TinyModel, where: str) -> None:
    request = ask("a", prompts(1, shortest=20)[0])
    (read,) = pair.read(request)
    pair.writer.suspend()
    pair.carry(request, read)
    if where == "running":
        pair.writer.resume()
        steps(pair.writer, 3)
        pair.writer.suspend()
    pair.writer.update(1, model.weights(other=True))
    assert pair.writer.stats().kv_tokens == 0
    pair.writer.resume()
    result = finish(pair.writer)["a"]
    old = 4 if where == "running" else 1
    assert result.versions == [0] * old + [1] * (12 - old)
    assert result.logprobs[:old] == close(model.score(request.prompt, result.tokens)[:old])
    assert result.logprobs[old:] == close(model.score(request.prompt, result.tokens, other=True)[old:])


def test_a_reader_that_was_updated_has_nothing_of_before(pair: Pair, model: TinyModel) -> None:
    request = ask("a", prompts(1, shortest=20)[0])
    (read,) = pair.read(request)
    pair.reader.update(1, model.weights(other=True))
    assert pair.reader.payload(request, read, 0) is None


# -------------------------------------------------------------------------------------------------------- trouble
def test_a_payload_of_another_kind_of_engine_is_refused_and_leaves_nothing_behind(pair: Pair) -> None:
    request = ask("a", prompts(1, shortest=20)[0])
    (read,) = pair.read(request)
    with pytest.raises(GenerationError, match="another model or dtype"):
        pair.writer.add_decode(request, read, 0, bytearray(100))
    assert not pair.writer.has_work()
    pair.carry(request, read)
    assert_same([finish(pair.writer)["a"]], run(pair.both, request))


def test_a_request_that_can_never_run_is_refused_on_both_sides(pair: Pair) -> None:
    request = ask("a", [])
    for add in (pair.reader.add_prefill, lambda *given: pair.writer.add_decode(*given, 0, None)):
        with pytest.raises(GenerationError, match="empty"):
            add(request, nothing(request))
    assert not pair.reader.has_work()
    assert not pair.writer.has_work()
