"""The embedded engine at the pace of another device: an emulation, for benchmarks and for trying out a mix of pools.

Tokens, log-probabilities, caching and batching are those of `embedded`, whatever model it runs. Only the time is
made up: after the real computation of a step the engine sleeps until the step has lasted as long as it would on the
emulated device, by the roofline of a large model of `params` parameters in bf16 (P prompt tokens and D decoding
requests in the step):

    seconds = max(2 x params x (P + D) / FLOPS, 2 bytes x params / memory bandwidth) x slowdown

FLOPS and bandwidth are those of `resource/classes.py` (RollArt, OSDI 2026, section 7, for H800 and H20). `params` is
that of the paper's Qwen3-8B. `slowdown` stretches time alike on all classes, so that sleeping outweighs the real
computation of a small model on a CPU.

What the emulation leaves out: attention (its arithmetic and its reads of the cache), efficiency below the peak (taken
as equal on all classes), tensor parallelism, and memory, so that no cache ever runs full.
"""

from __future__ import annotations

from typing import Any

from rollart.data.engines import check_options
from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.engines.emulation import PARAMS, SLOWDOWN
from rollart.errors import ConfigError
from rollart.resource.classes import CLASSES


def emulated_engine(
    model_folder: str, device_class: str = "", params: float = PARAMS, slowdown: float = SLOWDOWN, **options: Any
) -> EmbeddedEngine:
    """An `EmbeddedEngine` at the pace of `device_class`. Raises ConfigError for a class without figures."""
    device = CLASSES.get(device_class)
    if device is None:
        raise ConfigError(
            f"engine: 'emulated' has no figures for device class {device_class!r}; take one of {', '.join(CLASSES)}"
        )

    def floor_s(num_prompt_tokens: int, num_decoding: int) -> float:
        return slowdown * device.step_seconds(num_prompt_tokens + num_decoding, params)

    check_options(EmbeddedEngine, options)
    return EmbeddedEngine(model_folder, floor_s=floor_s, **options)
