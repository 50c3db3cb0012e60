import asyncio

import msgspec
import pytest

from rollart.data.environment import EnvironmentWorker, RemoteEnvironment
from rollart.errors import ConfigError, EnvError, EnvTimeout, WorkerError
from rollart.sections import TaskConfig
from rollart.types import EnvReply

from . import user_tasks
from .fake_handles import FakeHandle

NAUGHTY = "tests.data.user_tasks:Naughty"


@pytest.fixture(autouse=True)
def _let_go():
    user_tasks.gate.clear()
    yield
    user_tasks.gate.set()


def _worker(num_threads=4, **tasks):
    plain = {name: msgspec.to_builtins(task) for name, task in tasks.items()}
    return EnvironmentWorker(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), num_threads)


def _naughty(num_threads=4, **options):
    task = TaskConfig(env=NAUGHTY, options=options, reset_timeout_s=0.5, step_timeout_s=0.5)
    return _worker(num_threads, naughty=task, sorting=TaskConfig())


def test_two_episodes_of_a_seed_are_equal_whoever_plays_them():
    async def play(worker, env_id):
        replies = [await worker.reset(env_id, "frozenlake", 2**31 + 4)]
        replies += [await worker.step(env_id, action) for action in ("down", "right", "?")]
        await worker.close(env_id)
        return replies

    async def main():
        worker = _worker(frozenlake=TaskConfig(options={"frozen_probability": 1.0}))
        assert (
            await play(worker, "a")
            == await play(worker, "b")
            == await play(_worker(frozenlake=TaskConfig(options={"frozen_probability": 1.0})), "c")
        )

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", r"step of task 'naughty': KeyError: 'no such page' \(user_tasks.py:\d+\)"),
        ("exit", "step of task 'naughty': SystemExit: 1"),
        ("none", "step of task 'naughty' returned None; expected"),
        ("hang", "step of task 'naughty' did not answer within 0.5 s"),
    ],
)
def test_a_fault_costs_its_own_episode_and_no_other(action, reason):
    async def main():
        worker = _naughty()
        await worker.reset("bad", "naughty", 1)
        await worker.reset("good", "naughty", 2)
        fault = asyncio.create_task(worker.step("bad", action))
        for _ in range(3):
            assert (await worker.step("good", "on")).observation == "on"
        with pytest.raises(EnvTimeout if action == "hang" else EnvError, match=reason):
            await fault
        with pytest.raises(EnvError, match="no environment 'bad' here"):
            await worker.step("bad", "on")
        await worker.close("bad")
        assert (await worker.reset("bad", "naughty", 3)).info == {"resets": 1}  # a fresh object
        assert (await worker.step("good", "end")).terminated
        assert (await worker.stats())["hung"] == (action == "hang")

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["raise", "exit", "hang"])
def test_a_reset_that_fails_raises_and_other_tasks_go_on(fault):
    async def main():
        worker = _naughty(on_reset=fault)
        with pytest.raises(EnvTimeout if fault == "hang" else EnvError, match="reset of task 'naughty'"):
            await worker.reset("bad", "naughty", 1)
        assert (await worker.reset("good", "sorting", 1)).observation.startswith("Sort:")

    asyncio.run(main())


def test_more_hung_calls_than_threads_do_not_stop_the_rest():
    async def main():
        worker = _naughty(num_threads=2)
        for number in range(6):
            await worker.reset(f"e{number}", "naughty", number)
        faults = await asyncio.gather(*(worker.step(f"e{n}", "hang") for n in range(5)), return_exceptions=True)
        assert [type(fault) for fault in faults] == [EnvTimeout] * 5
        assert (await worker.step("e5", "on")).observation == "on"
        assert await worker.stats() == {"running": 1, "idle": 0, "hung": 5}

    asyncio.run(main())


def test_environments_that_ended_cleanly_are_used_again():
    async def main():
        worker = _naughty()
        await worker.reset("a", "naughty", 1)
        await worker.close("a")
        assert await worker.stats() == {"running": 0, "idle": 1, "hung": 0}
        assert (await worker.reset("b", "naughty", 2)) == EnvReply("seed 2", info={"resets": 2})

    asyncio.run(main())


def test_what_ends_an_episode_also_closes_it():
    async def main():
        remote, handles = _remote(1)
        await remote.reset("a", "naughty", 1)
        assert (await remote.step("a", "end")).terminated
        assert await handles[0].call("stats") == {"running": 0, "idle": 1, "hung": 0}
        await remote.close("a")
        with pytest.raises(EnvError, match="no environment 'a'"):
            await remote.step("a", "on")
        assert [call[0] for call in handles[0].calls] == ["reset", "step", "stats"]

    asyncio.run(main())


def test_at_the_end_environments_are_closed_whether_they_run_rest_or_are_in_the_middle_of_a_step():
    async def main():
        worker = _naughty(label="ended")
        for env_id in ("runs", "rests", "steps"):
            await worker.reset(env_id, "naughty", 1)
        await worker.close("rests")
        step = asyncio.create_task(worker.step("steps", "hang"))
        await asyncio.sleep(0)
        step.cancel()
        await worker.close("steps")
        asyncio.get_running_loop().call_later(0.1, user_tasks.gate.set)
        await worker.shutdown()
        assert [user_tasks.closed.get_nowait() for _ in range(3)] == ["ended"] * 3

    asyncio.run(main())


def test_no_more_environments_are_made_than_were_once_in_use_together():
    async def main():
        worker = _naughty(num_threads=1, label="mine")
        for episodes in (("a", "b", "c"), ("d", "e"), ("f", "g", "h")):
            for env_id in episodes:
                await worker.reset(env_id, "naughty", 1)
            for env_id in episodes:
                await worker.close(env_id)
            assert await worker.stats() == {"running": 0, "idle": 3, "hung": 0}
        assert user_tasks.closed.empty()
        await worker.shutdown()
        assert [user_tasks.closed.get(timeout=10) for _ in range(3)] == ["mine"] * 3

    asyncio.run(main())


def test_closing_is_harmless_in_any_state():
    async def main():
        worker = _naughty()
        await worker.close("never")
        await worker.reset("a", "naughty", 1)
        step = asyncio.create_task(worker.step("a", "hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        step.cancel()
        await worker.close("a")
        await worker.close("a")
        with pytest.raises(asyncio.CancelledError):
            await step
        assert (await worker.stats())["idle"] == 0  # still busy, so not for others

    asyncio.run(main())


def test_an_id_that_is_reset_twice_begins_anew():
    async def main():
        worker = _naughty()
        await worker.reset("a", "naughty", 1)
        assert (await worker.reset("a", "naughty", 2)).observation == "seed 2"
        assert (await worker.stats())["running"] == 1

    asyncio.run(main())


def test_an_unknown_task_and_a_wrong_config_are_named():
    with pytest.raises(EnvError, match="no task 'x' here; this worker has naughty, sorting"):
        asyncio.run(_naughty().reset("a", "x", 1))
    with pytest.raises(ConfigError, match=r"tasks.lake: unknown environment 'lake'"):
        _worker(lake=TaskConfig())


def test_a_simulated_task_fails_only_where_its_profile_says():
    async def main():
        worker = _worker(synthetic=TaskConfig(options={"failure_rate": 0.2, "none_rate": 0.2}, step_timeout_s=5.0))
        outcomes = await asyncio.gather(
            *(worker.reset(f"e{seed}", "synthetic", seed) for seed in range(60)), return_exceptions=True
        )
        kinds = {type(outcome) for outcome in outcomes}
        assert kinds == {EnvReply, EnvError}
        assert sum(type(outcome) is EnvReply for outcome in outcomes) > 20

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------------- the handle
def _remote(count):
    handles = [FakeHandle(f"env{number}", _naughty()) for number in range(count)]
    return RemoteEnvironment(handles), handles


def test_an_episode_stays_on_the_least_loaded_worker_that_began_it():
    async def main():
        remote, handles = _remote(2)
        for env_id in ("a", "b", "c"):
            await remote.reset(env_id, "naughty", 1)
        await remote.close("b")
        await remote.reset("d", "naughty", 1)
        for env_id in ("a", "c", "d"):
            assert (await remote.step(env_id, "on")).observation == "on"
        assert [call[1] for call in handles[0].calls] == ["a", "c", "a", "c"]
        assert [call[1] for call in handles[1].calls] == ["b", "b", "d", "d"]

    asyncio.run(main())


def test_errors_keep_their_class_over_the_wire():
    async def main():
        remote, _ = _remote(1)
        await remote.reset("a", "naughty", 1)
        with pytest.raises(EnvTimeout, match=r"did not answer within 0.5 s"):
            await remote.step("a", "hang")
        await remote.reset("a", "naughty", 1)
        with pytest.raises(EnvError, match="KeyError"):
            await remote.step("a", "raise")

    asyncio.run(main())


def test_a_dead_worker_costs_its_episodes_and_gets_no_more(caplog):
    async def main():
        remote, handles = _remote(2)
        await remote.reset("a", "naughty", 1)
        await remote.reset("b", "naughty", 1)
        handles[0].dead = True
        with pytest.raises(EnvError, match=r"step on worker env0: env0: exit status 9"):
            await remote.step("a", "on")
        with pytest.raises(EnvError, match="no environment 'a'"):
            await remote.step("a", "on")
        assert (await remote.reset("a", "naughty", 1)).observation == "seed 1"
        await remote.reset("c", "naughty", 1)
        assert [call[0] for call in handles[0].calls] == ["reset", "step"]
        handles[1].dead = True
        await remote.close("b")
        for env_id in ("a", "c"):
            with pytest.raises(EnvError):
                await remote.step(env_id, "on")
        waiting = asyncio.ensure_future(remote.reset("e", "naughty", 1))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "it waits for a worker"
        handles[0].dead = False
        remote.join(handles[0])
        assert (await waiting).observation == "seed 1"

    asyncio.run(main())
    assert not caplog.records, "its death is one line, not one for each episode"


def test_a_worker_that_fails_in_another_way_is_an_environment_error_too():
    class Confused:
        name = "env0"

        async def call(self, method, *args, returns=None):
            raise WorkerError("KeyError in the worker")

    async def main():
        remote = RemoteEnvironment([Confused()])
        with pytest.raises(EnvError, match="reset on worker env0: KeyError in the worker"):
            await remote.reset("a", "x", 1)
        await remote.close("a")

    asyncio.run(main())


def test_calls_that_waited_when_their_episode_was_closed_touch_nothing_and_hold_nobody_up():
    """As when a run aborts hundreds of trajectories at once, and an evaluation follows."""

    async def main():
        worker = _worker(1, naughty=TaskConfig(env=NAUGHTY, reset_timeout_s=20.0, step_timeout_s=20.0))
        await worker.reset("first", "naughty", 0)
        holding = asyncio.ensure_future(worker.step("first", "hang"))
        await asyncio.sleep(0)
        waiting = []
        for number in range(40):
            waiting.append(asyncio.ensure_future(worker.reset(f"e{number}", "naughty", number)))
            await asyncio.sleep(0)
            await worker.close(f"e{number}")
        user_tasks.gate.set()
        await holding
        faults = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        assert {str(fault) for fault in faults} == {
            "reset of task 'naughty': its episode was closed before the call began"
        }
        for number in range(8):
            reply = await asyncio.wait_for(worker.reset(f"after{number}", "naughty", number), 10)
            assert reply.observation == f"seed {number}"
        assert (await worker.stats())["hung"] == 0

    asyncio.run(main())
