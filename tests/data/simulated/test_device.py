"""Seconds on devices: the formulas by hand, and what must never be slower."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollart.data.engines.emulation import PARAMS, SLOWDOWN
from rollart.data.simulated.device import Pace, series_seconds, series_steps
from rollart.data.simulated.model_shape import attended_tokens, load_shape
from rollart.errors import ConfigError
from rollart.resource.classes import CLASSES, DeviceClass
from tests.data.engines.small_devices import TYPICAL

H20, H800 = CLASSES["H20"], CLASSES["H800"]
DENSE, EXPERTS = load_shape("Qwen3-8B"), load_shape("Qwen3-30B-A3B")


def pace(device: DeviceClass = H800, num_devices: int = 1, model: Any = DENSE, **changes: Any) -> Pace:
    return Pace(device, model, num_devices, replace(TYPICAL, **changes))


def test_prefill_takes_its_arithmetic_at_its_share_of_the_peak() -> None:
    flops = 2 * DENSE.active_params * 4096 + 4 * 36 * 32 * 128 * attended_tokens(4096, 1000)
    expected = 0.004 + flops / (989.5e12 * 0.5)
    assert pace().prefill_step(4096, attended_tokens(4096, 1000)) == pytest.approx(expected)


def test_decoding_takes_the_bytes_of_weights_and_kv_and_grows_with_each_step() -> None:
    bandwidth = 3.35e12 * 0.7
    first, growth = pace().decode(16, 16 * 5000)
    expected = 0.004 + (2 * DENSE.active_params + 16 * 5000 * DENSE.kv_bytes_per_token) / bandwidth
    assert first == pytest.approx(expected)
    assert growth == pytest.approx(16 * DENSE.kv_bytes_per_token / bandwidth)
    assert pace().decode(16, 16 * 5001)[0] == pytest.approx(first + growth)


def test_a_batch_beyond_the_balance_of_the_device_decodes_at_the_pace_of_its_arithmetic() -> None:
    linear_s = pace(H20, step_overhead_s=0.0).decode(200, 0)[0]
    assert linear_s == pytest.approx(2 * DENSE.active_params * 200 / (148e12 * 0.5))


def test_a_mixed_step_is_a_decode_step_and_what_prompts_add() -> None:
    alone, together = pace().decode(8, 8000)[0], pace().prefill_step(512, attended_tokens(512), 8, 8000)
    assert alone < together < alone + pace().prefill_step(512, attended_tokens(512))


def test_few_tokens_read_few_experts() -> None:
    few, many = (pace(model=EXPERTS, step_overhead_s=0.0).decode(number, 0)[0] for number in (1, 64))
    assert few == pytest.approx(2 * EXPERTS.active_params / (3.35e12 * 0.7))
    assert many == pytest.approx(2 * EXPERTS.read_params(64) / (3.35e12 * 0.7))


def test_tensor_parallel_devices_lose_a_share_with_each_doubling_and_sum_over_their_link() -> None:
    device = replace(H800, interconnect_gbs=0.0)
    one, four = (pace(device, number, step_overhead_s=0.0).prefill_step(4096, 0) for number in (1, 4))
    assert four == pytest.approx(one / (4 * 0.9**2))
    linked = pace(H800, 4, step_overhead_s=0.0).prefill_step(4096, 0)
    num_bytes = 2 * 36 * 2 * 4096 * 4096 * 2 * 3 / 4
    assert linked - four == pytest.approx(num_bytes / 200e9)


def test_affinity_of_the_paper_comes_out_of_the_figures() -> None:
    """Two H800 cost as much as six H20: prompts are read faster on the former, answers written faster on the latter."""
    read_h800, read_h20 = pace(H800).prefill_step(8192, 0) / 2, pace(H20).prefill_step(8192, 0) / 6
    write_h800, write_h20 = pace(H800).decode(16, 16 * 8000)[0] / 2, pace(H20).decode(16, 16 * 8000)[0] / 6
    assert read_h800 < read_h20
    assert write_h20 < write_h800


def test_kv_has_the_room_that_weights_leave() -> None:
    assert pace().kv_capacity_tokens == int((80e9 * 0.9 - DENSE.weight_bytes) / DENSE.kv_bytes_per_token)
    model = load_shape("Qwen3-32B")
    assert pace(H800, 4, model).kv_capacity_tokens == int((320e9 * 0.9 - model.weight_bytes) / model.kv_bytes_per_token)


def test_a_model_that_does_not_fit_says_how_many_devices_would_do() -> None:
    too_large = pace(H800, 1, load_shape("Qwen3-32B"))
    assert 0 <= too_large.kv_capacity_tokens < 32768
    with pytest.raises(ConfigError, match=r"Qwen3-32B does not fit on 1 x H800: weights of 65\.5 GB.*at least 2 dev"):
        too_large.check_room(32768)
    with pytest.raises(ConfigError, match="no number of these devices holds them"):
        pace(DeviceClass("toy", 1, 0.5, 1)).check_room(1)
    pace().check_room(32768)


def test_a_class_without_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mystery' has no figures"):
        pace(DeviceClass("mystery", 0, 80, 1))
    with pytest.raises(ConfigError, match="at least 1 device"):
        pace(num_devices=0)


def test_training_takes_its_flops_at_its_share_of_all_devices() -> None:
    lengths = [3000, 12000]
    seconds = pace().train_seconds(lengths, 32)
    assert seconds == pytest.approx(DENSE.training_flops(lengths) / (32 * 989.5e12 * 0.3) + 2.0)


def test_the_emulated_pace_is_that_of_the_emulated_engine() -> None:
    emulated = Pace(H20, EXPERTS, 1, TYPICAL, emulated=True)
    for tokens in (1, 5, 3000):
        expected = pytest.approx(SLOWDOWN * H20.step_seconds(tokens, PARAMS))
        assert emulated.decode(tokens, 10**6) == (expected, 0.0)
        assert emulated.prefill_step(tokens, 10**6) == expected
    assert emulated.kv_capacity_tokens > 10**15


FIGURES = st.fixed_dictionaries(
    {
        "tflops": st.floats(10, 3000),
        "memory_gb": st.floats(20, 200),
        "bandwidth_tbs": st.floats(0.5, 10),
        "interconnect_gbs": st.floats(1, 2000),
    }
)
WORK = st.tuples(st.integers(1, 9000), st.integers(0, 10**6), st.integers(1, 300), st.integers(0, 10**6))


@settings(max_examples=100)
@given(FIGURES, st.sampled_from(["tflops", "memory_gb", "bandwidth_tbs", "interconnect_gbs"]), WORK, st.booleans())
def test_better_figures_are_never_slower(figures: dict[str, float], which: str, work: Any, experts: bool) -> None:
    model = EXPERTS if experts else DENSE
    before = pace(DeviceClass("before", **figures), 2, model)
    after = pace(DeviceClass("after", **figures | {which: figures[which] * 1.5}), 2, model)
    new_tokens, attended, decoding, kv_tokens = work
    assert after.prefill_step(*work) <= before.prefill_step(*work)
    assert after.decode(decoding, kv_tokens) <= before.decode(decoding, kv_tokens)
    assert after.kv_capacity_tokens >= before.kv_capacity_tokens
    assert after.train_seconds([new_tokens, attended + 1], 4) <= before.train_seconds([new_tokens, attended + 1], 4)


@settings(max_examples=200)
@given(st.floats(1e-4, 10), st.floats(0, 2), st.integers(0, 5000), st.floats(0.01, 0.99))
def test_the_steps_within_a_time_are_those_that_the_series_takes(
    first_s: float, share: float, steps: int, part: float
) -> None:
    growth_s = first_s * share / 2
    before, after = (series_seconds(number, first_s, growth_s) for number in (steps, steps + 1))
    assert series_steps(before + part * (after - before), first_s, growth_s) == steps
    assert before == pytest.approx(sum(first_s + growth_s * each for each in range(steps)), rel=1e-9)
