"""`lambda://` on the wire: what travels, what Lambda may answer, and what becomes of it."""

import asyncio
import base64
import contextlib

import msgspec
import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.registry import open_endpoint
from rollart.errors import ConfigError, EndpointBusy, EndpointError, FunctionError, FunctionTimeout
from tests.data.serverless.invoke_engine import AWS, Reply, engine, environ, refusal, report, serving

pytest.importorskip("boto3", reason="the extra `lambda` is not installed")

EVENT = b'{"args":["x"]}'


@contextlib.asynccontextmanager
async def opened(address, name="echo", query="", **variables):
    with environ(**{**AWS, **variables}):
        endpoint = open_endpoint(
            f"lambda://{name}?region=eu-west-1&endpoint=http://{address}{query}", EndpointOptions()
        )
        try:
            yield endpoint
        finally:
            await endpoint.close()


def answered(reply, timeout_s=10.0, **variables):
    """What comes of one answer of Lambda's."""

    async def answer(_):
        return await reply() if callable(reply) else reply

    async def main():
        async with serving(answer) as address, opened(address, **variables) as endpoint:
            return await endpoint.invoke(EVENT, "k", timeout_s)

    return asyncio.run(main())


def failed(kind="", message="", body=None):
    body = msgspec.json.encode({"errorType": kind, "errorMessage": message}) if body is None else body
    return Reply(body, headers={"X-Amz-Function-Error": "Unhandled"})


def test_a_call_carries_the_event_the_key_and_the_qualifier_and_is_signed():
    async def main():
        async with engine(EndpointOptions()) as (made, address), opened(address, "echo:live") as endpoint:
            answer = await endpoint.invoke(EVENT, "grüße", 10.0)
            await endpoint.invoke(EVENT, "", 10.0)
        return answer, made.requests

    answer, (keyed, plain) = asyncio.run(main())
    assert msgspec.json.decode(answer.body) == {"result": "x"}
    assert (keyed.path, keyed.query) == ("/2015-03-31/functions/echo/invocations", "Qualifier=live")
    assert msgspec.json.decode(keyed.body) == {"key": "grüße", "args": ["x"]}
    context = msgspec.json.decode(base64.b64decode(keyed.headers["x-amz-client-context"]))
    assert context == {"custom": {"key": "grüße"}}
    assert keyed.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDTEST/")
    assert plain.body == EVENT
    assert "x-amz-client-context" not in plain.headers


def test_an_arn_is_a_name_of_its_own():
    arn = "arn:aws:lambda:eu-west-1:123456789012:function:score:3"
    asked = []

    async def answer(request):
        asked.append(request)
        return Reply(b'{"result":1}')

    async def main():
        async with serving(answer) as address, opened(address, arn) as endpoint:
            await endpoint.invoke(EVENT, "", 10.0)

    asyncio.run(main())
    assert asked[0].path == f"/2015-03-31/functions/{arn.replace(':', '%3A')}/invocations"


def test_what_lambda_measured_is_what_counts():
    answer = answered(Reply(b'{"result":1}', headers={"X-Amz-Log-Result": report(0.0125, cold=True)}))
    assert (answer.cold, answer.run_s, answer.billed_s) == (True, 0.0125, 0.013)
    answer = answered(Reply(b'{"result":1}', headers={"X-Amz-Log-Result": report(0.0125, cold=False)}))
    assert not answer.cold
    answer = answered(Reply(b'{"result":1}', headers={"X-Amz-Log-Result": "no Base64"}))
    assert (answer.cold, answer.run_s, answer.billed_s) == (False, None, None)


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (refusal(429, "TooManyRequestsException", "Rate exceeded"), EndpointBusy, "429 TooManyReq.*: Rate exceeded"),
        (refusal(400, "ThrottlingException"), EndpointBusy, "400 Throttling"),
        (refusal(500, "ServiceException"), EndpointError, "500 ServiceException"),
        (Reply(b"<html>bad gateway</html>", 502), EndpointError, "502"),
        (refusal(409, "ResourceConflictException"), EndpointError, "409 ResourceConflict"),
        (refusal(413, "RequestTooLargeException"), FunctionError, "Lambda takes 6,291,456 bytes per call"),
        (refusal(404, "ResourceNotFoundException"), FunctionError, "no function of that name and qualifier"),
        (refusal(403, "AccessDeniedException"), FunctionError, "allow the credentials in use lambda:InvokeFunction"),
        (refusal(403, "UnrecognizedClientException"), FunctionError, "set AWS_ACCESS_KEY_ID"),
        (refusal(403, "IncompleteSignature"), FunctionError, "set AWS_ACCESS_KEY_ID"),
        (failed("ImportError", "no module x"), FunctionError, "lambda://echo: ImportError: no module x"),
        (failed(message="2026-01-01 8f5 Task timed out after 3.00 seconds"), FunctionTimeout, "timed out after 3.00"),
        (failed("Runtime.ExitError", "signal: killed"), EndpointError, "Runtime.ExitError: signal: killed"),
        (failed(body=b"\xff" + b"x" * 2000), FunctionError, r"failed: .x+\.\.\.$"),
        (failed(body=b"[]"), FunctionError, r"failed: \[\]$"),
    ],
)
def test_each_answer_of_lambda_is_the_error_that_it_means(reply, kind, words):
    with pytest.raises(FunctionError, match=words) as caught:
        answered(reply)
    assert type(caught.value) is kind
    assert "not a secret" not in str(caught.value)


def test_a_function_that_does_not_answer_is_given_up_and_asked_once():
    asked = []

    async def never():
        asked.append(1)
        await asyncio.Event().wait()

    with pytest.raises(FunctionTimeout, match=r"lambda://echo did not answer within 0\.3 s"):
        answered(never, timeout_s=0.3)
    assert asked == [1]


def test_a_connection_that_is_refused_is_a_failure_of_the_endpoint():
    async def main():
        async with serving(None) as address:
            pass
        async with opened(address) as endpoint:
            await endpoint.invoke(EVENT, "", 5.0)

    with pytest.raises(EndpointError, match=r"lambda://echo cannot be reached"):
        asyncio.run(main())


def test_missing_credentials_are_told_before_anything_is_sent():
    with pytest.raises(FunctionError, match=r"NoCredentialsError: .*; set AWS_ACCESS_KEY_ID .*or give this machine"):
        answered(refusal(500, "asked"), AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
    with pytest.raises(FunctionError, match=r"PartialCredentialsError: .*; set AWS_ACCESS_KEY_ID"):
        answered(refusal(500, "asked"), AWS_SECRET_ACCESS_KEY=None)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("lambda://echo", r"names no region; add \?region=eu-west-1, or set AWS_REGION"),
        ("lambda://echo?regoin=eu-west-1", "'regoin' is not a choice; did you mean 'region'?"),
        ("lambda://echo?region", "bad query field"),
        ("lambda://echo?region=eu-west-1&endpoint=ftp://x", "endpoint is https://host"),
        ("lambda://echo?region=eu-west-1&endpoint=http://id:secret@x", "endpoint is https://host .*holds no secret"),
        ("lambda://?region=eu-west-1", "names no function"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_any_call(url, words):
    with environ(**AWS), pytest.raises(ConfigError, match=words):
        open_endpoint(url)


def test_the_region_may_come_from_the_environment():
    with environ(**{**AWS, "AWS_DEFAULT_REGION": "eu-north-1"}):
        asyncio.run(open_endpoint("lambda://echo").close())
