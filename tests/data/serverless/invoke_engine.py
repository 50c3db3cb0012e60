"""AWS Lambda on loopback, as far as its Invoke goes: functions run in a pool of processes. And the HTTP below it.

POST /2015-03-31/functions/NAME/invocations?Qualifier=...    200 the reply, with X-Amz-Function-Error where it failed
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.local import LocalPool
from rollart.errors import FunctionError

MODULE = "tests.data.serverless.user_functions"
AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDTEST",
    "AWS_SECRET_ACCESS_KEY": "not a secret",
    "AWS_SESSION_TOKEN": None,
    "AWS_PROFILE": None,
    "AWS_REGION": None,
    "AWS_DEFAULT_REGION": None,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
PATIENCE_S = 60.0


class Request(NamedTuple):
    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Reply(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


@contextlib.contextmanager
def environ(**values):
    """Environment variables for a while; None: not set."""
    kept = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(kept)


def _set(values):
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.asynccontextmanager
async def serving(answer: Callable[[Request], Awaitable[Reply]], port: int = 0):
    """The address of a server that answers so. What it works at ends when its client has gone."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                request = await _read(reader)
                if (reply := await _unless_gone(reader, answer(request))) is None:
                    break
                head = {"Content-Type": "application/json", "Content-Length": str(len(reply.body)), **reply.headers}
                lines = [f"HTTP/1.1 {reply.status} Said", *(f"{name}: {value}" for name, value in head.items()), "", ""]
                writer.write("\r\n".join(lines).encode() + reply.body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=512)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


async def _read(reader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    path, _, query = target.partition("?")
    return Request(method, path, query, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def _unless_gone(reader, work) -> Reply | None:
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        going.cancel()
        await asyncio.gather(working, going, return_exceptions=True)


class Engine:
    """Functions of `user_functions`, each in a pool of its own."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.pools: dict[str, LocalPool] = {}
        self.requests: list[Request] = []

    async def run(self, name: str, event: bytes):
        """The reply as an object. Raises FunctionError."""
        if name not in self.pools:
            self.pools[name] = LocalPool(f"local://{MODULE}:{name}", self.options)
        body = msgspec.msgpack.encode(msgspec.json.decode(event))
        answer = await self.pools[name].invoke(body, "", PATIENCE_S)
        return msgspec.msgpack.decode(answer.body), answer

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    async def invoke(self, request: Request) -> Reply:
        """As Lambda does."""
        self.requests.append(request)
        path = re.fullmatch(r"/2015-03-31/functions/([^/]+)/invocations", request.path)
        if not path or request.method != "POST":
            return refusal(404, "ResourceNotFoundException")
        if "/eu-west-1/lambda/aws4_request" not in request.headers.get("authorization", ""):
            return refusal(403, "MissingAuthenticationTokenException")
        try:
            reply, answer = await self.run(unquote(path[1]), request.body)
        except FunctionError as error:
            body = msgspec.json.encode({"errorType": "Runtime.ExitError", "errorMessage": str(error)})
            return Reply(body, headers={"X-Amz-Function-Error": "Unhandled"})
        return Reply(msgspec.json.encode(reply), headers={"X-Amz-Log-Result": report(answer.run_s, answer.cold)})


def refusal(status: int, code: str, message: str = "so it is") -> Reply:
    """As Lambda says no."""
    return Reply(msgspec.json.encode({"Message": message}), status, {"X-Amzn-ErrorType": code})


def report(run_s: float, cold: bool) -> str:
    """The end of a function's log."""
    times = f"Duration: {run_s * 1e3:.2f} ms\tBilled Duration: {int(run_s * 1e3) + 1} ms\tMemory Size: 128 MB"
    lines = f"START\nEND RequestId: 8f5\nREPORT RequestId: 8f5\t{times}" + "\tInit Duration: 90.10 ms" * cold
    return base64.b64encode(lines.encode()).decode()


@contextlib.asynccontextmanager
async def engine(options: EndpointOptions):
    """A Lambda and its address."""
    made = Engine(options)
    try:
        async with serving(made.invoke) as address:
            yield made, address
    finally:
        await made.close()
