from __future__ import annotations

import asyncio
import random

import pytest

from rollart.control.sample_buffer import Batch, ReadyGroups, SampleBuffer, start_version
from rollart.control.staleness import Staleness
from rollart.types import Group, GroupSpec, Trajectory, Turn
from rollart.virtual_time import run_virtual


def group(index: int, *versions: int) -> Group:
    members = [
        Trajectory(f"g{index}-{n}", f"g{index}", "t", 0, [Turn([1], [5], [0.0], [version])])
        for n, version in enumerate(versions)
    ]
    return Group(GroupSpec(index, "t", 0), members)


@pytest.mark.parametrize("seed", range(30))
def test_no_group_comes_out_twice_and_none_too_old(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 5)
    staleness = Staleness.of(rng.choice([0.0, 0.5, 1.0, 1.75]), size)
    ready, out, version, added = ReadyGroups(staleness), [], 0, 0
    for _ in range(300):
        kind = rng.random()
        if kind < 0.6:
            ready.add(group(added, max(0, version - rng.randrange(4)), version))
            added += 1
        elif kind < 0.7:
            version += 1
        else:
            evicted = ready.evict(version)
            assert all(version - start_version(each) > staleness.whole for each in evicted)
            taken = ready.take(size) or []
            ages = [version - start_version(each) for each in taken]
            assert sum(age > staleness.whole for age in ages) <= staleness.quota
            assert max(ages, default=0) <= staleness.oldest
            assert ages == sorted(ages, reverse=True), "oldest first"
            out += [each.spec.index for each in evicted + taken]
    assert len(out) == len(set(out))
    assert len(out) + len(ready) == added


def test_get_batch_waits_for_the_last_group_and_no_group_waits_behind_another() -> None:
    async def main() -> tuple[Batch, float]:
        loop = asyncio.get_running_loop()
        buffer = SampleBuffer(Staleness.of(1, 2), lambda: 3, lambda groups: None)
        loop.call_later(1.0, buffer.put, [group(7, 3)])
        loop.call_later(5.0, buffer.put, [group(9, 2)])
        return await buffer.get_batch(2), loop.time()

    batch, when = run_virtual(main())
    assert [each.spec.index for each in batch.groups] == [9, 7]
    assert (batch.version, when) == (3, 5.0)


def test_get_batch_evicts_first_and_says_what() -> None:
    async def main() -> list[int]:
        evicted: list[int] = []
        buffer = SampleBuffer(
            Staleness.of(1, 1), lambda: 5, lambda groups: evicted.extend(g.spec.index for g in groups)
        )
        buffer.put([group(0, 5, 3), group(1, 4)])
        batch = await buffer.get_batch(1)
        assert [each.spec.index for each in batch.groups] == [1]
        return evicted

    assert run_virtual(main()) == [0]


def test_cancelling_get_batch_loses_nothing() -> None:
    async def main() -> Batch:
        buffer = SampleBuffer(Staleness.of(1, 2), lambda: 0, lambda groups: None)
        waiting = asyncio.ensure_future(buffer.get_batch(2))
        await asyncio.sleep(1)
        buffer.put([group(0, 0)])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        buffer.put([group(1, 0)])
        return await buffer.get_batch(2)

    assert len(run_virtual(main()).groups) == 2
