"""The simulated inference worker: real commands in virtual time, weights, death, and prefill on other devices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from rollart.data.engines.simulated import SimulatedEngine
from rollart.data.inference import RemoteInference
from rollart.data.simulated.inference import SimulatedInference
from rollart.data.simulated.profile import Link
from rollart.data.simulated.store import SimulatedStore
from rollart.data.simulated.timeline import Timeline
from rollart.errors import ConfigError, GenerationError, WeightsError, WorkerDied
from rollart.types import GenResult
from rollart.virtual_time import run_virtual
from tests.data.engines.small_devices import SMALL, TYPICAL, ask, small_pace

EFFICIENCY = replace(TYPICAL, step_overhead_s=0.01, chunk_tokens=200)
LINKS = {
    "push": Link(latency_s=0.0, bytes_per_s=1e9),
    "pull": Link(latency_s=0.0, bytes_per_s=1e9),
    "load": Link(latency_s=0.0, bytes_per_s=4e9),
    "kv": Link(latency_s=0.1, bytes_per_s=SMALL.kv_bytes_per_token * 100.0),
}
PULL_S, LOAD_S = SMALL.weight_bytes / 1e9, SMALL.weight_bytes / 4e9


class Cluster:
    """A store with version 0, and workers on it."""

    def __init__(self, links: dict[str, Link] = LINKS, timeline: Timeline | None = None) -> None:
        self.links, self.timeline = links, timeline
        self.store = SimulatedStore(SMALL, links)

    def worker(self, name: str = "worker", peers: Any = (), room: int = 2000) -> SimulatedInference:
        pace = small_pace(EFFICIENCY, room)
        engine = SimulatedEngine(pace, EFFICIENCY, max_model_tokens=room)
        return SimulatedInference(name, engine, self.store, pace, self.links, peers, self.timeline)


def now() -> float:
    return asyncio.get_running_loop().time()


def started(worker: SimulatedInference, *arguments: Any, **options: Any) -> asyncio.Task[GenResult]:
    return asyncio.create_task(worker.generate(ask(*arguments, **options)))


def test_a_request_takes_the_engine_s_time() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        result = await worker.generate(ask("a", 40, 11))
        assert (len(result.tokens), result.finish_reason) == (11, "stop")
        assert now() == pytest.approx(result.prefill_s + result.decode_s)
        stats = await worker.stats()
        assert (stats.generated_tokens, stats.running) == (11, 0)
        assert await worker.logprobs([1, 2, 3]) == [0.0, 0.0]
        assert await worker.parameters() == []

    run_virtual(main())


def test_requests_of_one_moment_share_their_first_step() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        await asyncio.gather(*(started(worker, str(number), 20, 1) for number in range(5)))
        assert (await worker.stats()).steps == 1

    run_virtual(main())


def test_an_abort_returns_the_partial_result_at_once() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        task = started(worker, "a", 40, 1000)
        await asyncio.sleep(1.0)
        await worker.abort(["a", "unknown"])
        result = await task
        assert now() == 1.0
        assert result.finish_reason == "abort"
        assert 0 < len(result.tokens) < 1000
        worker.engine.check()

    run_virtual(main())


def test_a_caller_that_gives_up_frees_its_request() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        task = started(worker, "a", 40, 1000)
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await worker.stats()).running == 0

    run_virtual(main())


def test_an_impossible_request_is_refused_and_the_next_one_runs() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        with pytest.raises(GenerationError):
            await worker.generate(ask("a", 5000, 1))
        await worker.generate(ask("a", 10, 1))

    run_virtual(main())


def test_released_kv_is_forgotten() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        await worker.generate(ask("1", 40, 10, "t"))
        assert worker.engine.kept_tokens("t") == 49
        await worker.release(["t", "unknown"])
        assert worker.engine.kept_tokens("t") == 0

    run_virtual(main())


# ------------------------------------------------------------------------------------------------------------- weights
def test_suspend_returns_when_the_step_under_way_has_ended() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        task = started(worker, "a", 200, 10)
        await asyncio.sleep(0.001)
        await worker.suspend()
        first_step = now()
        assert first_step == pytest.approx(small_pace(EFFICIENCY).prefill_step(200, 200 * 201 / 2))
        await worker.suspend()
        assert now() == first_step
        await asyncio.sleep(100.0)
        assert (await worker.stats()).generated_tokens == 1
        await worker.resume()
        assert len((await task).tokens) == 10
        assert now() > 100.0

    run_virtual(main())


def test_a_prefetched_version_costs_only_its_loading() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker()
        await cluster.store.publish(1)
        began = now()
        await worker.prefetch(1)
        assert now() - began == pytest.approx(PULL_S)
        began = now()
        await worker.update(1)
        assert now() - began == pytest.approx(LOAD_S)
        assert (await worker.stats()).version == 1

    run_virtual(main())


def test_an_update_waits_for_the_pull_under_way_or_pulls_itself() -> None:
    async def main() -> None:
        cluster = Cluster()
        waiting, pulling = cluster.worker(), cluster.worker()
        await cluster.store.publish(1)
        began = now()
        prefetch = asyncio.create_task(waiting.prefetch(1))
        await asyncio.sleep(PULL_S / 2)
        await waiting.update(1)
        assert now() - began == pytest.approx(PULL_S + LOAD_S)
        await prefetch
        began = now()
        await pulling.update(1)
        assert now() - began == pytest.approx(PULL_S + LOAD_S)

    run_virtual(main())


def test_an_update_with_requests_under_way_recomputes_them_under_the_new_version() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker()
        await cluster.store.publish(1)
        task = started(worker, "a", 40, 200)
        await asyncio.sleep(1.0)
        await worker.prefetch(1)
        await worker.suspend()
        await worker.update(1)
        await worker.resume()
        result = await task
        assert sorted(set(result.versions)) == [0, 1]
        assert (await worker.stats()).recomputed_tokens == 40 + result.versions.count(0) - 1

    run_virtual(main())


def test_an_update_without_a_suspension_holds_the_engine_by_itself() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker()
        await cluster.store.publish(1)
        task = started(worker, "a", 40, 400)
        await asyncio.sleep(0.5)
        await worker.update(1)
        assert not worker.engine.suspended
        assert 1 in (await task).versions

    run_virtual(main())


def test_a_version_that_is_not_there_leaves_the_old_one() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker()
        for call in (worker.prefetch, worker.update):
            with pytest.raises(WeightsError, match="version 5"):
                await call(5)
        await cluster.store.publish(5)
        await worker.update(5)
        assert (await worker.stats()).version == 5

    run_virtual(main())


def test_death_ends_what_runs_and_what_waits() -> None:
    async def main() -> None:
        worker = Cluster().worker()
        task = started(worker, "a", 40, 1000)
        await asyncio.sleep(0.5)
        suspended = asyncio.create_task(worker.suspend())
        await asyncio.sleep(0)
        worker.die(WorkerDied("gone"))
        for waiting in (task, suspended, worker.generate(ask("b", 10, 1))):
            with pytest.raises(WorkerDied, match="gone"):
                await waiting

    run_virtual(main())


def test_the_timeline_shows_what_the_engine_did() -> None:
    async def main() -> Timeline:
        timeline = Timeline()
        await Cluster(timeline=timeline).worker("engine-0").generate(ask("a", 40, 11))
        return timeline

    events = run_virtual(main()).to_chrome()["traceEvents"]
    assert [each["name"] for each in events if each["ph"] == "X"] == ["prefill", "decode"]
    assert any(each["ph"] == "C" for each in events)


def test_the_worker_answers_all_calls_that_control_makes() -> None:
    # `decode` apart: a simulated worker has prompts read on its peers by itself.
    other = ("name", "stop", "decode")
    calls = [name for name in vars(RemoteInference) if not name.startswith("_") and name not in other]
    assert all(callable(getattr(SimulatedInference, name)) for name in calls)


# --------------------------------------------------------------------------------------------------- prefill elsewhere
def test_a_request_is_read_on_a_peer_crosses_the_link_and_is_decoded_here() -> None:
    async def main() -> None:
        cluster = Cluster()
        peer = cluster.worker("peer")
        worker = cluster.worker("worker", [peer])
        result = await worker.generate(ask("a", 40, 11))
        assert (len(result.tokens), result.finish_reason) == (11, "stop")
        assert now() == pytest.approx(result.prefill_s + result.decode_s + 0.1 + 40 / 100)
        there, here = await peer.stats(), await worker.stats()
        assert (there.prefilled_tokens, there.generated_tokens) == (40, 1)
        assert (here.prefilled_tokens, here.generated_tokens) == (0, 10)

    run_virtual(main())


def test_a_further_turn_reads_and_moves_only_what_is_new() -> None:
    async def main() -> None:
        cluster = Cluster()
        peers = [cluster.worker("peer 0"), cluster.worker("peer 1")]
        worker = cluster.worker("worker", peers)
        await worker.generate(ask("1", 40, 11, "t"))
        began = now()
        result = await worker.generate(ask("2", 71, 5, "t"))
        assert result.cached_tokens == 40
        assert now() - began == pytest.approx(result.prefill_s + result.decode_s + 0.1 + (71 - 50) / 100)
        prefilled = [(await peer.stats()).prefilled_tokens for peer in peers]
        assert prefilled == [40 + 31, 0]
        await worker.release(["t"])
        assert [each.engine.kept_tokens("t") for each in (worker, *peers)] == [0, 0, 0]

    run_virtual(main())


def test_new_trajectories_go_to_the_peer_with_the_least_to_read() -> None:
    async def main() -> None:
        cluster = Cluster()
        peers = [cluster.worker("peer 0"), cluster.worker("peer 1")]
        worker = cluster.worker("worker", peers)
        await asyncio.gather(*(started(worker, str(number), 100, 2) for number in range(4)))
        assert [(await peer.stats()).prefilled_tokens for peer in peers] == [200, 200]

    run_virtual(main())


def test_an_answer_of_one_token_never_crosses_the_link() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker("worker", [cluster.worker("peer")])
        stop, length = await worker.generate(ask("a", 40, 1)), await worker.generate(ask("b", 40, 9, max_tokens=1))
        assert (stop.finish_reason, length.finish_reason) == ("stop", "length")
        assert (await worker.stats()).generated_tokens == 0

    run_virtual(main())


def test_the_link_carries_one_request_after_the_other() -> None:
    async def main() -> None:
        cluster = Cluster()
        worker = cluster.worker("worker", [cluster.worker("peer 0"), cluster.worker("peer 1")])
        both = await asyncio.gather(started(worker, "a", 100, 2), started(worker, "b", 100, 2))
        last_decode_s = min(each.decode_s for each in both)
        assert now() >= both[0].prefill_s + 0.1 + 2 * 100 / 100 + last_decode_s - 1e-9

    run_virtual(main())


def test_after_an_update_requests_are_read_by_their_peers_again() -> None:
    async def main() -> None:
        cluster = Cluster()
        peer = cluster.worker("peer")
        worker = cluster.worker("worker", [peer])
        await cluster.store.publish(1)
        task = started(worker, "a", 40, 200)
        await asyncio.sleep(1.5)
        for each in (peer, worker):
            await each.suspend()
        moving = started(worker, "b", 40, 5)
        for each in (peer, worker):
            await each.update(1)
        for each in (peer, worker):
            await each.resume()
        result = await task
        made = result.versions.count(0)
        assert result.versions == [0] * made + [1] * (200 - made)
        assert (result.finish_reason, len((await moving).tokens)) == ("stop", 5)
        assert (await peer.stats()).prefilled_tokens == 40 + (40 + made) + 40
        assert (await worker.stats()).prefilled_tokens == 0
        assert 1 < made < 200

    run_virtual(main())


def test_kv_that_crosses_the_link_during_an_update_is_made_again() -> None:
    async def main() -> None:
        links = LINKS | {"kv": Link(latency_s=1000.0, bytes_per_s=1e12)}
        cluster = Cluster(links)
        peer = cluster.worker("peer")
        worker = cluster.worker("worker", [peer])
        await cluster.store.publish(1)
        task = started(worker, "a", 40, 20)
        await asyncio.sleep(10.0)
        await asyncio.gather(peer.update(1), worker.update(1))
        result = await task
        assert result.versions == [0] + [1] * 19
        assert (await peer.stats()).prefilled_tokens == 40 + 41

    run_virtual(main())


@pytest.mark.parametrize(("after", "least", "most"), [(0.001, 0, 0), (0.3, 1, 1), (1.5, 2, 199)])
def test_an_abort_finds_a_request_wherever_it_is(after: float, least: int, most: int) -> None:
    async def main() -> None:
        cluster = Cluster()
        peer = cluster.worker("peer")
        worker = cluster.worker("worker", [peer])
        task = started(worker, "a", 40, 200)
        await asyncio.sleep(after)
        await worker.abort(["a"])
        result = await task
        assert result.finish_reason == "abort"
        assert least <= len(result.tokens) <= most
        for each in (peer, worker):
            each.engine.check()
            assert (await each.stats()).running == 0
        assert len((await worker.generate(ask("a", 40, 3))).tokens) == 3

    run_virtual(main())


def test_when_a_peer_dies_another_reads_and_without_any_the_engine_itself() -> None:
    async def main() -> None:
        cluster = Cluster()
        peers = [cluster.worker("peer 0"), cluster.worker("peer 1")]
        worker = cluster.worker("worker", peers)
        task = started(worker, "a", 200, 5)
        await asyncio.sleep(0.01)
        peers[0].die(WorkerDied("gone"))
        assert len((await task).tokens) == 5
        assert (await peers[1].stats()).prefilled_tokens == 200
        peers[1].die(WorkerDied("gone"))
        assert len((await worker.generate(ask("b", 100, 5))).tokens) == 5
        assert (await worker.stats()).prefilled_tokens == 100

    run_virtual(main())


def test_without_room_a_request_is_read_by_its_peer_again() -> None:
    async def main() -> None:
        cluster = Cluster()
        peer = cluster.worker("peer")
        worker = cluster.worker("worker", [peer], room=100)
        results = await asyncio.gather(started(worker, "a", 30, 50), started(worker, "b", 30, 50))
        assert [len(each.tokens) for each in results] == [50, 50]
        assert worker.engine.preemptions >= 1
        assert (await worker.stats()).prefilled_tokens == 0
        worker.engine.check()

    run_virtual(main())


def test_prefill_elsewhere_needs_a_link_for_kv() -> None:
    async def main() -> None:
        cluster = Cluster({name: link for name, link in LINKS.items() if name != "kv"})
        worker = cluster.worker("worker", [cluster.worker("peer")])
        with pytest.raises(ConfigError, match=r"links\.kv is missing"):
            await worker.generate(ask("a", 40, 5))

    run_virtual(main())
