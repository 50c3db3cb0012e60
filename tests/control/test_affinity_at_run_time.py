"""Affinity in virtual time: two tasks on engines at the pace of an H800 and of an H20."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rollart.control.llm_proxy import LLMProxy
from rollart.resource.affinity import Affinity
from rollart.resource.classes import CLASSES
from rollart.resource.routing import Router
from rollart.types import GenRequest, Sampling
from rollart.virtual_time import run_virtual
from tests.control.paced import PacedEngine

TURNS = {"explore": 5, "solve": 1}
OBSERVATION = {"explore": 200, "solve": 60}
ANSWER = {"explore": 4, "solve": 200}
PARAMS = 8.2e9
MIXED = {"H800": 1, "H20": 3}
DECLARED = {"explore": "H800", "solve": "H20"}


class Lab:
    """A closed loop of trajectories over paced engines. `noise`: relative spread of the time of each step."""

    def __init__(self, pool: dict[str, int], affinity: Affinity, noise: float = 0.0, **router: object) -> None:
        self.noise = random.Random(0), noise
        self.engines = {
            f"{name}-{n}": PacedEngine(f"{name}-{n}", self._pace(name), lambda request: ANSWER[request.tag])
            for name, count in pool.items()
            for n in range(count)
        }
        self.classes = {name: name.partition("-")[0] for name in self.engines}
        self.affinity, self.said = affinity, list[str]()
        fallback = {name: [other for other in pool if other != name] for name in pool}
        self.router = Router(affinity.mapping, fallback, **router)  # type: ignore[arg-type]
        self.proxy = LLMProxy(
            list(self.engines.values()),
            router=self.router,
            classes=self.classes,
            affinity=affinity,
            say=self.said.append,
        )
        self.ended: Counter[str] = Counter()
        self._numbers: Iterator[int] = itertools.count()

    def _pace(self, name: str) -> Callable[[int, int], float]:
        draw, noise = self.noise
        device = CLASSES[name]
        return lambda tokens, decoding: (
            device.step_seconds(tokens + decoding, PARAMS) * draw.uniform(1 - noise, 1 + noise)
        )

    async def trajectories(self) -> None:
        while True:
            number = next(self._numbers)
            tag = ("explore", "solve")[number % 2]
            history = 0
            for turn in range(TURNS[tag]):
                history += OBSERVATION[tag]
                request = GenRequest(f"{number}-{turn}", f"t{number}", [1] * history, Sampling(max_tokens=200), tag)
                history += len((await self.proxy.generate(request)).tokens)
            self.proxy.release(f"t{number}")
            self.ended[tag] += 1

    async def rate(self, seconds: float, in_flight: int = 96) -> float:
        """Trajectories per second, without the first half of the time."""
        running = [asyncio.ensure_future(self.trajectories()) for _ in range(in_flight)]
        await asyncio.sleep(seconds / 2)
        self.ended.clear()
        await asyncio.sleep(seconds / 2)
        ended = sum(self.ended.values())
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return 2 * ended / seconds

    async def kill(self, device_class: str) -> None:
        """All workers of a class die, and the proxy hears of it by the requests that they held."""
        for name, engine in self.engines.items():
            if self.classes[name] == device_class:
                engine.dead.set()

    def served(self, device_class: str) -> Counter[str]:
        """Requests by task that a class has answered since the last call."""
        found: Counter[str] = Counter()
        for name, engine in self.engines.items():
            if self.classes[name] == device_class:
                found.update(engine.served)
                engine.served.clear()
        return found


def auto() -> Affinity:
    return Affinity(mode="auto", slots=16)


def test_auto_finds_the_better_mapping_and_is_as_fast_as_if_it_had_been_declared() -> None:
    async def main() -> None:
        lab = Lab(MIXED, auto())
        found = await lab.rate(12.0)
        assert lab.affinity.mapping == DECLARED
        assert lab.router.affinity == DECLARED
        declared = await Lab(MIXED, Affinity(DECLARED)).rate(12.0)
        swapped = await Lab(MIXED, Affinity({"explore": "H20", "solve": "H800"})).rate(12.0)
        assert found >= 0.95 * declared
        assert declared > 1.5 * swapped
        (explored, solved) = sorted(lab.said)
        assert "explore -> H800: " in explored
        assert "x faster per turn than on H20 (prefill " in explored
        assert "solve -> H20: " in solved

    run_virtual(main())


@pytest.mark.parametrize("pool", [MIXED, {"H800": 2, "H100": 2}], ids=["unequal", "equal"])
def test_auto_does_not_flap_under_noise(pool: dict[str, int]) -> None:
    async def main() -> None:
        lab = Lab(pool, auto(), noise=0.9)
        await lab.rate(20.0)
        assert set(lab.affinity.mapping) == set(DECLARED)
        assert pool != MIXED or lab.affinity.mapping == DECLARED
        assert len(lab.said) <= 4
        assert not any(change.at_s > 10 for change in lab.affinity.changes)

    run_virtual(main())


@pytest.mark.parametrize("gone", ["H800", "H20"])
def test_when_a_class_dies_the_others_take_its_tasks_and_when_it_returns_they_go_back(gone: str) -> None:
    async def main() -> None:
        lab = Lab(MIXED, auto())
        await lab.rate(8.0)
        other = "H20" if gone == "H800" else "H800"
        moved = next(tag for tag, name in DECLARED.items() if name == gone)
        await lab.kill(gone)
        assert await lab.rate(4.0) > 0
        assert set(lab.affinity.mapping.values()) == {other}
        assert f"affinity: {moved} -> {other}: {gone} has no worker left" in lab.said
        engine = PacedEngine(f"{gone}-new", lab._pace(gone), lambda request: ANSWER[request.tag])
        lab.engines[engine.name], lab.classes[engine.name] = engine, gone
        await lab.proxy.join(engine, gone)
        assert await lab.rate(6.0) > 0
        assert set(lab.served(gone)) >= {moved}
        assert lab.affinity.mapping[moved] == gone
        lab.affinity.check()

    run_virtual(main())


def test_with_one_class_there_is_nothing_to_decide() -> None:
    async def main() -> None:
        lab = Lab({"H20": 3}, auto())
        assert await lab.rate(4.0) > 0
        assert lab.affinity.mapping == {}
        assert lab.said == []
        report = lab.proxy.affinity()
        assert report.mode == "auto"
        assert report.profile["explore"]["prefix_hit_rate"] > 0.5  # type: ignore[operator]

    run_virtual(main())


def test_a_class_without_a_free_slot_lends_from_one_that_is_idle_and_the_report_counts_it() -> None:
    async def main() -> None:
        lab = Lab({"H800": 1, "H20": 1}, Affinity({"default": "H800"}), slots=8)
        await lab.rate(4.0, in_flight=20)
        assert lab.served("H20")
        fallbacks = lab.proxy.affinity().fallbacks
        assert set(fallbacks) == {f"{tag}: H800 -> H20 (none free)" for tag in TURNS}

    run_virtual(main())
