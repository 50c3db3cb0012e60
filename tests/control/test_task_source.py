from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from rollart.control.staleness import Staleness
from rollart.control.task_source import NUM_EVAL_SEEDS, TaskSource
from rollart.errors import ConfigError
from rollart.types import HELD_OUT, GroupSpec, TaskSpec

TASKS = {"maze": TaskSpec("maze", weight=3.0), "math": TaskSpec("math"), "off": TaskSpec("off", weight=0.0)}


def test_the_order_depends_on_the_seed_alone() -> None:
    first, second, other = TaskSource(1, TASKS), TaskSource(1, dict(reversed(TASKS.items()))), TaskSource(2, TASKS)
    order = [first.next() for _ in range(50)]
    assert order == [second.next() for _ in range(50)]
    assert order != [other.next() for _ in range(50)]
    assert [(spec.task, spec.seed) for spec in order] == [first.draw(n) for n in range(50)]


def test_the_mixture_follows_the_weights() -> None:
    source = TaskSource(0, TASKS)
    counts = Counter(source.next().task for _ in range(2000))
    assert set(counts) == {"maze", "math"}
    assert 0.7 < counts["maze"] / 2000 < 0.8


def test_training_and_held_out_seeds_are_disjoint_and_the_latter_the_same_in_every_run() -> None:
    source = TaskSource(0, TASKS)
    assert max(source.next().seed for _ in range(500)) < HELD_OUT
    specs = [source.eval_spec(task, n) for task in TASKS for n in range(20)]
    assert all(spec.seed >= HELD_OUT for spec in specs)
    assert len({spec.group_id for spec in specs}) == len(specs)
    assert specs[0] == TaskSource(9, TASKS).eval_spec("maze", 0)
    with pytest.raises(ConfigError, match="held-out seeds"):
        source.eval_spec("maze", NUM_EVAL_SEEDS)


def test_a_task_that_is_queued_again_takes_a_new_index_and_shifts_no_fresh_one() -> None:
    source = TaskSource(0, TASKS)
    first, second = source.next(), source.next()
    assert source.requeue(first)
    assert source.next() == GroupSpec(2, first.task, first.seed)
    third = source.next()
    assert (third.index, third.task, third.seed) == (3, *source.draw(2))
    assert (second.task, second.seed) == source.draw(1)


def test_a_task_that_fails_again_and_again_is_given_up() -> None:
    source = TaskSource(0, TASKS, requeue_limit=2)
    spec = source.next()
    assert [source.requeue(spec) for _ in range(3)] == [True, True, False]
    source.settled(spec)
    assert source.requeue(spec)


def test_a_restored_source_goes_on_where_it_was() -> None:
    source = TaskSource(0, TASKS)
    specs = [source.next() for _ in range(5)]
    source.requeue(specs[3])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(source.state()))
    restored = TaskSource(0, TASKS)
    restored.restore(state)
    assert [restored.next() for _ in range(5)] == [source.next() for _ in range(5)]


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="every weight is 0"):
        TaskSource(0, {"off": TASKS["off"]})


@pytest.mark.parametrize(
    ("alpha", "batch", "whole", "quota"), [(0, 8, 0, 0), (1, 8, 1, 0), (1.5, 8, 1, 4), (1.7, 10, 1, 7), (0.3, 3, 0, 0)]
)
def test_alpha_splits_into_a_whole_and_a_share(alpha: float, batch: int, whole: int, quota: int) -> None:
    assert Staleness.of(alpha, batch) == Staleness(whole, quota)
