from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollart.control.background import Background
from rollart.control.ledger import Ledger
from rollart.control.lockstep import Lockstep
from rollart.control.sample_buffer import Batch
from rollart.control.supervisor import Supervisor
from rollart.errors import RolloutError, WorkerDied
from rollart.types import EngineStats, Group, GroupSpec, Trajectory, Turn
from rollart.virtual_time import run_virtual
from tests.fakes import FakeWorker


def test_every_second_of_waiting_is_attributed_to_the_stages_that_ran() -> None:
    async def main() -> dict[str, float]:
        ledger = Ledger()
        ledger.clock.change(None, "reset")
        with ledger.waiting_for_batch():
            await asyncio.sleep(2.0)
            ledger.clock.change(None, "generate")
            await asyncio.sleep(2.0)
            ledger.clock.change("reset", "step")
            ledger.clock.change("generate", "step")
            await asyncio.sleep(3.0)
            ledger.clock.change("step", None)
            ledger.clock.change("step", None)
            await asyncio.sleep(4.0)
        await asyncio.sleep(9.0)
        return ledger.clock.waited_s

    waited = run_virtual(main())
    assert waited == {"reset": 3, "generate": 1, "step": 3, "score": 0, "nothing_running": 4, "no_engine": 0}


def test_trajectories_that_generate_without_an_engine_wait_for_one() -> None:
    async def main() -> dict[str, float]:
        ledger = Ledger()
        ledger.clock.change(None, "generate")
        ledger.clock.change(None, "step")
        with ledger.waiting_for_batch():
            await asyncio.sleep(2.0)
            ledger.clock.engines(0)
            await asyncio.sleep(6.0)
            ledger.clock.engines(1)
            await asyncio.sleep(2.0)
        return ledger.clock.waited_s

    waited = run_virtual(main())
    assert {cause: seconds for cause, seconds in waited.items() if seconds} == {
        "generate": 2.0,
        "step": 5.0,
        "no_engine": 3.0,
    }


def test_rollout_waits_for_training_while_nothing_runs() -> None:
    async def main() -> Ledger:
        ledger = Ledger()
        with ledger.training():
            await asyncio.sleep(3.0)
            ledger.clock.change(None, "reset")
            await asyncio.sleep(5.0)
            ledger.clock.change("reset", None)
        with ledger.wait("weights"):
            await asyncio.sleep(0.5)
        return ledger

    waits = run_virtual(main()).snapshot()["waits_s"]
    assert (waits["training"], waits["weights"]) == (3.0, 0.5)


def test_overlap_is_the_share_of_training_during_which_workers_generated() -> None:
    ledger = Ledger()
    assert ledger.overlap == 0.0
    before = {"a": EngineStats(busy_s=1.0), "b": EngineStats(busy_s=5.0)}
    ledger.overlapped(4.0, before, {"a": EngineStats(busy_s=3.0), "b": EngineStats(busy_s=99.0)})
    assert ledger.overlap == pytest.approx((2.0 + 4.0) / 2 / 4.0)


def test_a_batch_that_is_awaited_while_the_trainer_works_is_no_wait_for_it() -> None:
    async def scenario() -> dict[str, float]:
        ledger = Ledger()
        ledger.clock.change(None, "generate")
        with ledger.waiting_for_batch():
            with ledger.training():
                await asyncio.sleep(3)
            with ledger.wait("weights"):
                await asyncio.sleep(2)
            await asyncio.sleep(1)
        waits: dict[str, float] = ledger.snapshot()["waits_s"]
        return waits

    waits = run_virtual(scenario())
    assert (waits["generate"], waits["weights"], waits["nothing_running"]) == (1.0, 2.0, 0.0)


def test_the_accounts_go_on_in_a_resumed_run() -> None:
    async def scenario() -> Ledger:
        ledger = Ledger()
        with ledger.wait("weights"), ledger.waiting_for_batch():
            await asyncio.sleep(2)
        ledger.trained(Batch([Group(GroupSpec(0, "t", 0), [spoken("g0-m0-a0", version=3)])], version=4), 5)
        ledger.lost(spoken("g1-m0-a0", version=4), "redundant", aborted=True)
        ledger.lost(Trajectory("g1-m1-a0", "g1", "t", 0), "env_error", aborted=False)
        ledger.overlapped(2.0, {"w": EngineStats()}, {"w": EngineStats(busy_s=1.0)})
        return ledger

    first, again = run_virtual(scenario()), Ledger()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state())))
    assert again.snapshot() == first.snapshot()
    assert again.snapshot()["age_histogram"] == {"1": 1}


def spoken(trajectory_id: str, version: int) -> Trajectory:
    return Trajectory(trajectory_id, "g0", "t", 0, [Turn([1], [2, 3], [-1.0, -1.0], [version, version])])


def test_lockstep_lets_all_go_together_and_a_member_that_leaves_holds_up_nobody() -> None:
    async def main() -> list[tuple[str, float]]:
        lockstep, went, loop = Lockstep(), [], asyncio.get_running_loop()

        async def member(name: str, after_s: float, waits: bool) -> None:
            await asyncio.sleep(after_s)
            if waits:
                await lockstep.wait(name)
                went.append((name, loop.time()))
            lockstep.leave(name)
            await lockstep.all_left()
            went.append(("end", loop.time()))

        for name in "abc":
            lockstep.join(name)
        await asyncio.gather(member("a", 1.0, True), member("b", 2.0, True), member("c", 3.0, False))
        return went

    assert sorted(run_virtual(main())) == [("a", 3.0), ("b", 3.0), ("end", 3.0), ("end", 3.0), ("end", 3.0)]


def test_a_cancelled_member_of_a_lockstep_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        lockstep = Lockstep()
        for name in "abc":
            lockstep.join(name)
        a, b = (asyncio.ensure_future(lockstep.wait(name)) for name in "ab")
        await asyncio.sleep(1.0)
        a.cancel()
        await asyncio.sleep(0)
        lockstep.leave("a")
        assert not b.done()
        lockstep.leave("c")
        await b

    run_virtual(main())


def test_background_counts_faults_and_ends_what_does_not_end() -> None:
    async def main() -> Background:
        background = Background()

        async def fails() -> None:
            raise OSError("gone")

        background.spawn(fails(), "close")
        background.spawn(asyncio.sleep(1e6), "close")
        await background.drain(5.0)
        return background

    background = run_virtual(main())
    assert len(background) == 0
    assert background.faults == {"close: OSError: gone": 1, "not finished in time": 1}


def test_the_first_death_ends_the_guarded_work_after_it_has_cleaned_up() -> None:
    async def main() -> list[str]:
        workers, cleaned = [FakeWorker("a"), FakeWorker("b")], []
        supervisor = Supervisor(workers)

        async def work() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(1.0)
                cleaned.append("clean")

        asyncio.get_running_loop().call_later(3.0, workers[1].die, "exit code 1")
        with pytest.raises(WorkerDied, match="worker 'b' died: exit code 1"):
            await supervisor.guard(work())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return cleaned

    assert run_virtual(main()) == ["clean"]


def test_guard_returns_what_the_work_returns_and_reports_the_first_failure_only() -> None:
    async def main() -> None:
        assert await Supervisor([FakeWorker("a")]).guard(asyncio.sleep(1.0, "result")) == "result"
        supervisor = Supervisor()
        supervisor.fail(RolloutError("first"))
        supervisor.fail(RolloutError("second"))
        with pytest.raises(RolloutError, match="first"):
            await supervisor.guard(asyncio.sleep(1e6))

    run_virtual(main())
