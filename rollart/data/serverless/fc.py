"""`fc://ACCOUNT_ID/FUNCTION?region=cn-hangzhou`: Alibaba Function Compute 3.0, or what speaks like it at `endpoint=`.

    what Function Compute answers                              here
    200                                                        the reply
    200 with X-Fc-Error-Type                                   FunctionError; "timed out after" FunctionTimeout;
                                                               its process ended: EndpointError
    429, 503, throttling                                       EndpointBusy
    5xx, 409, no connection                                    EndpointError
    no answer in time                                          FunctionTimeout
    the rest: credentials, permissions, no function, too large FunctionError, with the way out

Invariants: credentials come from the SDK's own chain (ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET,
profile, role) and never from the URL; nothing is tried again here. The SDK's blocking calls are used, on threads: its
asynchronous ones open a connection per call. Function Compute does not deduplicate: the key goes along in the event,
and a call that is given up here may go on there until the function's own time limit.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from rollart.data.serverless.cloud import CONCURRENCY, CONNECT_TIMEOUT_S, fault, keyed, parsed, shortened, spent
from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.lanes import Lanes
from rollart.errors import ConfigError, EndpointBusy, EndpointError, FunctionError, FunctionTimeout, to_install

LIMIT = "Function Compute takes 32 MB per call"
CREDENTIALS = (
    "set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET, or give this machine a role; "
    "they need fc:InvokeFunction"
)
HINTS = {
    "AccessDenied": "allow the credentials in use fc:InvokeFunction on it",
    "SignatureNotMatch": CREDENTIALS,
    "InvalidAccessKeyID": CREDENTIALS,
    "FunctionNotFound": "no function of that name in that account and region",
    "EntityTooLarge": LIMIT,
}


class FunctionComputeEndpoint:
    """`Endpoint` over Alibaba's SDK. Raises ConfigError without it, or for a URL that names no account or region."""

    media: Media = "json"
    remote = True

    def __init__(self, url: str, options: EndpointOptions) -> None:
        self.concurrency = options.max_concurrency or CONCURRENCY
        self._url = url.partition("?")[0]
        self._function, protocol, host, self._qualifier = _place(url)
        try:
            client = importlib.import_module("alibabacloud_fc20230330.client")
        except ImportError:
            raise ConfigError(f"fc:// needs an extra; {to_install('fc')}") from None
        self._models = importlib.import_module("alibabacloud_fc20230330.models")
        self._options = importlib.import_module("darabonba.runtime").RuntimeOptions
        self._faults = importlib.import_module("darabonba.exceptions")
        self._timeout: Any = importlib.import_module("requests").exceptions.ReadTimeout
        config = importlib.import_module("alibabacloud_tea_openapi.utils_models").Config(
            protocol=protocol,
            endpoint=host,
            credential=importlib.import_module("alibabacloud_credentials.client").Client(),
        )
        self._client: Any = client.Client(config)
        self._lanes = Lanes(self._url)

    def capacity(self) -> Capacity:
        """Nothing here."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        """One InvokeFunction, on a thread."""
        return await self._lanes.run(timeout_s + CONNECT_TIMEOUT_S, self._invoke, body, key, timeout_s)

    async def close(self) -> None:
        """End the threads; idle connections are the SDK's."""
        self._lanes.end()

    # ---------------------------------------------------------------------------------------------------- on a thread
    def _invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        request = self._models.InvokeFunctionRequest(body=keyed(body, key), qualifier=self._qualifier)
        headers = self._models.InvokeFunctionHeaders(x_fc_invocation_type="Sync", x_fc_log_type="Tail")
        options = self._options(
            read_timeout=max(1, round(timeout_s * 1000)),
            connect_timeout=round(CONNECT_TIMEOUT_S * 1000),
            max_idle_conns=self.concurrency,
        )
        try:
            reply = self._client.invoke_function_with_options(self._function, request, headers, options)
        except self._faults.ResponseException as error:
            raise self._refusal(error) from error
        except self._faults.UnretryableException as error:
            raise self._unanswered(error.inner_exception, timeout_s) from error
        payload, said = reply.body.read(), spent(reply.headers.get("x-fc-log-result", ""))
        if kind := reply.headers.get("x-fc-error-type"):
            raise self._failure(kind, payload)
        return Answer(payload, said.cold, run_s=said.run_s, billed_s=said.billed_s)

    def _refusal(self, error: Any) -> FunctionError:
        """What Function Compute, and not the function, had to say."""
        status, code = int(error.status_code or 0), str(error.code)
        said = f"{self._url} answered {status} {code}: {shortened(str(error.message))}"
        if status in (429, 503) or "Throttl" in code:
            return EndpointBusy(said)
        if status >= 500 or status == 409:
            return EndpointError(said)
        hint = HINTS.get(code) or {403: CREDENTIALS, 413: LIMIT}.get(status)
        return FunctionError(f"{said}; {hint}" if hint else said)

    def _unanswered(self, error: BaseException, timeout_s: float) -> FunctionError:
        """No answer that can be read: what the SDK raises for a bad connection has the cause as its context."""
        if isinstance(error.__context__, self._timeout):
            return FunctionTimeout(f"{self._url} did not answer within {timeout_s:g} s")
        said = f"{type(error).__name__}: {shortened(str(error))}"
        if isinstance(error, self._faults.RetryError | ValueError | RuntimeError):
            return EndpointError(f"{self._url} cannot be reached: {said}")
        hint = f"; {CREDENTIALS}" if "Credential" in type(error).__name__ else ""
        return FunctionError(f"{self._url} cannot be called: {said}{hint}")

    def _failure(self, kind: str, payload: bytes) -> FunctionError:
        """What the function's runtime had to say."""
        named, message = fault(payload)
        said = f"{self._url}: {named or kind}: {message}"
        if "timed out after" in message:
            return FunctionTimeout(f"{said}; raise the function's own time limit, or give it less to do")
        return EndpointError(said) if "exited unexpectedly" in message else FunctionError(said)


def _place(url: str) -> tuple[str, str, str, str | None]:
    """Function, protocol, host, qualifier."""
    name, options = parsed(url, {"region", "endpoint", "qualifier"})
    account, _, function = name.partition("/")
    if not re.fullmatch(r"\d+", account) or not re.fullmatch(r"[\w-]+", function):
        raise ConfigError(f"{url!r}: write it as fc://ACCOUNT_ID/FUNCTION?region=cn-hangzhou")
    if endpoint := options.get("endpoint"):
        protocol, _, host = endpoint.rstrip("/").partition("://")
    elif region := options.get("region"):
        protocol, host = "https", f"{account}.{region}.fc.aliyuncs.com"
    else:
        raise ConfigError(f"{url!r}: names no region; add ?region=cn-hangzhou")
    return function, protocol.upper(), host, options.get("qualifier")
