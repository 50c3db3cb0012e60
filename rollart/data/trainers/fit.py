"""Whether a model divides among the ranks of a trainer, from the sizes in its config.json alone.

Invariant: what is refused here would fail, or be wrong, when the ranks have started. What this file leaves out: whether
ranks divide among themselves (`config.py`), and models that are not on this machine yet, which the ranks look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import GROUPS, Config, Layout, layout
from rollart.data.model import TINY
from rollart.errors import ConfigError, boundary

CONFIG = "config.json"


def check_fits(config: Config) -> None:
    """Of the model and ranks of a run. Raises ConfigError."""
    parts = layout(config)
    if config.trainer not in GROUPS or parts.tensor == parts.pipeline == parts.expert == 1:
        return
    if (model := _known(config.model.name)) is not None:
        check_divides(model, parts)


def check_divides(model: Mapping[str, Any], parts: Layout) -> None:
    """`model`: what its config.json says. Raises ConfigError with the nearest choice that divides."""
    model = model.get("text_config") or model
    dense = "moe_intermediate_size" not in model
    split = ["num_attention_heads", "num_key_value_heads", *(["intermediate_size"] if dense else [])]
    _check("train.tensor_parallel", parts.tensor, {name: model[name] for name in split if model.get(name)})
    _check("train.megatron.pipeline_parallel", parts.pipeline, {"num_hidden_layers": model["num_hidden_layers"]})
    experts = 1 if dense else model.get("num_experts") or model["num_local_experts"]
    _check("train.megatron.expert_parallel", parts.expert, {"num_experts": experts})


def _check(key: str, size: int, numbers: Mapping[str, int]) -> None:
    common = math.gcd(*numbers.values())
    choice = min((each for each in range(1, common + 1) if common % each == 0), key=lambda each: abs(each - size))
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(f"{key}: {size} does not divide the model's {name} {number}; take {choice}")


def _known(name: str) -> Mapping[str, Any] | None:
    """The config of a model, if it is here."""
    if name == "tiny":
        return TINY
    path = Path(name).expanduser() / CONFIG
    if not path.is_file() and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        path = Path(cached) if isinstance(cached := try_to_load_from_cache(name, CONFIG), str) else path
    if not path.is_file():
        return None
    with boundary(ConfigError, f"model.name: reading {path}"):
        read: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return read
