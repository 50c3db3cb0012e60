"""Whole runs and sessions on a Ray cluster of four machines: the loss of one, two at once, and none at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import rollart.distributed as rdist
from rollart.errors import WorkerDied
from rollart.pipeline import train
from rollart.pool_view import view
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import (
    REPOSITORY,
    SMALL,
    Laboratory,
    Process,
    batches,
    check_audit,
    lines,
    steps_done,
    summary,
)
from tests.ray.conftest import Machines

pytestmark = [pytest.mark.e2e]

ON_POOLS = f"""
{SMALL.replace('runtime = "inline"', 'runtime = "ray"')}
[pools.H800]
device = "cpu"
[pools.H20]
device = "cpu"
[roles.actor_gen]
workers = 2
"""
"""Count and nodes of each pool come from what the cluster says of itself."""


class Echo(rdist.Worker):
    """Says what it is told."""

    role = "echo"

    @rdist.register(mode="split")
    def louder(self, words: list[str]) -> list[str]:
        """Each word, louder."""
        return [word.upper() for word in words]

    @rdist.register(mode="execute_all")
    def process(self) -> int:
        """Its process id."""
        return os.getpid()


def test_the_ranks_of_a_trainer_are_actors_that_find_each_other(machines: Machines, lab: Laboratory) -> None:
    words = ("trainer=fsdp2", "roles.actor_train.workers=2", f"resources.store=file:{lab.folder / 'pools'}")
    assert train(lab.config(*words, text=ON_POOLS)) == 0
    check_audit(lab.run, steps=3, alpha=1)
    assert {"training-0", "training-1"} <= summary(lab.run)["resources"]["workers"].keys()


def test_a_run_over_four_machines_goes_on_when_one_of_them_dies(machines: Machines, lab: Laboratory) -> None:
    steps = 25
    store = f"resources.store=file:{lab.folder / 'pools'}"
    gate = lab.folder / "gate"
    held = (
        'tasks.friendly.env="tests.e2e.hostile:Held"',
        f"tasks.friendly.options.gate={json.dumps(str(gate))}",
        "tasks.friendly.step_timeout_s=300",
    )
    process = lab.start(f"steps={steps}", store, *held, text=ON_POOLS)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    gate.touch()
    machines.kill()
    process.until(lambda: "inference-1.1 runs on H20:1 of pool H20 on rollout-1" in process.text(), "a new worker")
    assert steps_done(lab.run) < steps - 2, "the new worker came too late to be of use"
    gate.unlink()
    assert process.wait() == 0, process.text()
    check_audit(lab.run, steps, alpha=1)
    said = summary(lab.run)
    assert said["outcome"] == "completed"
    resources = said["resources"]
    assert resources["lost"] == ["node rollout-2"]
    assert resources["restarts"] == {"inference-1": 1}
    places = {name: where.rpartition(" on ")[2] for name, where in resources["workers"].items()}
    assert places == {
        "training-0": "train",
        "inference-0": "rollout-1",
        "inference-1.1": "rollout-1",
        "environment-0": "head",
    }
    assert "lost: node rollout-2" in process.text()
    rows = {row.node: row for row in view(lab.config(store, text=ON_POOLS)) if row.pool == "H20"}
    assert {node: (row.total, row.free, row.failed, row.holders) for node, row in rows.items()} == {
        "rollout-1": (2, 2, 0, ()),
        "rollout-2": (2, 0, 2, ()),
    }


def test_a_node_that_dies_under_two_runs_of_one_store_costs_each_its_own_worker(
    machines: Machines, lab: Laboratory
) -> None:
    """Each has a worker on each node of H20; in place of those that are lost, H800 stands in."""
    more = ("steps=1000", "roles.actor_train.device_class=CPU", 'pools.H20.compatible=["H800"]')
    store = f"resources.store=file:{lab.folder / 'pools'}"
    names = [f"{lab.name}-{number}" for number in (1, 2)]
    runs = [lab.run.with_name(name) for name in names]
    both: list[Process] = []
    for name, run in zip(names, runs, strict=True):
        both.append(lab.start(*more, store, f"log.name={name}", text=ON_POOLS))
        both[-1].until(lambda run=run: steps_done(run) >= 1, "its first step")
    machines.kill()
    places = []
    for process, run in zip(both, runs, strict=True):
        process.until(lambda process=process: "inference-1.1 runs on" in process.text(), "a new worker")
        done = steps_done(run)
        process.until(lambda run=run, done=done: steps_done(run) >= done + 2, "two more steps")
        process.send(signal.SIGTERM)
        assert process.wait() == 130, process.text()
        check_audit(run, steps_done(run), alpha=1)
        resources = summary(run)["resources"]
        assert resources["lost"] == ["node rollout-2"]
        assert resources["restarts"] == {"inference-1": 1}
        places += [resources["workers"][name] for name in ("inference-0", "inference-1.1")]
    assert sorted(places) == [
        *(f"H20:{device} of pool H20 on rollout-1" for device in (0, 1)),
        *(f"H800:{device} of pool H800 on train" for device in (0, 1)),
    ]


def test_two_runs_at_once_on_one_cluster_end_each_in_its_own_time_and_leave_it_to_a_third(
    machines: Machines, lab: Laboratory
) -> None:
    short, long = lab.start(text=ON_POOLS), lab.start("steps=1000", f"log.name={lab.name}-long", text=ON_POOLS)
    long_run = lab.run.with_name(f"{lab.name}-long")

    async def beside_them() -> None:
        async with rdist.session(runtime="ray") as session:
            echoes = await session.cluster(Echo, workers=2, device_class="CPU")
            assert await asyncio.to_thread(short.wait) == 0, short.text()
            done = steps_done(long_run)
            await asyncio.to_thread(long.until, lambda: steps_done(long_run) > done, "a step after the other's end")
            long.send(signal.SIGTERM)
            assert await asyncio.to_thread(long.wait) == 130, long.text()
            assert await echoes.louder(["a", "b", "c"]) == ["A", "B", "C"]

    asyncio.run(beside_them())
    assert summary(lab.run)["outcome"] == "completed"
    check_audit(lab.run, steps=3, alpha=1)
    assert summary(long_run)["outcome"] == "stopped"
    check_audit(long_run, steps=steps_done(long_run), alpha=1)
    assert checkpoints(long_run) == [steps_done(long_run)]


def test_a_synchronous_run_trains_on_the_same_batches_locally_and_on_ray(machines: Machines, lab: Laboratory) -> None:
    """Same seeds, same schedule: what runs where changes nothing of what is learned."""
    same = ("schedule=sync", "roles.actor_gen.workers=1")
    emulated = ("pools.H800.count=2", "pools.H20.count=2")
    assert train(lab.config("runtime=local", "log.name=here", *same, *emulated, text=ON_POOLS)) == 0
    assert train(lab.config("log.name=there", *same, text=ON_POOLS)) == 0
    here, there = (lab.run.parent / name for name in ("here", "there"))
    assert batches(here) == batches(there)
    assert len(batches(here)) == 3
    for ours, theirs in zip(_learned(here), _learned(there), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def _learned(run: Path) -> list[dict[str, float]]:
    names = ("train/loss", "train/grad_norm", "train/tokens", "train/learning_rate")
    return [{name: line[name] for name in names} for line in lines(run / "metrics.jsonl") if "train/loss" in line]


def test_a_cluster_of_workers_on_ray_answers_and_outlives_one_of_them(machines: Machines) -> None:
    async def scenario() -> None:
        async with rdist.session(runtime="ray") as session:
            echoes = await session.cluster(Echo, workers={"H800": 1, "H20": 1})
            assert await echoes.call(Echo.louder, ["a", "b", "c"]) == ["A", "B", "C"]
            first, second = await echoes.process()
            assert first != second
            psutil.Process(second).kill()
            with pytest.raises(WorkerDied, match=r"Echo\.louder on worker echo-1 \(H20:0 of pool H20 on rollout-"):
                await echoes.louder(["a", "b"])
            assert await echoes.louder(["a", "b"]) == ["A", "B"]
            assert len(echoes) == 1

    asyncio.run(scenario())


ALONE = """
import asyncio, psutil, sys
import rollart.distributed as rdist
from tests.ray.test_runs_on_ray import Echo

async def main():
    async with rdist.session(runtime="ray") as session:
        echoes = await session.cluster(Echo, workers=2)
        assert await echoes.louder(["a", "b"]) == ["A", "B"]
        sockets = [each for child in psutil.Process().children(recursive=True) for each in child.net_connections("tcp")]
        listening = {each.laddr.ip for each in sockets if each.status == "LISTEN"}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), 30)
    assert not alive, alive

asyncio.run(main())
print("alone and well")
"""


def test_without_any_cluster_a_run_has_one_of_its_own_on_loopback_and_ends_it(tmp_path: Path) -> None:
    """In a network of its own, without a route to anywhere, where the kernel allows to make one."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    apart = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0:
        command = [*apart, *command]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        command,
        env={**environ, "PYTHONPATH": str(REPOSITORY), "RAY_TMPDIR": str(tmp_path.parent)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "alone and well" in done.stdout, done.stdout + done.stderr


def test_shards_on_ray_call_other_workers_past_the_driver(machines: Machines, lab: Laboratory) -> None:
    assert train(lab.config("steps=3", "rollout.shard_trajectories=6", text=ON_POOLS)) == 0
    check_audit(lab.run, 3, alpha=1)
    assert {"rollout-0", "rollout-1"} <= set(summary(lab.run)["resources"]["workers"])


def test_prompts_are_read_on_one_machine_and_decoded_on_another(machines: Machines, lab: Laboratory) -> None:
    apart = "roles.prefill.workers={H800=1}", "rollout.shard_trajectories=6"
    assert train(lab.config("steps=3", *apart, text=ON_POOLS)) == 0
    check_audit(lab.run, 3, alpha=1)
    found = summary(lab.run)
    assert found["prefill"]["received_tokens"] > 0
    assert found["prefill"]["by_decode_workers"] == {}
    assert " on train" in found["resources"]["workers"]["prefill-0"]
