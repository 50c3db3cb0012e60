from __future__ import annotations

import asyncio

import pytest

from rollart.control.background import Background
from rollart.control.llm_proxy import LLMProxy
from rollart.errors import GenerationError, WeightsError, WeightsLost, WorkerDied
from rollart.types import GenRequest, Sampling
from rollart.virtual_time import run_virtual
from tests.fakes import FakeInference, FakeStore


def request(name: str, trajectory_id: str = "") -> GenRequest:
    return GenRequest(name, trajectory_id or name, [1, 2, 3], Sampling())


def engines(num: int = 2, **options: object) -> list[FakeInference]:
    store = FakeStore({0, 1})
    return [FakeInference(store, f"w{n}", **options) for n in range(num)]  # type: ignore[arg-type]


def test_requests_are_spread_and_stay_with_their_trajectory() -> None:
    async def main() -> list[list[str]]:
        workers = engines()
        proxy = LLMProxy(workers)
        for turn in range(3):
            await asyncio.gather(*(proxy.generate(request(f"r{turn}{t}", t)) for t in "ab"))
        assert proxy.num_in_flight == 0
        return [[r.trajectory_id for r in worker.requests] for worker in workers]

    assert run_virtual(main()) == [["a", "a", "a"], ["b", "b", "b"]]


def test_suspend_holds_new_requests_at_the_gate_and_keeps_the_tokens_of_those_in_flight() -> None:
    async def main() -> None:
        (worker,) = engines(1)
        worker.version = 0
        proxy = LLMProxy([worker])
        flying = asyncio.ensure_future(proxy.generate(request("old")))
        await asyncio.sleep(0.15)
        await proxy.suspend()
        waiting = asyncio.ensure_future(proxy.generate(request("new")))
        await asyncio.sleep(5.0)
        assert [r.request_id for r in worker.requests] == ["old"]
        await proxy.update(1)
        await proxy.resume()
        assert (await flying).versions == [0, 1, 1]
        assert (await waiting).versions == [1, 1, 1]
        assert proxy.version == 1

    run_virtual(main())


def test_abort_ends_requests_at_the_gate_and_on_workers() -> None:
    async def main() -> None:
        (worker,) = engines(1, num_tokens=lambda request: 50)
        proxy = LLMProxy([worker])
        flying = asyncio.ensure_future(proxy.generate(request("r1", "t1")))
        await asyncio.sleep(0.35)
        proxy.abort("t1")
        result = await flying
        assert (result.finish_reason, len(result.tokens)) == ("abort", 3)
        await proxy.suspend()
        waiting = asyncio.ensure_future(proxy.generate(request("r2", "t2")))
        await asyncio.sleep(1.0)
        proxy.abort("t2")
        assert (await waiting).finish_reason == "abort"
        assert worker.aborted == ["r1"]
        assert proxy.num_in_flight == 0
        proxy.abort("unknown")

    run_virtual(main())


def test_trajectories_that_end_while_a_worker_is_told_of_others_share_one_call() -> None:
    async def main() -> None:
        (worker,) = engines(1)
        proxy = LLMProxy([worker])
        await asyncio.gather(*(proxy.generate(request(f"r{n}", f"t{n}")) for n in range(5)))
        for number in range(3):
            proxy.release(f"t{number}")
        await asyncio.sleep(0)
        proxy.release("t3")
        await asyncio.sleep(0.1)
        assert worker.releases == [["t0", "t1", "t2"], ["t3"]]
        worker.dead = "killed"
        proxy.release("t4")
        await asyncio.sleep(0.1)
        worker.dead = ""
        proxy.release("t4")
        await asyncio.gather(proxy.generate(request("r6", "t6")))
        proxy.release("t6")
        await asyncio.sleep(0.1)
        assert worker.releases[2:] == [["t6"]]

    run_virtual(main())


def test_an_error_of_one_request_names_its_worker_and_spares_the_run() -> None:
    async def main() -> None:
        (worker,) = engines(1)
        worker.failing = lambda request: True
        proxy = LLMProxy([worker])
        with pytest.raises(GenerationError, match="inference worker 'w0', generate: the engine is out of KV memory"):
            await proxy.generate(request("r"))
        assert proxy.num_workers == 1

    run_virtual(main())


def test_the_requests_of_a_dead_worker_go_to_another() -> None:
    async def main() -> None:
        workers = engines()
        workers[0].dead = "killed"
        proxy = LLMProxy(workers)
        results = await asyncio.gather(*(proxy.generate(request(f"r{n}")) for n in range(4)))
        assert [each.finish_reason for each in results] == ["stop"] * 4
        assert proxy.num_workers == 1
        assert sorted(r.request_id for r in workers[1].requests) == ["r0", "r1", "r2", "r3"]
        assert proxy.num_in_flight == 0

    run_virtual(main())


def test_without_any_worker_requests_wait_until_one_joins_with_the_weights_of_now() -> None:
    async def main() -> None:
        first, second = engines()
        proxy = LLMProxy([first])
        await proxy.update(1)
        first.dead = "killed"
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        given_up = asyncio.ensure_future(proxy.generate(request("s", "t")))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        assert proxy.num_workers == 0
        proxy.abort("t")
        assert (await given_up).finish_reason == "abort"
        await proxy.join(second)
        assert (await waiting).versions == [1, 1, 1]
        assert proxy.version == second.version == 1

    run_virtual(main())


def test_a_worker_that_joins_while_suspended_waits_for_the_update_and_resumes_with_all() -> None:
    async def main() -> None:
        first, second = engines()
        proxy = LLMProxy([first])
        await proxy.update(0)
        await proxy.suspend()
        await proxy.join(second)
        assert second.is_suspended
        await proxy.update(1)
        await proxy.resume()
        assert (first.version, second.version) == (1, 1)
        assert not second.is_suspended

    run_virtual(main())


def test_a_worker_that_dies_in_an_update_is_left_out_of_it() -> None:
    async def main() -> None:
        workers = engines()
        proxy = LLMProxy(workers)
        workers[0].dead = "killed"
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        assert list(await proxy.stats()) == ["w1"]
        assert proxy.version == 1

    run_virtual(main())


def test_an_update_that_fails_names_worker_and_version_and_leaves_the_version() -> None:
    async def main() -> None:
        proxy = LLMProxy(engines())
        with pytest.raises(WeightsError, match="'w0', update to version 9: version 9 was not published"):
            await proxy.update(9)
        assert proxy.version == 0

    run_virtual(main())


def test_a_worker_that_holds_other_weights_after_an_update_ends_it_by_name() -> None:
    async def main() -> None:
        workers = engines()
        proxy = LLMProxy(workers)
        await proxy.update(0)
        workers[1].keeps_its_weights = True
        with pytest.raises(
            WeightsError, match="'w1', update to version 1: it holds version 0 after it was given version 1"
        ):
            await proxy.update(1)
        assert proxy.version == 0

    run_virtual(main())


def test_versions_never_go_back() -> None:
    async def main() -> None:
        workers = engines()
        proxy = LLMProxy(workers)
        await proxy.update(1)
        with pytest.raises(WeightsError, match="update to version 0: the inference workers hold version 1"):
            await proxy.update(0)
        assert [worker.version for worker in workers] == [1, 1]
        await proxy.update(1)

    run_virtual(main())


def test_a_worker_that_never_acknowledges_is_ended_and_the_others_go_on() -> None:
    async def main() -> None:
        said: list[str] = []
        workers = engines()
        workers[0].update_s = 1e9
        background = Background()
        proxy = LLMProxy(workers, background=background, say=said.append, answer_timeout_s=30.0)
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        await background.drain(1.0)
        assert workers[0].dead == "stopped"
        assert proxy.num_workers == 1
        assert (await proxy.generate(request("r"))).versions == [1, 1, 1]
        end = "update to version 1: no answer within 30 s (weights.update_timeout_s); it is ended and replaced"
        assert said == [f"inference worker 'w0', {end}"]
        assert asyncio.get_running_loop().time() < 40.0

    run_virtual(main())


@pytest.mark.parametrize("call", ["prefetch", "suspend", "resume", "logprobs", "stats"])
def test_a_worker_that_hangs_in_any_call_is_ended_once_and_the_others_go_on(call: str) -> None:
    async def main() -> None:
        said: list[str] = []
        workers = engines()
        background = Background()
        proxy = LLMProxy(workers, background=background, say=said.append, answer_timeout_s=30.0)
        await proxy.update(1)
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0)
        workers[1].hangs_in = call
        arguments = {"prefetch": (1,), "logprobs": ([1, 2],)}.get(call, ())
        await asyncio.gather(*(getattr(proxy, call)(*arguments) for _ in range(2)))
        await background.drain(1.0)
        assert ([each.dead for each in workers], proxy.num_workers) == (["", "stopped"], 1)
        assert len(said) == 1
        assert "'w1'" in said[0]
        await proxy.resume()
        assert (await waiting).finish_reason == "stop"

    run_virtual(main())


def test_a_worker_that_joins_and_never_acknowledges_is_not_taken_in() -> None:
    async def main() -> None:
        first, second = engines()
        proxy = LLMProxy([first], answer_timeout_s=30.0)
        await proxy.update(1)
        second.update_s = 1e9
        with pytest.raises(WorkerDied, match="'w1', update to version 1: no answer within 30 s"):
            await proxy.join(second)
        assert proxy.num_workers == 1

    run_virtual(main())


def test_a_worker_that_joins_when_the_weights_of_now_are_lost_waits_for_the_next() -> None:
    async def main() -> None:
        store = FakeStore({0, 1})
        first, second = FakeInference(store, "w0"), FakeInference(store, "w1")
        proxy = LLMProxy([first])
        await proxy.update(0)
        store.lost.add(0)
        joining = asyncio.ensure_future(proxy.join(second))
        await asyncio.sleep(5.0)
        assert (joining.done(), proxy.num_workers) == (False, 1)
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        await joining
        assert (second.version, proxy.num_workers) == (1, 2)

    run_virtual(main())


def test_nobody_waits_for_next_weights_when_there_is_no_other_worker_to_bring_them_about() -> None:
    async def main() -> None:
        store = FakeStore({0})
        first, second = FakeInference(store, "w0"), FakeInference(store, "w1")
        proxy = LLMProxy([first])
        await proxy.update(0)
        store.lost.add(0)
        joining = asyncio.ensure_future(proxy.join(second))
        await asyncio.sleep(5.0)
        proxy.lost("w0")
        with pytest.raises(WeightsLost):
            await joining

    run_virtual(main())
