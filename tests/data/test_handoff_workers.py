"""Workers that read and workers that decode, behind the proxy: real engines, real files, real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.control.background import Background
from rollart.control.llm_proxy import LLMProxy
from rollart.control.prefill import GONE, NOBODY, PrefillReport
from rollart.data.handoff import DecodeWorker, PrefillWorker
from rollart.data.inference import RemoteInference, RemotePrefill
from rollart.data.parcels import Parcels
from rollart.data.runtime import InlineRuntime
from rollart.data.weights import FileWeightStore
from rollart.errors import ConfigError, GenerationError
from rollart.types import GenRequest, GenResult, Sampling
from tests.data.engine_contract import GREEDY, SAMPLED, MakeEngine, ask, assert_same, close, prompts
from tests.data.handoff_contract import nothing
from tests.data.test_inference_worker import CountingEngine, Shelf
from tests.data.tiny_models import TinyModel

LONG = Sampling(0, max_tokens=40)


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["qwen3"]


class Lab:
    """`reader` and `writer` behind `proxy`; `both` does all of it alone. `files`: what lies between the two."""

    def __init__(
        self, folder: Path, model: TinyModel, share: bool = True, engine: str | MakeEngine = "embedded", **options: Any
    ) -> None:
        self.parcels, self.model = folder / "parcels", model
        self.parcels.mkdir()
        self.runtime, self.background = InlineRuntime(), Background()
        weights = {"folder": str(folder / "weights"), "bucket_bytes": 1 << 20, "keep": 2}
        FileWeightStore(**weights).publish(1, model.weights(other=True))
        self._made = {
            "model_folder": model.folder,
            "engine": engine,
            "engine_options": {"slots": 8, "max_model_tokens": 128, **options},
            "weights": weights,
        }
        self._shared = str(self.parcels) if share else ""

    async def build(self) -> None:
        self._reader, self._writer, both = [await self._spawn(part) for part in ("prefill", "decode", "")]
        await self._reader.call("listen_at", await self._reader.address())
        self.reader, self.writer = RemotePrefill(self._reader), RemoteInference(self._writer)
        self.proxy = LLMProxy([self.writer, self.reader], background=self.background)
        self.both = LLMProxy([RemoteInference(both)])

    async def _spawn(self, part: str) -> Any:
        given = {**self._made, "part": part, "parcels": self._shared}
        return await self.runtime.spawn(part or "both", "rollart.data.roles:inference", given)

    @property
    def files(self) -> list[Path]:
        return list(self.parcels.iterdir())

    def report(self) -> PrefillReport:
        found = self.proxy.prefill.report()
        assert found is not None
        return found

    async def check_nothing_left(self, *trajectory_ids: str) -> None:
        """No file, no KV and no request once the trajectories are over."""
        for trajectory_id in trajectory_ids:
            self.proxy.release(trajectory_id)
        await self.background.drain(30.0)
        for stats in (await self.proxy.stats()).values():
            assert (stats.kv_tokens, stats.running, stats.waiting) == (0, 0, 0)
        assert self.files == []
        self.proxy.prefill.check()


@contextlib.asynccontextmanager
async def built(*args: Any, **options: Any) -> AsyncIterator[Lab]:
    lab = Lab(*args, **options)
    try:
        await lab.build()
        yield lab
    finally:
        await lab.runtime.shutdown()


async def everyone(proxy: LLMProxy, requests: list[GenRequest]) -> list[GenResult]:
    return list(await asyncio.gather(*(proxy.generate(request) for request in requests)))


async def turns(
    proxy: LLMProxy, between: Callable[[], Awaitable[None]] | None = None, first: Sampling = SAMPLED, shortest: int = 1
) -> list[GenResult]:
    """Six trajectories of three turns each, at once."""
    histories = prompts(6, shortest=shortest, longest=shortest + 29)
    found: list[GenResult] = []
    for turn in range(3):
        sampling = GREEDY if turn % 2 else first
        requests = [ask(f"{turn}{i}", history, sampling, f"t{i}") for i, history in enumerate(histories)]
        results = await everyone(proxy, requests)
        new = prompts(6, seed=turn, shortest=1, longest=6)
        histories = [[*r.prompt, *result.tokens, *n] for r, result, n in zip(requests, results, new, strict=True)]
        found += results
        if between is not None:
            await between()
    return found


@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "connection"])
def test_many_trajectories_of_several_turns_equal_those_of_one_worker(
    tmp_path: Path, model: TinyModel, share: bool
) -> None:
    async def main() -> None:
        async with built(tmp_path, model, share, slots=4, kept_tokens=1024) as lab:
            results = await turns(lab.proxy)
            assert_same(results, await turns(lab.both))
            report, writer = lab.report(), await lab.writer.stats()
            assert (report.read, report.again, report.by_decode_workers) == (18, 0, {})
            assert writer.prefilled_tokens == 0
            assert report.received_tokens == writer.received_tokens
            await lab.check_nothing_left(*(f"t{i}" for i in range(6)))

    asyncio.run(main())


def test_a_worker_that_has_lost_the_trajectory_asks_the_other_for_more_than_came(
    tmp_path: Path, model: TinyModel
) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            forget = [f"t{i}" for i in range(6)]
            results = await turns(lab.proxy, lambda: lab.writer.release(forget))
            assert_same(results, await turns(lab.both))
            assert lab.report().by_decode_workers == {}
            assert (await lab.writer.stats()).prefilled_tokens == 0

    asyncio.run(main())


def test_kv_that_nobody_has_any_more_is_computed_where_the_request_is_decoded(tmp_path: Path, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model, kept_tokens=0) as lab:
            results = await turns(lab.proxy)
            assert_same(results, await turns(lab.both))
            assert lab.report().by_decode_workers == {GONE: 18}

    asyncio.run(main())


def test_the_death_of_the_reader_costs_only_what_is_not_in_the_file(tmp_path: Path, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(2, shortest=20))]
            in_file, gone = [await lab.reader.prefill(request, nothing(request), 0) for request in requests]
            assert len(lab.files) == 2
            await lab._reader.stop()
            Parcels(str(lab.parcels)).drop("1")
            results = [await lab.writer.decode(requests[0], in_file), await lab.writer.decode(requests[1], gone)]
            assert [result.received_tokens for result in results] == [len(requests[0].prompt), 0]
            assert_same(results, await everyone(lab.both, requests))
            assert lab.files == []
            lab.proxy.lost("prefill")
            (after,) = await everyone(lab.proxy, [ask("3", [1, 2, 3])])
            assert after.finish_reason == "length"
            assert lab.report().by_decode_workers == {NOBODY: 1}

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------- abort
@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "connection"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_an_abort_at_any_moment_leaves_nothing_on_either_side(
    tmp_path: Path, model: TinyModel, share: bool, how: str
) -> None:
    async def main() -> None:
        async with built(tmp_path, model, share) as lab:
            asked = prompts(4, shortest=20)
            for moment in range(1, 36, 2):
                requests = [ask(f"{moment}-{i}", prompt, LONG) for i, prompt in enumerate(asked)]
                flying = [asyncio.ensure_future(lab.proxy.generate(request)) for request in requests]
                for _ in range(moment):
                    await asyncio.sleep(0)
                for request, future in zip(requests, flying, strict=True):
                    if how == "cancel":
                        future.cancel()
                    else:
                        lab.proxy.abort(request.trajectory_id)
                ended = await asyncio.gather(*flying, return_exceptions=True)
                for result in ended:
                    assert isinstance(result, asyncio.CancelledError) or result.finish_reason == "abort"
                await lab.check_nothing_left(*(request.trajectory_id for request in requests))

    asyncio.run(main())


def test_an_abort_of_what_is_unknown_or_lies_in_a_file_is_harmless(tmp_path: Path, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            request = ask("a", prompts(1, shortest=20)[0])
            await lab.reader.prefill(request, nothing(request), 0)
            assert len(lab.files) == 1
            await lab.proxy.give_up([request.trajectory_id, "unknown"], ["a", "unknown"])
            await lab.check_nothing_left()

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------------- update
@pytest.mark.parametrize("moment", [1, 3, 8, 20, 40])
def test_an_update_in_the_middle_has_everything_read_again_under_the_new_weights(
    tmp_path: Path, model: TinyModel, moment: int
) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            requests = [ask(str(i), prompt, LONG) for i, prompt in enumerate(prompts(5, shortest=20))]
            flying = asyncio.ensure_future(everyone(lab.proxy, requests))
            for _ in range(moment):
                await asyncio.sleep(0)
            await lab.proxy.suspend()
            for _ in range(30):
                await asyncio.sleep(0)
            await lab.proxy.update(1)
            for _ in range(30):
                await asyncio.sleep(0)
            await lab.proxy.resume()
            for request, result in zip(requests, await flying, strict=True):
                old = result.versions.count(0)
                assert result.versions == [0] * old + [1] * (40 - old)
                assert result.logprobs[:old] == close(model.score(request.prompt, result.tokens)[:old])
                assert result.logprobs[old:] == close(model.score(request.prompt, result.tokens, other=True)[old:])
            assert (await lab.writer.stats()).prefilled_tokens == 0
            await lab.check_nothing_left(*(request.trajectory_id for request in requests))

    asyncio.run(main())


def test_kv_of_older_weights_goes_back_unused(tmp_path: Path, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            request = ask("a", prompts(1, shortest=20)[0])
            handoff = await lab.reader.prefill(request, nothing(request), 0)
            await lab.writer.update(1)
            assert await lab.writer.decode(request, handoff) == handoff.result
            assert lab.files == []
            stats = await lab.writer.stats()
            assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------------- trouble
@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
def test_an_engine_that_cannot_hand_over_is_refused_at_the_start(
    kind: type[PrefillWorker] | type[DecodeWorker],
) -> None:
    with pytest.raises(ConfigError, match=r"roles\.prefill: CountingEngine cannot hand keys and values"):
        kind("folder", CountingEngine, {}, Shelf({}))


def test_a_request_that_can_never_run_raises_at_its_caller(tmp_path: Path, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model) as lab:
            with pytest.raises(GenerationError, match="'prefill', prefill: request a: the prompt is empty"):
                await lab.proxy.generate(ask("a", []))
            (result,) = await everyone(lab.proxy, [ask("b", [1])])
            assert result.finish_reason == "length"

    asyncio.run(main())


def test_a_parcel_is_found_once_and_a_folder_that_is_gone_keeps_none(tmp_path: Path) -> None:
    parcels = Parcels(str(tmp_path))
    assert parcels.put("a/b", b"keys and values")
    taken = parcels.take("a/b")
    assert taken is not None
    assert bytes(taken) == b"keys and values"
    assert parcels.take("a/b") is None
    assert parcels.put("empty", b"")
    assert parcels.take("empty") == b""
    assert parcels.put("c", b"1")
    assert parcels.put("c", b"other")
    parcels.drop("c")
    parcels.drop("c")
    assert list(tmp_path.iterdir()) == []
    assert not Parcels(str(tmp_path / "gone")).put("a", b"1")
    assert not Parcels("").put("a", b"1")
    assert Parcels("").take("a") is None
