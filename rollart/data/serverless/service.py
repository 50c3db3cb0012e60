"""The routes of a served function: who may call, how much at once, and each call exactly once per key.

    POST / or /invoke  ->  token -> place -> body -> event -> known key? -> queue -> pool -> reply

Invariants: a call beyond the limits is turned away before its body is read; no more of a body is kept than the limit;
a key is executed once, however often it is delivered and whoever stops waiting; a call without a key ends with its
connection; nothing of an event, a token or a query stands in a line of the log. What this file leaves out: the life of
the process (`server.py`), keys that are known (`replies.py`), the shape of Lambda's Invoke (`invoke_api.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollart.data.serverless import invoke_api
from rollart.data.serverless.endpoint import Answer, Endpoint
from rollart.data.serverless.handler import check_event
from rollart.data.serverless.openapi import description
from rollart.data.serverless.replies import Call, Refused, Replies
from rollart.errors import EndpointError, FunctionError, FunctionTimeout

BODY_S = 30.0
"""How long the body of a call may take to arrive."""
DISCARD_S = 2.0
DISCARD_BYTES = 16 << 20
QUEUE_S = 5.0
"""How long a call waits for a place; then it is told to come again, as its caller's patience is short too."""
MAX_KEY = 512
NOTHING = msgspec.msgpack.encode({"batch": []})
"""An event that loads the function and does not call it."""
RETRY = {"Retry-After": "1"}
AUTHENTICATE = {"WWW-Authenticate": "Bearer"}
CLOSE = {"Connection": "close"}
MEDIA = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


class Limits(Struct, frozen=True, kw_only=True):
    """Calls that run and that wait at once, seconds of one call, bytes of one body."""

    max_concurrency: int
    max_queue: int
    timeout_s: float
    max_body_bytes: int


class Service:
    """One function's routes over the pool that runs it."""

    def __init__(self, pool: Endpoint, target: str, limits: Limits, token: str = "") -> None:
        self.draining = False
        self._pool = pool
        self._target = target
        self._limits = limits
        self._token = token.encode()
        self._places = asyncio.Semaphore(limits.max_concurrency)
        self._replies = Replies(self._execute)
        self._deliveries = self._executions = 0
        self._ended = asyncio.Event()
        """One of them has."""
        self._fault = ""
        """Why the function cannot be loaded, as far as is known."""
        self._probing = False

    def app(self, lifespan: Any = None) -> Starlette:
        """The ASGI application."""
        paths: list[tuple[str, Callable[..., Any], str]] = [
            ("/", self._invoke, "POST"),
            ("/invoke", self._invoke, "POST"),
            (invoke_api.PATH, self._invoke_api, "POST"),
            ("/health", self._health, "GET"),
            ("/ready", self._ready, "GET"),
            ("/openapi.json", self._description, "GET"),
        ]
        routes = [Route(path, work, methods=[method]) for path, work, method in paths]
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})
        app.router.redirect_slashes = False
        return app

    async def drain(self) -> None:
        """Turn new calls away and wait until those that run have ended."""
        self.draining = True
        while self._deliveries or self._executions:
            self._ended.clear()
            await self._ended.wait()

    # ----------------------------------------------------------------------------------------------------- a call
    async def _invoke(self, request: Request) -> Response:
        async def work() -> Response:
            media, wanted = _media_in(request), _media_out(request)
            event = _event(await self._body(request), media)
            try:
                answer = await self._answer(request, event)
                return _reply(answer, wanted or media)
            except FunctionTimeout as error:
                return _reply(Answer(_error_reply("FunctionTimeout", str(error))), wanted or media)
            except EndpointError as error:
                raise Refused(503, "EndpointError", str(error), RETRY) from error
            except FunctionError as error:
                raise Refused(500, "FunctionError", str(error)) from error

        return await self._delivery(request, work, _refusal)

    async def _invoke_api(self, request: Request) -> Response:
        async def work() -> Response:
            invoke_api.check(request, self._target)
            if request.headers.get("x-amz-invocation-type") == "DryRun":
                return Response(status_code=204)
            event = _packed(_unpacked(await self._body(request) or b"{}", "json"))
            try:
                answer = await self._answer(request, event)
                return invoke_api.reply(_json(answer.body), answer)
            except FunctionError as error:
                return invoke_api.unserved(error)

        return await self._delivery(request, work, invoke_api.refusal)

    async def _delivery(
        self, request: Request, work: Callable[[], Any], refusal: Callable[[Refused], Response]
    ) -> Response:
        """One delivery of a call, from its headers to its response."""
        began = time.monotonic()
        try:
            self._authorise(request)
            self._enter()
            try:
                response: Response = await work()
            finally:
                self._deliveries -= 1
                self._ended.set()
        except Refused as error:
            response = refusal(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; the log says how it ended
        route = request.scope["route"].path
        with contextlib.suppress(OSError, ValueError):  # a log that nobody reads any more is no reason to fail a call
            sys.stderr.write(f"POST {route} {response.status_code} {time.monotonic() - began:.3f} s\n")
        return response

    def _authorise(self, request: Request) -> None:
        if not self._token:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._token)
        if scheme.lower() != "bearer" or not same:
            raise Refused(401, "Unauthorized", "send the token: Authorization: Bearer TOKEN", AUTHENTICATE)

    def _enter(self) -> None:
        if self.draining:
            raise Refused(503, "Draining", "this service is ending; another one takes the call", RETRY)
        if self._deliveries >= self._limits.max_concurrency + self._limits.max_queue:
            raise Refused(429, "Busy", f"{self._deliveries} calls run or wait already", RETRY)
        self._deliveries += 1

    async def _body(self, request: Request) -> bytes:
        limit = self._limits.max_body_bytes
        said = request.headers.get("content-length", "")
        body, stream = bytearray(), request.stream()
        too_large = said.isdigit() and int(said) > limit
        try:
            async with asyncio.timeout(BODY_S):
                while not too_large and (chunk := await anext(stream, None)) is not None:
                    body += chunk
                    too_large = len(body) > limit
        except TimeoutError:
            raise Refused(408, "Timeout", f"the body did not arrive within {BODY_S:g} s", CLOSE) from None
        if too_large:
            body.clear()
            await _discard(stream)
            raise Refused(413, "TooLarge", f"a body has at most {limit:,} bytes here (--max-body-bytes)", CLOSE)
        return bytes(body)

    async def _answer(self, request: Request, event: bytes) -> Answer:
        """The function's answer, once per key. Raises FunctionError, Refused, ClientDisconnect."""
        call = Call(event, _key(request), self._timeout_s(request))
        task = self._replies.task(call)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            gone.cancel()
            if not call.key:
                task.cancel()  # nobody else can ask for it

    def _timeout_s(self, request: Request) -> float:
        limit_s = self._limits.timeout_s
        if (asked := request.headers.get("x-rollart-timeout")) is None:
            return limit_s
        try:
            asked_s = float(asked)
        except ValueError:
            asked_s = math.nan
        if not asked_s > 0:
            raise Refused(400, "BadRequest", "X-Rollart-Timeout: not a number of seconds above 0")
        return min(asked_s, limit_s)

    async def _execute(self, call: Call) -> Answer:
        """Run one call. Raises FunctionError, Refused."""
        self._executions += 1
        try:
            waited_s = await self._place()
            try:
                answer = await self._invoked(call)
            finally:
                self._places.release()
        finally:
            self._executions -= 1
            self._ended.set()
        answer.queue_s += waited_s
        return answer

    async def _place(self) -> float:
        """Wait for one; the seconds that it took. Raises Refused."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._places.acquire()
        except TimeoutError:
            raise Refused(429, "Busy", f"no place within {QUEUE_S:g} s", RETRY) from None
        return loop.time() - asked

    async def _invoked(self, call: Call) -> Answer:
        try:
            answer = await self._pool.invoke(call.event, call.key, call.timeout_s)
        except (FunctionTimeout, EndpointError):
            raise
        except FunctionError as error:
            self._fault = str(error)  # it cannot be loaded; what it raises is an answer
            raise
        self._fault = ""
        return answer

    # ----------------------------------------------------------------------------------------------------- the rest
    async def _health(self, _: Request) -> Response:
        held = self._pool.capacity()
        return _json_response({"alive": True, "processes": held.processes, "calls": self._deliveries})

    async def _ready(self, _: Request) -> Response:
        if self._fault and not self._probing and not self.draining:
            await self._probe()
        why = "draining" if self.draining else self._fault
        return _json_response({"ready": False, "why": why} if why else {"ready": True}, 503 if why else 200)

    async def _probe(self) -> None:
        """Whether the function can be loaded again."""
        self._probing = True
        try:
            await self._pool.invoke(NOTHING, "", self._limits.timeout_s)
            self._fault = ""
        except FunctionError as error:
            self._fault = str(error)
        finally:
            self._probing = False

    async def _description(self, _: Request) -> Response:
        name = invoke_api.function_name(self._target)
        return _json_response(description(self._target, name, self._limits.max_body_bytes, bool(self._token)))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Let a body that is refused pass by, within bounds: a caller that still writes would not hear why."""
    passed = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                if (passed := passed + len(chunk)) > DISCARD_BYTES:
                    break


# ------------------------------------------------------------------------------------------------------ what travels
def _media_in(request: Request) -> str:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "UnsupportedMedia", "compressed bodies are not read; send it as it is")
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said not in MEDIA:
        raise Refused(415, "UnsupportedMedia", "Content-Type is application/json or application/msgpack")
    return MEDIA[said]


def _media_out(request: Request) -> str:
    """The media asked for; "": that of the request."""
    ranges = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "*/*").split(",")]
    for each in ranges:
        if each in MEDIA:
            return MEDIA[each]
    if not {"*/*", "application/*", ""} & set(ranges):
        raise Refused(406, "NotAcceptable", "replies are application/json or application/msgpack")
    return ""


def _key(request: Request) -> str:
    key: str = request.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        raise Refused(400, "BadRequest", f"an Idempotency-Key has at most {MAX_KEY} characters")
    return key


def _event(body: bytes, media: str) -> bytes:
    """The event as MessagePack."""
    event = _unpacked(body, media)
    try:
        check_event(event)
    except ValueError as error:
        raise Refused(400, "BadRequest", str(error)) from error
    return body if media == "msgpack" else _packed(event)


def _packed(event: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(event)
    except UNREADABLE as error:
        raise Refused(400, "BadRequest", str(error)) from error


def _unpacked(body: bytes, media: str) -> Any:
    try:
        return msgspec.json.decode(body) if media == "json" else msgspec.msgpack.decode(body)
    except UNREADABLE as error:
        raise Refused(400, "BadRequest", f"the body cannot be read: {error}") from error


def _json(packed: bytes) -> bytes:
    return msgspec.json.encode(msgspec.msgpack.decode(packed))


def _reply(answer: Answer, media: str) -> Response:
    body = answer.body if media == "msgpack" else _json(answer.body)
    headers = {"X-Rollart-Queue-S": f"{answer.queue_s:.6f}", "X-Rollart-Cold": str(int(answer.cold))}
    if answer.run_s is not None:
        headers["X-Rollart-Run-S"] = f"{answer.run_s:.6f}"
    return Response(body, headers=headers, media_type=f"application/{media}")


def _error_reply(kind: str, message: str) -> bytes:
    return msgspec.msgpack.encode({"error": {"type": kind, "message": message, "where": "", "trace": ""}})


def _json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _refusal(refused: Refused) -> Response:
    body = {"error": {"type": refused.kind, "message": str(refused)}}
    return _json_response(body, refused.status, refused.headers)


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, "NoRoute", f"{error.detail}; the routes are in /openapi.json", error.headers)
    return _refusal(refused)
