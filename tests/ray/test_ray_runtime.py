"""The contract of all runtimes over Ray, and what is Ray's alone: places, faults of nodes, who ends a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollart
from rollart.data.ray_runtime import RayRuntime
from rollart.errors import ConfigError, ResourceError, WorkerDied
from rollart.types import Binding, NodeInfo
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
from tests.ray.conftest import Machines


@pytest.fixture
def runtime(machines: Machines, tmp_path: Path) -> Iterator[RayRuntime]:
    opened = RayRuntime(tmp_path)
    yield opened
    asyncio.run(opened.shutdown())


def on(node: str, device_class: str, *devices: int) -> Binding:
    return Binding("run/w", "actor_gen", device_class, device_class, node, devices, device_class)


def test_each_raylet_is_a_node_with_its_own_name_and_classes(runtime: RayRuntime) -> None:
    nodes = asyncio.run(runtime.nodes())
    home = nodes[0].address
    assert home
    assert sorted(nodes, key=lambda node: node.name) == [
        NodeInfo("head", {"CPU": 2}, address=home),
        NodeInfo("rollout-1", {"H20": 2}, address=home),
        NodeInfo("rollout-2", {"H20": 2}, address=home),
        NodeInfo("train", {"H800": 2}, address=home),
    ]


@pytest.mark.parametrize(("node", "device_class"), [("train", "H800"), ("rollout-2", "H20"), ("head", "CPU")])
def test_a_worker_stands_on_the_node_of_its_binding(node: str, device_class: str, runtime: RayRuntime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3}, on(node, device_class, 0))
        folder, cuda = await worker.call("where", returns=tuple[str, list[str]])
        assert folder == os.getcwd()
        assert cuda == [""]
        assert await _node_of(worker) == node
        await runtime.shutdown()

    asyncio.run(scenario())


async def _node_of(worker: Any) -> str:
    ray: Any = importlib.import_module("ray")
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    context = await worker._actor.__ray_call__.remote(
        lambda _: importlib.import_module("ray").get_runtime_context().get_node_id()
    )
    return names[context]


def test_what_a_node_does_not_have_at_all_is_not_waited_for(runtime: RayRuntime) -> None:
    binding = msgspec.structs.replace(on("rollout-1", "H20", 0), device="cuda")
    with pytest.raises(ResourceError) as caught:
        asyncio.run(runtime.spawn("w", TARGET, {"factor": 3}, binding))
    assert str(caught.value) == (
        'worker w: node rollout-1 has 0 GPU, not 1; to emulate the class on CPU, set pools.H20.device = "cpu"'
    )


def test_devices_that_another_program_holds_are_not_taken_and_the_error_says_so(
    runtime: RayRuntime, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await runtime.spawn("first", TARGET, {"factor": 3}, on("train", "H800", 0, 1))
        impatient = RayRuntime(tmp_path, place_timeout_s=1.0)
        with pytest.raises(ResourceError, match=r"second.*no room for .'H800': 1.0. on node train"):
            await impatient.spawn("second", TARGET, {"factor": 3}, on("train", "H800", 0))
        await impatient.shutdown()
        await runtime.shutdown()
        patient = RayRuntime(tmp_path, place_timeout_s=60.0)  # Ray takes a moment to give the place back
        await patient.spawn("second", TARGET, {"factor": 3}, on("train", "H800", 0))
        await patient.shutdown()

    asyncio.run(scenario())


def test_an_actor_that_dies_fails_pending_and_later_calls_with_its_last_output(runtime: RayRuntime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        pending = asyncio.create_task(worker.call("slow", 60.0))
        with pytest.raises(WorkerDied, match=r"(?s)call vanish.*died.*last words"):
            await worker.call("vanish")
        with pytest.raises(WorkerDied, match="call slow"):
            await pending
        assert "died" in await worker.wait_dead()
        with pytest.raises(WorkerDied):
            await worker.call("times", 1)
        await runtime.shutdown()

    asyncio.run(scenario())


def test_a_worker_that_hangs_does_not_hold_up_the_end(runtime: RayRuntime) -> None:
    async def scenario() -> None:
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        blocked = asyncio.create_task(worker.call("block"))
        await asyncio.sleep(0.1)
        await runtime.shutdown()
        with pytest.raises(WorkerDied):
            await blocked

    asyncio.run(scenario())


def test_the_loss_of_a_node_kills_its_workers_alone_and_is_known_when_they_are_dead(
    runtime: RayRuntime, machines: Machines
) -> None:
    async def scenario() -> None:
        lost = await runtime.spawn("lost", TARGET, {"factor": 3}, on("rollout-2", "H20", 0))
        kept = await runtime.spawn("kept", TARGET, {"factor": 3}, on("rollout-1", "H20", 0))
        pending = asyncio.create_task(lost.call("slow", 600.0))
        await asyncio.to_thread(machines.kill)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerDied):
                await pending
            await lost.wait_dead()
        assert "rollout-2" not in {node.name for node in await runtime.nodes()}
        with pytest.raises(ResourceError, match="node rollout-2 has left"):
            await runtime.spawn("late", TARGET, {"factor": 3}, on("rollout-2", "H20", 0))
        assert await kept.call("times", 2, returns=int) == 6
        await runtime.shutdown()

    asyncio.run(scenario())


@contextlib.contextmanager
def node_of(machines: Machines, name: str, folder: Path) -> Iterator[None]:
    """A node on which `rollart` is the one in `folder`, whatever the driver's path says."""
    (folder / "sitecustomize.py").write_text("import rollart")
    node = machines.add(name, "H20", {"PYTHONPATH": str(folder)})
    try:
        yield
    finally:
        machines.cluster.remove_node(node)


def test_a_node_with_another_rollart_or_none_is_named_with_the_way_out(
    runtime: RayRuntime, machines: Machines, tmp_path: Path
) -> None:
    copy = shutil.copytree(Path(rollart.__file__).parent, tmp_path / "newer" / "rollart")
    (copy / "__init__.py").write_text('__version__ = "9.9.9"')
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "rollart.py").write_text("")

    async def complaint(node: str) -> str:
        with pytest.raises(ResourceError) as caught:
            await runtime.spawn("w", TARGET, {"factor": 3}, on(node, "H20", 0))
        await runtime.shutdown()
        return str(caught.value)

    with node_of(machines, "newer", copy.parent):
        said = asyncio.run(complaint("newer"))
    assert said.startswith("worker w: node newer has rollart 9.9.9 ")
    assert f"but here is rollart {rollart.__version__} " in said
    assert "install the same rollart on all machines" in said
    with node_of(machines, "none", tmp_path / "none"):
        said = asyncio.run(complaint("none"))
    assert said.startswith("worker w: node none cannot begin it (")
    assert "No module named 'rollart.data'; 'rollart' is not a package" in said
    assert f"has it the rollart {rollart.__version__} of this process, with its packages?" in said


def test_a_ray_client_address_is_refused_with_the_way_out() -> None:
    from rollart.data.ray_runtime import address_of

    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: 'ray://host:10001' .* such as 10.0.0.1:6379"):
        address_of({"RAY_ADDRESS": "ray://host:10001"})
