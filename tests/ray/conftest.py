"""One Ray cluster for all tests here: four raylets on this machine, which stand for four machines.

    head        2 CPU cores             where environments go
    train       2 devices of class H800
    rollout-1   2 devices of class H20
    rollout-2   2 devices of class H20  the one that dies; `restored` puts it back

Classes are emulated: torch computes on the CPU. Without the extra `ray` every test here is skipped; `make test-ray` has
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.laboratory import Laboratory

HAVE_RAY = importlib.util.find_spec("ray") is not None
STORE_BYTES = 80 << 20
ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything on loopback
}
PATIENCE_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why nothing runs where ray is not installed; Ray's own warnings are not ours to fix."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.skipif(not HAVE_RAY, reason="ray is not installed; run them with: make test-ray")
            )
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))


class Machines:
    """The cluster, and the one node that tests may kill."""

    def __init__(self) -> None:
        utility = importlib.import_module("ray.cluster_utils")
        common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster: Any = utility.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "head", **common}
        )
        self.add("train", "H800")
        self.add("rollout-1", "H20")
        self.doomed = self.add("rollout-2", "H20")
        self.address = str(self.cluster.address)

    def add(self, name: str, device_class: str, environ: dict[str, str] | None = None) -> Any:
        """A node with two devices of a class and no cores; its processes see `environ`."""
        more = {"env_vars": environ} if environ else {}
        return self.cluster.add_node(
            num_cpus=0, resources={device_class: 2}, node_name=name, object_store_memory=STORE_BYTES, **more
        )

    def kill(self) -> None:
        """SIGKILL to the doomed node, without a word."""
        self.cluster.remove_node(self.doomed, allow_graceful=False)
        self.doomed = None

    def whole(self) -> None:
        """All four nodes are there."""
        if self.doomed is None:
            self.doomed = self.add("rollout-2", "H20")
            self.cluster.wait_for_nodes(PATIENCE_S)


@pytest.fixture(scope="session")
def four_machines() -> Iterator[Machines]:
    """The cluster; this process is connected to it as a program that has called `ray.init` by itself."""
    kept = {key: os.environ.get(key) for key in (*ENVIRON, "RAY_ADDRESS")}
    os.environ.update(ENVIRON)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray: Any = importlib.import_module("ray")
        made = Machines()
        os.environ["RAY_ADDRESS"] = made.address
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        made.cluster.wait_for_nodes(PATIENCE_S)
        yield made
        ray.shutdown()
        made.cluster.shutdown()
    for key, value in kept.items():
        os.environ.pop(key)
        if value is not None:
            os.environ[key] = value


@pytest.fixture
def machines(four_machines: Machines) -> Iterator[Machines]:
    """The cluster with all its nodes. Afterwards it goes on, and nothing of ours is left in it."""
    four_machines.whole()
    yield four_machines
    ray: Any = importlib.import_module("ray")
    util: Any = importlib.import_module("ray.util")
    assert ray.is_initialized()
    assert any(node["Alive"] for node in ray.nodes())
    assert {group["state"] for group in util.placement_group_table().values()} <= {"REMOVED"}
    actors = [each for each in psutil.Process().children(recursive=True) if "ray::Actor" in " ".join(_words(each))]
    _gone, alive = psutil.wait_procs(actors, PATIENCE_S)
    assert not alive


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """A place for runs; afterwards no weights of theirs in shared memory are left."""
    place = Laboratory(tmp_path)
    try:
        yield place
    finally:
        for process in place.processes:
            process.end()
    assert place.weights() == []
