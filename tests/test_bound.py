"""The lower bound: exact where a formula is known, below whatever any assignment reaches, and never beaten."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.bound import Engines, Rollout, TrainedTrajectory, Turn, bound_of
from rollart.config import parse
from rollart.control.staleness import Staleness
from rollart.data.simulated.device import Pace
from rollart.data.simulated.model_shape import load_shape
from rollart.data.simulated.profile import load_profile
from rollart.resource.classes import CLASSES
from rollart.simulator import simulate

FRESH = Staleness.of(0, 4)


class Flat:
    """Seconds per token read, per token attended to while reading or decoding, and per read of the weights."""

    def __init__(self, token_s: float, weights_s: float, attended_s: float = 0.0, room: int = 10**9) -> None:
        self._token_s, self._weights_s, self._attended_s = token_s, weights_s, attended_s
        self.kv_capacity_tokens = room

    def prefill_step(self, new_tokens: int, attended: float) -> float:
        return max(self._token_s * new_tokens, self._weights_s) + self._attended_s * attended

    def decode(self, decoding: int, kv_tokens: float) -> tuple[float, float]:
        return self.prefill_step(decoding, kv_tokens), self._attended_s * decoding


def engines(**classes: tuple[int, Flat]) -> dict[str, Engines]:
    return {name: Engines(number, speed, slots=10) for name, (number, speed) in classes.items()}


def one(prompt: int, response: int, step_s: float = 0.0) -> TrainedTrajectory:
    seconds = {"step": step_s + 1e6, "reset": 1e6, "score": 1e6}
    return TrainedTrajectory("task", [prompt], [response], seconds, step_s)


def test_reading_alone_is_bound_by_arithmetic() -> None:
    where = engines(a=(2, Flat(1.0, 5.0)))
    assert Rollout(where, [(30, 0, 1), (70, 0, 1)]).seconds == pytest.approx(100 / 2, rel=0.01)


def test_decoding_alone_is_bound_by_reads_of_the_weights_for_full_slots() -> None:
    where = engines(a=(2, Flat(0.01, 5.0)))
    assert Rollout(where, [(0, 0, 101)]).seconds == pytest.approx(100 / 10 * 5 / 2, rel=0.01)


def test_decoding_is_bound_by_the_room_for_kv_when_that_is_less_than_the_slots() -> None:
    where = engines(a=(1, Flat(0.01, 5.0, room=100)))
    assert Rollout(where, [(50, 0, 2)] * 100).seconds == pytest.approx(100 * 51 / 100 * 5, rel=0.01)


def test_attention_counts_every_token_before() -> None:
    where = engines(a=(1, Flat(1.0, 0.0, attended_s=1.0)))
    assert Rollout(where, [(10, 0, 1)]).seconds == pytest.approx(10 + 55, rel=0.01)
    assert Rollout(where, [(10, 90, 1)]).seconds == pytest.approx(10 + 900 + 55, rel=0.01)


def test_each_class_does_what_it_is_good_at() -> None:
    where = engines(reads=(1, Flat(0.1, 1e5)), writes=(1, Flat(10.0, 10.0)))
    both = Rollout(where, [(1000, 0, 11)])
    assert both.seconds == pytest.approx(100, rel=0.02)
    assert both.seconds <= both.reached_s <= 1.02 * both.seconds


def test_work_is_shared_in_proportion_to_speed() -> None:
    where = engines(fast=(1, Flat(1.0, 0.0)), slow=(2, Flat(4.0, 0.0)))
    assert Rollout(where, [(100, 0, 1)]).seconds == pytest.approx(100 / (1 + 2 / 4), rel=0.01)


def test_more_engines_never_make_it_longer() -> None:
    turns = [(random.Random(n).randrange(1, 900), 100 * n, 50 + n) for n in range(30)]
    before = float("inf")
    for number in range(1, 6):
        fast, slow = Flat(0.01, 2.0, 1e-4, room=5000), Flat(0.1, 1.0, 1e-5, room=9000)
        now = Rollout(engines(a=(number, fast), b=(2, slow)), turns).seconds
        assert now <= before * 1.006
        before = now


turns_of = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=12)


@settings(max_examples=25)
@given(turns_of, st.integers(0, 2**20))
def test_no_assignment_of_turns_to_engines_is_faster(turns: list[Turn], seed: int) -> None:
    """Each token is decoded in as large a batch as slots and room allow, as no engine can do all the time."""
    speeds = {"a": Flat(0.01, 2.0, 1e-3, room=4000), "b": Flat(0.1, 1.0, 1e-4, room=9000)}
    rollout = Rollout({name: Engines(1, speed, slots=10) for name, speed in speeds.items()}, turns)
    rng = random.Random(seed)
    loads = dict.fromkeys(speeds, 0.0)
    for prompt, context, response in turns:
        name = rng.choice(list(speeds))
        speed = speeds[name]
        loads[name] += speed.prefill_step(prompt, prompt * context + prompt * (prompt + 1) / 2) if prompt else 0.0
        for number in range(1, response):
            at = context + prompt + number
            batch = min(10, speed.kv_capacity_tokens // at)
            loads[name] += speed.decode(batch, batch * at)[0] / batch
    assert rollout.seconds <= max(loads.values()) * (1 + 1e-9)
    assert rollout.seconds <= rollout.reached_s * (1 + 1e-9)


def test_nothing_to_do_takes_no_time() -> None:
    assert Rollout(engines(a=(1, Flat(1.0, 1.0))), []).seconds == 0


# ----------------------------------------------------------------------------------------------------------- the parts
def test_the_largest_part_is_the_bound_and_parts_are_not_added() -> None:
    where = engines(a=(1, Flat(1.0, 1.0)))
    bound = bound_of([[one(100, 1)], [one(50, 1)]], [10.0, 30.0], where, FRESH)
    assert bound.parts["training"] == 20
    assert bound.parts["longest trajectory"] == pytest.approx(75)
    assert bound.step_s == max(bound.parts.values()) == pytest.approx(75, rel=0.01)
    assert bound_of([[one(1, 1)]], [99.0], where, FRESH).binding == "training"


def test_resets_rewards_and_waiting_for_others_do_not_count_and_the_work_of_environments_does() -> None:
    bound = bound_of([[one(1, 3, step_s=500.0)]], [0.0], engines(a=(1, Flat(1.0, 1.0))), FRESH)
    assert (bound.step_s, bound.binding) == (503.0, "longest trajectory")


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0, 120.0), (1, 60.0), (3, 30.0), (0.5, 60.0), (0.25, 90.0)],
)
def test_the_longest_trajectory_may_last_for_as_many_steps_as_alpha_allows(alpha: float, expected: float) -> None:
    """Four groups of two; a fraction of alpha lets that share of the groups be one version older."""
    lengths = [120, 100, 90, 60, 50, 40, 30, 20]
    where = engines(a=(1000, Flat(1.0, 1.0)))
    batch = [one(length, 1) for length in lengths]
    bound = bound_of([batch], [0.0], where, Staleness.of(alpha, 4), group_size=2)
    assert bound.parts["longest trajectory"] == expected


def test_without_batches_or_engines_there_is_no_bound() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        bound_of([], [], engines(a=(1, Flat(1.0, 1.0))), FRESH)
    with pytest.raises(ValueError, match="at least one batch"):
        bound_of([[one(1, 1)]], [1.0], {}, FRESH)


# ----------------------------------------------------------------------------------------------- on modelled devices
def test_h800_reads_and_h20_writes() -> None:
    efficiency, model = load_profile("paper").efficiency, load_shape("Qwen3-8B")
    where = {name: Engines(4, Pace(CLASSES[name], model, 1, efficiency), slots=256) for name in ("H800", "H20")}
    turns = [(2000, 0, 500)] * 100
    both = Rollout(where, turns).seconds
    for name in where:
        assert both < Rollout({name: where[name]}, turns).seconds
    assert "H20" in Rollout(where, [(10, 4000, 500)] * 100).limits()


SMALL = """
steps = 7
schedule = "{schedule}"

[simulate]
warmup_steps = 1

[tasks.webshop]
[tasks.gem_game]

[pools.H800]
count = 8
share = 2
cost = 2.85
[pools.H20]
count = 4

[roles.actor_train]
device_class = "H800"
workers = 1
devices = 4

[roles.actor_gen]
workers = {{ H800 = 4, H20 = 4 }}

[rollout]
groups_per_batch = 4
group_size = 4
max_model_tokens = 32768
engine_slots = {slots}
zero_variance = "keep"
"""


@pytest.mark.parametrize("schedule", ["sync", "sync_plus", "one_off", "areal", "rollart"])
@pytest.mark.parametrize("slots", [4, 64])
def test_no_schedule_beats_the_bound(schedule: str, slots: int) -> None:
    result = simulate(parse(SMALL.format(schedule=schedule, slots=slots)))
    assert result.bound is not None
    assert 0.02 < result.share_of_possible <= 1
    assert set(result.bound.parts) == {"training", "longest trajectory", "rollout"}
