"""A control plane whose trajectories run in shards: real shards behind fakes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollart.errors import RolloutError
from rollart.virtual_time import run_virtual
from tests.fakes import FakeEnv, FakeRun, FakeShard, share

SCHEDULES = ["sync_plus", "one_off", "areal", "rollart"]


def trained(meanwhile: Callable[[FakeRun], Coroutine[Any, Any, None]] | None = None, **options: object) -> FakeRun:
    """A run that went to its end, while `meanwhile` did what it does to its shards."""

    async def main() -> FakeRun:
        run = FakeRun(**{"num_shards": 3, **options})  # type: ignore[arg-type]
        disturbing = asyncio.ensure_future(meanwhile(run)) if meanwhile else None
        try:
            return await run.train()
        finally:
            if disturbing is not None:
                disturbing.cancel()
                await asyncio.gather(disturbing, return_exceptions=True)

    return run_virtual(main())


def versions_of(run: FakeRun) -> Counter[int]:
    return Counter(v for t in run.recorder.kept for turn in t.turns for v in turn.versions)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sharded_run_trains_all_steps_within_its_bound(schedule: str) -> None:
    run = trained(schedule=schedule, rollout__group_size=3)
    assert [summary.step for summary in run.hooks.summaries] == [1, 2, 3, 4, 5, 6]
    assert sum(run.ledger.ages.values()) == 6 * 2 * 3
    assert len(versions_of(run)) > 1, "shards went on under new weights"
    assert [shard.proxy.version for shard in run.shards] == [6, 6, 6], "by which they judge ages at every turn"


def test_trajectories_are_spread_and_their_stages_are_known_to_the_driver() -> None:
    seen: list[tuple[dict[str, int], int]] = []

    async def look(run: FakeRun) -> None:
        assert run.runner is not None
        while True:
            await asyncio.sleep(0.5)
            seen.append((run.runner.loads, sum(run.ledger.clock.counts.values())))

    trained(look, rollout__group_size=6, rollout__groups_per_batch=4, num_tokens=lambda request: 9)
    fullest = max(seen, key=lambda each: sum(each[0].values()))[0]
    assert max(fullest.values()) - min(fullest.values()) <= 2
    assert any(count > 0.8 * sum(loads.values()) > 0 for loads, count in seen)


def test_no_shard_lets_a_request_leave_between_suspend_and_resume() -> None:
    async def main() -> None:
        env = FakeEnv(misbehave=lambda call, env_id, task: share(f"{call}{env_id}"), turns=5)
        irregular = {"num_tokens": lambda request: 1 + int(share(request.request_id) * 9), "env": env}
        run = FakeRun(num_shards=2, rollout__group_size=4, rollout__groups_per_batch=4, **irregular)  # type: ignore[arg-type]
        asked: list[bool] = []
        for engine in run.engines:
            engine.failing = lambda request, engine=engine: bool(asked.append(engine.is_suspended))  # type: ignore[misc]
        await run.train()
        assert len(asked) > 100
        assert not any(asked)

    run_virtual(main())


def test_what_an_update_makes_stale_is_aborted_in_its_shard() -> None:
    def straggler(call: str, env_id: str, task: str) -> float | None:
        return 12.0 if env_id == "g2-m0-a0" and call == "step" else None

    run = trained(env=FakeEnv(misbehave=straggler), train_s=0.2, steps=20)
    lost = next(t for t in run.recorder.lost if t.trajectory_id == "g2-m0-a0")
    assert lost.stop_reason == "stale"
    assert lost.turns, "what it had by then came home"
    assert sum(lost.seconds.values()) < 12


def test_the_length_of_redundant_members_is_known() -> None:
    run = trained(rollout__extra_members=2, num_tokens=lambda request: 1 + int(share(request.trajectory_id) * 40))
    assert run.ledger.aborted["redundant"] > 0
    assert run.ledger.snapshot()["tokens_redundant_mean"] > 0
    assert any(engine.aborted for engine in run.engines)


def test_the_death_of_a_shard_reruns_its_members_and_gives_up_what_they_held() -> None:
    async def kill(run: FakeRun) -> None:
        engine, busy = run.engines[0], asyncio.Event()
        engine.failing = lambda request: bool(len(engine.in_flight) >= 3 and busy.set())  # type: ignore[func-returns-value]
        await busy.wait()
        run.shards[0].die()

    run = trained(kill, rollout__group_size=4, steps=8, eval__episodes=1)
    dead = [t for t in run.recorder.lost if t.cause == "rollout shard rollout-0 died"]
    assert dead
    assert {t.stop_reason for t in dead} == {"generation_error"}
    assert {f"{t.trajectory_id}-t0" for t in dead} <= set(run.engines[0].aborted)
    assert {t.trajectory_id for t in dead} <= set(run.engines[0].released)
    rerun = {t.trajectory_id.rpartition("-")[0] for t in dead} & {
        t.trajectory_id.rpartition("-")[0] for t in run.recorder.kept
    }
    assert rerun, "members ran again inside their groups"


def test_without_any_shard_trajectories_wait_for_one_to_join() -> None:
    async def replace_all(run: FakeRun) -> None:
        await asyncio.sleep(3.3)
        for shard in run.shards:
            shard.die()
        await asyncio.sleep(5)
        run.shards.append(run.new_shard("rollout-0.1"))
        await run.join(run.shards[-1])

    run = trained(replace_all, num_shards=2)
    assert len(run.hooks.summaries) == 6
    assert run.runner is not None
    assert list(run.runner.loads) == ["rollout-0.1"]
    assert run.shards[-1].proxy.version == 6


def test_a_fault_inside_a_shard_ends_the_run() -> None:
    async def cancel(run: FakeRun) -> None:
        await asyncio.sleep(3)
        next(iter(run.shards[0]._shard._runner._running.values()))[1].cancel()

    with pytest.raises(RolloutError, match="was cancelled by something outside"):
        trained(cancel)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_shards_and_engines_the_invariants_hold(seed: int) -> None:
    """Nothing is trained twice or too old, slots never leak, every group ends once: `FakeRun.check` asserts it."""
    rng = random.Random(seed)

    async def disturb(run: FakeRun) -> None:
        living: list[FakeShard] = list(run.shards)
        while True:
            await asyncio.sleep(rng.expovariate(0.5))
            if living and rng.random() < 0.6:
                living.pop(rng.randrange(len(living))).die()
            else:
                living.append(run.new_shard(f"rollout-{len(run.shards)}"))
                run.shards.append(living[-1])
                await run.join(living[-1])
            run.scheduler.book.check()

    def misbehave(call: str, env_id: str, task: str) -> object:
        number = share(f"{seed}{call}{env_id}")
        return "raise" if number < 0.05 else 6.0 * number if number > 0.8 else None

    schedule = rng.choice(SCHEDULES[1:])
    early = schedule != "one_off" and seed % 2
    run = trained(
        disturb,
        schedule=schedule,
        rollout__free_slots="train_start" if early else "train_end",
        env=FakeEnv(misbehave=misbehave),
        num_tokens=lambda request: 1 + int(share(request.request_id) ** 3 * 40),
        num_workers=2,
        train_s=0.5,
        steps=8,
        max_drops=10_000,
        rollout__groups_per_batch=3,
        rollout__group_size=3,
        rollout__extra_members=1,
        rollout__extra_groups=1,
        rollout__member_retries=3,
    )
    assert len(run.hooks.summaries) == 8
    counts = run.scheduler.book.counts
    assert counts.ends["trained"] == 8 * 3
    assert counts.admitted == sum(counts.ends.values())
