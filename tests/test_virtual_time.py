"""The event loop of virtual time: what moves it, in which order things happen, and how it ends."""

from __future__ import annotations

import asyncio
import contextvars
import signal

import pytest

from rollart.virtual_time import Deadlock, run_virtual


def test_time_starts_at_zero_and_moves_only_with_sleep() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        for _ in range(1000):
            await asyncio.sleep(0)
        seen.append(loop.time())
        await asyncio.sleep(1e9)
        seen.append(loop.time())
        return seen

    assert run_virtual(main()) == [0.0, 0.0, 1e9]


def test_timers_go_off_in_order_of_time_and_those_of_one_moment_as_they_were_asked_for() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), []
        done = loop.create_future()
        for name, when in (("late", 3.0), ("b", 2.0), ("first", 1.0), ("c", 2.0), ("a", 2.0)):
            loop.call_at(when, seen.append, f"{name} {when:g}")
        loop.call_at(2.0, lambda: loop.call_soon(seen.append, f"soon {loop.time():g}"))
        loop.call_at(2.0, seen.append, "d 2")
        loop.call_at(3.0, done.set_result, None)
        await done
        return seen

    assert run_virtual(main()) == ["first 1", "b 2", "c 2", "a 2", "d 2", "soon 2", "late 3"]


def test_a_timer_of_the_past_goes_off_now_and_time_does_not_run_back() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        done = loop.create_future()
        loop.call_at(1.0, lambda: done.set_result(loop.time()))
        return await done, loop.time()

    assert run_virtual(main()) == (5.0, 5.0)


def test_cancelled_timers_do_not_go_off_however_many_there_are() -> None:
    async def main() -> tuple[list[int], float]:
        loop, seen = asyncio.get_running_loop(), []
        timers = [loop.call_at(float(number), seen.append, number) for number in range(1, 2001)]
        for number, timer in enumerate(timers, start=1):
            if number % 500:
                timer.cancel()
                timer.cancel()
        await asyncio.sleep(1500.5)
        return seen, loop.time()

    assert run_virtual(main()) == ([500, 1000, 1500], 1500.5)


def test_a_limit_of_time_ends_what_takes_longer_and_costs_nothing_else() -> None:
    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            await asyncio.sleep(9)
        try:
            async with asyncio.timeout(10):
                await asyncio.sleep(11)
        except TimeoutError:
            return "too late", loop.time()
        return "in time", loop.time()

    assert run_virtual(main()) == ("too late", 19.0)


def test_what_is_handed_to_a_thread_is_done_at_once_within_no_time() -> None:
    def fails() -> None:
        raise ValueError("from the thread")

    async def main() -> tuple[int, float]:
        answer = await asyncio.to_thread(sum, [1, 2, 3])
        with pytest.raises(ValueError, match="from the thread"):
            await asyncio.to_thread(fails)
        return answer, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (6, 0.0)


def test_each_task_keeps_its_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")

    async def child(name: str) -> str:
        variable.set(name)
        await asyncio.sleep(1)
        return variable.get()

    async def main() -> list[str]:
        return [*await asyncio.gather(child("a"), child("b")), variable.get()]

    assert run_virtual(main()) == ["a", "b", "outside"]


def test_waiting_for_what_can_never_happen_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="every task waits"):
        run_virtual(main())


def test_an_interrupt_cancels_the_program_and_lets_it_clean_up() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(5, signal.raise_signal, signal.SIGINT)
        try:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(2)
            seen.append(f"{loop.time():g}")

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert seen == ["7"]


def test_an_error_in_a_callback_is_told_and_the_others_go_on() -> None:
    async def main() -> tuple[list[str], float]:
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        loop.call_later(1, int, "no number")
        await asyncio.sleep(2)
        return told, loop.time()

    assert run_virtual(main()) == (["invalid literal for int() with base 10: 'no number'"], 2.0)
