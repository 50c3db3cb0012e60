"""What every engine must do, whatever is inside it, as tests over two fixtures that the importing module defines:
`kind`, and `make_engine`, which gives an engine as good as new.

Log-probabilities are compared with a tolerance of 1e-4.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from rollart.errors import GenerationError, WeightsError
from rollart.protocols import Engine
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.tiny_models import LETTERS, VOCABULARY, TinyModel

TOLERANCE = 1e-4
GREEDY = Sampling(temperature=0, max_tokens=12)
MakeEngine = Callable[..., Engine]
Alone = Callable[[list[GenRequest]], list[GenResult]]


def release(engine: Engine, request: GenRequest) -> None:
    engine.release(request.trajectory_id)


@dataclass(frozen=True)
class Kind:
    """Where the contract leaves an engine room.

    `block_tokens`: prefixes are reused in whole blocks of so many. `keeps`: why what idle trajectories leave behind is
    neither counted nor given up at their release; "" where it is. `unfiltered`: why it refuses top-k and top-p.
    `counts_calls`: its steps are calls. `forget`: how the next request finds nothing of one. `redraws`: why another
    draw follows where a request goes on that had begun elsewhere; "" where seed, trajectory and position decide.
    """

    name: str
    block_tokens: int = 1
    keeps: str = ""
    unfiltered: str = ""
    counts_calls: bool = False
    forget: Callable[[Engine, GenRequest], None] = release
    redraws: str = ""

    def whole(self, num_tokens: int) -> int:
        """How many of so many common tokens are reused."""
        return num_tokens // self.block_tokens * self.block_tokens

    @property
    def sampled(self) -> Sampling:
        """What is the same wherever it is drawn."""
        return GREEDY if self.redraws else SAMPLED

    @property
    def extra(self) -> int:
        """What makes prompts of twenty tokens long enough for two blocks, or nearly."""
        return 0 if self.block_tokens == 1 else 2 * self.block_tokens - 20


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models[request.param]


@pytest.fixture
def engine(make_engine: MakeEngine, model: TinyModel) -> Engine:
    return make_engine(model.folder, slots=8, max_model_tokens=128)


@pytest.fixture
def alone(make_engine: MakeEngine, model: TinyModel, kind: Kind) -> Alone:
    """Runs requests one after the other, so that there is nobody to share with."""

    def serve(requests: list[GenRequest]) -> list[GenResult]:
        engine, results = make_engine(model.folder, slots=1, max_model_tokens=128), []
        for request in requests:
            results += run(engine, request)
            kind.forget(engine, request)
        assert engine.stats().cached_tokens == 0
        return results

    return serve


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 30) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(len(VOCABULARY)) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def long_prompts(kind: Kind, count: int, seed: int = 0, shortest: int = 20) -> list[list[int]]:
    """Long enough for something to be reused of each."""
    return prompts(count, seed, shortest + kind.extra, 30 + kind.extra)


def ask(name: str, prompt: list[int], sampling: Sampling = GREEDY, trajectory: str = "") -> GenRequest:
    return GenRequest(name, trajectory or f"trajectory {name}", prompt, sampling)


def finish(engine: Engine) -> dict[str, GenResult]:
    results: dict[str, GenResult] = {}
    while engine.has_work():
        results |= {result.request_id: result for result in engine.step()}
    return results


def run(engine: Engine, *requests: GenRequest) -> list[GenResult]:
    for request in requests:
        engine.add(request)
    results = finish(engine)
    return [results[request.request_id] for request in requests]


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


def text(tokens: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


close = partial(pytest.approx, abs=TOLERANCE)


# ----------------------------------------------------------------------------------------------------- correctness
def test_logprobs_of_generated_tokens_equal_a_plain_forward_pass(engine: Engine, model: TinyModel) -> None:
    for prompt, sampling in zip(prompts(4), [GREEDY, GREEDY, Sampling(max_tokens=20), Sampling()], strict=True):
        (result,) = run(engine, ask("a", prompt, sampling))
        assert result.logprobs == close(model.score(prompt, result.tokens))
        assert result.finish_reason == "length"
        assert len(result.tokens) == sampling.max_tokens
        assert result.versions == [0] * sampling.max_tokens


def test_greedy_takes_the_likeliest_token_every_time(engine: Engine, model: TinyModel) -> None:
    prompt = prompts(1)[0]
    (result,) = run(engine, ask("a", prompt))
    table = model.logprobs(prompt + result.tokens)
    assert result.tokens == table[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_logprobs_of_given_tokens_equal_a_plain_forward_pass(engine: Engine, model: TinyModel) -> None:
    tokens = prompts(1, shortest=20)[0]
    assert engine.logprobs(tokens) == close(model.score(tokens[:1], tokens[1:]))
    assert engine.logprobs(tokens[:1]) == []


def test_batching_changes_neither_tokens_nor_logprobs(
    engine: Engine, make_engine: MakeEngine, model: TinyModel, alone: Alone
) -> None:
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(8))]
    together = run(engine, *requests)
    single = alone(requests[:3])
    staggered_engine = make_engine(model.folder, slots=8, max_model_tokens=128)
    results: dict[str, GenResult] = {}
    for request in requests:
        staggered_engine.add(request)
        results |= {result.request_id: result for result in staggered_engine.step()}
    results |= finish(staggered_engine)
    staggered = [results[request.request_id] for request in requests]
    for result, other in [*zip(together, single, strict=False), *zip(together, staggered, strict=True)]:
        assert result.tokens == other.tokens
        assert result.logprobs == close(other.logprobs)


def test_a_prompt_longer_than_one_prefill_gives_the_same_tokens(
    engine: Engine, make_engine: MakeEngine, model: TinyModel
) -> None:
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(6, shortest=20, longest=60))]
    expected = run(engine, *requests)
    chunked = run(make_engine(model.folder, slots=8, max_model_tokens=128, prefill_tokens=13), *requests)
    for result, other in zip(expected, chunked, strict=True):
        assert result.tokens == other.tokens
        assert result.logprobs == close(other.logprobs)


def test_more_requests_than_slots_queue_and_all_finish(make_engine: MakeEngine, model: TinyModel) -> None:
    engine = make_engine(model.folder, slots=3, max_model_tokens=128)
    requests = [ask(str(i), prompt, Sampling(0, max_tokens=3 + i)) for i, prompt in enumerate(prompts(10))]
    for request in requests:
        engine.add(request)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 7)
    results = finish(engine)
    for request in requests:
        result = results[request.request_id]
        assert len(result.tokens) == request.sampling.max_tokens
        assert result.logprobs == close(model.score(request.prompt, result.tokens))


# ---------------------------------------------------------------------------------------------------- prefix reuse
def test_the_next_turn_reuses_its_prefix_and_equals_a_cold_run(
    engine: Engine, make_engine: MakeEngine, model: TinyModel, kind: Kind
) -> None:
    cold = make_engine(model.folder, slots=8, max_model_tokens=128)
    histories = long_prompts(kind, 3, shortest=5)
    for turn in range(3):
        requests = [ask(f"{turn}{i}", history, GREEDY, f"t{i}") for i, history in enumerate(histories)]
        warm_results = run(engine, *requests)
        for i, (request, warm) in enumerate(zip(requests, warm_results, strict=True)):
            (plain,) = run(cold, ask("x", request.prompt))
            assert warm.tokens == plain.tokens
            assert warm.logprobs == close(plain.logprobs)
            reused = 0 if turn == 0 else len(request.prompt) - len(histories[i][-4:]) - 1
            assert warm.cached_tokens == kind.whole(reused)
            histories[i] = [*request.prompt, *warm.tokens, *prompts(1, seed=turn, shortest=4, longest=4)[0]]
    assert engine.stats().cached_tokens > 0


def test_a_prompt_that_departs_from_the_last_turn_reuses_only_what_they_share(
    engine: Engine, model: TinyModel, kind: Kind
) -> None:
    first = long_prompts(kind, 1)[0]
    run(engine, ask("a", first, GREEDY, "t"))
    shared = 10 + kind.extra
    second = [*first[:shared], (first[shared] + 1) % len(VOCABULARY), *first[shared + 1 :]]
    (result,) = run(engine, ask("b", second, GREEDY, "t"))
    assert result.cached_tokens == kind.whole(shared) > 0
    assert result.logprobs == close(model.score(second, result.tokens))


def test_the_same_prompt_again_still_computes_its_last_token(engine: Engine, model: TinyModel, kind: Kind) -> None:
    for length in range(2 * kind.block_tokens, 3 * kind.block_tokens + 1):
        (prompt,) = prompts(1, seed=length, shortest=length, longest=length)
        (first,) = run(engine, ask("a", prompt, Sampling(0, max_tokens=2), "t"))
        (again,) = run(engine, ask("b", prompt, Sampling(0, max_tokens=2), "t"))
        assert again.cached_tokens == kind.whole(len(prompt) - 1) > 0
        assert again.tokens == first.tokens


def test_release_forgets_the_prefix(engine: Engine, kind: Kind) -> None:
    if kind.keeps:
        pytest.skip(kind.keeps)
    prompt = prompts(1, shortest=20)[0]
    run(engine, ask("a", prompt, GREEDY, "t"))
    assert engine.stats().kv_tokens > 0
    engine.release("t")
    assert engine.stats().kv_tokens == 0
    (result,) = run(engine, ask("b", prompt, GREEDY, "t"))
    assert result.cached_tokens == 0


# ------------------------------------------------------------------------------------------- prompts that begin alike
SAMPLED = Sampling(max_tokens=10)


def group(name: str, prompt: list[int], size: int = 4, sampling: Sampling = SAMPLED) -> list[GenRequest]:
    return [ask(f"{name}{i}", prompt, sampling) for i in range(size)]


def assert_same(results: list[GenResult], others: list[GenResult]) -> None:
    for result, other in zip(results, others, strict=True):
        assert result.tokens == other.tokens
        assert result.logprobs == close(other.logprobs)


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 13}, {"slots": 3}], ids=["at once", "chunked", "few slots"])
def test_a_prompt_that_several_ask_for_is_computed_once_and_gives_the_same(
    make_engine: MakeEngine, model: TinyModel, kind: Kind, alone: Alone, options: dict[str, int]
) -> None:
    engine = make_engine(model.folder, **{"slots": 16, "max_model_tokens": 128, **options})
    asked = long_prompts(kind, 3)
    requests = [request for i, prompt in enumerate(asked) for request in group(f"g{i}.", prompt)]
    results = run(engine, *requests)
    assert_same(results, alone(requests))
    assert engine.stats().cached_tokens == sum(result.cached_tokens for result in results)
    if "slots" not in options:
        for i, prompt in enumerate(asked):
            reused = sorted(result.cached_tokens for result in results[4 * i : 4 * i + 4])
            assert reused == [0, *[kind.whole(len(prompt) - 1)] * 3]
        assert engine.stats().prefilled_tokens == sum(map(partial(once, kind), asked))


def once(kind: Kind, prompt: list[int]) -> int:
    """Tokens computed where four requests have the same prompt."""
    return len(prompt) + 3 * (len(prompt) - kind.whole(len(prompt) - 1))


def test_prompts_that_only_begin_alike_share_their_beginning(engine: Engine, kind: Kind, alone: Alone) -> None:
    system, tails = long_prompts(kind, 1, shortest=25)[0], prompts(6, seed=1, shortest=2, longest=9)
    requests = [ask(str(i), [*system, *tail], SAMPLED) for i, tail in enumerate(tails)]
    results = run(engine, *requests)
    assert_same(results, alone(requests))
    assert results[0].cached_tokens == 0
    assert all(result.cached_tokens >= kind.whole(len(system)) > 0 for result in results[1:])


def test_one_that_comes_later_copies_from_one_that_already_generates(engine: Engine, kind: Kind, alone: Alone) -> None:
    first, second = group("a", long_prompts(kind, 1)[0], size=2)
    engine.add(first)
    steps(engine, 4)
    engine.add(second)
    results = finish(engine)
    assert_same([results["a0"], results["a1"]], alone([first, second]))
    assert results["a1"].cached_tokens == kind.whole(len(first.prompt) - 1)


def test_one_that_has_just_ended_still_lends_what_it_computed(engine: Engine, kind: Kind, alone: Alone) -> None:
    prompt = long_prompts(kind, 1)[0]
    requests = group("a", prompt, sampling=Sampling(max_tokens=1))
    results = run(engine, *requests)
    assert_same(results, alone(requests))
    assert engine.stats().prefilled_tokens == once(kind, prompt)
    for request in requests:
        engine.release(request.trajectory_id)
    assert engine.stats().kv_tokens == 0


def test_a_next_turn_takes_its_own_prefix_where_that_is_longer(engine: Engine, model: TinyModel, kind: Kind) -> None:
    prompt, answer = long_prompts(kind, 1)[0], prompts(1, seed=1, shortest=12, longest=12)[0]
    (first,) = run(engine, ask("a", prompt, GREEDY, "t"))
    engine.add(ask("other", prompt, Sampling(0, max_tokens=40)))
    steps(engine, 2)
    following = [*prompt, *first.tokens, *answer]
    (second,) = run(engine, ask("b", following, GREEDY, "t"))
    assert second.cached_tokens == kind.whole(len(prompt) + len(first.tokens) - 1)
    assert second.logprobs == close(model.score(following, second.tokens))


@pytest.mark.parametrize("after", [0, 1, 3], ids=["while others wait for it", "as others copy", "later"])
def test_aborting_the_one_that_others_copy_from_harms_nobody(
    engine: Engine, kind: Kind, alone: Alone, after: int
) -> None:
    requests = group("a", long_prompts(kind, 1)[0])
    expected = alone(requests)
    for request in requests:
        engine.add(request)
    steps(engine, after)
    aborted = engine.abort("a0")
    assert aborted is not None
    assert aborted.tokens == expected[0].tokens[:after]
    results = finish(engine)
    assert_same([results[request.request_id] for request in requests[1:]], expected[1:])


@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_update_computes_shared_prompts_again(engine: Engine, model: TinyModel, kind: Kind, after: int) -> None:
    prompt = long_prompts(kind, 1, shortest=25)[0]
    requests = group("a", prompt, sampling=GREEDY)
    for request in requests:
        engine.add(request)
    steps(engine, after)
    engine.suspend()
    engine.update(1, model.weights(other=True))
    assert engine.stats().kv_tokens == 0
    engine.resume()
    results = finish(engine)
    for request in requests:
        result = results[request.request_id]
        old = result.versions.count(0)
        assert result.versions == [0] * old + [1] * (12 - old)
        assert result.logprobs[:old] == close(model.score(prompt, result.tokens)[:old])
        assert result.logprobs[old:] == close(model.score(prompt, result.tokens, other=True)[old:])
    # The prompt is read once more, and each reads what it had generated.
    assert engine.stats().prefilled_tokens < once(kind, prompt) + 2 * len(prompt)


# ----------------------------------------------------------------------------------------- abort, suspend, update
def test_abort_frees_the_cache_and_gives_the_partial_tokens(engine: Engine, model: TinyModel, kind: Kind) -> None:
    expected = run(engine, *[ask(str(i), prompt) for i, prompt in enumerate(prompts(4))])
    for i in range(4):
        engine.release(f"trajectory {i}")
    for i, prompt in enumerate(prompts(4)):
        engine.add(ask(str(i), prompt))
    steps(engine, 5)
    partial_result = engine.abort("1")
    assert partial_result is not None
    assert partial_result.finish_reason == "abort"
    assert partial_result.tokens == expected[1].tokens[:5]
    assert len(partial_result.logprobs) == len(partial_result.versions) == 5
    results = finish(engine)
    assert sorted(results) == ["0", "2", "3"]
    assert all(results[str(i)].tokens == expected[i].tokens for i in (0, 2, 3))
    kept = sum(len(prompts(4)[i]) + len(expected[i].tokens) - 1 for i in (0, 2, 3))
    assert engine.stats().kv_tokens == (0 if kind.keeps else kept)


def test_abort_of_a_waiting_or_unknown_request(make_engine: MakeEngine, model: TinyModel) -> None:
    engine = make_engine(model.folder, slots=1, max_model_tokens=64)
    engine.add(ask("a", [1, 2]))
    engine.add(ask("b", [1, 2]))
    engine.step()
    waiting = engine.abort("b")
    assert waiting is not None
    assert (waiting.tokens, waiting.finish_reason) == ([], "abort")
    assert engine.abort("b") is None
    assert engine.abort("never seen") is None
    assert list(finish(engine)) == ["a"]


def test_suspend_update_with_equal_weights_resume_equals_never_interrupted(engine: Engine, model: TinyModel) -> None:
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(5))]
    expected = run(engine, *requests)
    for request in requests:
        engine.release(request.trajectory_id)
        engine.add(request)
    steps(engine, 4)
    engine.suspend()
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.stats().suspended
    engine.update(1, model.weights())
    engine.resume()
    results = finish(engine)
    for request, before in zip(requests, expected, strict=True):
        result = results[request.request_id]
        assert result.tokens == before.tokens
        assert result.logprobs == close(before.logprobs)
        assert result.versions == [0] * 4 + [1] * 8
    assert engine.stats().recomputed_tokens == sum(len(request.prompt) + 3 for request in requests)


def test_after_an_update_the_tail_is_that_of_a_fresh_run_under_the_new_weights(
    engine: Engine, make_engine: MakeEngine, model: TinyModel
) -> None:
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(4))]
    old = run(engine, *requests)
    for request in requests:
        engine.add(request)
    steps(engine, 5)
    engine.suspend()
    engine.update(7, model.weights(other=True))
    engine.resume()
    results = finish(engine)
    fresh = make_engine(model.other_folder, slots=8, max_model_tokens=128)
    for request, before in zip(requests, old, strict=True):
        result = results[request.request_id]
        head, tail = result.tokens[:5], result.tokens[5:]
        assert head == before.tokens[:5]
        (expected,) = run(fresh, ask("x", request.prompt + head, Sampling(0, max_tokens=7)))
        assert tail == expected.tokens
        assert result.logprobs[5:] == close(expected.logprobs)
        assert result.versions == [0] * 5 + [7] * 7
    assert engine.stats().version == 7


def test_an_update_drops_the_prefixes_of_idle_trajectories(engine: Engine, model: TinyModel, kind: Kind) -> None:
    prompt = long_prompts(kind, 1)[0]
    run(engine, ask("a", prompt, GREEDY, "t"))
    engine.update(1, model.weights(other=True))
    assert engine.stats().kv_tokens == 0
    (result,) = run(engine, ask("b", prompt, GREEDY, "t"))
    assert result.cached_tokens == 0
    assert result.logprobs == close(model.score(prompt, result.tokens, other=True))


def test_requests_added_while_suspended_wait_for_resume(engine: Engine) -> None:
    engine.suspend()
    engine.add(ask("a", [1, 2, 3]))
    assert not engine.has_work()
    engine.resume()
    assert list(finish(engine)) == ["a"]


def test_weights_may_come_one_by_one(engine: Engine, model: TinyModel) -> None:
    prompt = prompts(1)[0]
    engine.update(1, iter(model.weights(other=True)))
    (result,) = run(engine, ask("a", prompt))
    assert result.versions == [1] * 12
    assert result.logprobs == close(model.score(prompt, result.tokens, other=True))


@pytest.mark.parametrize("suspended", [False, True], ids=["running", "suspended"])
def test_logprobs_of_given_tokens_leave_those_that_run_alone(
    engine: Engine, model: TinyModel, alone: Alone, suspended: bool
) -> None:
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(8))]
    tokens = prompts(1, seed=9, shortest=20)[0]
    expected = alone(requests)
    for request in requests:
        engine.add(request)
    steps(engine, 3)
    if suspended:
        engine.suspend()
    assert engine.logprobs(tokens) == close(model.score(tokens[:1], tokens[1:]))
    assert engine.stats().suspended == suspended
    if suspended:
        assert not engine.has_work()
        engine.resume()
    results = finish(engine)
    assert_same([results[request.request_id] for request in requests], expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: pairs[1:], "is missing"),
        (lambda pairs: [*pairs, ("model.surprise", torch.zeros(2))], "model.surprise is unknown"),
        (lambda pairs: [*pairs[:-1], (pairs[-1][0], torch.zeros(3, 3))], r"is float32 \[3, 3\], not"),
        (lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1].half())], "is float16"),
        (lambda pairs: [*pairs, pairs[0]], "twice"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "twice"],
)
def test_weights_that_do_not_fit_change_nothing(
    engine: Engine, model: TinyModel, spoil: Callable[..., list[tuple[str, torch.Tensor]]], message: str
) -> None:
    prompt = prompts(1)[0]
    with pytest.raises(WeightsError, match=message):
        engine.update(1, spoil(model.weights(other=True)))
    (result,) = run(engine, ask("a", prompt))
    assert result.versions == [0] * 12
    assert result.logprobs == close(model.score(prompt, result.tokens))


def test_parameters_are_those_of_the_weights(engine: Engine, model: TinyModel) -> None:
    listed = {info.name: (info.shape, info.dtype) for info in engine.parameters()}
    assert listed == {name: (tuple(tensor.shape), "float32") for name, tensor in model.weights()}


# -------------------------------------------------------------------------------------------------- when to stop
def test_a_stop_token_ends_a_request_and_is_part_of_it(engine: Engine) -> None:
    prompt = prompts(1)[0]
    (free,) = run(engine, ask("a", prompt, Sampling(0, max_tokens=20)))
    stop = free.tokens[6]
    (result,) = run(engine, ask("b", prompt, Sampling(0, max_tokens=20, stop_token_ids=(stop,))))
    assert result.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("start", [0, 3])
def test_a_stop_string_ends_a_request_even_at_its_very_start_and_across_tokens(engine: Engine, start: int) -> None:
    prompt = prompts(1, seed=3)[0]
    (free,) = run(engine, ask("a", prompt, Sampling(0, max_tokens=20)))
    stop = text(free.tokens[start : start + 3])
    (result,) = run(engine, ask("b", prompt, Sampling(0, max_tokens=20, stop=("never!", stop))))
    ends = [end for end in range(1, 21) if stop in text(free.tokens[:end])]
    assert result.tokens == free.tokens[: ends[0]]
    assert result.finish_reason == "stop"
    assert len(result.logprobs) == len(result.tokens)


def test_a_stop_string_may_be_a_part_of_one_token(engine: Engine, model: TinyModel) -> None:
    pair = next(i for i, word in enumerate(VOCABULARY) if len(word) == 2)
    only_pairs = Sampling(temperature=1.0, max_tokens=60, stop=tuple(LETTERS[2:7]))
    (result,) = run(engine, ask("a", [pair, 1, 2], only_pairs))
    hits = [i for i, token in enumerate(result.tokens) if set(VOCABULARY[token]) & set(LETTERS[2:7])]
    assert result.finish_reason == "stop"
    assert hits == [len(result.tokens) - 1]


def test_max_model_tokens_ends_a_request(make_engine: MakeEngine, model: TinyModel) -> None:
    engine = make_engine(model.folder, slots=2, max_model_tokens=32)
    prompt = prompts(1, shortest=25, longest=25)[0]
    (result,) = run(engine, ask("a", prompt, Sampling(0, max_tokens=100)))
    assert (len(result.tokens), result.finish_reason) == (7, "length")
    assert result.logprobs == close(model.score(prompt, result.tokens))
    (last,) = run(engine, ask("b", prompts(1, shortest=31, longest=31)[0]))
    assert (len(last.tokens), last.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], GREEDY, "empty"),
        ([1] * 128, GREEDY, "max_model_tokens"),
        ([1, len(VOCABULARY)], GREEDY, "vocabulary"),
        ([-1], GREEDY, "vocabulary"),
        ([1], Sampling(max_tokens=0), "max_tokens"),
        ([1], Sampling(temperature=-1.0), "temperature"),
        ([1], Sampling(temperature=math.nan), "temperature"),
        ([1], Sampling(top_p=0.0), "top_p"),
        ([1], Sampling(top_k=-1), "top_k"),
        ([1], Sampling(stop=("",)), "stop"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    engine: Engine, prompt: list[int], sampling: Sampling, message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        engine.add(ask("a", prompt, sampling))
    assert not engine.has_work()


def test_the_same_request_id_twice_is_refused(engine: Engine) -> None:
    engine.add(ask("a", [1]))
    with pytest.raises(GenerationError, match="already running"):
        engine.add(ask("a", [2]))
    assert list(finish(engine)) == ["a"]


# ------------------------------------------------------------------------------------------------------ sampling
def expected_distribution(table: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Straight from the definition: temperature, then the k best, then the smallest set that holds top_p."""
    weights = {token: math.exp(float(lp) / sampling.temperature) for token, lp in enumerate(table)}
    best = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k or None]
    total, kept, mass = sum(weights[token] for token in best), [], 0.0
    for token in best:
        if mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return {token: weights[token] / mass for token in kept}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1),
        Sampling(temperature=0.5, max_tokens=1),
        Sampling(temperature=1.5, top_k=5, max_tokens=1),
        Sampling(top_p=0.7, max_tokens=1),
        Sampling(temperature=1.3, top_k=12, top_p=0.8, max_tokens=1),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "all"],
)
def test_samples_and_logprobs_follow_the_filtered_distribution(
    make_engine: MakeEngine, tiny_models: dict[str, TinyModel], kind: Kind, sampling: Sampling
) -> None:
    if kind.unfiltered and (sampling.top_k or sampling.top_p < 1):
        pytest.skip(kind.unfiltered)
    model, prompt, draws = tiny_models["llama"], [3, 1, 4], 1500
    engine = make_engine(model.folder, slots=64, max_model_tokens=64, seed=5)
    expected = expected_distribution(model.logprobs(prompt)[-1], sampling)
    mixed = [Sampling(0, max_tokens=1), Sampling(max_tokens=1)]
    requests = [ask(str(i), prompt, sampling) for i in range(draws)]
    results = run(engine, *[ask(f"m{i}", prompt, other) for i, other in enumerate(mixed)], *requests)[2:]
    counts = Counter(result.tokens[0] for result in results)
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        spread = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[token] - draws * probability) <= 4.5 * spread + 1
    for result in results:
        assert result.logprobs[0] == close(math.log(expected[result.tokens[0]]))


def test_a_greedy_row_among_sampled_ones_stays_greedy_with_plain_logprobs(
    engine: Engine, model: TinyModel, kind: Kind
) -> None:
    prompt = prompts(1)[0]
    warm = Sampling(temperature=2.0) if kind.unfiltered else Sampling(temperature=2.0, top_k=3, top_p=0.9)
    others = [ask(str(i), [i], warm) for i in range(5)]
    result, *_ = run(engine, ask("greedy", prompt), *others)
    assert result.tokens == model.logprobs(prompt + result.tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert result.logprobs == close(model.score(prompt, result.tokens))


def test_the_same_seed_gives_the_same_samples(make_engine: MakeEngine, tiny_models: dict[str, TinyModel]) -> None:
    folder = tiny_models["qwen3"].folder
    first, second, third = (
        run(make_engine(folder, slots=4, max_model_tokens=64, seed=seed), ask("a", [1, 2], Sampling(max_tokens=30)))
        for seed in (1, 1, 2)
    )
    assert first[0].tokens == second[0].tokens
    assert first[0].tokens != third[0].tokens


# ------------------------------------------------------------------------------------------------------- trouble
def test_logits_that_are_not_finite_fail_one_request_and_harm_no_other(
    make_engine: MakeEngine, tiny_models: dict[str, TinyModel]
) -> None:
    model, poison = tiny_models["llama"], 7
    engine = make_engine(model.folder, slots=8, max_model_tokens=128)
    weights = dict(model.weights())
    weights["model.embed_tokens.weight"][poison] = math.nan
    engine.update(1, weights.items())
    short = Sampling(0, max_tokens=4)
    clean = [prompt for prompt in prompts(20, longest=5) if poison not in prompt][:5]
    bad = ask("bad", [*[1] * 20, poison], short)
    # Beside it, then in the very place that it leaves behind.
    failed, *beside = run(engine, bad, *[ask(str(i), prompt, short) for i, prompt in enumerate(clean)])
    assert (failed.finish_reason, failed.tokens) == ("error", [])
    assert "not finite" in failed.error
    run(engine, bad)
    after = [run(engine, ask("after", prompt, short))[0] for prompt in clean]
    for prompt, *results in zip(clean, beside, after, strict=True):
        for result in results:
            assert len(result.tokens) == 4
            assert result.logprobs == close(model.score(prompt, result.tokens))


def test_statistics_count_what_happened(engine: Engine, kind: Kind) -> None:
    run(engine, ask("a", [1, 2, 3], Sampling(0, max_tokens=5)), ask("b", [1], Sampling(0, max_tokens=2)))
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prefilled_tokens, stats.running, stats.waiting) == (7, 4, 0, 0)
    assert stats.steps >= (2 if kind.counts_calls else 5)
    assert stats.busy_s > 0
