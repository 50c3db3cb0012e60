import asyncio

import pytest

from rollart.control.group_scores import GroupScores
from rollart.errors import RewardError
from rollart.types import RewardRequest, TaskSpec
from rollart.virtual_time import run_virtual
from tests.fakes import FakeEnv, FakeReward, FakeRun


class Judge:
    """Scores a group by the rank of each answer's length; remembers whom it saw."""

    def __init__(self, error=None):
        self.groups = []
        self.error = error

    async def score(self, request):
        raise AssertionError("single trajectories are not asked for")

    async def score_group(self, requests):
        self.groups.append([request.responses[0] for request in requests])
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        return [float(len(request.responses[0])) for request in requests]


def _request(answer):
    return RewardRequest("t", 0, ["q"], [answer])


def test_members_wait_for_each_other_and_each_gets_its_own_number():
    async def main():
        judge = Judge()
        scores = GroupScores(judge, 3)
        names = [("g1", "a"), ("g2", "bb"), ("g1", "ccc"), ("g2", "dddd"), ("g1", "eeeee"), ("g2", "ffffff")]
        values = await asyncio.gather(*(scores.score(group, answer, _request(answer)) for group, answer in names))
        assert values == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert judge.groups == [["a", "ccc", "eeeee"], ["bb", "dddd", "ffffff"]]

    asyncio.run(main())


def test_a_member_that_is_aborted_while_it_waits_is_replaced_by_its_rerun():
    async def main():
        judge = Judge()
        scores = GroupScores(judge, 2)
        first = asyncio.create_task(scores.score("g", "m0", _request("stale")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        values = await asyncio.gather(*(scores.score("g", f"m{n}", _request("x" * n)) for n in (1, 2)))
        assert values == [1.0, 2.0]
        assert judge.groups == [["x", "xx"]]
        assert not scores._waiting

    asyncio.run(main())


def test_members_beyond_the_size_wait_for_their_abort_and_leave_nothing():
    async def main():
        scores = GroupScores(Judge(), 2)
        tasks = [asyncio.create_task(scores.score("g", f"m{n}", _request("x"))) for n in range(3)]
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, True, False]
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not scores._waiting

    asyncio.run(main())


def test_the_fault_of_a_group_is_told_to_every_member():
    async def main():
        scores = GroupScores(Judge(RewardError("no judge")), 2)
        answers = await asyncio.gather(
            *(scores.score("g", f"m{n}", _request("x")) for n in range(2)), return_exceptions=True
        )
        assert [str(answer) for answer in answers] == ["no judge"] * 2

    asyncio.run(main())


def test_a_member_that_is_aborted_during_the_call_costs_the_others_nothing():
    async def main():
        scores = GroupScores(Judge(), 2)
        tasks = [asyncio.create_task(scores.score("g", f"m{n}", _request("x" * n))) for n in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert await tasks[1] == 2.0

    asyncio.run(main())


@pytest.mark.parametrize("num_shards", [0, 3])
@pytest.mark.parametrize("schedule", ["sync", "sync_plus", "rollart"])
def test_in_a_whole_run_every_group_is_scored_at_once_wherever_its_members_run(schedule, num_shards):
    if schedule == "sync" and num_shards:
        pytest.skip("sync runs in one process")

    async def main():
        reward = FakeReward()
        run = FakeRun(
            tasks={"maze": TaskSpec("maze", has_reward=True, reward_scope="group")},
            env=FakeEnv(),
            reward=reward,
            num_shards=num_shards,
            schedule=schedule,
            rollout__group_size=4,
        )
        await run.train()
        return run, reward

    run, reward = run_virtual(main())
    assert len(run.hooks.summaries) == 6
    whole = [members for members in reward.groups if len(members) > 1]
    assert all(len(members) == 4 and len({member.seed for member in members}) == 1 for members in whole)
    for batch in run.trainer.batches:
        for group in batch.groups:
            assert sorted(each.reward for each in group.trajectories) == [0.0, 1.0, 2.0, 3.0]
