"""The calling side of a function behind a URL: tries, limits, deduplication, fallback and the meter.

The way of one call:

    key known? -> batch -> breaker -> gate (adaptive limit) -> try, hedged -> reply
                              ^                                 |
                              `--- backoff with full jitter ----' endpoint failures only, up to `max_attempts`

Invariants: every call ends, with a value or a `FunctionError` that names the cause; what the function itself raised is
never tried again; calls with one key give one result, however often they are asked; an endpoint that is down holds
calls back and costs them nothing until `deadline_s`. What this file leaves out: the endpoints."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from rollart.data.serverless.breaker import Breaker
from rollart.data.serverless.endpoint import Answer, Endpoint
from rollart.data.serverless.limiter import Gate, Limit
from rollart.data.serverless.meter import Usage, merged
from rollart.errors import EndpointBusy, EndpointError, FunctionError, FunctionTimeout

KEYS_KEPT = 8192
BATCH_OVERHEAD_BYTES = 32
HEDGE_SAMPLES = 20
"""Answered tries before a straggler can be told."""
FIRST_LIMIT = 8
"""Calls at once at an endpoint that somebody else runs, before its latency is known."""


class CallPolicy(Struct, frozen=True, kw_only=True):
    """How calls are made; the keys of `[serverless.NAME]` (`sections.ServerlessConfig`)."""

    timeout_s: float = 30.0
    deadline_s: float = 600.0
    max_attempts: int = 5
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    hedge: float = 0.0
    batch: int = 1
    batch_wait_s: float = 0.005
    max_payload_bytes: int = 6_000_000
    breaker_failures: int = 5
    breaker_s: float = 5.0
    price_per_call: float = 0.0
    price_per_second: float = 0.0


class Function:
    """One function at one endpoint, called from one event loop. `name` stands in errors."""

    def __init__(
        self, name: str, endpoint: Endpoint, policy: CallPolicy | None = None, fallback: Function | None = None
    ) -> None:
        self.name = name
        self.policy = policy or CallPolicy()
        self._endpoint = endpoint
        self._fallback = fallback
        self._usage = Usage()
        self._breaker = Breaker(self.policy.breaker_failures, self.policy.breaker_s)
        self._limit = Limit(endpoint.concurrency, FIRST_LIMIT)
        self._gate = Gate(lambda: self._limit.value if endpoint.remote else endpoint.concurrency)
        self._known: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()
        self._open: _Batch | None = None
        self._last: EndpointError | None = None
        self._codec = msgspec.json if endpoint.media == "json" else msgspec.msgpack

    async def call(self, *args: Any, key: str = "", **kwargs: Any) -> Any:
        """The function's value. `key`: equal for all deliveries of one call; without one nothing is deduplicated.

        Raises FunctionError (FunctionTimeout, EndpointError).
        """
        self._usage.calls += 1
        event = {"args": list(args), "kwargs": kwargs} if kwargs else {"args": list(args)}
        if not key:
            return await self._finished(event, "")
        if (task := self._known.get(key)) is None or task.cancelled():
            task = self._known[key] = asyncio.create_task(self._finished(event, key), name=f"{self.name} {key}")
            task.add_done_callback(_looked_at)
            self._forget()
        else:
            self._usage.repeated += 1
        return await asyncio.shield(task)  # whoever stops waiting does not take the result from the others

    def usage(self) -> Usage:
        """What calls took and cost so far."""
        capacity = self._endpoint.capacity()
        usage = msgspec.structs.replace(self._usage, processes=capacity.processes, allocated_s=capacity.allocated_s)
        if self._endpoint.remote:
            usage.allocated_s = usage.billed_s
        if self._breaker.is_open:
            usage.trouble = str(self._last)
        usage.cost = usage.tries * self.policy.price_per_call + usage.billed_s * self.policy.price_per_second
        return usage if self._fallback is None else merged([usage, self._fallback.usage()])

    async def close(self) -> None:
        """Nothing of it runs any more."""
        tasks = [task for task in self._known.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()
        if self._fallback is not None:
            await self._fallback.close()

    def _forget(self) -> None:
        """Keep the newest keys; those whose call still runs are kept whatever their number."""
        while len(self._known) > KEYS_KEPT:
            oldest = next(iter(self._known))
            if not self._known[oldest].done():
                break
            del self._known[oldest]

    # -------------------------------------------------------------------------------------------------------- one call
    async def _finished(self, event: dict[str, Any], key: str) -> Any:
        try:
            async with asyncio.timeout(self.policy.deadline_s):
                reply = await (self._batched(event, key) if self.policy.batch > 1 else self._delivered(event, key))
        except TimeoutError as error:
            if isinstance(error, FunctionTimeout):
                raise
            self._usage.failed("deadline")
            why = f"no answer within its deadline of {self.policy.deadline_s:g} s, tries and queue together"
            raise FunctionTimeout(f"{self.name}: {why}{self._last_fault()}") from None
        return self._value(reply)

    def _value(self, reply: Any) -> Any:
        match reply:
            case {"result": value}:
                self._usage.results += 1
                return value
            case {"error": {"type": str(kind), "message": str(message)} as fault}:
                late = kind == FunctionTimeout.__name__  # so a place says it that cut the call itself
                self._usage.failed("timeout" if late else "raised")
                where = f" ({fault['where']})" if fault.get("where") else ""
                error = (FunctionTimeout if late else FunctionError)(f"{self.name}: {kind}: {message}{where}")
                error.add_note(f"raised in the function:\n{fault.get('trace', '')}")
                raise error
            case _:
                self._usage.failed("reply")
                raise FunctionError(
                    f'{self.name}: answered {_shown(reply)}; expected {{"result": ...}} or {{"error": ...}}'
                )

    async def _batched(self, event: dict[str, Any], key: str) -> Any:
        """Wait for others to go along, then for this member's reply."""
        size = len(self._encoded(event))
        batch, room = self._open, self.policy.max_payload_bytes - BATCH_OVERHEAD_BYTES
        if batch is not None and batch.num_bytes + size > room:
            self._close_batch(batch)
            batch = None
        if batch is None:
            batch = self._open = _Batch()
            batch.task = asyncio.create_task(self._send(batch), name=f"{self.name} batch")
            batch.task.add_done_callback(_looked_at)
        position = batch.add(event, key, size)
        if len(batch.events) >= self.policy.batch:
            self._close_batch(batch)
        replies = await asyncio.shield(batch.task)
        return replies[position]

    def _close_batch(self, batch: _Batch) -> None:
        batch.full.set()
        if self._open is batch:
            self._open = None

    async def _send(self, batch: _Batch) -> Sequence[Any]:
        try:
            async with asyncio.timeout(self.policy.batch_wait_s):
                await batch.full.wait()
        except TimeoutError:
            self._close_batch(batch)
        digest = hashlib.sha256("\n".join(batch.keys).encode()).hexdigest() if all(batch.keys) else ""
        reply = await self._delivered({"batch": batch.events}, digest)
        if not isinstance(reply, dict) or not isinstance(reply.get("batch"), list):
            return [reply] * len(batch.events)  # an error that is everybody's
        if len(reply["batch"]) != len(batch.events):
            raise FunctionError(f"{self.name}: {len(reply['batch'])} replies to a batch of {len(batch.events)}")
        replies: list[Any] = reply["batch"]
        return replies

    # ------------------------------------------------------------------------------------------------------- deliveries
    async def _delivered(self, event: Mapping[str, Any], key: str) -> Any:
        """The decoded reply, after as many tries as it takes."""
        body = self._encoded(event)
        failures = 0
        while True:
            if not await self._entered():
                return await self._fall_back(event, key)
            try:
                answer = await self._tried(body, key)
            except EndpointError as error:
                failures += 1
                self._last = error
                if failures >= self.policy.max_attempts:
                    if self._fallback is not None:
                        return await self._fall_back(event, key)
                    raise EndpointError(f"{self.name}: {failures} tries failed; the last one: {error}") from error
                longest = min(self.policy.max_backoff_s, self.policy.backoff_s * 2 ** (failures - 1))
                await asyncio.sleep(random.uniform(0, longest))
            else:
                return self._decoded(answer)

    def _encoded(self, event: Mapping[str, Any]) -> bytes:
        try:
            body: bytes = self._codec.encode(event)
        except (TypeError, ValueError, RecursionError) as error:
            self._usage.failed("payload")
            raise FunctionError(f"{self.name}: its arguments cannot travel: {error}") from error
        if len(body) > self.policy.max_payload_bytes:
            self._usage.failed("payload")
            raise FunctionError(
                f"{self.name}: a payload of {len(body):,} bytes is more than {self.policy.max_payload_bytes:,}; "
                "raise max_payload_bytes, or let the trajectory be shorter (max_tokens)"
            )
        return body

    def _decoded(self, answer: Answer) -> Any:
        try:
            return self._codec.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._usage.failed("reply")
            raise FunctionError(f"{self.name}: the reply {answer.body[:80]!r} cannot be read: {error}") from error

    async def _entered(self) -> bool:
        """Wait for a place at the endpoint; False: it is away, and the fallback is to answer."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while True:
            if (wait_s := self._breaker.wait_s(loop.time())) > 0:
                if self._fallback is not None:
                    return False
                await asyncio.sleep(wait_s * random.uniform(1, 1.2))
            await self._gate.enter()
            if self._breaker.wait_s(loop.time()) == 0:
                break
            self._gate.leave()  # the endpoint went away while this call waited
        self._usage.queue_s += loop.time() - asked
        if self._endpoint.remote:
            self._breaker.admit()
        return True

    async def _fall_back(self, event: Mapping[str, Any], key: str) -> Any:
        assert self._fallback is not None
        self._usage.fallbacks += 1
        return await self._fallback._delivered(event, key)

    async def _tried(self, body: bytes, key: str) -> Answer:
        """One delivery, in the place that was entered, which it leaves."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._hedged(body, key)
            self._count(answer, loop.time() - began)
            return answer
        except EndpointError as error:
            self._failed(error)
            raise
        except FunctionError as error:
            self._usage.failed("timeout" if isinstance(error, FunctionTimeout) else "raised")
            self._breaker.abandoned()
            raise type(error)(f"{self.name}: {error}") from error
        except BaseException:
            self._breaker.abandoned()
            raise
        finally:
            self._gate.leave()

    def _failed(self, error: EndpointError) -> None:
        busy = isinstance(error, EndpointBusy)
        self._usage.failed("refused" if busy else "endpoint")
        if busy:
            self._limit.refused()
        if self._endpoint.remote:
            self._breaker.failed(asyncio.get_running_loop().time())

    def _count(self, answer: Answer, took_s: float) -> None:
        self._breaker.succeeded()
        ran_s = answer.run_s if answer.run_s is not None else max(0.0, took_s - answer.queue_s)
        self._usage.busy_s += ran_s
        self._usage.queue_s += answer.queue_s
        self._usage.billed_s += answer.billed_s if answer.billed_s is not None else ran_s
        self._usage.cold_starts += answer.cold
        self._usage.answered(took_s)
        if self._endpoint.remote and not answer.cold:
            self._limit.observe(took_s, self._gate.in_use)

    async def _hedged(self, body: bytes, key: str) -> Answer:
        """One delivery; a second one with the same key when it takes longer than most. The first answer counts."""
        if (after_s := self._hedge_after_s()) is None:
            return await self._invoke(body, key)
        first = asyncio.create_task(self._invoke(body, key))
        try:
            await asyncio.wait([first], timeout=after_s)
            if first.done():
                return first.result()
            self._usage.hedged += 1
            second = asyncio.create_task(self._invoke(body, key))
        except BaseException:
            first.cancel()
            raise
        return await _first_answer(first, second)

    async def _invoke(self, body: bytes, key: str) -> Answer:
        self._usage.tries += 1
        return await self._endpoint.invoke(body, key, self.policy.timeout_s)

    def _hedge_after_s(self) -> float | None:
        if not self.policy.hedge or sum(self._usage.latency) < HEDGE_SAMPLES:
            return None
        return self._usage.quantile(self.policy.hedge)

    def _last_fault(self) -> str:
        return f"; the last failure: {self._last}" if self._last is not None else ""


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Whoever asked may be gone; the fault is counted all the same."""
    if not task.cancelled():
        task.exception()


class _Batch:
    """Calls that travel together."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.keys: list[str] = []
        self.num_bytes = 0
        self.full = asyncio.Event()
        self.task: asyncio.Task[Sequence[Any]]

    def add(self, event: Any, key: str, num_bytes: int) -> int:
        """The member's position."""
        self.num_bytes += num_bytes + 1
        self.events.append(event)
        self.keys.append(key)
        return len(self.events) - 1


async def _first_answer(first: asyncio.Task[Answer], second: asyncio.Task[Answer]) -> Answer:
    """Of the one that answers first; a failure counts when both failed."""
    pending = {first, second}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None or not pending:
                    return task.result()
        raise AssertionError("unreachable")
    finally:
        for task in (first, second):
            task.cancel()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
