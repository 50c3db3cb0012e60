"""What a machine has is read from files, so that a made-up root is a made-up machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollart.resource.devices import Machine, detect, environment_of, this_node
from rollart.types import Binding, NodeInfo

CORES = len(os.sched_getaffinity(0))


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_machine_without_files_has_its_cores_and_no_gpu(tmp_path: Path) -> None:
    assert detect(tmp_path, {}) == Machine(CORES)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, CORES),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, CORES),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n1:name=systemd:/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, CORES),
    ],
)
def test_a_quota_of_the_cgroup_limits_the_cores(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in files.items():
        put(tmp_path, name, text)
    assert detect(tmp_path, {}).num_cores == expected


def two_gpus(root: Path) -> Path:
    for index in range(2):
        put(root, f"dev/nvidia{index}")
        put(root, f"proc/driver/nvidia/gpus/0000:0{index}/information", f"Model: \t\t NVIDIA H{index}00\nIRQ: 1\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        put(root, f"dev/{name}")
    return root


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("NVIDIA H000", "NVIDIA H100")),
        ("1", ("NVIDIA H100",)),
        ("1,0", ("NVIDIA H100", "NVIDIA H000")),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("NVIDIA H000",)),
        ("GPU-8932f937", ("NVIDIA",)),
    ],
)
def test_gpus_are_those_that_the_environment_leaves(
    visible: str | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert detect(two_gpus(tmp_path), environ).cuda == names


def test_a_container_has_the_gpus_of_its_device_files_only(tmp_path: Path) -> None:
    two_gpus(tmp_path)
    (tmp_path / "dev/nvidia1").unlink()
    assert detect(tmp_path, {}).cuda == ("NVIDIA",)


def test_a_machine_is_a_node_with_its_cores_and_its_gpus_by_class() -> None:
    node = this_node(Machine(4, ("NVIDIA H800 PCIe", "NVIDIA H20", "NVIDIA H800 PCIe")))
    assert node == NodeInfo("localhost", {"CPU": 4, "H800": 2, "H20": 1}, ("H800", "H20"))


def binding(device_class: str, devices: tuple[int, ...], device: str = "cuda") -> Binding:
    return Binding("run/worker", "actor_gen", "pool", device_class, "localhost", devices, device_class, device)


@pytest.mark.parametrize(
    ("bound", "visible", "expected"),
    [
        (binding("H100", (0,)), None, "1"),
        (binding("H000", (0,)), None, "0"),
        (binding("H000", (0,)), "1,0", "0"),
        (binding("H100", (0,)), "1,0", "1"),
        (binding("rollout", (0, 1)), None, "0,1"),
        (binding("CPU", (0,), "cpu"), None, ""),
    ],
)
def test_a_worker_sees_the_devices_of_its_binding_alone(
    bound: Binding, visible: str | None, expected: str, tmp_path: Path
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment_of(bound, environ, two_gpus(tmp_path)) == {"CUDA_VISIBLE_DEVICES": expected}


def test_a_worker_without_a_binding_sees_what_its_driver_sees() -> None:
    assert environment_of(None, {}) == {}
