"""The calling side against an endpoint that does as told: tries, breaker, hedge, batch, limit, fallback and meter."""

import asyncio

import msgspec
import pytest

from rollart.data.serverless.breaker import Breaker
from rollart.data.serverless.endpoint import Answer, Capacity
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.limiter import Gate, Limit
from rollart.data.serverless.meter import Usage, merged
from rollart.errors import EndpointBusy, EndpointError, FunctionError, FunctionTimeout

QUICK = CallPolicy(backoff_s=0.001, max_backoff_s=0.005, breaker_s=0.05, max_attempts=4)


class Scripted:
    """Answers by `script`: an exception to raise, seconds to sleep first, or None; then goes on with the last entry."""

    media = "msgpack"
    remote = True

    def __init__(self, *script, concurrency=8):
        self.script = list(script)
        self.concurrency = concurrency
        self.keys = []
        self.running = self.most = self.cancelled = 0

    async def invoke(self, body, key, timeout_s):
        self.keys.append(key)
        act = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if isinstance(act, Exception):
                raise act
            await asyncio.sleep(act or 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        event = msgspec.msgpack.decode(body)
        one = lambda each: {"result": each["args"][0]}  # noqa: E731
        reply = {"batch": [one(each) for each in event["batch"]]} if "batch" in event else one(event)
        return Answer(msgspec.msgpack.encode(reply))

    def capacity(self):
        return Capacity()

    async def close(self):
        pass


def away(text="no route"):
    return EndpointError(text)


def test_failures_of_the_endpoint_are_tried_again_with_the_same_key():
    async def main():
        endpoint = Scripted(away(), EndpointBusy("full"), None)
        function = Function("it", endpoint, QUICK)
        assert await function.call(7, key="k") == 7
        usage = function.usage()
        assert endpoint.keys == ["k"] * 3
        assert (usage.calls, usage.tries, usage.results, usage.failures) == (1, 3, 1, {"endpoint": 1, "refused": 1})

    asyncio.run(main())


def test_tries_are_bounded_and_the_last_cause_is_told():
    async def main():
        function = Function("it", Scripted(away()), msgspec.structs.replace(QUICK, breaker_failures=99))
        with pytest.raises(EndpointError, match="it: 4 tries failed; the last one: no route"):
            await function.call(1)

    asyncio.run(main())


def test_a_timeout_and_a_refusal_of_the_function_are_final():
    async def main():
        for error in (FunctionTimeout("late"), FunctionError("bad")):
            endpoint = Scripted(error, None)
            with pytest.raises(type(error), match="it: "):
                await Function("it", endpoint, QUICK).call(1)
            assert len(endpoint.keys) == 1

    asyncio.run(main())


def test_an_endpoint_that_is_down_costs_no_call_that_can_wait():
    """It is away for longer than all tries last; meanwhile few deliveries are made, and then every call is answered."""

    async def main():
        endpoint = Scripted(away())
        policy = msgspec.structs.replace(QUICK, max_attempts=50)
        function = Function("it", endpoint, policy)
        calls = [asyncio.create_task(function.call(number)) for number in range(40)]
        await asyncio.sleep(0.5)
        tried = len(endpoint.keys)
        endpoint.script = [None]
        assert await asyncio.gather(*calls) == list(range(40))
        assert tried < 40, "an open breaker holds calls back"

    asyncio.run(main())


def test_an_endpoint_that_is_left_alone_says_why_until_it_answers():
    async def main():
        endpoint = Scripted(away("no route to it"))
        function = Function("it", endpoint, QUICK)
        await asyncio.gather(*(function.call(n) for n in range(8)), return_exceptions=True)
        assert merged([Usage(), function.usage()]).trouble == "no route to it"
        endpoint.script = [None]
        assert await function.call(1) == 1
        assert not function.usage().trouble

    asyncio.run(main())


def test_while_the_endpoint_is_away_the_fallback_answers():
    async def main():
        endpoint, other = Scripted(away()), Scripted(None)
        function = Function("it", endpoint, QUICK, Function("it", other, QUICK))
        assert await asyncio.gather(*(function.call(number) for number in range(20))) == list(range(20))
        assert function.usage().fallbacks == 20
        assert len(endpoint.keys) <= QUICK.breaker_failures + 8

    asyncio.run(main())


def test_no_call_waits_beyond_its_deadline():
    async def main():
        policy = msgspec.structs.replace(QUICK, deadline_s=0.2, max_attempts=999)
        with pytest.raises(FunctionTimeout, match=r"it: no answer within its deadline of 0.2 s.*no route"):
            await Function("it", Scripted(away("no route")), policy).call(1)

    asyncio.run(main())


def test_a_straggler_is_overtaken_by_a_second_delivery():
    async def main():
        endpoint = Scripted(*[0.001] * 30, 30.0, 0.001)
        function = Function("it", endpoint, msgspec.structs.replace(QUICK, hedge=0.95))
        for number in range(30):
            await function.call(number)
        assert await asyncio.wait_for(function.call("late", key="k"), 5) == "late"
        assert endpoint.keys[-2:] == ["k", "k"]
        assert function.usage().hedged >= 1
        await asyncio.sleep(0.01)
        assert endpoint.cancelled >= 1, "the loser is ended"

    asyncio.run(main())


def test_calls_that_arrive_together_travel_together():
    async def main():
        endpoint = Scripted(None)
        function = Function("it", endpoint, msgspec.structs.replace(QUICK, batch=4, batch_wait_s=0.02))
        assert await asyncio.gather(*(function.call(number, key=str(number)) for number in range(10))) == list(
            range(10)
        )
        assert len(endpoint.keys) == 3
        assert len(set(endpoint.keys)) == 3

    asyncio.run(main())


def test_never_more_calls_at_once_than_the_endpoint_takes():
    async def main():
        endpoint = Scripted(0.01, concurrency=3)
        function = Function("it", endpoint, QUICK)
        await asyncio.gather(*(function.call(number) for number in range(30)))
        assert endpoint.most == 3

    asyncio.run(main())


def test_a_reply_that_is_none_fails_with_what_came():
    class Odd(Scripted):
        async def invoke(self, body, key, timeout_s):
            return Answer(self.script[0])

    async def main():
        for body, reason in ((b"\xc1", "cannot be read"), (msgspec.msgpack.encode([1]), r"answered \[1\]; expected")):
            with pytest.raises(FunctionError, match=reason):
                await Function("it", Odd(body), QUICK).call(1)

    asyncio.run(main())


def test_arguments_that_cannot_travel_are_told():
    async def main():
        with pytest.raises(FunctionError, match="it: its arguments cannot travel"):
            await Function("it", Scripted(None), QUICK).call(object())

    asyncio.run(main())


def test_the_limit_grows_while_latency_is_flat_shrinks_when_it_rises_and_recovers():
    limit = Limit(maximum=100, start=8)
    for _ in range(200):
        limit.observe(0.1, limit.value)
    grown = limit.value
    assert grown > 40
    for _ in range(40):
        limit.observe(0.1 * 8, limit.value)
    assert limit.value < grown / 2
    for _ in range(600):
        limit.observe(0.1, limit.value)
    assert limit.value > grown / 2
    before = limit.value
    for _ in range(50):
        limit.observe(0.1, 1)
    assert limit.value == before, "it moves only while it is what holds calls back"
    for _ in range(1000):
        limit.refused()
    assert limit.value == 1


def test_the_gate_lets_calls_through_in_order_and_a_cancelled_one_takes_no_place():
    async def main():
        gate, order = Gate(lambda: 1), []

        async def go(number):
            await gate.enter()
            order.append(number)
            await asyncio.sleep(0)
            gate.leave()

        tasks = [asyncio.create_task(go(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3, 4]
        assert gate.in_use == 0

    asyncio.run(main())


def test_the_breaker_opens_probes_and_closes():
    breaker = Breaker(failures=2, open_s=5.0)
    breaker.failed(now=0)
    assert breaker.wait_s(0) == 0
    breaker.failed(now=1)
    assert breaker.wait_s(1) == 5.0
    assert breaker.wait_s(6) == 0
    breaker.admit()
    assert breaker.wait_s(6) > 0, "one probe at a time"
    breaker.failed(now=7)
    assert breaker.wait_s(7) == 5.0
    breaker.admit()
    breaker.abandoned()
    assert breaker.wait_s(12) == 0
    breaker.succeeded()
    assert breaker.wait_s(12) == 0
    assert not breaker.is_open


def test_meters_add_up():
    first, second = (
        Usage(calls=2, busy_s=1.0, failures={"raised": 1}),
        Usage(calls=3, allocated_s=4.0, failures={"raised": 2}),
    )
    first.answered(0.003)
    second.answered(100.0)
    total = merged([first, second])
    assert (total.calls, total.busy_s, total.allocated_s, total.failures) == (5, 1.0, 4.0, {"raised": 3})
    assert total.utilisation == 0.25
    assert sum(total.latency) == 2
    assert total.latency[-1] == 1
    assert total.quantile(0.5) == 0.005
    assert total.quantile(0.99) is None
    assert Usage().utilisation == 0.0


def test_a_batch_holds_no_more_than_a_payload_may():
    async def main():
        endpoint = Scripted(None)
        policy = msgspec.structs.replace(QUICK, batch=50, batch_wait_s=0.02, max_payload_bytes=1000)
        function = Function("it", endpoint, policy)
        texts = [f"{number}" + "x" * 300 for number in range(6)]
        answers = await asyncio.gather(*(function.call(text) for text in [*texts, "y" * 2000]), return_exceptions=True)
        assert answers[:-1] == texts
        assert "a payload of 2,0" in str(answers[-1])
        assert len(endpoint.keys) == 2

    asyncio.run(main())


def test_what_the_fallback_took_is_on_the_same_bill():
    async def main():
        function = Function("it", Scripted(away()), QUICK, Function("it", Scripted(0.01), QUICK))
        await asyncio.gather(*(function.call(number) for number in range(5)))
        usage = function.usage()
        assert (usage.calls, usage.results, usage.fallbacks) == (5, 5, 5)
        assert usage.busy_s >= 5 * 0.01

    asyncio.run(main())
