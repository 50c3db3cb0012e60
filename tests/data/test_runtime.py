import asyncio
import stat
from pathlib import Path

import psutil
import pytest

from rollart.data.peers import connect
from rollart.data.runtime import InlineRuntime, LocalRuntime, ProcessWorker
from rollart.errors import WorkerDied
from rollart.protocols import Addressed
from tests.data.runtime_contract import (  # noqa: F401
    TARGET,
    test_a_constructor_that_fails_leaves_the_runtime_able_to_start_others,
    test_a_large_value_arrives_whole_both_ways,
    test_a_target_that_does_not_exist_is_named,
    test_a_worker_answers_with_typed_values_and_calls_overlap,
    test_an_error_with_a_broken_text_comes_home_all_the_same,
    test_errors_come_home_as_ours_with_the_remote_traceback,
    test_five_thousand_calls_can_wait_at_once,
)


@pytest.fixture(params=["local", "inline"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> LocalRuntime | InlineRuntime:
    return LocalRuntime(tmp_path) if request.param == "local" else InlineRuntime()


def test_a_killed_process_fails_pending_and_later_calls_with_its_last_output(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        pending = asyncio.create_task(worker.call("slow", 60.0))
        with pytest.raises(WorkerDied, match=r"(?s)killed by SIGKILL.*last words"):
            await worker.call("vanish")
        with pytest.raises(WorkerDied, match="call slow"):
            await pending
        assert "SIGKILL" in await worker.wait_dead()
        with pytest.raises(WorkerDied):
            await worker.call("times", 1)
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_worker_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        assert isinstance(worker, ProcessWorker)
        blocked = asyncio.create_task(worker.call("block"))
        await asyncio.sleep(0.1)
        await runtime.shutdown()
        with pytest.raises(WorkerDied):
            await blocked
        assert worker.process.returncode is not None

    asyncio.run(scenario())


def test_a_worker_ends_when_its_driver_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        assert isinstance(worker, ProcessWorker)
        blocked = asyncio.create_task(worker.call("block"))
        await asyncio.sleep(0.1)
        folder = Path((await worker.address()).removeprefix("unix:")).parent
        worker._connection.shutdown(2)
        await asyncio.wait_for(worker.process.wait(), 10)
        assert not folder.exists(), "its socket went with it"
        with pytest.raises(WorkerDied):
            await blocked
        await runtime.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["stop", "death"])
def test_a_child_that_user_code_forked_neither_hides_the_end_of_its_worker_nor_outlives_it(
    ending: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        child = psutil.Process(await worker.call("fork", returns=int))
        if ending == "death":
            with pytest.raises(WorkerDied, match="killed by SIGKILL"):
                await asyncio.wait_for(worker.call("vanish"), 30)
        await asyncio.wait_for(runtime.shutdown(), 30)
        _gone, alive = psutil.wait_procs([child], timeout=30)
        assert not alive

    asyncio.run(scenario())


def test_a_worker_from_a_script_finds_the_neighbours_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("FACTOR = 5\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from neighbour_of_script import FACTOR\nclass Five:\n    def times(self, n: int) -> int: return n * FACTOR\n"
    )

    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", f"{script}:Five", {})
        assert await worker.call("times", 2, returns=int) == 10
        await runtime.shutdown()

    asyncio.run(scenario())


class Caller:
    """A worker that calls another one."""

    async def forward(self, name: str, address: str, number: int) -> int:
        other = await connect(name, address)
        try:
            return int(await other.call("times", number, returns=int))
        finally:
            await other.stop()

    async def outlive(self, name: str, address: str) -> str:
        other = await connect(name, address)
        try:
            await other.call("slow", 60.0)
        except WorkerDied as error:
            return str(error)
        return "it lived"


def test_workers_call_each_other_past_the_driver(runtime: LocalRuntime | InlineRuntime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        caller = await runtime.spawn("caller", "tests.data.test_runtime:Caller", {})
        assert isinstance(worker, Addressed)
        address = await worker.address()
        assert address == await worker.address()
        folder = Path(address.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "nobody else may call"
        assert await caller.call("forward", "w", address, 14, returns=int) == 42
        await runtime.shutdown()
        assert not folder.exists()

    asyncio.run(scenario())


def test_a_worker_learns_of_the_death_of_one_it_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        assert isinstance(worker, ProcessWorker)
        caller = await runtime.spawn("caller", "tests.data.test_runtime:Caller", {})
        waiting = asyncio.create_task(caller.call("outlive", "w", await worker.address(), returns=str))
        await asyncio.sleep(0.5)
        worker.kill()
        assert "worker w, call slow: its connection has ended" in await waiting
        with pytest.raises(WorkerDied, match="worker w does not listen at unix:"):
            await connect("w", f"unix:{tmp_path}/nobody")
        await runtime.shutdown()

    asyncio.run(scenario())


def test_what_runs_for_a_caller_that_goes_away_is_cancelled() -> None:
    async def scenario() -> None:
        runtime = InlineRuntime()
        worker = await runtime.spawn("w", "tests.data.test_runtime:Patient", {})
        assert isinstance(worker, Addressed)
        other = await connect("w", await worker.address())
        calling = asyncio.create_task(other.call("wait"))
        await worker.call("begun")
        await other.stop()
        with pytest.raises(WorkerDied):
            await calling
        await asyncio.wait_for(worker.call("ended"), 30)
        await runtime.shutdown()

    asyncio.run(scenario())


class Patient:
    """Waits for ever, and tells when that has begun and ended."""

    def __init__(self) -> None:
        self._begun, self._ended = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._ended.set()

    async def begun(self) -> None:
        await self._begun.wait()

    async def ended(self) -> None:
        await self._ended.wait()
