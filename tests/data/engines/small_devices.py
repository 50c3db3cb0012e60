"""A model and devices small enough that a test can fill their memory, and slow enough that their steps can be told."""

from __future__ import annotations

from rollart.data.simulated.device import Pace
from rollart.data.simulated.model_shape import ModelShape
from rollart.data.simulated.profile import Efficiency
from rollart.resource.classes import DeviceClass
from rollart.types import GenRequest, Sampling

PARAMS = 1e9
TYPICAL = Efficiency(
    prefill=0.5,
    decode=0.7,
    train=0.3,
    step_overhead_s=0.004,
    tp_efficiency=0.9,
    memory=0.9,
    chunk_tokens=8192,
    slots_max=256,
    train_overhead_s=2.0,
)
SMALL = ModelShape(
    name="small",
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    params=PARAMS,
    active_params=PARAMS,
)


def small_pace(
    efficiency: Efficiency,
    room: int = 1000,
    tflops: float = 1.0,
    bandwidth_tbs: float = 0.1,
    num_devices: int = 1,
    interconnect_gbs: float = 0.0,
    model: ModelShape = SMALL,
) -> Pace:
    """Devices that together hold the model and the KV of `room` tokens."""
    memory_gb = (model.weight_bytes + (room + 0.5) * model.kv_bytes_per_token) / efficiency.memory / num_devices / 1e9
    device = DeviceClass("small", tflops, memory_gb, bandwidth_tbs, interconnect_gbs)
    pace = Pace(device, model, num_devices, efficiency)
    assert pace.kv_capacity_tokens == room
    return pace


def ask(name: str, prompt: int, answer: int, trajectory: str = "", max_tokens: int = 10_000) -> GenRequest:
    """A request of `prompt` tokens that wants `answer` tokens."""
    tokens = [0] * (prompt - 1) + [answer]
    return GenRequest(name, trajectory or f"trajectory {name}", tokens, Sampling(max_tokens=max_tokens))
