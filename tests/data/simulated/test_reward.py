"""Simulated rewards in virtual time: one device serves in order, functions serve at once, scores follow from keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollart.data.reward import RemoteReward
from rollart.data.simulated.profile import Spread
from rollart.data.simulated.reward import SimulatedReward
from rollart.errors import RewardError
from rollart.protocols import RewardHandle
from rollart.types import RewardRequest
from rollart.virtual_time import run_virtual
from tests.data.fake_handles import FakeHandle

from .profiles import profile

JUDGED = profile(reward_s=Spread(10.0), reward_overhead_s=Spread(0.5))


def request(key: str, task: str = "maze", seed: int = 1) -> RewardRequest:
    return RewardRequest(task=task, seed=seed, prompts=["11 3"], responses=[""], key=key)


def run(main: Callable[[SimulatedReward], Coroutine[Any, Any, Any]], elastic: bool, **tasks: Any) -> Any:
    async def begin() -> Any:
        return await main(SimulatedReward(tasks or {"maze": JUDGED}, elastic))

    return run_virtual(begin())


async def ends(reward: SimulatedReward, starts: list[float]) -> list[float]:
    """When calls return that are made at `starts`."""
    loop = asyncio.get_running_loop()

    async def one(number: int, start: float) -> float:
        await asyncio.sleep(start)
        await reward.score(request(f"m{number}"))
        return loop.time()

    return list(await asyncio.gather(*(one(number, start) for number, start in enumerate(starts))))


def test_one_device_serves_calls_in_the_order_of_their_arrival() -> None:
    async def main(reward: SimulatedReward) -> None:
        assert await ends(reward, [0.0, 1.0, 2.0, 50.0]) == [10.5, 20.5, 30.5, 60.5]
        usage = (await reward.usage())["maze"]
        assert (usage.calls, usage.results, usage.processes) == (4, 4, 1)
        assert (usage.busy_s, usage.queue_s) == (40.0, 9.0 + 18.0)
        assert usage.allocated_s == 60.5
        assert usage.utilisation == pytest.approx(40 / 60.5)

    run(main, elastic=False)


def test_elastic_rewards_never_wait_and_exist_only_while_called() -> None:
    async def main(reward: SimulatedReward) -> None:
        assert await ends(reward, [0.0, 1.0, 2.0, 50.0]) == [10.5, 11.5, 12.5, 60.5]
        usage = (await reward.usage())["maze"]
        assert (usage.busy_s, usage.queue_s, usage.processes) == (40.0, 0.0, 0)
        assert (usage.allocated_s, usage.billed_s) == (42.0, 42.0)
        assert usage.utilisation == pytest.approx(10 / 10.5)
        assert usage.quantile(0.5) == 30.0, "the bucket of the latency histogram that holds 10.5 s"

    run(main, elastic=True)


def test_running_calls_are_the_processes_of_elastic_rewards() -> None:
    async def main(reward: SimulatedReward) -> None:
        calls = [asyncio.ensure_future(reward.score(request(f"m{number}"))) for number in range(3)]
        await asyncio.sleep(1.0)
        assert (await reward.usage())["maze"].processes == 3
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        usage = (await reward.usage())["maze"]
        assert (usage.processes, usage.calls, usage.results) == (0, 3, 0)

    run(main, elastic=True)


def test_a_device_is_allocated_to_its_tasks_by_their_work() -> None:
    async def main(reward: SimulatedReward) -> None:
        await reward.score(request("a", "maze"))
        await reward.score(request("b", "maths"))
        usage = await reward.usage()
        assert {name: each.busy_s for name, each in usage.items()} == {"maze": 10.0, "maths": 30.0, "idle": 0.0}
        assert sum(each.allocated_s for each in usage.values()) == 40.5
        assert usage["maths"].allocated_s == pytest.approx(40.5 * 0.75)

    tasks = {"maze": profile(reward_s=Spread(10.0), reward_overhead_s=Spread(0.5)), "idle": profile()}
    run(main, elastic=False, **tasks, maths=profile(reward_s=Spread(30.0)))


def test_before_any_call_tasks_share_the_device_evenly() -> None:
    async def main(reward: SimulatedReward) -> None:
        await asyncio.sleep(8.0)
        assert [each.allocated_s for each in (await reward.usage()).values()] == [4.0, 4.0]

    run(main, elastic=False, maze=JUDGED, maths=JUDGED)


def test_a_score_follows_from_the_trajectory_and_differs_between_them() -> None:
    async def main(reward: SimulatedReward) -> None:
        scores = [await reward.score(request(f"m{number}")) for number in range(8)]
        assert len(set(scores)) == 8
        assert all(0 <= score < 1 for score in scores)
        assert await reward.score(request("m3")) == scores[3]
        assert await reward.score(request("m3", seed=2)) != scores[3]
        assert await reward.score_group([request("m1"), request("m3")]) == [scores[1], scores[3]]

    run(main, elastic=True)


def test_a_group_is_one_call() -> None:
    async def main(reward: SimulatedReward) -> None:
        began = asyncio.get_running_loop().time()
        assert len(await reward.score_group([request("m0"), request("m1")])) == 2
        assert asyncio.get_running_loop().time() - began == 10.5
        assert (await reward.usage())["maze"].calls == 1

    run(main, elastic=False)


def test_groups_of_equal_rewards_are_scored_alike() -> None:
    async def main(reward: SimulatedReward) -> None:
        assert await reward.score(request("m0")) == await reward.score(request("m1")) == 0.0

    run(main, elastic=True, maze=profile(equal_rewards=1.0))


def test_the_real_proxy_of_rewards_takes_it_for_a_worker() -> None:
    async def main(reward: SimulatedReward) -> None:
        remote: RewardHandle = RemoteReward([FakeHandle("reward", reward)])
        assert await remote.score(request("m0")) == await reward.score(request("m0"))
        with pytest.raises(RewardError, match="no reward function for task 'chess' here"):
            await remote.score(request("m0", "chess"))
        await reward.shutdown()

    run(main, elastic=False)
