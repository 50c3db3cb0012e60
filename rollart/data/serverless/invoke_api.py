"""AWS Lambda's Invoke, as far as a synchronous call needs it: boto3 with `endpoint_url` calls a served function.

    POST /2015-03-31/functions/NAME/invocations     payload in, payload out; 200 also when the function was not served:
    X-Amz-Function-Error: Unhandled                 {"errorMessage", "errorType", "stackTrace"}

NAME is the function's own name (`score` of `rewards:score`), also with a qualifier or as the end of an ARN.
Source: the Invoke operation of Lambda's API reference, 2015-03-31.
"""

from __future__ import annotations

import re
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollart.data.serverless.endpoint import Answer
from rollart.data.serverless.replies import Refused
from rollart.errors import EndpointError, FunctionError, FunctionTimeout

PATH = "/2015-03-31/functions/{name}/invocations"
MEDIA = {"", "application/json", "application/octet-stream", "binary/octet-stream", "application/x-amz-json-1.0"}
"""What clients send. Media that a web page can send to any address without asking are not among them."""
CODES = {
    400: "InvalidRequestContentException",
    401: "UnrecognizedClientException",
    404: "ResourceNotFoundException",
    408: "InvalidRequestContentException",
    409: "ResourceConflictException",
    413: "RequestTooLargeException",
    415: "UnsupportedMediaTypeException",
    422: "InvalidParameterValueException",
    429: "TooManyRequestsException",
    503: "ServiceException",
}


def function_name(target: str) -> str:
    """The name under which a target is invoked.

    >>> function_name("rewards.maths:Judge.score")
    'Judge-score'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", target.rpartition(":")[2])


def check(request: Request, target: str) -> None:
    """Raises Refused for what is not served."""
    name = function_name(target)
    if name not in request.path_params["name"].split(":"):
        raise Refused(404, "NoFunction", f"no such function here; this one is called {name}")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() not in MEDIA:
        raise Refused(415, "UnsupportedMedia", "the payload is application/json")
    if request.headers.get("x-amz-invocation-type", "RequestResponse") not in ("RequestResponse", "DryRun"):
        raise Refused(422, "Asynchronous", "calls are answered here; InvocationType is RequestResponse or DryRun")


def reply(payload: bytes, answer: Answer | None = None, headers: dict[str, str] | None = None) -> Response:
    """The payload as Lambda returns it."""
    given = {"x-amzn-RequestId": str(uuid.uuid4()), "X-Amz-Executed-Version": "$LATEST", **(headers or {})}
    if answer is not None:
        given["X-Rollart-Queue-S"] = f"{answer.queue_s:.6f}"
        given["X-Rollart-Run-S"] = f"{answer.run_s or 0:.6f}"
        given["X-Rollart-Cold"] = str(int(answer.cold))
    return Response(payload, headers=given, media_type="application/json")


def unserved(error: FunctionError) -> Response:
    """The function did not get to answer: out of time, dead, or not to be loaded."""
    if isinstance(error, FunctionTimeout):
        kind = "Sandbox.Timedout"
    elif isinstance(error, EndpointError):
        kind = "Runtime.ExitError"
    else:
        kind = "Runtime.ImportModuleError"
    body = {"errorMessage": str(error), "errorType": kind, "stackTrace": []}
    return reply(msgspec.json.encode(body), headers={"X-Amz-Function-Error": "Unhandled"})


def refusal(refused: Refused) -> Response:
    """A call that was turned away, as Lambda's clients read it."""
    body = {"Type": "Service" if refused.status >= 500 else "User", "message": str(refused)}
    headers = {**refused.headers, "x-amzn-ErrorType": CODES.get(refused.status, "ServiceException")}
    return Response(msgspec.json.encode(body), refused.status, headers, media_type="application/json")
