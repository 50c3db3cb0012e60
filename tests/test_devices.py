"""What a machine has is read from files, so that a made-up root is a made-up machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollart.config import Config, parse
from rollart.errors import ConfigError
from rollart.resource.devices import Machine, check, detect

CORES = len(os.sched_getaffinity(0))


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def config(rollout: str = "cpu", train: str = "cpu") -> Config:
    return parse("[tasks.frozenlake]\n", [f"rollout.device={rollout}", f"train.device={train}"])


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


def test_a_missing_device_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(rollout="cuda:1"), Machine(2, ("NVIDIA H200",)))
    assert str(caught.value) == (
        "rollout.device: 'cuda:1': no such device on this machine; it has: cpu (2 cores), cuda:0 (NVIDIA H200)"
    )
    with pytest.raises(ConfigError, match=r"train\.device: 'cuda': no such device .*: cpu \(1 core\)$"):
        check(config(train="cuda"), Machine(1))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_a_device_that_is_there_is_accepted(device: str) -> None:
    machine = Machine(2, ("NVIDIA",))
    assert check(config(device, device), machine) is machine


@pytest.mark.parametrize(("device", "hint"), [("gpu", "cpu"), ("cuda1", "cuda"), ("CUDA", "cuda"), ("", "choose")])
def test_a_word_that_is_no_device_gets_the_nearest_one(device: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"is not a device; .*{hint}"):
        check(config(train=device), Machine(2))


def test_a_config_for_the_cpu_fits_this_machine() -> None:
    assert check(config()).num_cores >= 1
