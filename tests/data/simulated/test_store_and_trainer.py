"""Weights travel at the pace of their links; a train_step lasts as long as its tokens cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from rollart.data.simulated.device import Pace
from rollart.data.simulated.model_shape import load_shape
from rollart.data.simulated.profile import Link
from rollart.data.simulated.store import SimulatedStore
from rollart.data.simulated.timeline import Timeline
from rollart.data.trainers.simulated import SimulatedTrainer, measured, modelled
from rollart.errors import ConfigError, TrainError, WeightsError
from rollart.resource.classes import CLASSES
from rollart.types import Group, GroupSpec, TrainBatch, Trajectory, Turn
from rollart.virtual_time import run_virtual
from tests.data.engines.small_devices import TYPICAL

MODEL = load_shape("Qwen3-8B")
PACE = Pace(CLASSES["H800"], MODEL, 1, TYPICAL)
LINKS = {
    "push": Link(latency_s=1.0, bytes_per_s=2.5e9),
    "pull": Link(latency_s=0.0, bytes_per_s=25e9),
    "load": Link(latency_s=0.0, bytes_per_s=50e9),
}


async def took(work: Awaitable[Any]) -> float:
    began = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - began


def batch(*sizes: tuple[int, int]) -> TrainBatch:
    """One group, a trajectory of one turn for each (prompt, answer)."""
    trajectories = [
        Trajectory(str(number), "g0", "task", 0, [Turn([0] * prompt, [0] * answer, [0.0] * answer, [0] * answer)])
        for number, (prompt, answer) in enumerate(sizes)
    ]
    return TrainBatch(1, 0, [Group(GroupSpec(0, "task", 0), trajectories)])


def test_weights_are_pushed_once_and_pulled_and_loaded_by_shards() -> None:
    async def main() -> list[float]:
        store = SimulatedStore(MODEL, LINKS)
        assert (await store.publish(0)).version == 0
        return [await took(work) for work in (store.publish(1), store.fetch(1), store.fetch(1, 4), store.load(4))]

    size = MODEL.weight_bytes
    assert run_virtual(main()) == pytest.approx([1 + size / 2.5e9, size / 25e9, size / 4 / 25e9, size / 4 / 50e9])


def test_a_version_exists_once_it_is_pushed_whole_and_never_changes() -> None:
    async def main() -> None:
        store = SimulatedStore(MODEL, LINKS)
        pushing = asyncio.create_task(store.publish(3))
        await asyncio.sleep(1.0)
        with pytest.raises(WeightsError, match="version 3 of the weights is not published"):
            await store.fetch(3)
        await pushing
        await store.fetch(3)
        with pytest.raises(WeightsError, match="cannot change"):
            await store.publish(3)

    run_virtual(main())


def test_a_profile_without_a_link_for_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"links\.load is missing"):
        SimulatedStore(MODEL, {name: link for name, link in LINKS.items() if name != "load"})


def test_a_train_step_lasts_as_long_as_its_tokens_cost_on_the_devices_there_are() -> None:
    async def main() -> tuple[float, float]:
        devices = [8]
        trainer = SimulatedTrainer(modelled(PACE), lambda: devices[0], SimulatedStore(MODEL, LINKS))
        report = await trainer.train_step(batch((1000, 500), (3000, 20)))
        assert (report.step, report.trained_tokens, report.skipped) == (1, 520, False)
        assert report.seconds == PACE.train_seconds([1500, 3020], 8)
        devices[0] = 16
        return report.seconds, await took(trainer.train_step(batch((1000, 500), (3000, 20))))

    with_8, with_16 = run_virtual(main())
    assert with_16 - 2.0 == pytest.approx((with_8 - 2.0) / 2)


def test_a_measured_pace_replaces_the_model_of_it() -> None:
    async def main() -> float:
        trainer = SimulatedTrainer(measured(0.01), lambda: 8, SimulatedStore(MODEL, LINKS))
        return await took(trainer.train_step(batch((100, 50))))

    assert run_virtual(main()) == pytest.approx(0.5)


def test_a_publication_waits_for_the_train_step_before_it() -> None:
    async def main() -> Timeline:
        timeline = Timeline()
        trainer = SimulatedTrainer(modelled(PACE), lambda: 8, SimulatedStore(MODEL, LINKS), timeline)
        await asyncio.gather(trainer.train_step(batch((1000, 500))), trainer.publish(1))
        return timeline

    train, publish = (each for each in run_virtual(main()).to_chrome()["traceEvents"] if each["ph"] == "X")
    assert (train["name"], publish["name"]) == ("train", "publish")
    assert train["ts"] + train["dur"] == pytest.approx(publish["ts"])


def test_a_batch_without_a_generated_token_is_refused() -> None:
    trainer = SimulatedTrainer(modelled(PACE), lambda: 8, SimulatedStore(MODEL, LINKS))
    with pytest.raises(TrainError, match="no trajectory of the batch has a generated token"):
        run_virtual(trainer.train_step(batch((100, 0))))


def test_trainer_and_engines_agree_on_weights_that_are_not_there() -> None:
    async def main() -> None:
        trainer = SimulatedTrainer(modelled(PACE), lambda: 8, SimulatedStore(MODEL, LINKS))
        assert await trainer.logprobs([1, 2, 3]) == [0.0, 0.0]
        assert await trainer.parameters() == []
        await trainer.save("nowhere")
        await trainer.load("nowhere")

    run_virtual(main())


def test_nothing_simulated_needs_tensors() -> None:
    modules = ["data.simulated.inference", "data.simulated.timeline", "data.trainers.simulated"]
    imports = "; ".join(f"import rollart.{module}" for module in modules)
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
