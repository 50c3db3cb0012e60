"""The description of a served function, as OpenAPI 3.1: every route with every answer that it gives.

PURE. Invariant: it is true of `service.py`; the tests draw requests from it and check the answers against it.
"""

from __future__ import annotations

from typing import Any

from rollart import __version__

PROBLEMS = {
    400: "The body, or a header, cannot be read.",
    401: "The token is missing or wrong.",
    406: "None of the media asked for is spoken here.",
    408: "The body did not arrive in time.",
    409: "This Idempotency-Key came with another event before.",
    413: "The body is larger than the limit.",
    415: "The body's media is not read here.",
    429: "As many calls as fit run and wait already; come again.",
    500: "The function cannot be loaded any more.",
    503: "The service is ending, or the function's process died under the call; try again.",
}
INVOKE_PROBLEMS = (400, 401, 404, 408, 409, 413, 415, 422, 429, 503)
TEXT = {"type": "string"}
SECONDS = {"type": "string", "pattern": r"^[0-9]+\.[0-9]+$"}
VALUE = {"$ref": "#/components/schemas/Value"}
SCHEMAS: dict[str, Any] = {
    "Value": {
        "description": "What JSON holds; integers have 64 bits.",
        "anyOf": [
            {"type": ["null", "boolean", "string"]},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
            {"type": "number", "not": {"type": "integer"}},
            {"type": "array", "items": VALUE},
            {"type": "object", "additionalProperties": VALUE},
        ],
    },
    "Call": {
        "type": "object",
        "description": "One call: the function's arguments.",
        "properties": {
            "args": {"type": "array", "items": VALUE},
            "kwargs": {"type": "object", "additionalProperties": VALUE},
            "key": VALUE,
        },
        "additionalProperties": False,
        "examples": [{"args": [1, "two"], "kwargs": {"three": 3}}],
    },
    "Batch": {
        "type": "object",
        "description": "Several calls; a member's fault is its own.",
        "properties": {"batch": {"type": "array", "items": VALUE}},
        "required": ["batch"],
        "additionalProperties": VALUE,
        "examples": [{"batch": [{"args": [1]}, {"args": [2]}]}],
    },
    "Event": {"anyOf": [{"$ref": "#/components/schemas/Call"}, {"$ref": "#/components/schemas/Batch"}]},
    "Result": {
        "type": "object",
        "properties": {"result": VALUE},
        "required": ["result"],
        "additionalProperties": False,
    },
    "Fault": {
        "type": "object",
        "description": "What the function raised, or FunctionTimeout when it was cut.",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"type": TEXT, "message": TEXT, "where": TEXT, "trace": TEXT},
                "required": ["type", "message", "where", "trace"],
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
    "Replies": {
        "type": "object",
        "properties": {"batch": {"type": "array", "items": {"$ref": "#/components/schemas/Reply"}}},
        "required": ["batch"],
        "additionalProperties": False,
    },
    "Reply": {"oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Result", "Fault", "Replies")]},
    "Problem": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"type": TEXT, "message": TEXT},
                "required": ["type", "message"],
            }
        },
        "required": ["error"],
    },
    "Unserved": {
        "type": "object",
        "description": "With X-Amz-Function-Error: the function did not get to answer.",
        "properties": {"errorMessage": TEXT, "errorType": TEXT, "stackTrace": {"type": "array"}},
        "required": ["errorMessage", "errorType", "stackTrace"],
    },
    "InvokeProblem": {
        "type": "object",
        "properties": {"Type": {"enum": ["User", "Service"]}, "message": TEXT},
        "required": ["Type", "message"],
    },
}

NOT_READY = {
    "503": {
        "description": "It is ending, or the function cannot be loaded any more.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"ready": {"const": False}, "why": TEXT},
                    "required": ["ready", "why"],
                }
            }
        },
    }
}
MEDIA = ("json", "msgpack")


def description(target: str, name: str, max_body_bytes: int, with_token: bool) -> dict[str, Any]:
    """The description of the function `target`, which Lambda's clients call `name`."""
    security: list[dict[str, list[str]]] = [{"token": []}] if with_token else []
    return {
        "openapi": "3.1.0",
        "info": {
            "title": target,
            "version": __version__,
            "description": f"One function behind HTTP. A body has at most {max_body_bytes:,} bytes.",
        },
        "paths": {
            "/": {"post": _call("call", security)},
            "/invoke": {"post": _call("invoke", security)},
            "/2015-03-31/functions/{name}/invocations": {"post": _invoke(name, security)},
            "/health": {"get": _probe("health", "This process is alive.", {"alive": {"const": True}}, {})},
            "/ready": {"get": _probe("ready", "It takes calls.", {"ready": {"const": True}}, NOT_READY)},
            "/openapi.json": {"get": _probe("description", "This description.", {}, {})},
        },
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _call(name: str, security: list[dict[str, list[str]]]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": "Call the function.",
        "security": security,
        "parameters": [
            _header("Idempotency-Key", {"type": "string", "maxLength": 512}, "Equal for all deliveries of one call."),
            _header("X-Rollart-Timeout", {"type": "number", "exclusiveMinimum": 0}, "Seconds; only lowers the limit."),
        ],
        "requestBody": {"required": True, "content": _both("Event")},
        "responses": {
            "200": {
                "description": "The function's reply, also when it raised.",
                "content": _both("Reply"),
                "headers": {
                    "X-Rollart-Run-S": _shape(SECONDS, "Seconds that it ran."),
                    "X-Rollart-Queue-S": _shape(SECONDS, "Seconds that the call waited."),
                    "X-Rollart-Cold": _shape({"enum": ["0", "1"]}, "1: a process was started for it."),
                },
            },
            **{str(status): _problem(status, said, "Problem") for status, said in PROBLEMS.items()},
        },
    }


def _invoke(name: str, security: list[dict[str, list[str]]]) -> dict[str, Any]:
    said = {**PROBLEMS, 404: "No function of this name.", 422: "An invocation type that is not served."}
    answer = {"anyOf": [{"$ref": f"#/components/schemas/{each}"} for each in ("Reply", "Unserved")]}
    return {
        "operationId": "lambdaInvoke",
        "summary": "AWS Lambda's Invoke: boto3 with this address as endpoint_url.",
        "security": security,
        "parameters": [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "examples": [name]}},
            _header("X-Amz-Invocation-Type", {"enum": ["RequestResponse", "DryRun"]}, "How to call."),
        ],
        "requestBody": {"content": {"application/json": {"schema": VALUE}}},
        "responses": {
            "200": {"description": "The payload.", "content": {"application/json": {"schema": answer}}},
            "204": {"description": "DryRun: it would be called."},
            **{str(status): _problem(status, said[status], "InvokeProblem") for status in INVOKE_PROBLEMS},
        },
    }


def _probe(name: str, says: str, entries: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": entries, "required": list(entries)}
    answer = {"description": says, "content": {"application/json": {"schema": schema}}}
    return {"operationId": name, "summary": says, "security": [], "responses": {"200": answer, **more}}


def _header(name: str, schema: dict[str, Any], says: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": says}


def _shape(schema: dict[str, Any], says: str) -> dict[str, Any]:
    return {"schema": schema, "description": says}


def _both(schema: str) -> dict[str, Any]:
    return {f"application/{media}": {"schema": {"$ref": f"#/components/schemas/{schema}"}} for media in MEDIA}


def _problem(status: int, says: str, schema: str) -> dict[str, Any]:
    problem: dict[str, Any] = {
        "description": says,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }
    if status in (429, 503):
        problem["headers"] = {"Retry-After": _shape({"type": "string"}, "Seconds; not where the function is at fault.")}
    return problem
