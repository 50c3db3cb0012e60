import asyncio

import msgspec
import pytest

from rollart.data.reward import RemoteReward, RewardWorker
from rollart.errors import ConfigError, RewardError
from rollart.sections import TaskConfig
from rollart.types import RewardRequest

from . import user_tasks
from .fake_handles import FakeHandle


@pytest.fixture(autouse=True)
def _let_go():
    user_tasks.gate.clear()
    yield
    user_tasks.gate.set()


def _request(answer, task="mine"):
    return RewardRequest(task=task, seed=1, prompts=["a", "b", "c"], responses=[answer])


def _worker(num_threads=2, scheme="thread"):
    mine = TaskConfig(env="sorting", reward="tests.data.user_tasks:reward", reward_timeout_s=0.3)
    tasks = {"mine": mine, "sorting": TaskConfig(), "frozenlake": TaskConfig()}
    table = {"mine": {"max_concurrency": num_threads}}
    return RewardWorker({name: msgspec.to_builtins(task) for name, task in tasks.items()}, table, scheme)


def _score(request, scheme="thread"):
    async def main():
        worker = _worker(scheme=scheme)
        try:
            return await RemoteReward([FakeHandle("reward", worker)]).score(request)
        finally:
            await worker.shutdown()

    return asyncio.run(main())


SCHEMES = pytest.mark.parametrize("scheme", ["thread", "local"])


@SCHEMES
def test_a_trajectory_gets_the_number_of_its_tasks_function(scheme):
    assert _score(_request("fine"), scheme) == 1.5
    request = RewardRequest(task="sorting", seed=1, prompts=["Sort: 3 1"], responses=["1 3"])
    assert _score(request, scheme) == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("none", "reward of task 'mine' returned None; expected a finite number"),
        ("nan", "reward of task 'mine': ValueError: the function returned nan, not a finite number"),
        ("text", "reward of task 'mine' returned str '1'"),
        ("raise", r"reward of task 'mine': KeyError: 'no such key' \(user_tasks.py:\d+\)"),
        ("hang", r"reward of task 'mine': \S+ did not answer within 0.3 s"),
    ],
)
@SCHEMES
def test_a_faulty_reward_says_what_happened(answer, reason, scheme):
    with pytest.raises(RewardError, match=reason):
        _score(_request(answer), scheme)


def test_hung_rewards_do_not_stop_others():
    async def main():
        worker = _worker(num_threads=2)
        hung = [asyncio.create_task(worker.score(_request("hang"))) for _ in range(5)]
        faults = await asyncio.gather(*hung, return_exceptions=True)
        assert [type(fault) for fault in faults] == [RewardError] * 5
        assert await asyncio.gather(*(worker.score(_request("fine")) for _ in range(9))) == [1.5] * 9

    asyncio.run(main())


def test_a_task_without_reward_function_is_refused():
    with pytest.raises(RewardError, match="no reward function for task 'frozenlake'"):
        _score(_request("x", task="frozenlake"))
    with pytest.raises(RewardError, match="no reward function for task 'elsewhere'"):
        _score(_request("x", task="elsewhere"))


def test_a_reward_that_cannot_be_imported_is_found_at_the_start():
    with pytest.raises(ConfigError, match=r"tasks.x.reward: no module 'nowhere_at_all'"):
        RewardWorker({"x": {"env": "sorting", "reward": "nowhere_at_all:f"}})


def test_what_a_dead_worker_held_is_scored_by_another_or_by_its_successor():
    async def main():
        handles = [FakeHandle(f"reward-{number}", _worker()) for number in range(2)]
        remote = RemoteReward(handles)
        handles[0].dead = True
        assert await asyncio.gather(*(remote.score(_request("fine")) for _ in range(3))) == [1.5] * 3
        assert len(handles[0].calls) < len(handles[1].calls)
        handles[1].dead = True
        waiting = asyncio.ensure_future(remote.score(_request("fine")))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "it waits for a worker"
        remote.join(FakeHandle("reward-1.1", _worker()))
        assert await waiting == 1.5

    asyncio.run(main())
