from __future__ import annotations

import itertools
import random

import pytest

from rollart.resource.affinity import Affinity, Change
from rollart.resource.turn_profile import ENOUGH, ENOUGH_S, START_S, Profile
from rollart.types import GenResult

SPEED = {("maze", "fast"): (1.0, 1.0), ("maze", "wide"): (8.0, 2.0), ("sums", "fast"): (0.1, 9.0)}
SPEED["sums", "wide"] = (0.2, 6.0)
"""Seconds of prefill and of decoding per turn."""


def result(prefill_s: float, decode_s: float, num_tokens: int = 10, cached: int = 0, reason: str = "stop") -> GenResult:
    tokens = [1] * num_tokens
    return GenResult(
        *("r", tokens, [-1.0] * num_tokens, [0] * num_tokens, reason),  # type: ignore[arg-type]
        cached_tokens=cached,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


class Bench:
    """An affinity whose measurements come from a table of seconds."""

    def __init__(self, workers: dict[str, int], in_flight: int = 100, apart_s: float = 0.2, **options: object) -> None:
        self.affinity = Affinity(mode="auto", **{"slots": 4, **options})  # type: ignore[arg-type]
        self.in_flight, self.now_s, self.apart_s = in_flight, 100.0, apart_s
        for name, count in workers.items():
            for _ in range(count):
                self.affinity.joined(name)

    def see(self, tag: str, name: str, seconds: tuple[float, float], times: int = ENOUGH) -> list[Change]:
        changes: list[Change] = []
        for _ in range(times):
            self.now_s += self.apart_s
            changes += self.affinity.observe(tag, name, 100, result(*seconds), self.in_flight, self.now_s)
            self.affinity.check()
        return changes

    def see_all(self, speed: dict[tuple[str, str], tuple[float, float]], rounds: int = 2 * ENOUGH) -> list[Change]:
        return [
            change
            for _ in range(rounds)
            for (tag, name), seconds in speed.items()
            for change in self.see(tag, name, seconds, 1)
        ]


def test_each_task_goes_to_the_class_that_suits_it_and_the_reason_says_why() -> None:
    bench = Bench({"fast": 1, "wide": 3})
    changes = bench.see_all(SPEED)
    assert bench.affinity.mapping == {"maze": "fast", "sums": "wide"}
    assert [str(change) for change in changes] == [
        "affinity: maze -> fast: 5.0x faster per turn than on wide (prefill 80% of its time there)",
        "affinity: sums -> wide: 1.5x faster per turn than on fast (prefill 1% of its time there)",
    ]
    assert bench.affinity.report({}).changes == changes


def test_many_turns_in_a_moment_or_few_over_a_long_time_decide_nothing() -> None:
    for turns, apart_s in ((20 * ENOUGH, ENOUGH_S / (50 * ENOUGH)), (ENOUGH, 10 * ENOUGH_S)):
        bench = Bench({"fast": 1, "wide": 1}, apart_s=apart_s)
        assert bench.see_all({("a", "fast"): (1.0, 0.0), ("a", "wide"): (2.0, 0.0)}, turns) == []
        assert bench.affinity.mapping == {}
        bench.apart_s = ENOUGH_S
        bench.see_all({("a", "fast"): (1.0, 0.0), ("a", "wide"): (2.0, 0.0)}, ENOUGH)
        assert bench.affinity.mapping == {"a": "fast"}


def test_an_engine_that_is_slow_as_it_starts_is_not_taken_for_a_slow_class() -> None:
    bench = Bench({"fast": 1, "wide": 1}, apart_s=START_S / (50 * ENOUGH))
    bench.see_all({("a", "fast"): (50.0, 0.0), ("a", "wide"): (2.0, 0.0)}, 20 * ENOUGH)
    bench.apart_s = 0.2
    bench.see_all({("a", "fast"): (1.0, 0.0), ("a", "wide"): (2.0, 0.0)}, 2 * ENOUGH)
    assert [(each.device_class, each.before) for each in bench.affinity.changes] == [("fast", None)]


def test_a_task_leaves_its_favourite_class_to_one_that_gains_more() -> None:
    speed = {("a", "fast"): (1.0, 0.0), ("a", "wide"): (9.0, 0.0), ("b", "fast"): (1.0, 0.0), ("b", "wide"): (1.5, 0.0)}
    bench = Bench({"fast": 1, "wide": 1})
    changes = bench.see_all(speed, rounds=40)
    assert bench.affinity.mapping == {"a": "fast", "b": "wide"}
    assert "1.5x slower per turn than on fast" in str([each for each in changes if each.tag == "b"][-1])


@pytest.mark.parametrize(("fast", "wide", "on_wide"), [(4, 1, 0), (1, 4, 2), (1, 40, 3)])
def test_workers_per_class_decide_too(fast: int, wide: int, on_wide: int) -> None:
    speed = {(tag, name): (1.0 if name == "fast" else 1.6, 0.0) for tag in "abc" for name in ("fast", "wide")}
    bench = Bench({"fast": fast, "wide": wide}, in_flight=1000)
    bench.see_all(speed, rounds=40)
    assert list(bench.affinity.mapping.values()).count("wide") == on_wide


def test_when_few_requests_are_in_flight_each_task_has_the_class_where_its_turn_is_shortest() -> None:
    speed = {("a", "fast"): (1.0, 0.0), ("a", "wide"): (9.0, 0.0), ("b", "fast"): (1.0, 0.0), ("b", "wide"): (1.5, 0.0)}
    bench = Bench({"fast": 1, "wide": 1}, in_flight=1)
    bench.see_all(speed)
    assert bench.affinity.mapping == {"a": "fast", "b": "fast"}


def test_a_small_gain_moves_nobody_and_a_large_one_must_be_seen_twice() -> None:
    bench = Bench({"fast": 1, "wide": 1}, every=1, every_s=0.0)
    bench.see_all({("a", "fast"): (1.0, 0.0), ("a", "wide"): (1.3, 0.0)})
    assert bench.affinity.mapping == {"a": "fast"}
    assert bench.see("a", "fast", (1.39, 0.0), 300) == []
    first, *_ = bench.see("a", "fast", (2.0, 0.0), 300)
    assert (first.before, first.device_class) == ("fast", "wide")
    assert "with it the whole mixture is " in first.reason
    assert bench.affinity.mapping == {"a": "wide"}


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_half_the_time_moves_nobody_back_and_forth(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench({"fast": 1, "wide": 3}, every=1, every_s=0.0)
    for _ in range(300):
        tag, name = draw.choice(list(SPEED))
        bench.see(tag, name, tuple(each * draw.uniform(0.5, 1.5) for each in SPEED[tag, name]), 1)  # type: ignore[arg-type]
    assert bench.affinity.mapping == {"maze": "fast", "sums": "wide"}
    assert len(bench.affinity.changes) <= 4


@pytest.mark.parametrize("seed", range(8))
def test_tasks_stay_between_classes_that_are_equal_but_for_noise(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench({"fast": 1, "wide": 1})
    for _ in range(3000):
        bench.see(draw.choice("ab"), draw.choice(["fast", "wide"]), (draw.uniform(0.5, 1.5), 0.0), 1)
    assert sorted(bench.affinity.mapping.values()) == ["fast", "wide"]
    late = [change for change in bench.affinity.changes if change.at_s >= 100]
    assert len(bench.affinity.changes) <= 6
    assert len(late) <= 2  # in 500 s the two may change places once


def test_with_one_class_or_with_a_declared_mapping_nothing_is_decided() -> None:
    alone = Bench({"fast": 3})
    assert alone.see_all({key: each for key, each in SPEED.items() if key[1] == "fast"}) == []
    assert alone.affinity.wish("maze") is None
    declared = Affinity({"maze": "wide"})
    for name in ("fast", "wide"):
        declared.joined(name)
    for (tag, name), seconds in list(SPEED.items()) * 50:
        assert declared.observe(tag, name, 100, result(*seconds), 100, 1.0) == []
    assert declared.wish("maze") is None
    assert declared.mapping == {"maze": "wide"}
    assert set(declared.report({}).profile) == {"maze", "sums"}


def test_what_a_dead_class_had_moves_at_once_and_returns_with_it() -> None:
    bench = Bench({"fast": 1, "wide": 3})
    bench.see_all(SPEED)
    (change,) = bench.affinity.left("fast")
    assert str(change) == "affinity: maze -> wide: fast has no worker left"
    assert bench.affinity.mapping == {"maze": "wide", "sums": "wide"}
    (change,) = bench.affinity.joined("fast")
    assert (change.tag, change.device_class) == ("maze", "fast")


def test_a_task_that_no_other_class_has_measured_may_go_anywhere_when_its_class_dies() -> None:
    bench = Bench({"fast": 1, "wide": 3})
    bench.see_all(SPEED)
    bench.affinity.joined("new")
    (change,) = bench.affinity.left("fast")
    assert str(change) == "affinity: maze -> any class: fast has no worker left"
    assert bench.affinity.mapping == {"sums": "wide"}


def test_new_trajectories_try_every_class_first_and_later_seldom() -> None:
    bench = Bench({"fast": 1, "wide": 3})
    assert [bench.affinity.wish("maze") for _ in range(8)] == ["fast", "wide"] * 4
    assert sum(bench.affinity.wish("maze") is not None for _ in range(2 * ENOUGH - 8)) == 2 * ENOUGH - 8
    assert sum(bench.affinity.wish("maze") is not None for _ in range(80)) == 10
    bench.see_all(SPEED)
    assert sum(bench.affinity.wish("maze") is not None for _ in range(1280)) == 10


def test_many_tasks_are_assigned_about_as_well_as_by_trying_everything() -> None:
    draw = random.Random(3)
    tags = [f"t{n}" for n in range(14)]
    speed = {(tag, name): (draw.uniform(1, 9), draw.uniform(1, 9)) for tag in tags for name in ("fast", "wide")}
    bench = Bench({"fast": 2, "wide": 3}, every=10_000)
    bench.see_all(speed)
    bench.see_all(speed, rounds=400)
    mapping = bench.affinity.mapping
    assert set(mapping) == set(tags)

    def seconds(names: dict[str, str]) -> float:
        work = {"fast": 0.0, "wide": 0.0}
        for tag, name in names.items():
            prefill_s, decode_s = speed[tag, name]
            work[name] += (prefill_s + decode_s / 4) / {"fast": 2, "wide": 3}[name]
        alone_s = sum(sum(speed[tag, name]) for tag, name in names.items())
        return (alone_s + 99 * max(work.values())) / 100

    names = itertools.product(("fast", "wide"), repeat=len(tags))
    best = min(seconds(dict(zip(tags, each, strict=True))) for each in names)
    assert seconds(mapping) <= 1.12 * best


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_tasks_are_mapped_to_classes_with_workers(seed: int) -> None:
    draw = random.Random(seed)
    bench, workers = Bench({}, every=4, every_s=1.0), dict.fromkeys(("fast", "wide", "third"), 0)
    for _ in range(600):
        name, tag = draw.choice(list(workers)), draw.choice("abc")
        kind = draw.random()
        if kind < 0.03:
            workers[name] += 1
            bench.affinity.joined(name)
        elif kind < 0.06 and workers[name]:
            workers[name] -= 1
            bench.affinity.left(name)
        elif kind < 0.3:
            wish = bench.affinity.wish(tag)
            assert wish is None or workers[wish]
        else:  # also from a worker that has died meanwhile
            bench.see(tag, name, (draw.uniform(0, 5), draw.uniform(0, 5)), 1)
        bench.affinity.check()
        assert bench.affinity.classes == sorted(each for each, number in workers.items() if number)


def test_aborted_and_failed_requests_and_those_without_times_are_not_measured() -> None:
    profile = Profile()
    for each in (result(1, 1, reason="abort"), result(1, 1, reason="error"), result(0, 0)):
        profile.observe("maze", "fast", 100, each, 1, 0.0)
    assert profile.tags == []
    assert profile.unmeasured == 1


def test_a_turn_is_tokens_of_the_task_times_seconds_of_the_class() -> None:
    profile = Profile()
    for now_s in range(ENOUGH):
        fast, wide = result(0.5, 2.0, num_tokens=20, cached=50), result(6.0, 2.0, num_tokens=40)
        profile.observe("maze", "fast", 100, fast, 1, now_s)  # 10 ms and 100 ms a token
        profile.observe("maze", "wide", 300, wide, 1, now_s)  # 20 ms and 50 ms
    on_fast, on_wide = profile.turn("maze", "fast"), profile.turn("maze", "wide")
    assert (on_fast.prefill_s, on_fast.decode_s) == pytest.approx((0.01 * 175, 0.1 * 30), rel=0.02)
    assert (on_wide.prefill_s, on_wide.decode_s) == pytest.approx((0.02 * 175, 0.05 * 30), rel=0.02)
    assert profile.report()["maze"]["prefix_hit_rate"] == pytest.approx(1 / 8, rel=0.02)
