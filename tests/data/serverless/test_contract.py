"""What every endpoint does, whatever its scheme. A new scheme adds a line to `PLACES`."""

import asyncio
import contextlib
import json

import msgspec
import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.registry import open_endpoint
from rollart.errors import FunctionError, FunctionTimeout
from rollart.types import RewardRequest
from tests.data.serverless.compute_engine import ALIBABA, compute
from tests.data.serverless.invoke_engine import AWS, engine, environ
from tests.data.serverless.served import Servers

MODULE = "tests.data.serverless.user_functions"


@contextlib.asynccontextmanager
async def module_scheme(scheme, name, options):
    endpoint = open_endpoint(f"{scheme}://{MODULE}:{name}", options)
    try:
        yield endpoint
    finally:
        await endpoint.close()


@contextlib.asynccontextmanager
async def on_lambda(name, options):
    pytest.importorskip("boto3", reason="the extra `lambda` is not installed")
    with environ(**AWS):
        async with engine(options) as (_, address):
            endpoint = open_endpoint(f"lambda://{name}?region=eu-west-1&endpoint=http://{address}", options)
            try:
                yield endpoint
            finally:
                await endpoint.close()


@contextlib.asynccontextmanager
async def on_function_compute(name, options):
    with environ(**ALIBABA):
        pytest.importorskip("alibabacloud_fc20230330.client", reason="the extra `fc` is not installed")
    async with compute(options) as (_, address):
        endpoint = open_endpoint(f"fc://1234567890/{name}?endpoint=http://{address}", options)
        try:
            yield endpoint
        finally:
            await endpoint.close()


@contextlib.asynccontextmanager
async def http_scheme(media, name, options):
    pytest.importorskip("uvicorn", reason="serve-reward needs the extra: pip install -e '.[serve]'")
    words = ["--options", json.dumps(options.arguments)] if options.arguments else []
    url = SERVERS.url(name, *words)
    endpoint = open_endpoint(url, msgspec.structs.replace(options, media=media))
    try:
        yield endpoint
    finally:
        await endpoint.close()


SERVERS = Servers()
PLACES = {
    "http": lambda name, options: http_scheme("json", name, options),
    "http-msgpack": lambda name, options: http_scheme("msgpack", name, options),
    "local": lambda name, options: module_scheme("local", name, options),
    "thread": lambda name, options: module_scheme("thread", name, options),
    "lambda": on_lambda,
    "fc": on_function_compute,
    "ray": lambda name, options: module_scheme("ray", name, options),
}
HERE = [place for place in PLACES if place != "ray"]
"""Ray needs its cluster: `tests/ray/test_ray_tasks.py`."""

pytestmark = pytest.mark.parametrize("place", HERE)


@pytest.fixture(scope="module", autouse=True)
def servers():
    """They live as long as this module's tests."""
    yield
    SERVERS.close()


def using(place, name, work, *, policy=None, **options):
    """Run `await work(function)` on a function at a place."""

    async def main():
        async with PLACES[place](name, EndpointOptions(**options)) as endpoint:
            return await work(
                Function("it", endpoint, policy or CallPolicy(timeout_s=10, max_attempts=2, backoff_s=0.01))
            )

    return asyncio.run(main())


def call(place, name, *args, policy=None, options=None, **kwargs):
    return using(place, name, lambda function: function.call(*args, **kwargs), policy=policy, **(options or {}))


def test_values_come_back_as_they_went(place):
    values = [None, True, -1, 2**53, 0.1, "", "grüße 你好 \u0000 🎈", [1, [2.5]], {"a": {"b": []}}]
    assert call(place, "echo", values) == values
    assert call(place, "echo", 1, more="x") == {"value": 1, "more": "x"}


def test_calls_run_at_the_same_time_and_none_is_mixed_up(place):
    async def work(function):
        return await asyncio.gather(*(function.call(number) for number in range(100)))

    assert using(place, "echo", work, max_concurrency=4) == list(range(100))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raising", r"it: KeyError: 'no such thing' \(user_functions.py:\d+\)"),
        ("exiting", "it: SystemExit: 3"),
        ("no_number", "it: ValueError: the function returned nan, not a finite number"),
        ("no_data", "it: TypeError: .*not JSON serializable"),
        ("too_large_a_number", "it: ValueError: the function returned the integer 1180.*, which 64 bits do not hold"),
        ("half_a_character", "it: UnicodeEncodeError: .*surrogates not allowed"),
    ],
)
def test_what_a_function_does_wrong_is_told_and_not_tried_again(place, name, reason):
    async def work(function):
        with pytest.raises(FunctionError, match=reason):
            await function.call()
        usage = function.usage()
        assert (usage.tries, usage.failures) == (1, {"raised": 1})

    using(place, name, work)


def test_numbers_of_numpy_come_back_as_numbers(place):
    assert call(place, "numbers_of_numpy") == [1.5, 2.5]


def test_a_call_with_the_wrong_arguments_says_so(place):
    with pytest.raises(FunctionError, match=r"it: TypeError: slow\(\) missing 1 required positional argument"):
        call(place, "slow")


def test_a_function_that_hangs_is_cut_and_the_next_call_is_served(place):
    async def work(function):
        with pytest.raises(FunctionTimeout, match=r"it: .*did not answer within 3 s"):
            await function.call(60)
        assert await function.call(0) == 0

    policy = CallPolicy(timeout_s=3)  # at some places a cold start counts, too
    warm = CallPolicy(timeout_s=10)
    assert call(place, "echo", 1, policy=warm) == 1
    using(place, "slow", work, policy=policy, max_concurrency=1)


def test_a_payload_beyond_the_limit_names_the_way_out(place):
    policy = CallPolicy(max_payload_bytes=1000)
    with pytest.raises(FunctionError, match=r"a payload of 2,0\d\d bytes is more than 1,000; raise max_payload_bytes"):
        call(place, "echo", "x" * 2000, policy=policy)
    assert call(place, "echo", "x" * 2_000_000) == "x" * 2_000_000


def test_a_key_is_executed_once_however_often_it_is_asked(place, tmp_path):
    path = str(tmp_path / "marks")

    async def work(function):
        first = await asyncio.gather(*(function.call(path, key=path) for _ in range(5)))
        again = await function.call(path, key=path)
        other = await function.call(path, key=f"{path} another")
        return [*first, again, other]

    assert using(place, "mark", work) == [1.0] * 7
    assert len((tmp_path / "marks").read_text().splitlines()) == 2


def test_who_stops_waiting_does_not_take_the_result_from_the_others(place, tmp_path):
    path = str(tmp_path / "marks")

    async def work(function):
        first = asyncio.create_task(function.call(path, 0.5, key=path))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(function.call(path, 0.5, key=path))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert using(place, "mark", work) == 1.0
    assert len((tmp_path / "marks").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["score", "score_untyped", "score_later"])
def test_a_reward_gets_its_trajectory(place, name):
    request = RewardRequest("t", 1, ["question"], ["answer"])
    assert call(place, name, msgspec.to_builtins(request)) == 6.0


def test_a_reward_of_a_group_gets_them_all(place):
    requests = [RewardRequest("t", 1, ["q"], ["x" * length]) for length in (1, 2, 4)]
    assert call(place, "score_group", msgspec.to_builtins(requests)) == [0.25, 0.5, 1.0]


def test_a_class_gets_its_options(place):
    assert call(place, "Scaled", 3, options={"arguments": {"factor": 2.0}}) == 6.0


def test_members_of_a_batch_do_not_share_their_faults(place):
    async def work(function):
        texts = [None, "one", None]
        return await asyncio.gather(*(function.call(text) for text in texts), return_exceptions=True)

    policy = CallPolicy(batch=3, batch_wait_s=5.0)
    answers = using(place, "raising", work, policy=policy)
    assert [type(answer) for answer in answers] == [FunctionError] * 3
    assert ["'one'" in str(answer) for answer in answers] == [False, True, False]


def test_what_a_function_prints_disturbs_nothing(place):
    assert call(place, "shouting") == 1
