"""Seconds of engine steps and of training on devices of one class, by the roofline of each kind of kernel.

A kernel takes the longer of its arithmetic and its memory traffic (Williams, Waterman, Patterson, Roofline, CACM 2009),
and kernels follow one another, so that a step is the sum over three kinds, plus what the host and the links cost:

    linear layers   max(2 x active parameters x tokens / FLOPS, 2 bytes x parameters read / bandwidth)
    prefill         4 x layers x heads x head size x attended pairs / FLOPS
    decoding        max(the same, bytes of KV / bandwidth), for the KV that decoding requests attend to
    all-reduces     two per layer under tensor parallelism, over the devices' interconnect
    host            `step_overhead_s`

Every part but the first grows in proportion to tokens or KV, and the first does not change while a batch decodes. So n
decode steps take n times the first, plus a growth that is the same from step to step: an arithmetic series.

Invariant: more FLOPS, bandwidth, memory or interconnect never make anything slower.
What this file leaves out: latency of all-reduces (in the host's time), KV heads copied where devices outnumber them,
the KV read by prefill (its arithmetic outweighs it), pipeline and expert parallelism, and clocks that sink under load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollart.data.engines.emulation import PARAMS, SLOWDOWN
from rollart.data.simulated.model_shape import BF16, ModelShape
from rollart.data.simulated.profile import Efficiency
from rollart.errors import ConfigError
from rollart.resource.classes import DeviceClass

UNLIMITED = 2**62
"""Tokens of KV where memory is not modelled."""


class Pace:
    """What `num_devices` devices of one class do together with a model: one engine, tensor parallel.

    `emulated`: the pace of `engines/emulated.py` instead, on one device, without attention, efficiency or memory.
    Raises ConfigError for a class without figures.
    """

    def __init__(
        self, device: DeviceClass, model: ModelShape, num_devices: int, efficiency: Efficiency, emulated: bool = False
    ) -> None:
        if min(device.tflops, device.memory_gb, device.bandwidth_tbs) <= 0:
            raise ConfigError(f"device class {device.name!r} has no figures of FLOPS, memory and bandwidth")
        if num_devices < 1:
            raise ConfigError(f"an engine or trainer needs at least 1 device, not {num_devices}")
        self.device, self.model, self.num_devices, self.efficiency = device, model, num_devices, efficiency
        self.emulated = emulated
        if emulated:
            self._set_emulated()
        else:
            self._set_roofline()

    def _set_roofline(self) -> None:
        model, efficiency, together = self.model, self.efficiency, self._together()
        flops = self.device.tflops * 1e12 * efficiency.prefill * together
        bandwidth = self.device.bandwidth_tbs * 1e12 * efficiency.decode * together
        self._overhead_s = efficiency.step_overhead_s
        self._token_s = model.linear_flops(1) / flops
        self._dense_s = BF16 * model.dense_params / bandwidth
        self._experts_s = BF16 * model.expert_params / bandwidth
        self._unchosen_share = 1 - model.chosen_share
        self._attended_s = model.attention_flops(1) / flops
        self._kv_s = max(self._attended_s, model.kv_bytes_per_token / bandwidth)
        self._reduce_s = self._all_reduce_seconds()

    def _set_emulated(self) -> None:
        """As `DeviceClass.step_seconds` has it, for the emulated engine's model."""
        self._token_s = SLOWDOWN * 2 * PARAMS / (self.device.tflops * 1e12)
        self._dense_s = SLOWDOWN * 2 * PARAMS / (self.device.bandwidth_tbs * 1e12)
        self._overhead_s = self._experts_s = self._attended_s = self._kv_s = self._reduce_s = 0.0
        self._unchosen_share = 1.0

    def _together(self) -> float:
        """How many single devices the devices are worth: their number, less a share for each doubling."""
        return self.num_devices * math.pow(self.efficiency.tp_efficiency, math.log2(self.num_devices))

    def _all_reduce_seconds(self) -> float:
        """Of one token: each layer sums two bf16 vectors of the hidden size over n devices, for which a ring sends
        2 (n - 1) / n of their bytes through each (Patarasuk, Yuan, Bandwidth optimal all-reduce, JPDC 2009; two per
        layer: Shoeybi et al., Megatron-LM, 2019). Half of the interconnect goes one way."""
        if not self.device.interconnect_gbs:
            return 0.0
        share = 2 * (self.num_devices - 1) / self.num_devices
        num_bytes = 2 * self.model.num_layers * BF16 * self.model.hidden_size * share
        return num_bytes / (self.device.interconnect_gbs / 2 * 1e9)

    # ------------------------------------------------------------------------------------------------- engine steps
    def prefill_step(self, new_tokens: int, attended: float, decoding: int = 0, kv_tokens: float = 0) -> float:
        """Seconds of a step that reads `new_tokens` of prompts, which attend to `attended` tokens in all (see
        `attended_tokens`), while `decoding` requests, which attend to `kv_tokens`, gain a token each."""
        return self._linear(new_tokens + decoding) + self._attended_s * attended + self._kv_s * kv_tokens

    def decode(self, decoding: int, kv_tokens: float) -> tuple[float, float]:
        """Seconds of a step in which `decoding` requests, which attend to `kv_tokens` in all, gain a token each; and
        by how much each further step of the same requests takes longer than the one before it."""
        return self._linear(decoding) + self._kv_s * kv_tokens, self._kv_s * decoding

    def _linear(self, num_tokens: int) -> float:
        """All of a step but its attention. Parameters read: `ModelShape.read_params`."""
        read_s = self._dense_s
        if self._experts_s:
            read_s += self._experts_s * (1 - self._unchosen_share**num_tokens)
        return self._overhead_s + max(self._token_s * num_tokens, read_s) + self._reduce_s * num_tokens

    # ------------------------------------------------------------------------------------------------------- memory
    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV the devices hold beside their shards of the weights; 0 where these alone are too large."""
        return UNLIMITED if self.emulated else self._capacity(self.num_devices)

    def _capacity(self, num_devices: int) -> int:
        room = num_devices * self.device.memory_gb * 1e9 * self.efficiency.memory - self.model.weight_bytes
        return max(0, int(room / self.model.kv_bytes_per_token))

    def check_room(self, num_tokens: int) -> None:
        """Raises ConfigError, saying how many devices would do, unless weights and the KV of `num_tokens` fit."""
        if self.kv_capacity_tokens >= num_tokens:
            return
        model, heads = self.model, self.model.num_heads
        numbers = [number for number in range(1, heads + 1) if heads % number == 0]
        enough = next((number for number in numbers if self._capacity(number) >= num_tokens), None)
        way_out = f"take at least {enough} devices for an engine" if enough else "no number of these devices holds them"
        raise ConfigError(
            f"{model.name} does not fit on {self.num_devices} x {self.device.name}: weights of "
            f"{model.weight_bytes / 1e9:.1f} GB and KV of {num_tokens} tokens "
            f"({num_tokens * model.kv_bytes_per_token / 1e9:.1f} GB) in {self.efficiency.memory:.0%} of "
            f"{self.num_devices * self.device.memory_gb:g} GB; {way_out}"
        )

    # ----------------------------------------------------------------------------------------------------- training
    def train_seconds(self, lengths: Sequence[int], num_devices: int) -> float:
        """Of one train_step on sequences of these lengths, on `num_devices` devices of this class.

        `ModelShape.training_flops` at the efficiency of training, plus what a step costs whatever its size.
        """
        flops = num_devices * self.device.tflops * 1e12 * self.efficiency.train
        return self.model.training_flops(lengths) / flops + self.efficiency.train_overhead_s


def series_seconds(steps: int, first_s: float, growth_s: float) -> float:
    """Seconds of a run of decode steps, of which each takes `growth_s` longer than the one before.

    >>> series_seconds(3, 1.0, 0.5)
    4.5
    """
    return steps * first_s + growth_s * (steps * (steps - 1) / 2)


def series_steps(seconds: float, first_s: float, growth_s: float) -> int:
    """How many whole steps of such a run pass in `seconds`: the larger root of its equation, without cancellation.

    >>> series_steps(4.4, 1.0, 0.5), series_steps(4.5, 1.0, 0.5)
    (2, 3)
    """
    half_s = first_s - growth_s / 2
    steps = int(2 * seconds / (half_s + math.sqrt(half_s * half_s + 2 * growth_s * seconds)))
    while series_seconds(steps + 1, first_s, growth_s) <= seconds:
        steps += 1
    while steps and series_seconds(steps, first_s, growth_s) > seconds:
        steps -= 1
    return steps
