"""A served function and its own description: requests are drawn from the one, answers are checked against the other."""

import math

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn", reason="serve-reward needs the extra: pip install -e '.[serve]'")

from rollart.data.serverless.openapi import VALUE, description
from tests.data.serverless.served import MODULE, serving

CODECS = {"application/json": msgspec.json, "application/msgpack": msgspec.msgpack}
DESCRIBED = description(f"{MODULE}:echo", "echo", 2000, False)
ROUTES = [(path, method, route) for path, methods in DESCRIBED["paths"].items() for method, route in methods.items()]
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)
ANY_BYTES = st.binary(max_size=60) | st.binary(min_size=2001, max_size=2100)


@pytest.fixture(scope="module")
def client():
    with (
        serving("echo", "--max-body-bytes", "2000") as server,
        httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):
        yield client


def test_the_served_description_is_this_one(client):
    assert client.get("/openapi.json").json() == msgspec.json.decode(msgspec.json.encode(DESCRIBED))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_request_gets_an_answer_that_is_described(client, data):
    path, method, route = data.draw(st.sampled_from(ROUTES))
    headers = {
        each["name"]: str(data.draw(drawn(each["schema"])))
        for each in route.get("parameters", [])
        if each["in"] == "header" and each["name"] != "Idempotency-Key" and data.draw(st.booleans())
    }
    path = path.replace("{name}", data.draw(st.sampled_from(["echo", "echo:1", "other", "%00"])))
    body = None
    if "requestBody" in route:
        described = route["requestBody"]["content"]
        media = data.draw(st.sampled_from([*described, "text/plain"]))
        headers["Content-Type"] = media
        whole = media in described and data.draw(st.booleans())
        body = CODECS[media].encode(data.draw(drawn(described[media]["schema"]))) if whole else data.draw(ANY_BYTES)
    response = client.request(method.upper(), path, content=body, headers=headers)
    assert str(response.status_code) in route["responses"], "a status that is not described"
    answer = route["responses"][str(response.status_code)]
    media = response.headers.get("Content-Type", "")
    if not answer.get("content"):
        assert response.content == b""
        return
    assert media in answer["content"]
    assert valid(answer["content"][media]["schema"], CODECS[media].decode(response.content))
    for name, header in answer.get("headers", {}).items():
        assert name not in response.headers or valid(header["schema"], response.headers[name])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, media=st.sampled_from([*CODECS]))
def test_every_value_comes_back_as_it_went(client, value, media):
    content = CODECS[media].encode({"args": [value]})
    response = client.post("/", content=content, headers={"Content-Type": media})
    if len(content) > 2000:
        assert response.status_code == 413
    else:
        assert CODECS[media].decode(response.content) == {"result": value}


def test_a_wrong_answer_would_be_seen():
    reply = {"$ref": "#/components/schemas/Reply"}
    assert valid(reply, {"result": 1})
    assert not valid(reply, {"result": 1, "more": 2})
    assert not valid(reply, {"error": {"type": "x"}})
    assert not valid(reply, {"batch": [{"result": 1}, 2]})


# -------------------------------------------------------------------- the part of JSON Schema that the description uses
KINDS = {"object": dict, "array": list, "string": str}


def followed(schema):
    while "$ref" in schema:
        schema = DESCRIBED["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def drawn(schema):
    """A strategy for values that a schema describes."""
    if schema == VALUE:
        return VALUES
    schema = followed(schema)
    if "anyOf" in schema:
        return st.one_of([drawn(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            entries = {name: drawn(each) for name, each in schema.get("properties", {}).items()}
            required = {name: entries.pop(name) for name in schema.get("required", [])}
            return st.fixed_dictionaries(required, optional=entries) if entries or required else NAMED_VALUES
        case "array":
            return st.lists(drawn(schema.get("items", {})), max_size=4)
        case "number":
            return st.floats(0.5, 100)  # a tiny limit is a timeout, which costs a process each time
        case "string":
            return TEXT
    return VALUES


NAMED_VALUES = st.dictionaries(TEXT, VALUES, max_size=3)


def valid(schema, value):
    """Whether a schema describes a value."""
    if schema == VALUE:
        return True  # it was decoded
    schema = followed(schema)
    if "anyOf" in schema:
        return any(valid(each, value) for each in schema["anyOf"])
    if "oneOf" in schema:
        return sum(valid(each, value) for each in schema["oneOf"]) == 1
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        return False
    if "pattern" in schema:
        return math.isfinite(float(value))
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return (
            set(schema.get("required", [])) <= value.keys()
            and (schema.get("additionalProperties", True) or value.keys() <= known.keys())
            and all(valid(known.get(name, {}), each) for name, each in value.items())
        )
    return all(valid(schema.get("items", {}), each) for each in value) if isinstance(value, list) else True
