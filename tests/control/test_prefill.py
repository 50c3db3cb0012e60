"""Prompts that are read on workers of their own: who reads and who decodes, deaths, aborts and updates, by fakes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from rollart.control.background import Background
from rollart.control.llm_proxy import LLMProxy
from rollart.control.prefill import GONE, NOBODY
from rollart.errors import GenerationError
from rollart.resource.routing import Router
from rollart.types import GenRequest, GenResult, Sampling
from rollart.virtual_time import run_virtual
from tests.fake_parts import FakeDecoder, FakeReader
from tests.fakes import FakeStore


def request(name: str, trajectory_id: str = "", num_tokens: int = 10) -> GenRequest:
    return GenRequest(name, trajectory_id or name, [1] * num_tokens, Sampling(), "maze")


class Lab:
    """A proxy over readers and decoders. `said` holds its lines."""

    def __init__(self, num_readers: int = 1, num_decoders: int = 1, router: Router | None = None) -> None:
        self.store = FakeStore({0, 1, 2, 3, 4, 5})
        self.readers = [FakeReader(self.store, f"prefill-{n}") for n in range(num_readers)]
        self.decoders = [FakeDecoder(self.store, f"inference-{n}") for n in range(num_decoders)]
        self.said: list[str] = []
        self.background = Background()
        self.router = router or Router()
        self.proxy = LLMProxy(
            [*self.decoders, *self.readers], router=self.router, background=self.background, say=self.said.append
        )
        for worker in (*self.decoders, *self.readers):
            worker.version = 0

    def start(self, *requests: GenRequest) -> list[asyncio.Future[GenResult]]:
        return [asyncio.ensure_future(self.proxy.generate(each)) for each in requests]

    async def update(self, version: int) -> None:
        await self.proxy.suspend()
        await self.proxy.update(version)
        await self.proxy.resume()

    def check(self) -> None:
        self.proxy.prefill.check()
        assert self.proxy.num_in_flight == 0
        self.router.check([])


def test_a_request_is_read_on_one_worker_and_decoded_on_another() -> None:
    async def main() -> None:
        lab = Lab()
        result = await lab.proxy.generate(request("r"))
        assert (result.tokens, result.versions, result.finish_reason) == ([100, 101, 102], [0, 0, 0], "stop")
        assert lab.readers[0].read == [("r", 0, 0)]
        assert [handoff.result.tokens for handoff in lab.decoders[0].handoffs] == [[100]]
        report = lab.proxy.prefill.report()
        assert report is not None
        assert (report.read, report.again, report.received_tokens, report.by_decode_workers) == (1, 0, 10, {})
        lab.check()

    run_virtual(main())


def test_without_prefill_workers_nothing_is_handed_over() -> None:
    async def main() -> None:
        lab = Lab(num_readers=0)
        assert (await lab.proxy.generate(request("r"))).finish_reason == "stop"
        assert lab.decoders[0].handoffs == []
        assert lab.proxy.prefill.report() is None

    run_virtual(main())


def test_a_trajectory_stays_with_its_two_workers_and_carries_only_what_is_new() -> None:
    async def main() -> None:
        lab = Lab(num_readers=2, num_decoders=2)
        for turn in range(3):
            await asyncio.gather(*lab.start(*(request(f"{t}{turn}", t, 10 + 7 * turn) for t in "ab")))
        assert [[(name, have) for name, _, have in reader.read] for reader in lab.readers] == [
            [(f"{t}0", 0), (f"{t}1", 12), (f"{t}2", 19)] for t in "ab"
        ]
        assert [len(decoder.handoffs) for decoder in lab.decoders] == [3, 3]
        lab.proxy.release("a")
        await asyncio.sleep(0)
        assert [worker.released for worker in (lab.readers[0], lab.decoders[0])] == [["a"], ["a"]]
        await asyncio.gather(*lab.start(request("again", "a")))
        assert lab.readers[0].read[-1] == ("again", 0, 0)
        lab.check()

    run_virtual(main())


def test_a_tag_still_chooses_the_class_that_decodes() -> None:
    async def main() -> None:
        store = FakeStore({0})
        fast, wide, reader = FakeDecoder(store, "fast"), FakeDecoder(store, "wide"), FakeReader(store)
        router = Router({"maze": "H20"})
        proxy = LLMProxy(
            [fast, wide, reader], router=router, classes={"fast": "H800", "wide": "H20", "prefill-0": "H800"}
        )
        for worker in (fast, wide, reader):
            worker.version = 0
        await asyncio.gather(*(proxy.generate(request(f"r{n}")) for n in range(4)))
        assert (len(fast.handoffs), len(wide.handoffs), len(reader.read)) == (0, 4, 4)
        profile = proxy.affinity().profile["maze"]["on"]
        assert list(profile) == ["H20"]  # what the other class did is not counted for this one
        assert profile["H20"]["prefill_s"] == 0

    run_virtual(main())


def test_an_answer_that_ends_with_its_first_token_is_not_handed_over() -> None:
    async def main() -> None:
        lab = Lab()
        lab.readers[0].total = 1
        result = await lab.proxy.generate(request("r"))
        assert (result.tokens, result.finish_reason) == ([100], "stop")
        assert lab.decoders[0].handoffs == []
        lab.check()

    run_virtual(main())


# ---------------------------------------------------------------------------------------------------------- death
def test_prompts_of_a_dead_prefill_worker_are_read_by_another_then_by_those_that_decode_which_is_said_once() -> None:
    async def main() -> None:
        lab = Lab(num_readers=2)
        lab.readers[0].dead = "killed"
        results = await asyncio.gather(*lab.start(*(request(f"r{n}") for n in range(4))))
        assert len(lab.readers[1].read) == 4
        assert lab.said == []
        lab.readers[1].dead = "killed"
        results += await asyncio.gather(*lab.start(*(request(f"s{n}") for n in range(4))))
        assert [each.finish_reason for each in results] == ["stop"] * 8
        assert lab.said == ["prefill: no prefill worker is left; workers that decode read prompts themselves"]
        report = lab.proxy.prefill.report()
        assert report is not None
        assert report.by_decode_workers == {NOBODY: 4}
        await lab.proxy.join(FakeReader(lab.store, "prefill-0.1"))
        assert lab.said[1:] == ["prefill: prompts are read by prefill-0.1 again"]
        lab.check()

    run_virtual(main())


def test_a_prefill_worker_that_dies_while_it_reads_loses_nothing() -> None:
    async def main() -> None:
        lab = Lab(num_readers=2)
        flying = lab.start(request("r"))
        await asyncio.sleep(0.05)
        lab.readers[0].dead = "killed"
        (result,) = await asyncio.gather(*flying)
        assert result.tokens == [100, 101, 102]
        assert [name for name, _, _ in lab.readers[1].read] == ["r"]
        lab.check()

    run_virtual(main())


def test_a_request_whose_decoding_worker_dies_goes_on_elsewhere_from_the_tokens_it_has() -> None:
    async def main() -> None:
        lab = Lab(num_decoders=2)
        flying = lab.start(request("r"))
        await asyncio.sleep(0.15)
        lab.decoders[0].dead = "killed"
        (result,) = await asyncio.gather(*flying)
        assert result.tokens == [100, 101, 102]
        assert lab.readers[0].read == [("r", 0, 0), ("r", 1, 0)]
        assert lab.proxy.num_workers == 1
        lab.check()

    run_virtual(main())


def test_kv_that_does_not_arrive_is_counted() -> None:
    async def main() -> None:
        lab = Lab()
        lab.decoders[0].loses_kv = True
        await lab.proxy.generate(request("r"))
        lab.readers[0].has_kv = lambda request: False
        await lab.proxy.generate(request("s"))
        report = lab.proxy.prefill.report()
        assert report is not None
        assert report.by_decode_workers == {GONE: 2}

    run_virtual(main())


def test_an_error_names_the_worker_that_made_it() -> None:
    async def main() -> None:
        lab = Lab()
        lab.readers[0].failing = lambda request: True
        with pytest.raises(GenerationError, match="'prefill-0', prefill: the engine is out of KV memory"):
            await lab.proxy.generate(request("r"))
        lab.readers[0].failing = lambda request: False
        lab.decoders[0].failing = lambda request: True
        with pytest.raises(GenerationError, match="'inference-0', decode: the engine is out of KV memory"):
            await lab.proxy.generate(request("r"))
        lab.check()

    run_virtual(main())


# ---------------------------------------------------------------------------------------------------------- abort
@pytest.mark.parametrize(("after_s", "num_tokens"), [(0.05, 0), (0.15, 1), (0.25, 2)])
def test_an_abort_reaches_the_worker_that_has_the_request(after_s: float, num_tokens: int) -> None:
    async def main() -> None:
        lab = Lab()
        flying = lab.start(request("r", "t"))
        await asyncio.sleep(after_s)
        lab.proxy.abort("t")
        (result,) = await asyncio.gather(*flying)
        assert (len(result.tokens), result.finish_reason) == (num_tokens, "abort")
        assert "r" in (lab.decoders[0] if num_tokens else lab.readers[0]).aborted
        await lab.background.drain(1.0)
        lab.check()

    run_virtual(main())


def test_an_abort_while_the_request_changes_hands_ends_it() -> None:
    async def main() -> None:
        lab = Lab()
        flying = lab.start(request("r", "t"))
        await asyncio.sleep(0.1)  # to the very moment at which the reader answers
        lab.proxy.abort("t")
        (result,) = await asyncio.gather(*flying)
        assert result.finish_reason == "abort"
        assert lab.decoders[0].handoffs == []
        lab.check()

    run_virtual(main())


def test_an_abort_is_not_forgotten_when_the_worker_dies_of_it() -> None:
    async def main() -> None:
        lab = Lab(num_readers=0, num_decoders=2)
        flying = lab.start(request("r", "t"))
        await asyncio.sleep(0.05)
        lab.decoders[0].dead = "killed"
        lab.proxy.abort("t")
        (result,) = await asyncio.gather(*flying)
        assert result.finish_reason == "abort"
        assert lab.decoders[1].requests == []

    run_virtual(main())


# --------------------------------------------------------------------------------------------------------- weights
def test_weights_reach_both_kinds_of_worker() -> None:
    async def main() -> None:
        lab = Lab(num_readers=2, num_decoders=2)
        await lab.proxy.prefetch(1)
        await lab.update(1)
        everyone = (*lab.readers, *lab.decoders)
        assert [worker.version for worker in everyone] == [1] * 4
        assert [worker.prefetched for worker in everyone] == [[1]] * 4
        assert set(await lab.proxy.stats()) == {worker.name for worker in everyone}
        lab.check()

    run_virtual(main())


@pytest.mark.parametrize(("after_s", "versions"), [(0.05, [1, 1, 1]), (0.12, [0, 1, 1]), (0.25, [0, 0, 1])])
def test_what_an_update_meets_is_read_again_and_goes_on(after_s: float, versions: list[int]) -> None:
    async def main() -> None:
        lab = Lab()
        flying = lab.start(request("r"))
        await asyncio.sleep(after_s)
        await lab.update(1)
        (result,) = await asyncio.gather(*flying)
        assert result.versions == versions
        assert all(kv == held for kv, held in lab.decoders[0].used)
        report = lab.proxy.prefill.report()
        assert report is not None
        assert report.again == (after_s > 0.1)
        lab.check()

    run_virtual(main())


def test_after_an_update_all_of_the_next_turn_is_carried() -> None:
    async def main() -> None:
        lab = Lab()
        await lab.proxy.generate(request("r1", "t", 10))
        await lab.update(1)
        await lab.proxy.generate(request("r2", "t", 17))
        assert lab.readers[0].read == [("r1", 0, 0), ("r2", 0, 0)]

    run_virtual(main())


# ----------------------------------------------------------------------------------------------------- random events
class Chaos:
    """A proxy to which everything happens; `play` ends when all requests have."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lab = Lab(num_readers=2, num_decoders=2)
        self.version = 0
        self.suspended = False
        self.flying: dict[str, asyncio.Future[GenResult]] = {}
        self.results: list[GenResult] = []
        self.all: list[FakeDecoder | FakeReader] = [*self.lab.decoders, *self.lab.readers]
        self.names = Counter[str]()

    async def play(self, events: int) -> None:
        kinds = [self.ask, self.ask, self.ask, self.abort, self.forget, self.kill, self.join, self.weights, self.wait]
        for _ in range(events):
            await self.rng.choice(kinds)()
            self.lab.proxy.prefill.check()
        if self.suspended:
            await self.lab.proxy.resume()
        for kind in (FakeDecoder, FakeReader):
            await self.join(kind)
        self.results += await asyncio.wait_for(asyncio.gather(*self.flying.values()), 1000)
        await self.lab.background.drain(10.0)

    async def ask(self) -> None:
        self.names["r"] += 1
        trajectory = f"t{self.rng.randrange(8)}"
        each = request(f"r{self.names['r']}", trajectory, self.rng.randrange(1, 60))
        self.flying[each.request_id] = asyncio.ensure_future(self.lab.proxy.generate(each))
        await asyncio.sleep(0)

    async def abort(self) -> None:
        self.lab.proxy.abort(f"t{self.rng.randrange(8)}")

    async def forget(self) -> None:
        self.lab.proxy.release(f"t{self.rng.randrange(8)}")

    async def kill(self) -> None:
        living = [worker for worker in self.all if not worker.dead]
        if living and self.rng.random() < 0.3:
            worker = self.rng.choice(living)
            worker.die()
            if self.rng.random() < 0.5:
                self.lab.proxy.lost(worker.name)

    async def join(self, kind: type[FakeDecoder] | type[FakeReader] | None = None) -> None:
        kind = kind or self.rng.choice([FakeDecoder, FakeReader])
        self.names["w"] += 1
        worker = kind(self.lab.store, f"new-{self.names['w']}")
        worker.version = 0
        self.all.append(worker)
        await self.lab.proxy.join(worker)

    async def weights(self) -> None:
        if self.suspended:
            if self.version < 5:
                self.version += 1
                await self.lab.proxy.update(self.version)
            await self.lab.proxy.resume()
        else:
            await self.lab.proxy.suspend()
        self.suspended = not self.suspended

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice([0, 0.05, 0.1, 0.1, 0.3]))


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_every_request_ends_once_and_no_kv_of_other_weights_is_used(seed: int) -> None:
    async def main() -> None:
        chaos = Chaos(seed)
        await chaos.play(120)
        check_results(chaos.results)
        assert len(chaos.results) == chaos.names["r"]
        decoders: Sequence[FakeDecoder] = [worker for worker in chaos.all if isinstance(worker, FakeDecoder)]
        assert all(kv == held for decoder in decoders for kv, held in decoder.used)
        assert all(not reader.reading for reader in chaos.all if isinstance(reader, FakeReader))
        chaos.lab.check()

    run_virtual(main())


def check_results(results: list[GenResult]) -> None:
    for result in results:
        assert result.finish_reason in ("stop", "abort")
        assert result.tokens == list(range(100, 100 + len(result.tokens)))
        assert len(result.tokens) == len(result.versions) == len(result.logprobs)
        assert result.versions == sorted(result.versions)
        assert len(result.tokens) == 3 or result.finish_reason == "abort"
