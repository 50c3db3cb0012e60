"""Alibaba Function Compute on loopback, as far as its InvokeFunction goes; it checks every signature.

POST /2023-03-30/functions/NAME/invocations?qualifier=...    200 the reply; 403 for who signs it wrongly
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.errors import FunctionError
from tests.data.serverless.invoke_engine import Engine, Reply, Request, report, serving

SECRET = "still not a secret"
ALIBABA = {
    "ALIBABA_CLOUD_ACCESS_KEY_ID": "LTAITEST",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET": SECRET,
    "ALIBABA_CLOUD_SECURITY_TOKEN": None,
    "ALIBABA_CLOUD_CREDENTIALS_FILE": os.devnull,
    "ALIBABA_CLOUD_CLI_PROFILE_DISABLED": "true",
    "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
}
"""The SDK reads these once, when it is imported."""
ALGORITHM = "ACS3-HMAC-SHA256"
MUST_BE_SIGNED = {
    "host",
    "x-acs-action",
    "x-acs-content-sha256",
    "x-acs-date",
    "x-acs-signature-nonce",
    "x-acs-version",
}


def signature(request: Request, signed: list[str], secret: str) -> str:
    """Of a request, as Alibaba Cloud's documents define it (request syntax and signature method V3)."""
    query = sorted(parse_qsl(request.query, keep_blank_values=True))
    canonical = "\n".join(
        [
            request.method,
            request.path,
            "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in query),
            *(f"{name}:{request.headers[name].strip()}" for name in signed),
            "",
            ";".join(signed),
            hashlib.sha256(request.body).hexdigest(),
        ]
    )
    to_sign = f"{ALGORITHM}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    return hmac.new(secret.encode(), to_sign.encode(), hashlib.sha256).hexdigest()


def fault_of(request: Request, secret: str) -> str:
    """Why a request is not to be believed, or nothing."""
    form = rf"{ALGORITHM} Credential=LTAITEST,SignedHeaders=([a-z0-9;-]+),Signature=([0-9a-f]{{64}})"
    if not (said := re.fullmatch(form, request.headers.get("authorization", ""))):
        return "no signature"
    signed = said[1].split(";")
    headers = set(request.headers)
    if signed != sorted(signed) or not MUST_BE_SIGNED | {name for name in headers if "x-acs-" in name} <= set(signed):
        return f"not all is signed: {signed}"
    if request.headers["x-acs-content-sha256"] != hashlib.sha256(request.body).hexdigest():
        return "another body was signed"
    sent = datetime.strptime(request.headers["x-acs-date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    if abs((datetime.now(UTC) - sent).total_seconds()) > 900:
        return "too old"
    return "" if hmac.compare_digest(said[2], signature(request, signed, secret)) else "signature does not match"


class Compute(Engine):
    """Functions in pools, behind Function Compute's words."""

    def __init__(self, options: EndpointOptions, secret: str = SECRET) -> None:
        super().__init__(options)
        self.secret = secret

    async def invoke(self, request: Request) -> Reply:
        """As Function Compute does."""
        self.requests.append(request)
        if fault := fault_of(request, self.secret):
            return refusal(403, "SignatureNotMatch", fault)
        path = re.fullmatch(r"/2023-03-30/functions/([^/]+)/invocations", request.path)
        if not path or request.method != "POST" or request.headers["x-acs-action"] != "InvokeFunction":
            return refusal(404, "FunctionNotFound")
        try:
            reply, answer = await self.run(unquote(path[1]), request.body)
        except FunctionError as error:
            return failure(f"Process exited unexpectedly before completing request ({error})")
        return Reply(msgspec.json.encode(reply), headers={"X-Fc-Log-Result": report(answer.run_s, answer.cold)})


def refusal(status: int, code: str, message: str = "so it is") -> Reply:
    """As Function Compute says no."""
    return Reply(msgspec.json.encode({"Code": code, "Message": message, "RequestId": "1-2-3"}), status)


def failure(message: str, kind: str = "") -> Reply:
    """As Function Compute says what became of a function."""
    body = {"errorMessage": message, **({"errorType": kind} if kind else {})}
    return Reply(msgspec.json.encode(body), headers={"X-Fc-Error-Type": "UnhandledInvocationError"})


@contextlib.asynccontextmanager
async def compute(options: EndpointOptions, secret: str = SECRET):
    """A Function Compute and its address."""
    made = Compute(options, secret)
    try:
        async with serving(made.invoke) as address:
            yield made, address
    finally:
        await made.close()
