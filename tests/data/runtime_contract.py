"""What every runtime must do, as tests over a fixture `runtime` that the importing module defines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rollart.errors import ConfigError, EnvError, WorkerDied, WorkerError
from rollart.protocols import Runtime
from rollart.types import EnvReply, Sampling


class Odd(Exception):
    """Says a text that is not UTF-8, or fails to say anything."""

    def __str__(self) -> str:
        return "not \ud800 UTF-8" if self.args[0] else 1 / 0  # type: ignore[return-value]


class Mortal:
    """Loses what it depends on when it is told; its `shutdown` leaves a file."""

    def __init__(self, closed: str) -> None:
        self.closed = closed
        self.reason = asyncio.Event()

    async def lose(self) -> None:
        self.reason.set()

    async def wait_lost(self) -> str:
        await self.reason.wait()
        return "the sun went down"

    async def shutdown(self) -> None:
        await asyncio.to_thread(Path(self.closed).touch)


class Subject:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, number: int) -> int:
        return number * self.factor

    def echo(self, payload: bytes) -> bytes:
        return payload

    def where(self) -> tuple[str, list[str]]:
        """Where it works, and what of CUDA it sees."""
        return os.getcwd(), sorted(value for key, value in os.environ.items() if key == "CUDA_VISIBLE_DEVICES")

    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    def describe(self, sampling: Sampling) -> EnvReply:
        return EnvReply(observation=f"{type(sampling).__name__} {sampling.max_tokens}")

    def fail(self, ours: bool) -> None:
        if ours:
            raise EnvError("the cave is flooded")
        raise ZeroDivisionError("by nought")

    def block(self) -> None:
        time.sleep(60)

    def fork(self) -> int:
        """Leave a child that holds everything this process holds; its id."""
        child = os.fork()
        while child == 0:
            time.sleep(60)
        return child

    def fail_oddly(self, text: str | None) -> None:
        raise Odd(text)

    def vanish(self) -> None:
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


TARGET = "tests.data.runtime_contract:Subject"


def test_a_worker_answers_with_typed_values_and_calls_overlap(runtime: Runtime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        slow = asyncio.create_task(worker.call("slow", 0.2, returns=str))
        assert await worker.call("times", 14, returns=int) == 42
        assert not slow.done()
        assert await slow == "slept"
        reply = await worker.call("describe", Sampling(max_tokens=7), returns=EnvReply)
        assert reply == EnvReply(observation="Sampling 7")
        await runtime.shutdown()

    asyncio.run(scenario())


def test_errors_come_home_as_ours_with_the_remote_traceback(runtime: Runtime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        with pytest.raises(EnvError, match="the cave is flooded") as ours:
            await worker.call("fail", True)
        assert "worker w, call fail" in ours.value.__notes__[0]
        with pytest.raises(WorkerError, match="worker w, call fail: ZeroDivisionError: by nought") as foreign:
            await worker.call("fail", False)
        assert "in fail" in str(foreign.value)
        with pytest.raises(WorkerError, match="no method 'nothing'"):
            await worker.call("nothing")
        with pytest.raises(WorkerError, match="int"):
            await worker.call("times", "many")
        assert await worker.call("times", 2, returns=int) == 6
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_worker_whose_object_has_lost_what_it_depends_on_is_closed_and_dead_for_that_reason(
    runtime: Runtime, tmp_path: Path
) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", f"{__name__}:Mortal", {"closed": str(tmp_path / "closed")})
        await worker.call("lose")
        assert await worker.wait_dead() == "the sun went down"
        with pytest.raises(WorkerDied, match="call lose: the sun went down"):
            await worker.call("lose")
        await worker.stop()
        assert (tmp_path / "closed").exists()
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_target_that_does_not_exist_is_named(runtime: Runtime) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="worker target: no module 'nowhere'"):
            await runtime.spawn("w", "nowhere:Nobody", {})
        await runtime.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(("text", "said"), [("odd", r"not \\ud800 UTF-8"), ("", "its text cannot be shown")])
def test_an_error_with_a_broken_text_comes_home_all_the_same(text: str, said: str, runtime: Runtime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        with pytest.raises(WorkerError, match=said):
            await asyncio.wait_for(worker.call("fail_oddly", text), 30)
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_large_value_arrives_whole_both_ways(runtime: Runtime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        payload = os.urandom(1 << 20) * 5
        assert await worker.call("echo", payload, returns=bytes) == payload
        await runtime.shutdown()

    asyncio.run(scenario())


def test_five_thousand_calls_can_wait_at_once(runtime: Runtime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        waiting = [asyncio.create_task(worker.call("slow", 0.5, returns=str)) for _ in range(5000)]
        assert await worker.call("times", 2, returns=int) == 6
        assert await asyncio.gather(*waiting) == ["slept"] * 5000
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_constructor_that_fails_leaves_the_runtime_able_to_start_others(runtime: Runtime) -> None:
    async def scenario() -> None:
        with pytest.raises((WorkerError, TypeError), match="factor"):
            await runtime.spawn("w", TARGET, {})
        worker = await runtime.spawn("w", TARGET, {"factor": 2})
        assert await worker.call("times", 2, returns=int) == 4
        await runtime.shutdown()
        with pytest.raises(WorkerError, match="call times"):
            await worker.call("times", 2)

    asyncio.run(scenario())
