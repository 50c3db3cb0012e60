"""Measurements merge in any order, and a recorder never raises."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.metrics import Histogram, Max, Mean, Metrics, Status, Sum, TaskStatus, Value
from rollart.protocols import Recorder
from rollart.types import Trajectory, Turn

WHOLE = st.integers(-1000, 1000)


def gathered(kind: type[Value], numbers: list[int]) -> Value:
    value = kind()
    for number in numbers:
        value.add(number)
    return value


def merged(first: Value, second: Value) -> Value:
    first = copy.deepcopy(first)
    first.merge(second)
    return first


@pytest.mark.parametrize("kind", [Mean, Sum, Max, Histogram])
@given(st.lists(WHOLE), st.lists(WHOLE))
def test_merging_equals_gathering_in_one_place_in_either_order(
    kind: type[Value], left: list[int], right: list[int]
) -> None:
    one, other, both = gathered(kind, left), gathered(kind, right), gathered(kind, left + right)
    assert merged(one, other).flat("x") == both.flat("x") == merged(other, one).flat("x")


@pytest.mark.parametrize("kind", [Mean, Sum, Max, Histogram])
def test_values_travel_as_messagepack(kind: type[Value]) -> None:
    value = gathered(kind, [3, 5])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Value) == value


def test_a_step_holds_only_what_came_since_the_last_flush_and_totals_hold_all() -> None:
    metrics = Metrics()
    metrics.add("wait_s", 1.0)
    metrics.count("tokens", 10)
    metrics.peak("rss", 5)
    metrics.tally("age", 1)
    assert metrics.flush() == {
        "age/1": 1,
        "rss": 5,
        "tokens": 10,
        "wait_s": 1.0,
        "wait_s/max": 1.0,
        "wait_s/min": 1.0,
    }
    assert metrics.flush() == {}
    metrics.add("wait_s", 3.0)
    metrics.tally("age", 0)
    metrics.flush()
    totals = metrics.totals()
    assert (totals["wait_s"], totals["tokens"], totals["age/0"], totals["age/1"]) == (2.0, 10, 1, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "many", 10**400, [1]])
def test_what_is_not_a_finite_number_is_refused_and_counted_not_raised(value: object) -> None:
    metrics = Metrics()
    metrics.add("x", value)  # type: ignore[arg-type]
    metrics.count("y", value)  # type: ignore[arg-type]
    assert metrics.flush() == {"metrics/refused": 2}
    assert metrics.flush() == {}


def test_a_name_keeps_its_kind_for_the_whole_run() -> None:
    metrics = Metrics()
    metrics.add("x", 1)
    metrics.flush()
    metrics.count("x", 1)
    metrics.add("metrics/refused", 1)
    metrics.add(["not", "a", "name"], 1)  # type: ignore[arg-type]
    metrics.trajectory("no trajectory", kept=True)
    metrics.merge({"y": Sum(1)})
    metrics.merge({"y": Max(1)})
    assert metrics.flush() == {"metrics/refused": 5, "y": 1}


def test_metrics_is_a_recorder() -> None:
    recorder: Recorder = Metrics()
    recorder.count("x")


def test_a_trajectory_is_counted_by_task_reason_and_length() -> None:
    metrics = Metrics(success_reward={"maze": 0.5})
    turn = Turn(observation=[1, 2, 3], action=[4, 5], logprobs=[-1.0, -1.0], versions=[0, 0])
    good = Trajectory("t1", "g1", "maze", 7, turns=[turn], reward=0.6, stop_reason="done", seconds={"step": 2.0})
    bad = Trajectory("t2", "g1", "maze", 7, turns=[turn, turn], reward=0.0, stop_reason="stale")
    failed = Trajectory("t3", "g1", "maze", 7, stop_reason="env_error")
    for trajectory in (good, bad, failed):
        metrics.trajectory(trajectory, kept=trajectory is good)
    step = metrics.flush()
    assert (step["trajectories"], step["trajectories/kept"], step["trajectories/maze"]) == (3, 1, 3)
    assert (step["stopped/done"], step["stopped/stale"], step["stopped/env_error"]) == (1, 1, 1)
    assert (step["reward/maze"], step["success/maze"], step["turns/maze"]) == (0.6, 1.0, 1)
    assert (step["tokens"], step["tokens/generated"], step["seconds/step"]) == (15, 6, 2.0)
    assert (step["length/kept"], step["length/all"]) == (2, 3)


def test_failures_of_environments_are_counted_by_task_also_where_a_retry_helped() -> None:
    metrics = Metrics()
    turn = Turn(observation=[1], action=[2], logprobs=[-1.0], versions=[0])
    retried = Trajectory("t1", "g1", "maze", 7, turns=[turn], stop_reason="done", failed_resets_s=[2.0, 3.0])
    never = Trajectory("t2", "g1", "maze", 7, stop_reason="env_error", failed_resets_s=[1.0])
    broken = Trajectory("t3", "g1", "maze", 7, turns=[turn], stop_reason="env_error")
    fine = Trajectory("t4", "g1", "maths", 7, turns=[turn], stop_reason="done")
    for trajectory in (retried, never, broken, fine):
        metrics.trajectory(trajectory, kept=trajectory is retried)
    step = metrics.flush()
    assert (step["resets/maze/failed"], step["resets/maze/failed_s"], step["steps/maze/failed"]) == (3, 6.0, 1)
    assert (step["steps/maze"], step["steps/maths"]) == (2, 1)
    assert not [name for name in step if name.startswith(("resets/maths", "steps/maths/"))]


def test_a_status_is_frozen_and_travels() -> None:
    status = Status(step=1, steps=2, ages={0: 3}, tasks={"maze": TaskStatus(reward=0.5)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status) == status
    with pytest.raises(AttributeError):
        status.step = 2  # type: ignore[misc]
