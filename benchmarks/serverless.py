"""Rewards on elastic functions: what a call costs, and what a step and its devices gain (paper section 7, R3).

Calls (all real): `local_warm_ms`, `http_warm_ms` and `local_cold_ms` are medians of the time from call to value of a
function that does nothing, over a warm process, a warm `rollart serve-reward` on loopback, and a pool that holds no
process yet. `burst_lost`: of 2,000 calls that begin within one second, how many got no value.

Step: four devices. *Dedicated* reserves two of them for rewards, as one process each that is there all the time, and
two generate; *elastic* lets all four generate, and scores on a pool of up to two processes that comes and goes. Real:
the processes, their starts and ends, the CPU time of every reward (about 0.1 s each), queues and calls. Modelled:
generation, as sleeps of equal device-seconds in both (trajectories of each of two lengths end together, which is what
makes rewards bursty), and that a reserved device is worth one process. `utilisation_*`: busy over allocated process
seconds; `rollout_time_ratio`: elastic over dedicated step, median over repetitions.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import parser, publish

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.http import HttpEndpoint
from rollart.data.serverless.local import LocalPool

HERE = f"{Path(__file__).resolve()}"
NOTHING, HEAVY = f"{HERE}:nothing", f"{HERE}:heavy"
DEVICES, RESERVED = 4, 2
LENGTHS = (0.45, 1.0)
"""Of the two kinds of trajectories, as shares of the step's generation."""
REWARD_CPU_S = 0.1
IDLE_S = 0.1
POLICY = CallPolicy(timeout_s=60)


def nothing(*_: Any) -> float:
    """The least that a reward can do."""
    return 1.0


def heavy(number: int) -> float:
    """`REWARD_CPU_S` seconds of this process' CPU time."""
    ends = time.process_time() + REWARD_CPU_S
    total = number
    while time.process_time() < ends:
        total = (total * 1103515245 + 12345) % 2**31
    return total / 2**31


# -------------------------------------------------------------------------------------------------------------- calls
async def warm_ms(function: Function, num_calls: int) -> float:
    """Median milliseconds of calls one at a time."""
    for _ in range(20):
        await function.call()
    taken = []
    for _ in range(num_calls):
        began = time.perf_counter()
        await function.call()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


async def cold_ms(num_starts: int) -> float:
    """Median milliseconds of the first call on a pool that holds nothing."""
    taken = []
    for _ in range(num_starts):
        pool = LocalPool(f"local://{NOTHING}", EndpointOptions())
        began = time.perf_counter()
        await Function("cold", pool, POLICY).call()
        taken.append(1e3 * (time.perf_counter() - began))
        await pool.close()
    return statistics.median(taken)


async def over_http(num_calls: int) -> float:
    """Median milliseconds over `rollart serve-reward` on loopback."""
    command = [sys.executable, "-m", "rollart", "serve-reward", NOTHING, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as server:  # noqa: ASYNC220 - nothing else runs
        assert server.stdout is not None
        try:
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            endpoint = HttpEndpoint(url, EndpointOptions())
            taken = await warm_ms(Function("http", endpoint, POLICY), num_calls)
            await endpoint.close()
        finally:
            server.terminate()
    return taken


async def burst(num_calls: int) -> tuple[int, float, float]:
    """(lost, seconds until the last value, MiB that this process grew by) of calls spread over one second."""
    pool = LocalPool(f"local://{NOTHING}", EndpointOptions())
    function = Function("burst", pool, POLICY)
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()

    async def one(number: int) -> float:
        await asyncio.sleep(number / num_calls)
        return float(await function.call("x" * 4000, key=str(number)))

    values = await asyncio.gather(*(one(number) for number in range(num_calls)), return_exceptions=True)
    took_s = time.perf_counter() - began
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    await pool.close()
    return sum(value != 1.0 for value in values), took_s, grown


# --------------------------------------------------------------------------------------------------------------- a step
async def step(num_generating: int, idle_s: float, generation_s: float, num_each: int) -> tuple[float, float, float]:
    """(seconds, busy, allocated) of one step: generation on so many devices, rewards on up to `RESERVED` processes."""
    pool = LocalPool(f"local://{HEAVY}", EndpointOptions(max_concurrency=RESERVED, idle_s=idle_s))
    function = Function("step", pool, POLICY)
    reserved = idle_s > generation_s
    if reserved:
        await asyncio.gather(*(function.call(0) for _ in range(RESERVED)))  # there from the start
    busy_before, allocated_before = function.usage().busy_s, pool.capacity().allocated_s
    began = time.perf_counter()

    async def trajectory(length: float, number: int) -> None:
        await asyncio.sleep(generation_s * DEVICES / num_generating * length)
        await function.call(number)

    await asyncio.gather(*(trajectory(length, number) for length in LENGTHS for number in range(num_each)))
    took_s = time.perf_counter() - began
    if not reserved:
        await asyncio.sleep(idle_s + 0.2)  # what an elastic pool still holds after the step is part of its bill
    busy, allocated = function.usage().busy_s - busy_before, pool.capacity().allocated_s - allocated_before
    await pool.close()
    return took_s, busy, allocated


async def steps(repetitions: int, generation_s: float, num_each: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Both ways in turn; the rows and the summary."""
    rows: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        for kind, generating, idle_s in (
            ("dedicated", DEVICES - RESERVED, 1e6),
            ("elastic", DEVICES, IDLE_S),
        ):
            took_s, busy_s, allocated_s = await step(generating, idle_s, generation_s, num_each)
            rows.append(
                {
                    "rewards": kind,
                    "repetition": repetition,
                    "generating": generating,
                    "step_s": took_s,
                    "busy_s": busy_s,
                    "allocated_s": allocated_s,
                    "utilisation": busy_s / allocated_s,
                }
            )
    chosen = {kind: [row for row in rows if row["rewards"] == kind] for kind in ("dedicated", "elastic")}
    ratios = [
        elastic["step_s"] / dedicated["step_s"]
        for dedicated, elastic in zip(chosen["dedicated"], chosen["elastic"], strict=True)
    ]
    summary = {
        f"utilisation_{kind}": statistics.median(row["utilisation"] for row in of_kind)
        for kind, of_kind in chosen.items()
    }
    return rows, summary | {"rollout_time_ratio": statistics.median(ratios)}


async def measured(quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Everything; the rows and the summary."""
    pool = LocalPool(f"local://{NOTHING}", EndpointOptions())
    local = await warm_ms(Function("local", pool, POLICY), 100 if quick else 2000)
    await pool.close()
    lost, burst_s, burst_mib = await burst(200 if quick else 2000)
    calls: dict[str, Callable[[], Awaitable[float]]] = {
        "local_cold_ms": lambda: cold_ms(3 if quick else 15),
        "http_warm_ms": lambda: over_http(100 if quick else 2000),
    }
    summary = {"local_warm_ms": local, **{name: await call() for name, call in calls.items()}}
    summary |= {"burst_lost": float(lost), "burst_s": burst_s, "burst_mib": burst_mib}
    rows, of_steps = await steps(1 if quick else 3, 1.5 if quick else 21.0, 4 if quick else 40)
    return rows, summary | of_steps


def main() -> None:
    options = parser(__doc__).parse_args()
    rows, summary = asyncio.run(measured(options.quick))
    publish("serverless", rows, summary, options.json)


if __name__ == "__main__":
    main()
