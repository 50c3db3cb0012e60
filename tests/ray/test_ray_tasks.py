"""`ray://`: the contract of all places, and what is Ray's alone: processes that die, and nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy
from rollart.data.serverless.registry import open_endpoint
from rollart.errors import ConfigError, EndpointError, FunctionError
from tests.data.serverless.invoke_engine import environ
from tests.data.serverless.test_contract import (  # noqa: F401
    MODULE,
    test_a_call_with_the_wrong_arguments_says_so,
    test_a_class_gets_its_options,
    test_a_function_that_hangs_is_cut_and_the_next_call_is_served,
    test_a_key_is_executed_once_however_often_it_is_asked,
    test_a_payload_beyond_the_limit_names_the_way_out,
    test_a_reward_gets_its_trajectory,
    test_a_reward_of_a_group_gets_them_all,
    test_calls_run_at_the_same_time_and_none_is_mixed_up,
    test_members_of_a_batch_do_not_share_their_faults,
    test_values_come_back_as_they_went,
    test_what_a_function_does_wrong_is_told_and_not_tried_again,
    test_what_a_function_prints_disturbs_nothing,
    test_who_stops_waiting_does_not_take_the_result_from_the_others,
    using,
)
from tests.data.serverless.test_local import until

pytestmark = [pytest.mark.parametrize("place", ["ray"]), pytest.mark.usefixtures("machines")]
PATIENCE_S = 60.0


def gone(pid):
    """Whether a process is dead, or is soon."""
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        return True
    return not psutil.pid_exists(pid)


def test_a_process_that_dies_costs_one_try(place, tmp_path):
    async def work(function):
        assert await function.call(str(tmp_path / "mark")) == "second try"
        return function.usage()

    usage = using(place, "dying", work)
    assert (usage.tries, usage.failures) == (2, {"endpoint": 1})


def test_a_process_that_always_dies_is_a_failure_of_the_endpoint(place):
    async def work(function):
        with pytest.raises(EndpointError, match=r"it: 2 tries failed; .* its task ended under the call: WorkerCrashed"):
            await function.call()

    using(place, "dying", work)


def test_a_call_that_is_cancelled_ends_its_process(place, tmp_path):
    path = tmp_path / "pids"

    async def work(function):
        task = asyncio.create_task(function.call(str(path)))
        await until(lambda: path.exists() and path.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    using(place, "with_children", work)
    child, process = map(int, path.read_text().split())
    assert gone(process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def test_calls_wait_for_a_core_beyond_their_time_limit(place):
    async def work(function):
        return await asyncio.gather(*(function.call(1.0) for _ in range(6))), function.usage()

    answers, usage = using(place, "slow", work, policy=CallPolicy(timeout_s=2.5))
    assert answers == [1.0] * 6
    assert usage.failures == {}
    assert usage.queue_s > 1.0


def test_a_function_that_is_not_there_is_named(place):
    async def main():
        endpoint = open_endpoint(f"ray://{MODULE}:echo", EndpointOptions())
        endpoint._target = f"{MODULE}:no_such"  # as on a node with other code
        try:
            await endpoint.invoke(b"\x80", "", 10.0)
        finally:
            await endpoint.close()

    with pytest.raises(FunctionError, match=r"user_functions:no_such cannot be loaded: ConfigError"):
        asyncio.run(main())


def test_two_functions_of_a_process_connect_at_once_and_leave_the_cluster_as_it_was(place):
    script = f"""
import asyncio
from rollart.data.serverless.registry import open_function
async def main():
    functions = [open_function(name, "ray://{MODULE}:echo") for name in "ab"]
    print(await asyncio.gather(*(function.call(1) for function in functions)))
    await asyncio.gather(*(function.close() for function in functions))
asyncio.run(main())
import ray
print(ray.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[1, 1]", "False"], done.stderr


def test_an_address_that_cannot_serve_is_refused_before_any_call(place):
    with environ(RAY_ADDRESS="ray://head:10001"), pytest.raises(ConfigError, match="is a Ray Client"):
        open_endpoint(f"ray://{MODULE}:echo")
