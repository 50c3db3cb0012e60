"""What one trajectory turn costs in the control plane, by the number of trajectories that run at once.

Engine and environment answer after one tick of the event loop, so everything that is measured is ours: scheduler, group
book, EnvManager, LLMProxy, routing, buffer. A turn's cost must not depend on how many trajectories run.

With 50,000 in flight also sharded over NUM_SHARDS processes: `us_per_turn_50000_sharded` is processor time of the
driver alone, which must not be the limit; `turns_per_s_50000*` is by the clock, of all processes together, so it wants
as many cores; `kib_per_trajectory*` is resident memory of all processes, with every trajectory in its middle turn.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from report import parser, publish

from benchmarks.instant import NoRecorder, Pause, services, tasks
from rollart.config import from_dict
from rollart.control.garbage import relax_collector
from rollart.control.ledger import Ledger
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sharding import ShardedRunner
from rollart.control.task_source import TaskSource
from rollart.data.runtime import LocalRuntime
from rollart.protocols import WorkerHandle
from rollart.shard import RemoteShard

GROUP_SIZE = 10
NUM_TURNS = 10
QUICK_TURNS = 2
LARGE = 50_000
REPOSITORY = Path(__file__).resolve().parents[1]
NUM_SHARDS = 4


def scheduler(
    num_trajectories: int, num_turns: int, pause: Pause | None = None, sharded: bool = False
) -> tuple[RolloutScheduler, ShardedRunner | None]:
    """The control plane with exactly `num_trajectories` slots' worth of members, half a batch ahead."""
    groups = num_trajectories // GROUP_SIZE
    rollout = {"groups_per_batch": groups // 2, "group_size": GROUP_SIZE, "zero_variance": "keep"}
    config = from_dict({"alpha": 1.0, "tasks": {"bench": {}}, "rollout": rollout})
    ledger, known = Ledger(), tasks(num_turns)
    served = services(num_turns, ledger.clock, pause)
    runner = ShardedRunner(served, ledger.clock, known) if sharded else None

    def fail(error: BaseException) -> None:
        raise error

    source = TaskSource(0, known)
    return RolloutScheduler(config, known, source, served, ledger, NoRecorder(), fail, runner=runner), runner


async def roll_out(rollout: RolloutScheduler, num_batches: int) -> tuple[float, float]:
    """With a trainer that takes no time; seconds of this process's CPU and of the clock, after a first batch."""
    await _train(rollout)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        await _train(rollout)
    return time.process_time() - cpu_began, time.perf_counter() - began


async def _train(rollout: RolloutScheduler) -> None:
    batch = await rollout.get_batch()
    rollout.begin_training(batch)
    rollout.trained(batch)


async def microseconds_per_turn(num_trajectories: int, num_turns: int) -> float:
    """Roll out about `num_turns` turns; CPU time per turn."""
    rollout, _ = scheduler(num_trajectories, NUM_TURNS)
    batch_turns = num_trajectories // 2 * NUM_TURNS
    num_batches = max(2, num_turns // batch_turns)
    rollout.begin_iteration()
    seconds, _ = await roll_out(rollout, num_batches)
    await rollout.close()
    return seconds / (num_batches * batch_turns) * 1e6


# ------------------------------------------------------------------------------------------------------ very many
def large(sharded: bool, quick: bool) -> dict[str, float]:
    """LARGE trajectories in a fresh process: `us_per_turn`, `turns_per_s`, `kib_per_trajectory`."""
    relax_collector()
    return asyncio.run(_sharded(quick) if sharded else _in_one_process(quick))


async def _in_one_process(quick: bool) -> dict[str, float]:
    num_turns = QUICK_TURNS if quick else NUM_TURNS
    pause = Pause(num_turns // 2)
    rollout, _ = scheduler(LARGE, num_turns, pause)
    before = _rss()
    rollout.begin_iteration()
    await pause.until(LARGE)
    held = _rss() - before
    pause.end()
    return await _figures(rollout, quick, held)


async def _sharded(quick: bool) -> dict[str, float]:
    num_turns = QUICK_TURNS if quick else NUM_TURNS
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    logs = tempfile.TemporaryDirectory(prefix="rollart-bench-")
    runtime = LocalRuntime(Path(logs.name))
    try:
        kwargs = {"num_turns": num_turns, "paused_turn": num_turns // 2}
        spawning = (runtime.spawn(f"rollout-{n}", "benchmarks.instant:InstantShard", kwargs) for n in range(NUM_SHARDS))
        shards = await asyncio.gather(*spawning)
        rollout, runner = scheduler(LARGE, num_turns, sharded=True)
        assert runner is not None
        for shard in shards:
            await runner.join(RemoteShard(shard))
        before = await _sum(shards, "rss") + _rss()
        rollout.begin_iteration()
        await asyncio.gather(*(shard.call("until_held", runner.loads[shard.name]) for shard in shards))
        held = await _sum(shards, "rss") + _rss() - before
        await asyncio.gather(*(shard.call("end_pause") for shard in shards))
        return await _figures(rollout, quick, held)
    finally:
        await runtime.shutdown()
        logs.cleanup()


async def _sum(shards: list[WorkerHandle], method: str) -> int:
    return sum(await asyncio.gather(*(shard.call(method) for shard in shards)))


async def _figures(rollout: RolloutScheduler, quick: bool, held_bytes: int) -> dict[str, float]:
    """After the pause. In a quick run only the turns that are left, else as many whole lives."""
    if quick:
        turns = LARGE * (QUICK_TURNS - QUICK_TURNS // 2)
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(2):
            await rollout.get_batch()
        cpu_s, seconds = time.process_time() - cpu_began, time.perf_counter() - began
    else:
        turns = LARGE * NUM_TURNS
        cpu_s, seconds = await roll_out(rollout, num_batches=2)
    await rollout.close()
    return {
        "us_per_turn": cpu_s / turns * 1e6,
        "turns_per_s": turns / seconds,
        "kib_per_trajectory": held_bytes / LARGE / 1024,
    }


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _fresh(sharded: bool, quick: bool) -> dict[str, float]:
    """`large` in a process of its own, so that memory freed by others is not taken for none used."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(large, sharded, quick).result()


def main() -> None:
    """Print and write the figures."""
    args = parser(__doc__).parse_args()
    num_turns, repeats = (20_000, 1) if args.quick else (300_000, 3)
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    relax_collector()
    for num_trajectories in (100, 1_000, 10_000):
        gc.collect()
        runs = [asyncio.run(microseconds_per_turn(num_trajectories, num_turns)) for _ in range(repeats)]
        rows.append({"trajectories": num_trajectories, "us_per_turn": statistics.median(runs), "best": min(runs)})
        summary[f"us_per_turn_{num_trajectories}"] = statistics.median(runs)
    summary["ratio"] = max(summary.values()) / min(summary.values())
    for sharded in (False, True):
        several = [_fresh(sharded, args.quick) for _ in range(repeats)]
        middle = {key: statistics.median(each[key] for each in several) for key in several[0]}
        best = min(each["us_per_turn"] for each in several)
        rows.append({"trajectories": LARGE, "shards": NUM_SHARDS if sharded else 1, **middle, "best": best})
        end = "_sharded" if sharded else ""
        summary[f"us_per_turn_{LARGE}{end}"] = middle["us_per_turn"]
        summary[f"turns_per_s_{LARGE}{end}"] = middle["turns_per_s"]
        summary[f"kib_per_trajectory{end}"] = middle["kib_per_trajectory"]
    publish("control_plane", rows, summary, args.json)


if __name__ == "__main__":
    main()
