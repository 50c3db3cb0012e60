"""The elastic pool of processes: from none to the limit and back to none, and never a process left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.local import LocalPool
from rollart.errors import EndpointError, FunctionError, FunctionTimeout

MODULE = "tests.data.serverless.user_functions"


def run(name, work, policy=None, **options):
    async def main():
        pool = LocalPool(f"local://{MODULE}:{name}", EndpointOptions(**options))
        try:
            return await work(pool, Function("it", pool, policy or CallPolicy(timeout_s=20, backoff_s=0.01)))
        finally:
            await pool.close()
            assert pool.capacity().processes == 0

    return asyncio.run(main())


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


def test_it_begins_with_nothing_grows_to_its_limit_and_goes_back_to_nothing():
    async def work(pool, function):
        assert pool.capacity().processes == 0
        calls = [asyncio.create_task(function.call(0.2)) for _ in range(6)]
        await until(lambda: pool.capacity().processes == 3)
        await asyncio.gather(*calls)
        assert pool.capacity().processes <= 3
        await until(lambda: pool.capacity().processes == 0)
        before = pool.capacity().allocated_s
        await asyncio.sleep(0.2)
        assert pool.capacity().allocated_s == before, "nothing is allocated while idle"
        assert await function.call(0) == 0
        usage = function.usage()
        assert usage.cold_starts == 4
        assert usage.calls == usage.results == usage.tries == 7
        assert usage.busy_s >= 6 * 0.2
        assert usage.allocated_s >= usage.busy_s

    run("slow", work, max_concurrency=3, idle_s=0.3)


def test_a_free_process_is_taken_before_another_is_started():
    async def work(pool, function):
        first = await function.call()
        assert [await function.call() for _ in range(5)] == [first] * 5
        assert pool.capacity().processes == 1

    run("pid", work, max_concurrency=4)


def test_a_dead_process_is_no_capacity():
    async def work(pool, function):
        pids = set(await asyncio.gather(*(function.call() for _ in range(2))))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        again = await asyncio.gather(*(function.call() for _ in range(4)))
        assert not pids & set(again)

    run("pid", work, max_concurrency=2)


def test_a_process_that_dies_under_a_call_is_another_try(tmp_path):
    async def work(pool, function):
        assert await function.call(str(tmp_path / "tried")) == "second try"
        assert function.usage().failures == {"endpoint": 1}

    run("dying", work)


def test_a_call_that_always_kills_its_process_fails_with_the_cause_and_nobody_else_does():
    async def work(pool, function):
        with pytest.raises(EndpointError, match=r"it: 2 tries failed; .*ended under the call \(signal SIGKILL\)"):
            await function.call()

    run("dying", work, policy=CallPolicy(max_attempts=2, backoff_s=0.01))


def test_a_hog_of_memory_meets_the_limit():
    async def work(pool, function):
        assert await function.call(10) == 10 << 20
        with pytest.raises(FunctionError, match="MemoryError"):
            await function.call(2000)
        assert await function.call(10) == 10 << 20

    run("hungry", work, memory_bytes=512 << 20, max_concurrency=1)


@pytest.mark.parametrize("name", ["slow", "holding_the_interpreter"])
def test_what_hangs_is_ended_at_its_limit_even_in_c_code(name):
    async def work(pool, function):
        began = time.monotonic()
        with pytest.raises(FunctionTimeout):
            await function.call(600)
        assert time.monotonic() - began < 5

    run(name, work, policy=CallPolicy(timeout_s=0.5))


def test_what_a_call_started_ends_with_it(tmp_path):
    path = tmp_path / "pids"

    async def work(pool, function):
        with pytest.raises(FunctionTimeout):
            await function.call(str(path))
        pids = [int(pid) for pid in path.read_text().split()]
        await until(lambda: not any(map(is_alive, pids)))

    run("with_children", work, policy=CallPolicy(timeout_s=1.5))


def test_a_cancelled_call_ends_its_process_and_its_place_is_free():
    async def work(pool, function):
        task = asyncio.create_task(function.call(600))
        await until(lambda: function.usage().tries == 1 and pool.capacity().processes == 1)
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await function.call(0) == 0

    run("slow", work, max_concurrency=1)


async def warmed(pool, function, path):
    """After it short calls are given several at a time."""
    async with asyncio.timeout(10):
        while pool.concurrency <= 8 * pool.max_processes:
            await function.call(str(path), -1)
    path.write_text("")


def begun(path):
    return [int(line) for line in path.read_text().split()]


def test_of_a_burst_of_short_calls_those_behind_one_that_kills_its_process_go_to_another_and_begin_once(tmp_path):
    path = tmp_path / "begun"

    async def work(pool, function):
        await warmed(pool, function, path)
        calls = [function.call(str(path), number, "die" if number % 25 == 10 else "") for number in range(100)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, result in enumerate(results) if result != number] == [10, 35, 60, 85]
        assert all(isinstance(results[number], EndpointError) for number in (10, 35, 60, 85))
        assert sorted(begun(path)) == sorted([*range(100), 10, 35, 60, 85]), "two tries of what killed, one of others"

    run("mixed", work, policy=CallPolicy(timeout_s=20, max_attempts=2, backoff_s=0.01), max_concurrency=2)


def test_of_a_burst_of_short_calls_one_that_hangs_costs_the_others_nothing_but_time(tmp_path):
    path = tmp_path / "begun"

    async def work(pool, function):
        await warmed(pool, function, path)
        calls = [function.call(str(path), number, "hang" if number == 7 else "") for number in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, result in enumerate(results) if result != number] == [7]
        assert isinstance(results[7], FunctionTimeout)
        assert sorted(begun(path)) == list(range(40))

    run("mixed", work, policy=CallPolicy(timeout_s=1), max_concurrency=1)


def test_a_call_cancelled_before_its_turn_costs_nobody_and_one_cancelled_in_its_turn_its_process_alone(tmp_path):
    path = tmp_path / "begun"

    async def work(pool, function):
        await warmed(pool, function, path)
        does = {4: "hang"}
        calls = [asyncio.create_task(function.call(str(path), number, does.get(number, ""))) for number in range(12)]
        await until(lambda: 4 in begun(path))
        for number in (7, 9, 4):
            calls[number].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        cancelled = [number for number, result in enumerate(results) if isinstance(result, asyncio.CancelledError)]
        assert cancelled == [4, 7, 9]
        assert [result for result in results if isinstance(result, int)] == [0, 1, 2, 3, 5, 6, 8, 10, 11]

    run("mixed", work, max_concurrency=1)


def test_slow_calls_have_a_process_each():
    async def work(pool, function):
        await asyncio.gather(*(function.call(0.03) for _ in range(4)))
        assert pool.concurrency == pool.max_processes == 2

    run("slow", work, max_concurrency=2)


def test_a_module_that_cannot_be_loaded_fails_the_call_and_not_the_pool():
    async def main():
        pool = LocalPool("local://tests.data.serverless.nothing_here:f", EndpointOptions())
        with pytest.raises(FunctionError, match=r"it: .*cannot be loaded: ConfigError: .*nothing_here"):
            await Function("it", pool, CallPolicy()).call()
        await pool.close()

    asyncio.run(main())


def test_calls_that_wait_when_the_pool_closes_end():
    async def main():
        pool = LocalPool(f"local://{MODULE}:slow", EndpointOptions(max_concurrency=1))
        function = Function("it", pool, CallPolicy(max_attempts=1))
        calls = [asyncio.create_task(function.call(600)) for _ in range(3)]
        await until(lambda: pool.capacity().processes == 1)
        await pool.close()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EndpointError] * 3

    asyncio.run(main())


@pytest.mark.parametrize("name", ["with_children", "slow"])
def test_no_process_outlives_a_pool_that_is_killed(tmp_path, name):
    """The pool's process dies without a word, in the middle of a call that has started processes of its own."""
    path = tmp_path / "pids"
    argument = repr(str(path)) if name == "with_children" else "600"
    program = f"""
import asyncio
from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.local import LocalPool
async def main():
    pool = LocalPool("local://{MODULE}:{name}", EndpointOptions())
    asyncio.create_task(Function("it", pool, CallPolicy(timeout_s=500)).call({argument}))
    while True:
        await asyncio.sleep(0.05)
        print(pool.capacity().processes, flush=True)
asyncio.run(main())
"""
    pool = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        while pool.stdout.readline().strip() != "1":
            pass
        children = {child.pid for child in psutil.Process(pool.pid).children(recursive=True)}
        deadline = time.monotonic() + 20
        while name == "with_children" and not (path.exists() and path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        children |= {child.pid for child in psutil.Process(pool.pid).children(recursive=True)}
        assert children
    finally:
        pool.kill()
        pool.wait()
        pool.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, children))


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_reply_that_would_fill_the_memory_is_not_read():
    async def work(pool, function):
        with pytest.raises(FunctionError, match=r"reply is not read: .* is beyond the limit of 67,108,864"):
            await function.call(80)
        assert len(await function.call(1)) == 1 << 20

    run("long_text", work, max_concurrency=1)


def test_daemons_that_a_call_left_end_with_its_process(tmp_path):
    path = tmp_path / "pids"

    async def work(pool, function):
        assert await function.call(str(path)) == 1
        pids = [int(pid) for pid in path.read_text().split()]
        assert all(map(is_alive, pids))
        await until(lambda: not any(map(is_alive, pids)))

    run("with_daemons", work, idle_s=0.5)


def test_daemons_end_with_a_pool_that_is_killed(tmp_path):
    path = tmp_path / "pids"
    program = f"""
import asyncio
from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import Function
from rollart.data.serverless.local import LocalPool
async def main():
    pool = LocalPool("local://{MODULE}:with_daemons", EndpointOptions())
    await Function("it", pool).call({str(path)!r})
    print("called", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout.readline().strip() == "called"
        pids = [int(pid) for pid in path.read_text().split()]
        assert all(map(is_alive, pids))
        pool.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_an_exception_whose_text_ends_the_interpreter_is_told_all_the_same():
    async def work(pool, function):
        with pytest.raises(FunctionError, match=r"it: Ugly: \(its text cannot be shown\)"):
            await function.call()
        assert function.usage().tries == 1

    run("ugly", work)
