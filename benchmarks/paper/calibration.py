"""Calibration: every figure of the paper that the simulator's profile was fitted to, beside what the simulator gives.

These are not results: the numbers of rollart/data/simulated/paper.toml were chosen so that they come out. All other
experiments use the same numbers as they are.

Step breakdown: Qwen3-8B, 32 H800, SWE-bench, batch 16 x 8, schedule Sync+. The paper does not say under which schedule
it was taken; Sync+ fits both what it says of iterations with and without failures. Generation, reset and environment
are those of the trajectory that ends last, which add up to the rollout. An iteration with a failure is one that takes
another time than the same iteration where no reset fails.

Affinity: 2 H800 against 6 H20, one task each. The paper does not say how many trajectories: here 8, 16 and 32 groups of
8 for GEM-math, 4, 8 and 12 for FrozenLake (16 do not fit into the KV memory of 2 H800).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from common import Row, Settings, config, main, rollout_s, run
from msgspec.structs import replace as with_fields

from rollart.data.simulated.episode import draw_episode
from rollart.data.simulated.model_shape import load_shape
from rollart.data.simulated.profile import Profile, Spread, load_profile
from rollart.simulation import Simulation

STEP_S, TRAIN, GENERATE, RESET, REST = 365.7, 0.231, 0.538, 0.146, 0.085
TRANSFERS = {"Qwen3-8B": (15.26, 6.9, 5.5), "Qwen3-14B": (27.51, 14.4, 5.8), "Qwen3-32B": (61.02, 29.6, 9.4)}
"""GiB, and seconds over TCP at 200 Gbps and over RDMA at 400 Gbps."""
TURNS = {"swe_bench": (30, 50), "webshop": (5, 30), "frozenlake": (20, 100), "gem_math": (1, 4), "gem_game": (1, 1)}
CONTEXT = 32768
CALLS = 30_000
"""Calls of which the longest is looked for: some steps of 512 trajectories."""
ITERATIONS = 30


def experiment(settings: Settings) -> list[Row]:
    """All targets."""
    profile = load_profile(settings.profile)
    return [
        *_breakdown(settings, profile),
        *_affinity(settings),
        *_transfers(profile),
        *_lengths(profile),
        *_overheads(profile),
    ]


def _row(what: str, measured: float, published: float | list[float] | None, unit: str = "s") -> Row:
    return {"what": what, "unit": unit, "measured": measured, "published": published}


# ---------------------------------------------------------------------------------------------------------- breakdown
def _breakdown(settings: Settings, profile: Profile) -> Iterator[Row]:
    task = profile.tasks["swe_bench"]
    here = replace(settings, model="Qwen3-8B", pools={"H800": 32}, tasks=("swe_bench",), groups=16, steps=ITERATIONS)
    well, failing = (
        run(
            config(here, "sync_plus"),
            with_fields(profile, tasks={"swe_bench": with_fields(task, reset_failure_rate=rate)}),
        )
        for rate in (0.0, task.reset_failure_rate)
    )
    generate, reset, step = (_last(well, stage) for stage in ("generate", "reset", "step"))
    rest = well.step_s - well.breakdown["training"] - generate - reset
    yield _row("SWE-bench, step without failures", well.step_s, STEP_S)
    yield _row("- training", well.breakdown["training"], STEP_S * TRAIN)
    yield _row("- generation", generate, STEP_S * GENERATE)
    yield _row("- reset", reset, STEP_S * RESET)
    yield _row(f"- the rest (environment {step:.0f} s, weights)", rest, STEP_S * REST)
    yield from _failures(well, failing)


def _last(result: Simulation, stage: str) -> float:
    return fmean(each.get(stage, 0.0) for each in result.longest)


def _failures(well: Simulation, failing: Simulation) -> Iterator[Row]:
    pairs = zip(well.step_times, failing.step_times, failing.longest, strict=True)
    found = [(seconds, stages) for without, seconds, stages in pairs if abs(seconds - without) > 1]
    yield _row("share of iterations with failures", len(found) / failing.steps, 0.1, "")
    if found:
        rollout = sum(sum(stages.values()) for _, stages in found)
        yield _row("SWE-bench, step with failures", fmean(seconds for seconds, _ in found), 513.3)
        yield _row("- reset over rollout", sum(stages["reset"] for _, stages in found) / rollout, 0.78, "")


# ----------------------------------------------------------------------------------------------------------- affinity
def _affinity(settings: Settings) -> Iterator[Row]:
    for task, one, other, published, sizes in (
        ("frozenlake", "H800", "H20", 0.53, (4, 8, 12)),
        ("gem_math", "H20", "H800", [0.49, 0.79], (8, 16, 32)),
    ):
        for groups in sizes:
            here = replace(settings, model="Qwen3-8B", tasks=(task,), groups=groups, members=8, steps=2)
            seconds = {
                name: rollout_s(run(config(replace(here, pools={name: count}), "sync_plus")))
                for name, count in (("H800", 2), ("H20", 6))
            }
            what = f"{task}, {groups * 8} trajectories: rollout on {one} over {other}"
            yield _row(what, seconds[one] / seconds[other], published, "")


# ---------------------------------------------------------------------------------------- figures of the profile alone
def _transfers(profile: Profile) -> Iterator[Row]:
    for model, (gib, *published) in TRANSFERS.items():
        size = load_shape(model).weight_bytes
        yield _row(f"{model}, weights", size / 2**30, gib, "GiB")
        for link, name, seconds in zip(("push", "pull"), ("TCP", "RDMA"), published, strict=True):
            yield _row(f"{model}, {name}", profile.links[link].seconds(size), seconds)


def _lengths(profile: Profile) -> Iterator[Row]:
    generated: list[int] = []
    for name, (fewest, most) in TURNS.items():
        task = profile.tasks[name]
        episodes = [draw_episode(task, number // 8, f"{name}/{number}") for number in range(512)]
        turns = [len(each.responses) for each in episodes]
        yield _row(f"{name}, turns, fewest", float(min(turns)), fewest, "")
        yield _row(f"{name}, turns, most", float(max(turns)), most, "")
        read, written = (fmean(sum(getattr(each, key)) for each in episodes) for key in ("prompts", "responses"))
        yield _row(f"{name}, tokens, mean", read + written, [0, CONTEXT], "")
        if name != "swe_bench":
            generated += [min(CONTEXT, sum(each.responses)) for each in episodes[:128]]
    yield _row("response, the longest of a batch over the mean (> 5)", max(generated) / fmean(generated), 5.0, "")


def _overheads(profile: Profile) -> Iterator[Row]:
    task = profile.tasks["frozenlake"]
    for what, spread, mean, most in (
        ("environment call", task.step_s, 0.02, 1.4),
        ("reward call", task.reward_overhead_s, 0.01, 2.1),
    ):
        drawn = _draws(spread)
        yield _row(f"{what}, mean", fmean(drawn), mean)
        yield _row(f"{what}, most of {CALLS:,}", max(drawn), most)


def _draws(spread: Spread) -> list[float]:
    return spread.draws(random.Random("calibration"), CALLS)


if __name__ == "__main__":
    main("calibration", __doc__, experiment)
