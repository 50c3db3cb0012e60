"""A burst against a service that fails in every way, is killed in the middle of it, and comes back."""

import asyncio
import collections

import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.http import HttpEndpoint
from rollart.errors import EndpointError, FunctionError, FunctionTimeout
from tests.data.serverless.served import serving
from tests.data.serverless.user_functions import fate

pytest.importorskip("uvicorn", reason="serve-reward needs the extra: pip install -e '.[serve]'")

NUM_CALLS = 160
POLICY = CallPolicy(timeout_s=2.0, max_attempts=20, backoff_s=0.05, max_backoff_s=1.0, breaker_s=0.2, deadline_s=90)


def test_every_call_of_a_burst_ends_with_one_value_or_one_cause_though_the_service_dies(tmp_path):
    """30 % fail (half raise, half kill their process on the first try), 5 % hang, and the service is killed once."""
    marks = tmp_path / "marks"

    words = ("--timeout-s", "2", "--max-concurrency", "4")

    async def main(first, port):
        endpoint = HttpEndpoint(first.url, EndpointOptions(max_concurrency=32))
        function = Function("it", endpoint, POLICY)
        calls = [asyncio.create_task(function.call(str(marks), n, key=f"k{n}")) for n in range(NUM_CALLS)]
        while sum(call.done() for call in calls) < NUM_CALLS // 4:  # noqa: ASYNC110 - whichever end first
            await asyncio.sleep(0.02)
        first.kill()
        first.wait()
        await asyncio.sleep(0.3)
        with serving("flaky", *words, port=port):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            again = await asyncio.gather(
                *(function.call(str(marks), n, key=f"k{n}") for n in range(NUM_CALLS)), return_exceptions=True
            )
            usage = function.usage()
            await function.close()
        return outcomes, again, usage

    with serving("flaky", *words) as first:
        outcomes, again, usage = asyncio.run(main(first, int(first.url.rpartition(":")[2])))
    fates = {n: fate(n) for n in range(NUM_CALLS)}
    for n, outcome in enumerate(outcomes):
        match fates[n]:
            case "raises":
                assert type(outcome) is FunctionError, (n, outcome)
                assert "no luck" in str(outcome)
            case "hangs":
                assert type(outcome) is FunctionTimeout, (n, outcome)
            case _:
                assert outcome == float(n), (n, fates[n], outcome)
    assert [_plain(each) for each in again] == [_plain(each) for each in outcomes], "a key has one outcome for ever"
    assert usage.results == sum(isinstance(each, float) for each in outcomes)
    assert usage.failures["endpoint"] > 0
    executed = collections.Counter(int(line) for line in marks.read_text().split())
    assert set(executed) >= {n for n in fates if fates[n] in ("scores", "dies first")}
    twice = [n for n, count in executed.items() if count > 1]
    assert len(twice) <= 4, "only what ran when the service was killed may have run again"


def test_a_service_that_stays_away_fails_with_the_cause():
    with serving("echo") as server:
        url = server.url

    async def main():
        policy = CallPolicy(max_attempts=3, backoff_s=0.01, breaker_s=0.05)
        function = Function("it", HttpEndpoint(url, EndpointOptions()), policy)
        with pytest.raises(EndpointError, match=r"it: 3 tries failed; .*cannot be reached"):
            await function.call(1)
        await function.close()

    asyncio.run(main())


def _plain(outcome):
    return (type(outcome), str(outcome)) if isinstance(outcome, Exception) else outcome
