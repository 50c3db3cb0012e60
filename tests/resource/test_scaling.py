"""How many environment workers a run gets, by what they measure."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from rollart.resource.scaling import EnvironmentLoad, decide

BUSY = EnvironmentLoad(5.0, 4, 3.8, 1000, 18.0, engine_idle=0.6, in_environment=0.9)


def test_workers_that_use_their_cores_while_engines_wait_are_doubled() -> None:
    verdict = decide(BUSY, free_cores=100)
    assert (verdict.kind, verdict.add) == ("grow", 4)
    assert "4 -> 8" in verdict.why
    assert "a call costs 18 ms of CPU, 200 calls/s use 3.8 cores" in verdict.why


def test_no_more_are_added_than_cores_are_free() -> None:
    assert decide(BUSY, free_cores=3).add == 3
    for free in (0, -5):
        verdict = decide(BUSY, free_cores=free)
        assert (verdict.kind, verdict.add) == ("full", 0)
        assert "no core is free" in verdict.why


@pytest.mark.parametrize(
    "change", [{"cores": 2.0}, {"engine_idle": 0.05}, {"in_environment": 0.1}, {"workers": 0, "cores": 0.0}]
)
def test_workers_that_keep_nobody_waiting_are_enough(change: dict[str, float]) -> None:
    assert decide(replace(BUSY, **change), free_cores=100).kind == "enough"


@pytest.mark.parametrize("seed", range(20))
def test_the_number_grows_to_what_the_work_needs_and_stays(seed: int) -> None:
    """Engines ask for so many calls per second; workers that fall short of it use all of their cores."""
    rng = random.Random(seed)
    cost_s, wanted, cores = rng.uniform(1e-4, 0.1), rng.uniform(1, 2000), rng.randint(1, 128)
    workers, history = 1, [1]
    for _ in range(30):
        demand = wanted * cost_s
        used = min(demand, workers) * rng.uniform(0.95, 1.0)
        short = max(0.0, 1 - workers / demand)
        load = EnvironmentLoad(5.0, workers, used, int(used / cost_s * 5), used * 5, short, min(1.0, 0.1 + short))
        workers += decide(load, cores - workers).add
        history.append(workers)
    assert history == sorted(history)
    assert workers <= cores
    assert workers <= max(1, 2 * wanted * cost_s / 0.8)
    assert workers == cores or workers >= 0.85 * wanted * cost_s
    assert history[-1] == history[-10], "it has settled"
