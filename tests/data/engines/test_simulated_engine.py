"""The simulated engine: nothing lost and nothing invented, and the same as going step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollart.data.engines.simulated import SimulatedEngine
from rollart.data.simulated.profile import Efficiency
from rollart.errors import ConfigError, GenerationError
from rollart.types import GenRequest, GenResult
from tests.data.engines.small_devices import SMALL, TYPICAL, ask, small_pace
from tests.data.engines.stepwise import StepwiseEngine

EFFICIENCY = replace(TYPICAL, step_overhead_s=0.01, chunk_tokens=50, slots_max=4)
Command = tuple[float, str, tuple[Any, ...]]
Told = tuple[float, GenResult]


def make(
    room: int = 1000, efficiency: Efficiency = EFFICIENCY, slots: int | None = None, **figures: Any
) -> SimulatedEngine:
    return SimulatedEngine(small_pace(efficiency, room, **figures), efficiency, slots, max_model_tokens=room)


def drain(engine: Any, until: float = math.inf) -> list[Told]:
    """What ends by itself, and when."""
    told: list[Told] = []
    while (due := engine.next_event()) is not None and due <= until:
        told += [(due, result) for result in engine.advance(due)]
    return told


def play(engine: Any, commands: Sequence[Command], check: Callable[[], None]) -> list[Told]:
    """Give commands at their times; everything that ended, also by them."""
    told: list[Told] = []
    for at, name, arguments in commands:
        told += drain(engine, at)
        if name == "update" and not engine.suspended:
            continue
        if name == "update" and engine.next_event() is not None:
            at = engine.next_event()
            told += drain(engine, at)
        lost = getattr(engine, name)(*arguments[:1], at, *arguments[1:])
        told += [(at, each) for each in (lost if isinstance(lost, list) else [lost]) if each is not None]
        check()
    told += drain(engine)
    if engine.suspended:
        engine.resume(commands[-1][0])
        told += drain(engine)
    check()
    return told


def run(engine: SimulatedEngine, *requests: GenRequest, at: float = 0.0) -> dict[str, Told]:
    """Add requests at one moment and let them end."""
    for request in requests:
        engine.add(request, at)
    told = drain(engine)
    engine.check()
    return {result.request_id: (end, result) for end, result in told}


def makespan(engine: SimulatedEngine, requests: Sequence[GenRequest]) -> float:
    return max(end for end, _ in run(engine, *requests).values())


# ------------------------------------------------------------------------------------------------- against step by step
@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[Command]]:
    """Room for KV, and commands in order of time; answers and prompts often exceed the room together."""
    room = draw(st.integers(30, 200))
    rng = random.Random(draw(st.integers(0, 2**32)))
    commands: list[Command] = []
    now, lengths, version = 0.0, {}, 0
    for number in range(draw(st.integers(1, 25))):
        now += rng.choice([0.0, rng.expovariate(10), rng.expovariate(1)])
        match rng.choices(["add", "abort", "release", "suspend", "update", "resume"], [8, 2, 1, 1, 1, 2])[0]:
            case "add":
                trajectory = f"t{rng.randrange(6)}"
                size = min(lengths.get(trajectory, 0) + rng.randint(1, room // 2), room - 1)
                answer = rng.randint(1, room)
                lengths[trajectory] = min(size + answer, room - 1)
                request = ask(f"r{number}", size, answer, trajectory, max_tokens=rng.randint(1, room))
                received = rng.choice([0, 0, 0, rng.randint(0, size - 1), size - 1])
                commands.append((now, "add", (request, received)))
            case "abort":
                commands.append((now, "abort", (f"r{rng.randint(0, number)}",)))
            case "release":
                commands.append((now, "release", (f"t{rng.randrange(6)}",)))
            case "update":
                version += 1
                commands.append((now, "update", (version,)))
            case other:
                commands.append((now, other, ()))
    return room, commands


@settings(max_examples=250)
@given(stories())
def test_events_give_what_single_steps_give(story: tuple[int, list[Command]]) -> None:
    room, commands = story
    engine = make(room, slots=3)
    slow = StepwiseEngine(small_pace(EFFICIENCY, room), EFFICIENCY, 3, room)
    told = play(engine, commands, engine.check)
    expected = play(slow, commands, lambda: None)
    assert [each.request_id for _, each in told] == [each.request_id for _, each in expected]
    for (at, ours), (then, theirs) in zip(told, expected, strict=True):
        assert at == pytest.approx(then, rel=1e-6, abs=1e-9)
        assert ours.versions == theirs.versions
        assert (ours.finish_reason, ours.cached_tokens) == (theirs.finish_reason, theirs.cached_tokens)
        times = (ours.queue_s, ours.prefill_s, ours.decode_s)
        assert times == pytest.approx((theirs.queue_s, theirs.prefill_s, theirs.decode_s), rel=1e-6, abs=1e-9)
    stats = engine.stats(1e9)
    assert (stats.prefilled_tokens, stats.recomputed_tokens) == (slow.prefilled, slow.recomputed)
    assert (stats.generated_tokens, stats.cached_tokens) == (slow.generated, slow.cached)
    assert engine.preemptions == slow.preemptions


@settings(max_examples=100)
@given(stories())
def test_every_request_ends_once_and_every_token_is_in_one_result(story: tuple[int, list[Command]]) -> None:
    room, commands = story
    engine = make(room)
    told = [result for _, result in play(engine, commands, engine.check)]
    asked = {arguments[0].request_id: arguments[0] for _, name, arguments in commands if name == "add"}
    assert sorted(each.request_id for each in told) == sorted(asked)
    stats = engine.stats(1e9)
    assert stats.generated_tokens == sum(len(each.tokens) for each in told)
    assert (stats.running, stats.waiting) == (0, 0)
    for each in told:
        request = asked[each.request_id]
        most = min(request.prompt[-1], request.sampling.max_tokens, room - len(request.prompt))
        assert len(each.tokens) == len(each.logprobs) == len(each.versions)
        assert len(each.tokens) == most if each.finish_reason != "abort" else len(each.tokens) < most
        assert each.versions == sorted(each.versions)


def test_the_same_commands_give_the_same_times_to_the_last_bit() -> None:
    commands: list[Command] = [(0.1 * number, "add", (ask(str(number), 40, 30), 0)) for number in range(20)]
    first, second = (play(engine, commands, engine.check) for engine in (make(300), make(300)))
    assert first == second


# -------------------------------------------------------------------------------------------------------- one request
def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    engine, pace = make(), small_pace(EFFICIENCY)
    end, result = run(engine, ask("a", 40, 11))["a"]
    decode_s = sum(pace.decode(1, 41 + step)[0] for step in range(10))
    assert result.prefill_s == pytest.approx(pace.prefill_step(40, 40 * 41 / 2), rel=1e-9)
    assert result.decode_s == pytest.approx(decode_s, rel=1e-9)
    assert end == pytest.approx(result.prefill_s + result.decode_s, rel=1e-9)
    assert (result.finish_reason, len(result.tokens), result.queue_s) == ("stop", 11, 0.0)


def test_a_long_prompt_is_read_in_chunks() -> None:
    engine = make()
    run(engine, ask("a", 120, 1))
    assert engine.stats(1e9).steps == 3
    assert engine.stats(1e9).prefilled_tokens == 120


def test_an_answer_ends_at_the_limit_of_tokens_or_of_the_sequence() -> None:
    told = run(make(100), ask("a", 40, 11, max_tokens=7), ask("b", 95, 11))
    assert [(each.finish_reason, len(each.tokens)) for _, each in (told["a"], told["b"])] == [
        ("length", 7),
        ("length", 5),
    ]


def test_an_arrival_joins_when_the_step_under_way_has_ended() -> None:
    engine, pace = make(), small_pace(EFFICIENCY)
    engine.add(ask("a", 40, 100), 0.0)
    begun = pace.prefill_step(40, 40 * 41 / 2)
    second = begun + pace.decode(1, 41)[0]
    third = second + pace.decode(1, 42)[0]
    assert drain(engine, begun) == []
    arrival = (second + third) / 2
    engine.add(ask("b", 10, 1), arrival)
    (end, result), *_ = drain(engine)
    assert result.request_id == "b"
    assert result.queue_s == pytest.approx(third - arrival, rel=1e-6)
    assert end == pytest.approx(third + pace.prefill_step(10, 55, 1, 43), rel=1e-6)


def test_what_arrives_at_one_moment_is_read_together() -> None:
    engine = make()
    engine.add(ask("a", 20, 1), 0.0)
    assert engine.next_event() is not None
    engine.add(ask("b", 20, 1), 0.0)
    assert len({end for end, _ in drain(engine)}) == 1


def test_a_mixed_step_charges_decoding_its_own_part_and_prompts_the_rest() -> None:
    engine, pace = make(), small_pace(EFFICIENCY)
    engine.add(ask("a", 40, 2), 0.0)
    first = engine.next_event()
    assert first is not None
    engine.add(ask("b", 30, 1), first / 2)
    told = {result.request_id: result for _, result in drain(engine)}
    decode_s = pace.decode(1, 41)[0]
    assert told["a"].decode_s == pytest.approx(decode_s, rel=1e-9)
    assert told["b"].prefill_s == pytest.approx(pace.prefill_step(30, 465, 1, 41) - decode_s, rel=1e-9)


def test_slots_bound_what_runs_at_once_and_the_rest_queues_in_order() -> None:
    told = run(make(slots=1), *(ask(name, 10, 5) for name in "abc"))
    ends = [told[name][0] for name in "abc"]
    assert ends == sorted(ends)
    assert [told[name][1].queue_s for name in "abc"] == pytest.approx([0.0, *ends[:2]])


# ------------------------------------------------------------------------------------------------------ KV over turns
def test_the_next_turn_reads_only_what_is_new() -> None:
    engine = make()
    run(engine, ask("1", 40, 10, "t"))
    _, result = run(engine, ask("2", 70, 5, "t"), at=100.0)["2"]
    assert result.cached_tokens == 49
    assert engine.stats(1e9).prefilled_tokens == 40 + 21


def test_a_released_trajectory_is_read_anew() -> None:
    engine = make()
    run(engine, ask("1", 40, 10, "t"))
    assert engine.kept_tokens("t") == 49
    engine.release("t", 50.0)
    assert run(engine, ask("2", 70, 5, "t"), at=100.0)["2"][1].cached_tokens == 0


def test_what_was_left_longest_ago_gives_way_first() -> None:
    engine = make(200)
    for at, name in enumerate(("old", "new")):
        run(engine, ask(name, 60, 10, name), at=100.0 * at)
    run(engine, ask("big", 80, 10, "big"), at=300.0)
    assert [engine.kept_tokens(name) for name in ("old", "new", "big")] == [0, 69, 89]


def test_what_is_kept_gives_way_to_the_last_step_before_a_request_is_set_back() -> None:
    engine = make(100)
    run(engine, ask("1", 5, 5, "kept"))
    run(engine, ask("a", 30, 50), ask("b", 30, 50), at=100.0)
    assert engine.preemptions == 1
    assert engine.kept_tokens("kept") == 0


def test_without_room_the_request_that_joined_last_is_set_back_and_read_again() -> None:
    engine = make(100)
    told = run(engine, ask("a", 30, 50), ask("b", 30, 50))
    assert engine.preemptions == 1
    assert told["a"][0] < told["b"][0]
    assert [len(told[name][1].tokens) for name in "ab"] == [50, 50]
    stats = engine.stats(1e9)
    assert stats.recomputed_tokens > 30
    assert stats.prefilled_tokens == 30 + 30 + stats.recomputed_tokens + 1
    assert told["b"][1].queue_s > 0


# ------------------------------------------------------------------------------------------------------------ commands
def test_suspension_ends_the_step_under_way_and_begins_no_other() -> None:
    engine = make()
    engine.add(ask("a", 40, 100), 0.0)
    begun = engine.next_event()
    assert begun is not None
    drain(engine, begun)
    engine.suspend(begun + 1e-3)
    end = engine.next_event()
    assert end == pytest.approx(begun + small_pace(EFFICIENCY).decode(1, 41)[0])
    assert drain(engine) == []
    stats = engine.stats(1000.0)
    assert (stats.generated_tokens, stats.suspended, stats.running) == (2, True, 1)
    engine.add(ask("b", 10, 1), 1000.0)
    assert engine.next_event() is None
    engine.resume(2000.0)
    told = {result.request_id: (end, result) for end, result in drain(engine)}
    assert told["b"][0] > 2000.0
    assert told["b"][1].queue_s == pytest.approx(1000.0)
    assert len(told["a"][1].tokens) == 100


def test_a_suspension_without_an_update_changes_nothing_but_the_time() -> None:
    plain, held = make(), make()
    plain.add(ask("a", 40, 100), 0.0)
    held.add(ask("a", 40, 100), 0.0)
    drain(held, 0.5)
    held.suspend(0.5)
    drain(held)
    held.resume(7.0)
    (end, ours), (then, theirs) = drain(held)[0], drain(plain)[0]
    assert end > then
    assert (ours.prefill_s, ours.decode_s) == pytest.approx((theirs.prefill_s, theirs.decode_s))


def test_after_an_update_all_that_ran_is_read_again_and_goes_on_under_the_new_version() -> None:
    engine = make()
    run(engine, ask("before", 40, 10, "kept"))
    engine.add(ask("a", 40, 100), 100.0)
    drain(engine, 101.0)
    engine.suspend(101.0)
    drain(engine)
    made = engine.stats(102.0).generated_tokens - 10
    assert engine.update(7, 110.0) == []
    engine.check()
    assert engine.kept_tokens("kept") == 0
    engine.resume(110.0)
    ((_, result),) = drain(engine)
    assert result.versions == [0] * made + [7] * (100 - made)
    stats = engine.stats(1e9)
    assert (stats.version, stats.recomputed_tokens) == (7, 40 + made - 1)
    assert stats.prefilled_tokens == 40 + 40 + 40 + made


def test_weights_do_not_change_within_a_step() -> None:
    engine = make()
    engine.add(ask("a", 40, 100), 0.0)
    with pytest.raises(GenerationError, match="suspend the engine"):
        engine.update(1, 0.001)


def test_an_abort_gives_what_was_generated_and_frees_the_rest() -> None:
    engine = make()
    engine.add(ask("a", 20, 100), 0.0)
    engine.add(ask("b", 20, 100), 0.0)
    drain(engine, 1.0)
    generated = engine.stats(1.0).generated_tokens
    result = engine.abort("a", 1.0)
    engine.check()
    assert result is not None
    assert (result.finish_reason, len(result.tokens)) == ("abort", generated // 2)
    assert engine.abort("a", 1.0) is None
    assert [each.request_id for _, each in drain(engine)] == ["b"]
    engine.check()


def test_a_request_whose_kv_was_received_decodes_at_once() -> None:
    engine, pace = make(), small_pace(EFFICIENCY)
    engine.add(ask("a", 40, 1), 0.0, received=39)
    ((end, result),) = drain(engine)
    assert end == pytest.approx(pace.decode(1, 40)[0])
    assert (result.prefill_s, len(result.tokens), engine.stats(1e9).prefilled_tokens) == (0.0, 1, 0)


def test_a_request_that_loses_received_kv_comes_back() -> None:
    engine = make()
    engine.add(ask("running", 40, 100), 0.0, received=39)
    drain(engine, 1.0)
    engine.suspend(1.0)
    drain(engine)
    engine.add(ask("waiting", 40, 100), 2.0, received=39)
    lost = engine.update(1, 3.0)
    engine.check()
    assert [(each.request_id, each.finish_reason) for each in lost] == [("running", "abort"), ("waiting", "abort")]
    assert engine.stats(3.0).recomputed_tokens == 39 + len(lost[0].tokens)


def test_commands_that_come_late_lose_no_time() -> None:
    """Nobody asked for the events before; they are told with the next one."""
    engine = make(slots=1)
    engine.add(ask("a", 10, 5), 0.0)
    engine.add(ask("b", 10, 5), 0.0)
    engine.add(ask("c", 10, 5), 1000.0)
    assert engine.next_event() == 1000.0
    assert [each.request_id for each in engine.advance(1000.0)] == ["a", "b"]
    assert engine.stats(1000.0).busy_s < 10.0


@pytest.mark.parametrize(
    ("request_", "received", "complaint"),
    [
        (GenRequest("a", "t", [], ask("", 1, 1).sampling), 0, "must end with the number of tokens"),
        (ask("a", 10, 0), 0, "must end with the number of tokens"),
        (ask("a", 100, 1), 0, "a prompt of 100 tokens leaves no room in 100"),
        (ask("a", 10, 1), 10, "10 tokens of KV were received for a prompt of 10"),
        (ask("there", 10, 1), 0, "already running"),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_: GenRequest, received: int, complaint: str) -> None:
    engine = make(100)
    engine.add(ask("there", 10, 1), 0.0)
    with pytest.raises(GenerationError, match=complaint):
        engine.add(request_, 0.0, received)
    engine.check()


def test_an_engine_without_room_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"small does not fit on 1 x small.*take at least 2 devices"):
        SimulatedEngine(small_pace(EFFICIENCY, 100), EFFICIENCY, max_model_tokens=101)


def test_what_the_engine_does_is_told_without_gaps() -> None:
    engine, told = make(), []
    engine.watch = lambda name, begin, end: told.append((name, begin, end))
    end, _ = run(engine, ask("a", 120, 5))["a"]
    assert [name for name, *_ in told] == ["prefill"] * 3 + ["decode"]
    assert [begin for _, begin, _ in told] == [0.0, *(end for *_, end in told[:-1])]
    assert told[-1][2] == end
    assert engine.stats(1e9).busy_s == pytest.approx(end)


# -------------------------------------------------------------------------------------------------------- monotonicity
def crowd(seed: int, number: int = 40) -> list[GenRequest]:
    rng = random.Random(seed)
    return [ask(str(each), rng.randint(5, 150), rng.randint(1, 120)) for each in range(number)]


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from(["tflops", "bandwidth_tbs"]), st.floats(1.01, 10), st.integers(300, 900))
def test_more_flops_or_bandwidth_is_never_slower(seed: int, figure: str, factor: float, room: int) -> None:
    base = {"tflops": 1.0, "bandwidth_tbs": 0.1}
    slower, faster = base, base | {figure: base[figure] * factor}
    requests = crowd(seed)
    assert makespan(make(room, **faster), requests) <= makespan(make(room, **slower), requests) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_more_memory_is_not_slower(seed: int) -> None:
    requests = crowd(seed)
    spans = [makespan(make(room), requests) for room in (300, 600, 1200, 2400)]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_more_interconnect_is_never_slower(seed: int) -> None:
    requests = crowd(seed)
    spans = [makespan(make(num_devices=2, interconnect_gbs=gbs), requests) for gbs in (1.0, 10.0, 900.0)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]


def test_kv_of_a_token_is_as_large_as_the_model_says() -> None:
    assert small_pace(EFFICIENCY, 77).kv_capacity_tokens == 77
    assert SMALL.kv_bytes_per_token == 2 * 8 * 2 * 64 * 2
