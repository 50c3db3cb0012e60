"""`http(s)://`: any function behind HTTP, such as Knative, OpenFaaS, Cloud Run, Function Compute's HTTP trigger.

    POST url    the event as JSON or MessagePack; Idempotency-Key: the call's key; X-Rollart-Timeout: seconds
    200         the reply
    429, 503    EndpointBusy      502, 504, no connection    EndpointError      the rest    FunctionError

Invariant: the token comes from an environment variable and stands in no error. Proxies of the environment are not used:
an endpoint is named by its URL alone.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rollart.data.serverless.endpoint import REPLY_BYTES, Answer, Capacity, EndpointOptions, Media
from rollart.errors import ConfigError, EndpointBusy, EndpointError, FunctionError, FunctionTimeout

CONCURRENCY = 256
CONNECT_TIMEOUT_S = 10.0
START_S = 10.0
"""What an endpoint gets beyond a call's time limit, which begins when the function runs: its queue, a cold start."""
AWAY = (502, 504)
BUSY = (429, 503)
HINTS = {
    401: "set the environment variable that token_env names",
    403: "the token is not accepted there",
    404: "no function at that path",
    413: "the payload is larger than the function takes",
    415: 'it does not read this encoding; set media = "json"',
}


class HttpEndpoint:
    """`Endpoint` over HTTP."""

    remote = True

    def __init__(self, url: str, options: EndpointOptions) -> None:
        self.media: Media = options.media
        self.concurrency = options.max_concurrency or CONCURRENCY
        self._url = url
        try:
            parts = urlsplit(url)
            usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}") from error
        if not usable or parts.username is not None:
            raise ConfigError(f"{url!r}: write it as https://host/path; a token goes into token_env")
        self._headers = {"Content-Type": f"application/{options.media}", "Accept": f"application/{options.media}"}
        if options.token_env:
            if not (token := os.environ.get(options.token_env)):
                raise ConfigError(f"{url!r}: token_env names {options.token_env}, which is not set")
            self._headers["Authorization"] = f"Bearer {token}"
        self._client: httpx2.AsyncClient | None = None

    def capacity(self) -> Capacity:
        """Nothing here."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        """One POST."""
        headers = {**self._headers, "X-Rollart-Timeout": f"{timeout_s:g}"}
        if key:
            headers["Idempotency-Key"] = key
        try:
            async with asyncio.timeout(timeout_s + START_S + CONNECT_TIMEOUT_S):  # also of what comes in drips
                return await self._post(body, headers, timeout_s + START_S)
        except httpx2.ConnectTimeout as error:
            raise EndpointError(
                f"{self._url} cannot be reached: no connection within {CONNECT_TIMEOUT_S:g} s"
            ) from error
        except (httpx2.ReadTimeout, TimeoutError) as error:
            raise FunctionTimeout(
                f"{self._url} did not answer within {timeout_s:g} s and {START_S:g} s to start"
            ) from error
        except httpx2.HTTPError as error:
            raise EndpointError(f"{self._url} cannot be reached: {type(error).__name__}: {error}") from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise FunctionError(f"{self._url} is no URL: {error}") from error

    async def _post(self, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        async with self._connected().stream(
            "POST", self._url, content=body, headers=headers, timeout=timeout
        ) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > REPLY_BYTES:
                    raise FunctionError(f"{self._url}: a reply of more than {REPLY_BYTES:,} bytes is not read")
            return self._answer(response, bytes(content))

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
            self._client = httpx2.AsyncClient(limits=limits, trust_env=False, follow_redirects=False)
        return self._client

    def _answer(self, response: httpx2.Response, content: bytes) -> Answer:
        status = response.status_code
        if status == 200:
            cold = response.headers.get("X-Rollart-Cold") == "1"
            return Answer(
                content,
                cold,
                _seconds(response, "X-Rollart-Queue-S") or 0.0,
                _seconds(response, "X-Rollart-Run-S"),
            )
        said = f"{self._url} answered {status} {response.reason_phrase}: {content[:200].decode(errors='replace')!r}"
        if status in BUSY:
            raise EndpointBusy(said)
        if status in AWAY:
            raise EndpointError(said)
        raise FunctionError(f"{said}{'; ' + HINTS[status] if status in HINTS else ''}")


def _seconds(response: Any, name: str) -> float | None:
    try:
        return float(response.headers[name])
    except (KeyError, ValueError):
        return None
