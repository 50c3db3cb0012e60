"""Mathematical answers: what counts as equal, and what hostile ones cost."""

import asyncio
import signal
import threading

import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.local import LocalPool
from rollart.errors import ConfigError, FunctionError
from rollart.rewards.math import Math
from tests.rewards.parts import request

math_verify = pytest.importorskip("math_verify", reason="needs the extra `math`", exc_type=ImportError)


@pytest.mark.parametrize(
    ("expected", "response", "score"),
    [
        (r"\frac{1}{2}", r"so the answer is $\boxed{0.5}$", 1.0),
        ("(x+1)^2", "$x^2 + 2x + 1$", 1.0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        ("$3$", "The answer is 3", 1.0),
        (12, "first 11, no: the answer is 12", 1.0),
        ("12", r"\boxed{13}", 0.0),
        ("12", "I do not know", 0.0),
        ("12", "", 0.0),
        ("7", "word " * 5000 + r"\boxed{7}", 1.0),
        ("7", r"\boxed{7}" + " word" * 5000, 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(expected, response, score):
    assert Math()(request(response, answer=expected)) == score


@pytest.mark.parametrize(
    "response",
    [
        "$9^{9^{9}}$",
        "$99999999!$",
        "$" + "(" * 500 + "1" + ")" * 500 + "$",
        r"\boxed{" * 200 + "1" + "}" * 200,
        "$" + "-" * 1500 + "1$",
        r"$\frac{1}{" * 35 + "1" + "}" * 35 + "$",
        r"$\int_0^1 x^{x^{x}} \sin(x^{x}) dx$",
        "(" * 100_000,
    ],
)
def test_a_hostile_answer_scores_0_in_a_bounded_time(response):
    assert Math(timeout_s=0.3)(request(response, answer="7")) == 0.0


def test_the_alarm_is_off_after_a_call():
    before = signal.getsignal(signal.SIGPROF)
    assert Math(timeout_s=0.3)(request("$9^{9^{9}}$", answer="7")) == 0.0
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is before


@pytest.mark.parametrize(
    ("info", "complaint"),
    [({}, "no 'answer' .* it has"), ({"answer": " "}, "is empty"), ({"answer": "$$"}, "can be read")],
)
def test_a_missing_expected_answer_is_an_error(info, complaint):
    with pytest.raises(ValueError, match=complaint):
        Math()(request("1", **info))


def test_the_expected_answer_may_have_another_name():
    assert Math(answer="truth")(request("4", truth="2+2")) == 1.0


@pytest.mark.parametrize("option", [{"timeout_s": 0}, {"max_chars": "many"}, {"max_nesting": 0}])
def test_a_wrong_option_is_refused(option):
    with pytest.raises(ConfigError, match=f"reward_options.{next(iter(option))}"):
        Math(**option)


def test_outside_the_main_thread_it_says_what_it_needs():
    said = []

    def call():
        try:
            Math()(request("1", answer="1"))
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in said[0]


def test_its_alarms_ring_in_the_processes_of_the_pool():
    async def main():
        options = EndpointOptions(arguments={"timeout_s": 0.3}, max_concurrency=1)
        pool = LocalPool("local://rollart.rewards.math:Math", options)
        function = Function("math", pool, CallPolicy(timeout_s=60))

        async def score(response, **info):
            return await function.call({"task": "t", "seed": 0, "prompts": [], "responses": [response], "info": info})

        try:
            assert await score("$9^{9^{9}}$", answer="7") == 0.0
            assert await score(r"\boxed{\frac{14}{2}}", answer="7") == 1.0
            with pytest.raises(FunctionError, match="info has no 'answer'"):
                await score("7")
            assert function.usage().cold_starts == 1, "the process outlived the alarm"
        finally:
            await pool.close()

    asyncio.run(main())
