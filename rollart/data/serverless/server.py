"""`rollart serve-reward module:function`: one function as an HTTP service on this machine.

    settings -> token, address -> pool -> load once -> listen, say the URL -> serve -> SIGTERM: drain -> end

Invariants: nothing is served before the function was loaded once, and an address that others reach needs a token; after
a first SIGTERM or SIGINT running calls finish and new ones are turned away, a second one ends at once; whatever ends
this process, no process of the function outlives it (`child.py`). What this file leaves out: the routes (`service.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.local import LocalPool
from rollart.errors import ConfigError, EndpointError, FunctionError, to_install

if TYPE_CHECKING:
    import uvicorn

    from rollart.data.serverless.service import Service

BACKLOG = 2048
QUEUE_PER_PLACE = 8
HTTP: dict[str, Any] = {
    "lifespan": "on",
    "ws": "none",
    "log_config": None,
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 75,  # callers keep connections for less, so that none ends under a call
    "timeout_graceful_shutdown": 10,  # of responses that nobody reads; calls have ended before
}


class Settings(Struct, frozen=True, kw_only=True):
    """What `rollart serve-reward` is told. `token_env` names the variable that holds the token; 0: see each line."""

    target: str
    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    options: dict[str, Any] = field(default_factory=dict)
    max_concurrency: int = 0
    """0: as many as there are cores."""
    timeout_s: float = 60.0
    max_body_bytes: int = 6_000_000
    token_env: str = ""
    idle_s: float = 30.0
    memory_bytes: int = 0
    """0: no limit."""


def serve(settings: Settings) -> int:
    """Serve until a signal; the exit code. Raises ConfigError for settings that cannot work."""
    _need_libraries()
    token = _token(settings)
    with _listener(settings, token) as listener:
        return asyncio.run(_serve(settings, token, listener))


async def _serve(settings: Settings, token: str, listener: socket.socket) -> int:
    import uvicorn

    from rollart.data.serverless.service import Limits, Service

    options = EndpointOptions(
        arguments=settings.options,
        max_concurrency=settings.max_concurrency,
        idle_s=settings.idle_s,
        memory_bytes=settings.memory_bytes,
    )
    pool = LocalPool(f"local://{settings.target}", options)
    try:
        await _load(pool, settings)
        limits = Limits(
            max_concurrency=pool.max_processes,
            max_queue=pool.max_processes * QUEUE_PER_PLACE,
            timeout_s=settings.timeout_s,
            max_body_bytes=settings.max_body_bytes,
        )
        ending = _Ending(Service(pool, settings.target, limits, token), pool)
        app = ending.service.app(ending.lifespan)
        server = uvicorn.Server(uvicorn.Config(app, **HTTP))
        ending.server = server
        print(_url(listener), flush=True)  # noqa: T201 - what scripts wait for
        await server.serve(sockets=[listener])
        return ending.code
    finally:
        await pool.close()


async def _load(pool: LocalPool, settings: Settings) -> None:
    from rollart.data.serverless.service import NOTHING

    try:
        await pool.invoke(NOTHING, "", settings.timeout_s)
    except EndpointError as error:
        raise ConfigError(f"{settings.target}: {error}; does memory_bytes suffice to load it?") from error
    except FunctionError as error:
        raise ConfigError(str(error)) from error


class _Ending:
    """From a signal to the end: the first one drains, the second one does not wait."""

    def __init__(self, service: Service, pool: LocalPool) -> None:
        self.service = service
        self.code = 0
        self.server: uvicorn.Server | None = None
        self._pool = pool
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Take the signals from the HTTP server, which would close the door before `/ready` can say so."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        yield

    def _signalled(self, number: int) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._drain(), name="drain")
        else:
            self.code = 128 + number
            self._stop(at_once=True)
            self._task = asyncio.create_task(self._pool.close(), name="end")

    async def _drain(self) -> None:
        await self.service.drain()
        self._stop()

    def _stop(self, at_once: bool = False) -> None:
        assert self.server is not None
        self.server.should_exit, self.server.force_exit = True, at_once


# ------------------------------------------------------------------------------------------------------ before serving
def _need_libraries() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve-reward needs {error.name}; {to_install('serve')}") from error


def _token(settings: Settings) -> str:
    if not settings.token_env:
        return ""
    token = os.environ.get(settings.token_env, "")
    if not token:
        raise ConfigError(f"--token-env names {settings.token_env}, which is not set or empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {settings.token_env} cannot travel in a header: printable ASCII without spaces"
        )
    return token


def _listener(settings: Settings, token: str) -> socket.socket:
    """A socket that listens. Raises ConfigError."""
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {where}: no such address: {error}") from error
    if not token and not all(ipaddress.ip_address(str(each[4][0]).split("%")[0]).is_loopback for each in found):
        raise ConfigError(
            f"--host {where} is reached by others, and without a token they could all call {settings.target}; "
            "set one in an environment variable and name it: --token-env REWARD_TOKEN"
        )
    family, _, _, _, address = found[0]
    # With its protocol named: asyncio sends small answers at once (TCP_NODELAY) where it knows that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"--host {where} cannot be listened to: {error}; --port 0 takes a free one") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
