"""From a URL to a function: the schemes, and what `@register_serverless` puts in place of an attribute.

    local://module:function     processes of this machine, from none to a limit and back
    thread://module:function    a thread of the calling process: no isolation, nothing to start; for debugging
    http://host/path            any HTTP function (https:// too)
    lambda://name?region=       AWS Lambda
    fc://account/name?region=   Alibaba Function Compute
    ray://module:function       Ray tasks

A further scheme is a class with the constructor `(url: str, options: EndpointOptions)` that follows
`endpoint.Endpoint`, named by an entry point of group `rollart.functions`.

Invariant: an unknown scheme, or a function that does not exist here, is a ConfigError before any call.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from importlib.metadata import entry_points
from typing import Any, TypeVar

from msgspec.structs import replace

from rollart.checks import not_a_choice
from rollart.config import Config, serverless_of
from rollart.data.serverless.endpoint import Endpoint, EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.targets import named
from rollart.declarations import declared_methods
from rollart.errors import ConfigError
from rollart.imports import load_object
from rollart.sections import ServerlessConfig
from rollart.tasks.registry import OF_MODULES, reward_scheme, reward_url

T = TypeVar("T")

GROUP = "rollart.functions"
SCHEMES = {
    "local": "rollart.data.serverless.local:LocalPool",
    "thread": "rollart.data.serverless.thread:ThreadEndpoint",
    "http": "rollart.data.serverless.http:HttpEndpoint",
    "https": "rollart.data.serverless.http:HttpEndpoint",
    "lambda": "rollart.data.serverless.aws:LambdaEndpoint",
    "fc": "rollart.data.serverless.fc:FunctionComputeEndpoint",
    "ray": "rollart.data.serverless.ray_tasks:RayEndpoint",
}


def check_url(url: str, key: str) -> str:
    """The URL, with `local://` before a bare `module:function`. Raises ConfigError, beginning with `key`."""
    if "://" not in url:
        url = f"local://{url}"
    scheme, _, rest = url.partition("://")
    if scheme not in _schemes():
        raise ConfigError(f"{key} {url!r}: scheme {not_a_choice(scheme, sorted(_schemes()))}")
    if not rest:
        raise ConfigError(f"{key} {url!r}: names no function; write it as local://module:function or https://host/path")
    if scheme in OF_MODULES:
        named(rest, key)
    return url


def check_urls(config: Config) -> None:
    """Every URL of rewards and fallbacks in a config. Raises ConfigError."""
    for name, task in config.tasks.items():
        table = serverless_of(config, name)
        if url := reward_url(task, name, reward_scheme(config)):
            _check_place(check_url(url, f"tasks.{name}.reward"), f"tasks.{name}.reward", table)
        if table.fallback:
            fallback = check_url(table.fallback, f"serverless.{name}.fallback")
            reward_url(replace(task, reward=fallback), name)
            _check_place(fallback, f"serverless.{name}.fallback", table)


def _check_place(url: str, key: str, table: ServerlessConfig) -> None:
    """An endpoint of somebody else's machines is built as a run would build it, which sends nothing."""
    if url.partition("://")[0] not in OF_MODULES:
        open_endpoint(url, EndpointOptions(media=table.media, token_env=table.token_env), key)


def open_endpoint(url: str, options: EndpointOptions | None = None, key: str = "serverless_url") -> Endpoint:
    """The place that a URL names. Nothing is started or sent yet. Raises ConfigError, beginning with `key`."""
    url = check_url(url, key)
    make = load_object(_schemes()[url.partition("://")[0]], key)
    try:
        endpoint: Endpoint = make(url, options or EndpointOptions())
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return endpoint


def open_function(
    name: str,
    url: str,
    policy: CallPolicy | None = None,
    options: EndpointOptions | None = None,
    fallback: str = "",
) -> Function:
    """A function by its URL, with another one that answers when that is away. Raises ConfigError."""
    other = open_function(name, fallback, policy, options) if fallback else None
    return Function(name, open_endpoint(url, options), policy, other)


def attach(worker: object) -> None:
    """Set the attributes that a worker's declarations name, unless it has set them itself. Raises ConfigError."""
    for declaration in declared_methods(type(worker)).values():
        if declaration.url and declaration.attribute not in vars(worker):
            setattr(worker, declaration.attribute, Attribute(declaration.attribute, declaration.url))


class Attribute:
    """What stands at `self.<attribute>` of a worker: called like the function itself, it runs at the URL.

    `self.proxy(x)` waits for the value; `await self.proxy.call(x)` does not hold up the event loop.
    Raises FunctionError.
    """

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = check_url(url, f"@register_serverless {name}: serverless_url")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _on_loop(self._call(*args, **kwargs)).result()

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """The value, without blocking."""
        return await asyncio.wrap_future(_on_loop(self._call(*args, **kwargs)))

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        return await self._function.call(*args, **kwargs)

    @functools.cached_property
    def _function(self) -> Function:
        return open_function(self._name, self._url)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Calls of plain methods wait in their own thread, so the functions' loop has one to itself."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="serverless", daemon=True).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, T]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop())


@functools.cache
def _schemes() -> dict[str, str]:
    return SCHEMES | {point.name: point.value for point in entry_points(group=GROUP)}
