"""What a call of a Cluster costs: over local worker processes, over Ray, and beside a bare call of a Ray actor.

One worker, one declared method, a number there and a number back: what is measured is ours alone. The bare actor is an
async one with the same method, in the same run and on the same Ray; short rounds of both alternate, so that a busy
machine weighs on both. `ray_over_bare` is the median over rounds of the quotient of calls one at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import parser, publish

import rollart.distributed as rdist

Call = Callable[[int], Awaitable[int]]
AT_ONCE = 200


class Counter(rdist.Worker):
    """The least work that a worker can do."""

    role = "counter"

    @rdist.register(mode="execute_first")
    async def plus_one(self, number: int) -> int:
        """The next number."""
        return number + 1


class BareCounter:
    """The same, as an actor that knows nothing of us."""

    async def plus_one(self, number: int) -> int:
        """The next number."""
        return number + 1


async def one_at_a_time(call: Call, num_calls: int) -> float:
    """Microseconds per call."""
    began = time.perf_counter()
    for number in range(num_calls):
        assert await call(number) == number + 1
    return (time.perf_counter() - began) / num_calls * 1e6


async def many_at_once(call: Call, num_calls: int) -> float:
    """Calls per second with `AT_ONCE` under way."""
    began = time.perf_counter()
    for first in range(0, num_calls, AT_ONCE):
        await asyncio.gather(*(call(number) for number in range(first, first + AT_ONCE)))
    return num_calls / (time.perf_counter() - began)


async def measured(calls: dict[str, Call], num_calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Per way of calling: `us` and `calls_per_s` of each round; the ways take turns."""
    found: dict[str, dict[str, list[float]]] = {name: {"us": [], "calls_per_s": []} for name in calls}
    for call in calls.values():
        await one_at_a_time(call, max(50, num_calls // 10))
    for number in range(rounds):
        for name in sorted(calls, reverse=bool(number % 2)):
            found[name]["us"].append(await one_at_a_time(calls[name], num_calls))
            found[name]["calls_per_s"].append(await many_at_once(calls[name], max(AT_ONCE, num_calls)))
    return found


async def local(num_calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Over a worker process of this machine."""
    async with rdist.session(runtime="local") as session:
        counters = await session.cluster(Counter)
        return await measured({"local": counters.plus_one}, num_calls, rounds)


async def over_ray(num_calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Over an actor, ours and a bare one."""
    async with rdist.session(runtime="ray") as session:
        counters = await session.cluster(Counter)
        ray: Any = importlib.import_module("ray")
        bare = ray.remote(num_cpus=0)(BareCounter).remote()
        ways: dict[str, Call] = {"ray": counters.plus_one, "bare": lambda number: bare.plus_one.remote(number)}
        found = await measured(ways, num_calls, rounds)
        ray.kill(bare)
        return found


def main() -> None:
    """Print and write the figures."""
    args = parser(__doc__).parse_args()
    num_calls, rounds = (100, 10) if args.quick else (400, 50)
    found = asyncio.run(local(num_calls, rounds))
    have_ray = importlib.util.find_spec("ray") is not None
    if have_ray:
        found |= asyncio.run(over_ray(num_calls, rounds))
    rows: list[dict[str, Any]] = [
        {
            "call": name,
            "us": statistics.median(each["us"]),
            "best us": min(each["us"]),
            f"calls/s, {AT_ONCE} at once": statistics.median(each["calls_per_s"]),
        }
        for name, each in found.items()
    ]
    summary = {"local_us": rows[0]["us"], "local_calls_per_s": statistics.median(found["local"]["calls_per_s"])}
    if have_ray:
        pairs = zip(found["ray"]["us"], found["bare"]["us"], strict=True)
        rates = zip(found["bare"]["calls_per_s"], found["ray"]["calls_per_s"], strict=True)
        summary |= {
            "ray_us": statistics.median(found["ray"]["us"]),
            "bare_us": statistics.median(found["bare"]["us"]),
            "ray_calls_per_s": statistics.median(found["ray"]["calls_per_s"]),
            "bare_calls_per_s": statistics.median(found["bare"]["calls_per_s"]),
            "ray_over_bare": statistics.median(ours / bare for ours, bare in pairs),
            "ray_over_bare_at_once": statistics.median(bare / ours for bare, ours in rates),
        }
    else:
        rows.append({"call": "ray", "us": "ray is not installed: make env-ray"})
    publish("cluster_call", rows, summary, args.json, ("ray",))


if __name__ == "__main__":
    main()
