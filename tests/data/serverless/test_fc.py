"""`fc://` on the wire: what travels and how it is signed, what Function Compute may answer, and what becomes of it."""

import asyncio
import contextlib
import os
import subprocess
import sys

import msgspec
import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.registry import open_endpoint
from rollart.errors import ConfigError, EndpointBusy, EndpointError, FunctionError, FunctionTimeout
from tests.data.serverless.compute_engine import ALIBABA, SECRET, compute, failure, refusal
from tests.data.serverless.invoke_engine import Reply, environ, report, serving

with environ(**ALIBABA):
    pytest.importorskip("alibabacloud_fc20230330.client", reason="the extra `fc` is not installed")

EVENT = b'{"args":["x"]}'


@contextlib.asynccontextmanager
async def opened(address, query=""):
    endpoint = open_endpoint(f"fc://1234567890/echo?endpoint=http://{address}{query}", EndpointOptions())
    try:
        yield endpoint
    finally:
        await endpoint.close()


def answered(reply, timeout_s=10.0):
    """What comes of one answer of Function Compute's."""

    async def answer(_):
        return await reply() if callable(reply) else reply

    async def main():
        async with serving(answer) as address, opened(address) as endpoint:
            return await endpoint.invoke(EVENT, "k", timeout_s)

    return asyncio.run(main())


def test_a_call_is_signed_and_carries_the_event_the_key_and_the_qualifier():
    async def main():
        async with compute(EndpointOptions()) as (made, address), opened(address, "&qualifier=live~1") as endpoint:
            answer = await endpoint.invoke(EVENT, "grüße", 10.0)
            await endpoint.invoke(EVENT, "", 10.0)
        return answer, made.requests

    answer, (keyed, plain) = asyncio.run(main())
    assert msgspec.json.decode(answer.body) == {"result": "x"}
    assert answer.billed_s is not None
    assert (keyed.method, keyed.path) == ("POST", "/2023-03-30/functions/echo/invocations")
    assert keyed.query == "qualifier=live~1"
    assert msgspec.json.decode(keyed.body) == {"key": "grüße", "args": ["x"]}
    assert plain.body == EVENT
    assert (keyed.headers["x-fc-invocation-type"], keyed.headers["x-fc-log-type"]) == ("Sync", "Tail")
    assert SECRET not in str(keyed)


def test_a_wrong_secret_is_refused_with_the_way_out():
    async def main():
        async with compute(EndpointOptions(), secret="another") as (_, address), opened(address) as endpoint:
            await endpoint.invoke(EVENT, "", 10.0)

    with pytest.raises(FunctionError, match=r"403 SignatureNotMatch: .*match.*; set ALIBABA_CLOUD_ACCESS") as caught:
        asyncio.run(main())
    assert type(caught.value) is FunctionError
    assert SECRET not in str(caught.value)


def test_what_function_compute_measured_is_what_counts():
    answer = answered(Reply(b'{"result":1}', headers={"X-Fc-Log-Result": report(0.0125, cold=False)}))
    assert (answer.cold, answer.run_s, answer.billed_s) == (False, 0.0125, 0.013)
    assert answered(Reply(b'{"result":1}')).billed_s is None


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (refusal(429, "ResourceThrottled", "reserve reached"), EndpointBusy, "429 ResourceThrottled: .*reserve"),
        (refusal(503, "ResourceExhausted"), EndpointBusy, "503 ResourceExhausted"),
        (refusal(400, "Throttling.User"), EndpointBusy, "400 Throttling"),
        (refusal(500, "InternalServerError"), EndpointError, "500 InternalServerError"),
        (Reply(b"<html>bad gateway</html>", 502), EndpointError, "cannot be reached"),
        (refusal(400, "EntityTooLarge"), FunctionError, "Function Compute takes 32 MB per call"),
        (refusal(413, "RequestTooLarge"), FunctionError, "Function Compute takes 32 MB per call"),
        (refusal(404, "FunctionNotFound"), FunctionError, "no function of that name in that account and region"),
        (refusal(403, "AccessDenied"), FunctionError, "allow the credentials in use fc:InvokeFunction"),
        (refusal(403, "InvalidAccessKeyID"), FunctionError, "set ALIBABA_CLOUD_ACCESS_KEY_ID"),
        (failure("no module x", "ImportError"), FunctionError, "fc://1234567890/echo: ImportError: no module x"),
        (failure("Function timed out after 3 seconds"), FunctionTimeout, "UnhandledInvocationError: .*timed out after"),
        (failure("Process exited unexpectedly before completing request"), EndpointError, "exited unexpectedly"),
    ],
)
def test_each_answer_of_function_compute_is_the_error_that_it_means(reply, kind, words):
    with pytest.raises(FunctionError, match=words) as caught:
        answered(reply)
    assert type(caught.value) is kind


def test_a_function_that_does_not_answer_is_given_up_and_asked_once():
    asked = []

    async def never():
        asked.append(1)
        await asyncio.Event().wait()

    with pytest.raises(FunctionTimeout, match=r"fc://1234567890/echo did not answer within 0\.3 s"):
        answered(never, timeout_s=0.3)
    assert asked == [1]


def test_a_connection_that_is_refused_is_a_failure_of_the_endpoint():
    async def main():
        async with serving(None) as address:
            pass
        async with opened(address) as endpoint:
            await endpoint.invoke(EVENT, "", 5.0)

    with pytest.raises(EndpointError, match=r"fc://1234567890/echo cannot be reached"):
        asyncio.run(main())


def test_missing_credentials_are_told_before_anything_is_sent():
    script = """
import asyncio
from rollart.data.serverless.registry import open_endpoint
asyncio.run(open_endpoint("fc://1/echo?endpoint=http://127.0.0.1:9").invoke(b"{}", "", 5.0))
"""
    names = {**ALIBABA, "ALIBABA_CLOUD_ACCESS_KEY_ID": None, "ALIBABA_CLOUD_ACCESS_KEY_SECRET": None}
    with environ(**names, HOME=os.devnull):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()[-1]
    assert "FunctionError: fc://1/echo cannot be called: CredentialException" in said
    assert "; set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET" in said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("fc://echo?region=cn-hangzhou", "write it as fc://ACCOUNT_ID/FUNCTION"),
        ("fc://1/a/b?region=cn-hangzhou", "write it as fc://ACCOUNT_ID/FUNCTION"),
        ("fc://1/echo", r"names no region; add \?region=cn-hangzhou"),
        ("fc://1/echo?secret=x", "'secret' is not a choice"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_any_call(url, words):
    with pytest.raises(ConfigError, match=words):
        open_endpoint(url)
