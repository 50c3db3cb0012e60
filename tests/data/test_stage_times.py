from __future__ import annotations

import pytest

from rollart.config import from_dict
from rollart.data.engines import create_engine
from rollart.data.engines.request import Running
from rollart.data.engines.stage_times import StageTimes
from rollart.errors import ConfigError
from rollart.resource.classes import CLASSES
from rollart.resource.placement import place
from rollart.types import GenRequest, GenResult, NodeInfo, Sampling
from tests.data.tiny_models import TinyModel

PARAMS = 8.2e9


def running(name: str) -> Running:
    return Running(GenRequest(name, name, [1, 2, 3], Sampling()), 100, None)


def test_a_step_that_does_one_thing_is_charged_to_it() -> None:
    times, reading, writing = StageTimes(), [running("a"), running("b")], [running("c"), running("d")]
    times.charge(4.0, [], [(reading[0], 30), (reading[1], 10)])
    times.charge(2.0, writing, [])
    assert [each.prefill_s for each in reading] == [3.0, 1.0]
    assert [each.decode_s for each in writing] == [2.0, 2.0]


def test_a_mixed_step_charges_decoding_what_it_took_lately_and_prompts_the_rest() -> None:
    times, reading, writing = StageTimes(), running("a"), running("b")
    times.charge(2.0, [writing], [])
    times.charge(5.0, [writing], [(reading, 10)])
    times.charge(1.0, [writing], [(reading, 10)])
    assert (reading.prefill_s, writing.decode_s) == (3.0, 5.0)


def test_before_any_step_that_only_decodes_a_mixed_one_is_shared_by_tokens() -> None:
    times, reading, writing = StageTimes(), running("a"), running("b")
    times.charge(10.0, [writing], [(reading, 9)])
    assert (reading.prefill_s, writing.decode_s) == (9.0, 1.0)


def generate(model: TinyModel, engine: str, **options: object) -> list[GenResult]:
    made = create_engine(engine, model.folder, {"slots": 1, "max_model_tokens": 64, **options})
    for name in "ab":
        made.add(GenRequest(name, name, [3, 4, 5, 6], Sampling(temperature=0, max_tokens=5)))
    results: list[GenResult] = []
    while made.has_work():
        results += made.step()
    return results


def test_an_emulated_engine_says_the_same_tokens_and_takes_the_time_of_its_class(
    tiny_models: dict[str, TinyModel],
) -> None:
    plain = generate(tiny_models["qwen3"], "embedded")
    for name in ("H800", "H20"):
        slow = generate(tiny_models["qwen3"], "emulated", device_class=name, slowdown=2.0)
        assert [each.tokens for each in slow] == [each.tokens for each in plain]
        step_s = 2.0 * CLASSES[name].step_seconds(1, PARAMS)
        first, second = slow
        assert first.prefill_s >= step_s
        assert first.decode_s >= 4 * step_s
        assert second.queue_s >= 5 * step_s
    assert all(each.prefill_s > 0 and each.decode_s > 0 for each in plain)


def test_reading_is_bound_by_arithmetic_and_writing_by_memory() -> None:
    h800, h20 = CLASSES["H800"], CLASSES["H20"]
    read, write = (h20.step_seconds(n, PARAMS) / h800.step_seconds(n, PARAMS) for n in (4096, 1))
    assert read == pytest.approx(989.5 / 148)
    assert write == pytest.approx(3.35 / 4.0)


def test_an_emulated_engine_needs_a_class_with_figures(tiny_models: dict[str, TinyModel]) -> None:
    with pytest.raises(ConfigError, match="no figures for device class 'CPU'; take one of H20, H800"):
        create_engine("emulated", tiny_models["qwen3"].folder, {"device_class": "CPU"})
    nodes = [NodeInfo("node", {"CPU": 2})]
    config = {"engine": "emulated", "tasks": {"sorting": {}}}
    with pytest.raises(ConfigError, match="engine: 'emulated' has no figures for device class 'CPU' of actor_gen"):
        place(from_dict(config), nodes)
    pools = {"H800": {"device": "cpu", "count": 2, "compatible": ["H2O"]}, "H2O": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"device class 'H2O' of actor_gen; did you mean 'H20'\?"):
        place(from_dict({**config, "pools": pools, "affinity": {"sorting": "H800"}}), nodes)


def test_with_auto_every_class_that_generates_stands_in_for_every_other() -> None:
    pools = {name: {"device": "cpu", "count": 2} for name in ("H800", "H20")}
    placement = place(
        from_dict({"affinity": "auto", "tasks": {"sorting": {}}, "pools": pools}), [NodeInfo("node", {"CPU": 2})]
    )
    assert placement.affinity == {}
    assert placement.fallback == {"H800": ("H20",), "H20": ("H800",)}
    assert [each.device_class for each in placement.of_role("actor_gen")] == ["H800", "H20"]
