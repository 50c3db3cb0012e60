"""Whether the devices that a run was given can do what its trainer and its engine need.

Invariant: what is refused here would end the run after its start. What this file leaves out: whether there are enough
devices (`resource/placement.py`), and what a simulation makes of them.
"""

from __future__ import annotations

import os

from rollart.config import COARSE, Config, too_fine
from rollart.errors import ConfigError
from rollart.resource.placement import Placement

STAND_IN = "ROLLART_MEGATRON_ON_CPU"
"""Set by whoever gives Megatron-Core a CPU for a GPU, as the tests do."""


def check_devices(config: Config, placement: Placement) -> None:
    """Of a config and where its workers go. Raises ConfigError."""
    if config.trainer == "megatron" and "cpu" in _devices(placement, "actor_train") and not os.environ.get(STAND_IN):
        names = " and ".join(sorted({each.device_class for each in placement.of_role("actor_train")}))
        raise ConfigError(
            f"trainer: 'megatron' computes on GPUs alone, but its ranks are on class {names}, whose device is 'cpu'; "
            "take trainer = 'fsdp2', or put roles.actor_train on GPUs"
        )
    if config.engine == "vllm" and "dtype" not in config.engine_options:
        generating = _devices(placement, "actor_gen") | _devices(placement, "prefill")
        if "cuda" in generating and config.train.canary_tolerance < COARSE["bfloat16"]:
            raise too_fine(config, "vLLM in bfloat16, its default on GPUs, agrees with the trainer")


def _devices(placement: Placement, role: str) -> set[str]:
    """What torch calls the devices of a role."""
    classes = {each.device_class for each in placement.of_role(role)}
    return {pool.device for pool in placement.pools if pool.device_class in classes}
