"""What trainer and engine need of the devices that a run was given."""

from __future__ import annotations

import pytest

from rollart.config import parse
from rollart.data.devices import check_devices
from rollart.errors import ConfigError
from rollart.resource.placement import place
from rollart.types import NodeInfo
from tests.data.serverless.invoke_engine import environ

CLUSTER = [NodeInfo("n", {"CPU": 8, "H800": 2, "H20": 2}, ("H800", "H20"))]


def look(text: str) -> None:
    config = parse(f"{text}\n[tasks.sorting]\n")
    check_devices(config, place(config, CLUSTER))


@pytest.mark.parametrize(
    "text", ["pools.H800.device = 'cpu'", "pools.H800 = {}\nroles.actor_train.device_class = 'CPU'"]
)
def test_megatron_on_what_is_no_gpu_is_refused_unless_a_stand_in_is_there(text: str) -> None:
    with environ(ROLLART_MEGATRON_ON_CPU=None), pytest.raises(ConfigError) as caught:
        look(f"trainer = 'megatron'\n{text}")
    name = "CPU" if "CPU" in text else "H800"
    assert str(caught.value) == (
        f"trainer: 'megatron' computes on GPUs alone, but its ranks are on class {name}, whose device is 'cpu'; take "
        "trainer = 'fsdp2', or put roles.actor_train on GPUs"
    )
    with environ(ROLLART_MEGATRON_ON_CPU="1"):
        look(f"trainer = 'megatron'\n{text}")
    with environ(ROLLART_MEGATRON_ON_CPU=None):
        look("trainer = 'megatron'")
        look(f"trainer = 'fsdp2'\n{text}")


def test_the_dtype_that_vllm_takes_by_itself_on_gpus_needs_a_coarse_canary() -> None:
    with pytest.raises(ConfigError) as caught:
        look("engine = 'vllm'")
    assert str(caught.value) == (
        "train.canary_tolerance: 0.001 is finer than vLLM in bfloat16, its default on GPUs, agrees with the trainer; "
        "take train.canary_tolerance = 0.1"
    )
    look("engine = 'vllm'\ntrain.canary_tolerance = 0.1")
    look("engine = 'vllm'\nengine_options.dtype = 'float32'")
    look("engine = 'vllm'\npools = { H800 = { device = 'cpu' }, H20 = { device = 'cpu' } }")
    look("engine = 'embedded'")
