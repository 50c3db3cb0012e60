"""Reading on one vLLM and decoding on another: the contract, and what it does not say of vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollart.control.prefill import NOBODY
from rollart.types import Sampling
from tests.data.engine_contract import GREEDY, Kind, MakeEngine, ask, assert_same, close, finish, prompts, run
from tests.data.handoff_contract import *  # noqa: F403
from tests.data.handoff_contract import Pair, nothing
from tests.data.test_handoff_workers import built, everyone, turns
from tests.data.tiny_models import TinyModel
from tests.production.conftest import SMALL, Cores
from tests.production.test_vllm_contract import KEEPS

REDRAWS = "vLLM draws a request's tokens one after the other, and begins anew where it is added again"


@pytest.fixture
def kind() -> Kind:
    return Kind("vllm", SMALL["block_size"], KEEPS, forget=lambda engine, _: engine.forget(), redraws=REDRAWS)


@pytest.fixture
def make_engine(cores: Cores) -> MakeEngine:
    return cores.engine


def test_vllm_counts_all_that_arrived_as_hits_of_a_cache_outside(pair: Pair) -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    scheduler = pair.writer._core._llm.engine_core.engine_core.scheduler
    scheduler.connector_prefix_cache_stats = counted = PrefixCacheStats()
    try:
        requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(5, longest=100))]
        pair.run(*requests)
    finally:
        scheduler.connector_prefix_cache_stats = None
    num_tokens = sum(len(request.prompt) for request in requests)
    # What it asked for is that and the token that came with it, which it computes.
    assert (counted.queries, counted.hits) == (num_tokens + 5, num_tokens)


def test_blocks_that_are_gone_when_their_request_has_its_turn_are_read_again(pair: Pair) -> None:
    """What had arrived does not join on to what vLLM keeps any more."""
    history = prompts(1, shortest=70, longest=70)[0]
    (first,) = pair.run(ask("a", history, GREEDY, "t"))
    request = ask("b", [*history, *first.tokens, 1, 2, 3], GREEDY, "t")
    (read,) = pair.read(request)
    pair.writer.suspend()
    pair.carry(request, read)
    pair.writer.forget()
    pair.writer.resume()
    result = finish(pair.writer)["b"]
    assert_same([result], run(pair.both, request))
    assert result.received_tokens == 0


def test_sampled_tokens_have_the_log_probabilities_of_a_plain_forward_pass(pair: Pair, model: TinyModel) -> None:
    requests = [ask(str(i), prompt, Sampling(max_tokens=30)) for i, prompt in enumerate(prompts(6))]
    results = pair.run(*requests)
    for request, result in zip(requests, results, strict=True):
        assert result.logprobs == close(model.score(request.prompt, result.tokens))
    assert pair.writer.stats().prefilled_tokens == 0


@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "connection"])
def test_workers_hand_over_and_the_one_that_decodes_reads_nothing(
    tmp_path: Path, cores: Cores, model: TinyModel, share: bool
) -> None:
    async def main() -> None:
        async with built(tmp_path, model, share, cores.engine) as lab:
            given = {"first": GREEDY, "shortest": 34}
            results = await turns(lab.proxy, **given)
            assert_same(results, await turns(lab.both, **given))
            report, reader, writer = lab.report(), await lab.reader.stats(), await lab.writer.stats()
            assert (report.read, report.again, report.by_decode_workers) == (18, 0, {})
            assert report.received_tokens == writer.received_tokens > 0
            assert reader.generated_tokens == 18
            # Over a connection travels what is left when it is asked for: whole blocks.
            assert writer.prefilled_tokens == 0 if share else writer.prefilled_tokens < 18 * SMALL["block_size"]
            await lab.check_nothing_left(*(f"t{i}" for i in range(6)))

    asyncio.run(main())


def test_an_update_has_everything_in_flight_read_again(tmp_path: Path, cores: Cores, model: TinyModel) -> None:
    async def main() -> None:
        async with built(tmp_path, model, True, cores.engine) as lab:
            requests = [ask(str(i), prompt, Sampling(0, max_tokens=40)) for i, prompt in enumerate(prompts(5))]
            flying = asyncio.ensure_future(everyone(lab.proxy, requests))
            while (await lab.writer.stats()).generated_tokens < 30:  # noqa: ASYNC110  (lets the loop run on)
                await asyncio.sleep(0)
            await lab.proxy.suspend()
            await lab.proxy.update(1)
            await lab.proxy.resume()
            for request, result in zip(requests, await flying, strict=True):
                old = result.versions.count(0)
                assert 0 < old < 40
                assert result.versions == [0] * old + [1] * (40 - old)
                assert result.logprobs[:old] == close(model.score(request.prompt, result.tokens)[:old])
                assert result.logprobs[old:] == close(model.score(request.prompt, result.tokens, other=True)[old:])
            assert (await lab.writer.stats()).prefilled_tokens == 0
            assert lab.report().again == 5
            await lab.check_nothing_left(*(request.trajectory_id for request in requests))

    asyncio.run(main())


def test_the_death_of_the_reader_costs_nothing_and_an_abort_leaves_nothing(
    tmp_path: Path, cores: Cores, model: TinyModel
) -> None:
    async def main() -> None:
        async with built(tmp_path, model, True, cores.engine) as lab:
            requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts(3))]
            handoffs = [await lab.reader.prefill(request, nothing(request), 0) for request in requests]
            assert len(lab.files) == 3
            lab.proxy.abort(requests[2].trajectory_id)
            await lab.proxy.give_up([], [requests[2].request_id])
            assert len(lab.files) == 2
            await lab._reader.stop()
            results = [await lab.writer.decode(*each) for each in zip(requests[:2], handoffs[:2], strict=True)]
            assert [result.received_tokens for result in results] == [len(request.prompt) for request in requests[:2]]
            lab.proxy.lost("prefill")
            results += await everyone(lab.proxy, [requests[2]])
            assert_same(results, await everyone(lab.both, requests))
            assert lab.report().by_decode_workers == {NOBODY: 1}
            assert lab.files == []

    asyncio.run(main())
