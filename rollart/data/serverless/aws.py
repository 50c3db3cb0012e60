"""`lambda://NAME[:QUALIFIER]?region=eu-west-1`: AWS Lambda, or any engine behind `endpoint=` that speaks its Invoke.

    what Lambda answers                                        here
    200                                                        the reply
    200 with FunctionError                                     FunctionError; "Task timed out" FunctionTimeout;
                                                               its process ended: EndpointError
    429, throttling                                            EndpointBusy
    5xx, 408, being updated, no connection                     EndpointError
    no answer in time                                          FunctionTimeout
    the rest: credentials, permissions, no function, too large FunctionError, with the way out

Invariants: credentials come from AWS's own chain (environment, profile, role) and never from the URL; the client's own
retries are off, since the calling side makes them. Lambda does not deduplicate: the key goes along in the event and in
the client context, and a call that is given up here may go on there until the function's own time limit, so set that no
longer than `timeout_s`.
"""

from __future__ import annotations

import base64
import importlib
import threading
from typing import Any

import msgspec

from rollart.data.serverless.cloud import (
    CONCURRENCY,
    CONNECT_TIMEOUT_S,
    fault,
    keyed,
    parsed,
    shortened,
    spent,
)
from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.lanes import Lanes
from rollart.errors import ConfigError, EndpointBusy, EndpointError, FunctionError, FunctionTimeout, to_install

LIMIT = "Lambda takes 6,291,456 bytes per call"
AGAIN = ("ResourceConflictException", "SnapStartNotReadyException", "ResourceNotReadyException")
"""It is being updated or woken."""
DIED = ("Runtime.ExitError", "Extension.Crash")
CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role; "
    "they need lambda:InvokeFunction"
)
HINTS = {
    "AccessDeniedException": "allow the credentials in use lambda:InvokeFunction on it",
    "UnrecognizedClientException": CREDENTIALS,
    "InvalidSignatureException": CREDENTIALS,
    "ExpiredTokenException": CREDENTIALS,
    "ResourceNotFoundException": "no function of that name and qualifier in that region",
    "RequestTooLargeException": LIMIT,
    "RequestEntityTooLargeException": LIMIT,
    "SerializedRequestEntityTooLargeException": LIMIT,
}


class LambdaEndpoint:
    """`Endpoint` over boto3. Raises ConfigError without it, or without a region."""

    media: Media = "json"
    remote = True

    def __init__(self, url: str, options: EndpointOptions) -> None:
        self.concurrency = options.max_concurrency or CONCURRENCY
        self._url = url.partition("?")[0]
        name, self._options = parsed(url, {"region", "endpoint", "qualifier"})
        self._target = _target(name, self._options.get("qualifier", ""))
        try:
            self._boto3 = importlib.import_module("boto3")
        except ImportError:
            raise ConfigError(f"lambda:// needs an extra; {to_install('lambda')}") from None
        self._errors = importlib.import_module("botocore.exceptions")
        self._session: Any = self._boto3.Session(region_name=self._options.get("region"))
        if not self._session.region_name:
            raise ConfigError(f"{url!r}: names no region; add ?region=eu-west-1, or set AWS_REGION")
        self._clients: dict[float, Any] = {}
        self._making = threading.Lock()
        self._lanes = Lanes(self._url)

    def capacity(self) -> Capacity:
        """Nothing here."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        """One Invoke, on a thread."""
        return await self._lanes.run(timeout_s + CONNECT_TIMEOUT_S, self._invoke, body, key, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        self._lanes.end()
        for client in self._clients.values():
            client.close()

    # ---------------------------------------------------------------------------------------------------- on a thread
    def _invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        context = {"ClientContext": _context(key)} if key else {}
        try:
            client = self._client(timeout_s)
            reply = client.invoke(**self._target, **context, Payload=keyed(body, key), LogType="Tail")
            payload = reply["Payload"].read()
        except self._errors.ClientError as error:
            raise self._refusal(error.response) from error
        except self._errors.ReadTimeoutError as error:
            raise FunctionTimeout(f"{self._url} did not answer within {timeout_s:g} s") from error
        except (self._errors.HTTPClientError, self._errors.ConnectionError) as error:
            raise EndpointError(f"{self._url} cannot be reached: {shortened(str(error))}") from error
        except self._errors.BotoCoreError as error:
            raise self._unusable(error) from error
        if reply.get("FunctionError"):
            raise self._failure(payload)
        said = spent(reply.get("LogResult", ""))
        return Answer(payload, said.cold, run_s=said.run_s, billed_s=said.billed_s)

    def _client(self, timeout_s: float) -> Any:
        """For botocore a time limit is the client's; a function has one for all its calls."""
        with self._making:
            if timeout_s not in self._clients:
                config = importlib.import_module("botocore.config").Config(
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=timeout_s,
                    retries={"total_max_attempts": 1},
                    max_pool_connections=self.concurrency,
                    **({"proxies": {}} if "endpoint" in self._options else {}),
                )
                self._clients[timeout_s] = self._session.client(
                    "lambda", config=config, endpoint_url=self._options.get("endpoint")
                )
            return self._clients[timeout_s]

    def _refusal(self, response: Any) -> FunctionError:
        """What Lambda, and not the function, had to say."""
        code = str(response["Error"].get("Code", ""))
        status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
        said = f"{self._url} answered {status} {code}: {shortened(str(response['Error'].get('Message', '')))}"
        if status == 429 or "Throttl" in code:
            return EndpointBusy(said)
        if status >= 500 or status == 408 or code in AGAIN:
            return EndpointError(said)
        hint = HINTS.get(code) or {403: CREDENTIALS, 413: LIMIT}.get(status)
        return FunctionError(f"{said}; {hint}" if hint else said)

    def _failure(self, payload: bytes) -> FunctionError:
        """What the function's runtime had to say."""
        kind, message = fault(payload)
        said = f"{self._url}: {kind or 'failed'}: {message}"
        if "Task timed out" in message:
            return FunctionTimeout(f"{said}; raise the function's own time limit, or give it less to do")
        return EndpointError(said) if kind in DIED else FunctionError(said)

    def _unusable(self, error: Exception) -> FunctionError:
        """Nothing was sent."""
        said = f"{self._url} cannot be called: {type(error).__name__}: {shortened(str(error))}"
        named = ("Credential", "Token", "Profile", "SSO")
        return FunctionError(f"{said}; {CREDENTIALS}" if any(word in type(error).__name__ for word in named) else said)


def _target(name: str, qualifier: str) -> dict[str, str]:
    """The arguments that name a function: by its name, or by its ARN, which holds colons of its own."""
    plain, _, inner = name.partition(":")
    if ":" not in inner:
        name, qualifier = plain, inner or qualifier
    return {"FunctionName": name, "Qualifier": qualifier} if qualifier else {"FunctionName": name}


def _context(key: str) -> str:
    return base64.b64encode(msgspec.json.encode({"custom": {"key": key}})).decode()
