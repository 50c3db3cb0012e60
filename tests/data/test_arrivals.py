"""Results of threads reach the event loop once each, in order, errors and cancellations included."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from rollart.data.arrivals import Arrivals


def test_results_of_many_threads_arrive_with_their_callers() -> None:
    async def main() -> list[int]:
        arrivals, futures = Arrivals(), [Future[int]() for _ in range(200)]
        threads = [threading.Thread(target=future.set_result, args=[n]) for n, future in enumerate(futures)]
        waits = [asyncio.ensure_future(arrivals.wait(future)) for future in futures]
        for thread in threads:
            thread.start()
        return await asyncio.wait_for(asyncio.gather(*waits), 10)

    assert asyncio.run(main()) == list(range(200))


def test_an_error_arrives_as_itself_and_what_is_there_already_at_once() -> None:
    async def main() -> None:
        arrivals, bad, good = Arrivals(), Future[int](), Future[int]()
        bad.set_exception(KeyError("no such page"))
        good.set_result(1)
        with pytest.raises(KeyError, match="no such page"):
            await arrivals.wait(bad)
        assert await arrivals.wait(good) == 1

    asyncio.run(main())


def test_giving_up_cancels_what_has_not_begun_and_disturbs_nobody_else() -> None:
    async def main() -> None:
        arrivals, queued, running, other = Arrivals(), Future[int](), Future[int](), Future[int]()
        assert running.set_running_or_notify_cancel()
        waits = [asyncio.ensure_future(arrivals.wait(future)) for future in (queued, running, other)]
        await asyncio.sleep(0)
        for wait in waits[:2]:
            wait.cancel()
        await asyncio.gather(*waits[:2], return_exceptions=True)
        assert queued.cancelled()
        running.set_result(1)
        other.set_result(2)
        assert await waits[2] == 2

    asyncio.run(main())
