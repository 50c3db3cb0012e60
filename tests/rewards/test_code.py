"""Code of a model against tests: what is taken from the response, and what passes."""

import asyncio

import pytest

from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.local import LocalPool
from rollart.errors import ConfigError
from rollart.rewards.code import Code
from tests.rewards.parts import request
from tests.rewards.test_sandbox import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap works")

DOUBLE = "def double(x):\n    return 2 * x\n"
PAIRS = [{"stdin": f"{n}\n", "stdout": f"{2 * n}\n"} for n in (1, 2, 3)]


def fenced(code: str) -> str:
    return f"First I thought:\n```python\nraise SystemExit(1)\n```\nbut no:\n```python\n{code}\n```\nThat is it."


@pytest.mark.parametrize("response", [DOUBLE, fenced(DOUBLE), f"```\n{DOUBLE}"])
def test_the_last_block_is_what_runs(response):
    assert Code()(request(response, tests="assert double(4) == 8")) == 1.0


def test_the_score_is_the_share_of_tests_that_pass():
    tests = ["assert double(1) == 2", "assert double(1) == 3", "assert double('a') == 'aa'", "undefined"]
    assert Code()(request(fenced(DOUBLE), tests=tests)) == 0.5
    assert Code(all_or_nothing=True)(request(fenced(DOUBLE), tests=tests)) == 0.0
    assert Code(all_or_nothing=True)(request(fenced(DOUBLE), tests=tests[:1])) == 1.0


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(2 * int(input()))", 1.0),
        ("print(2 * int(input()), '  ')\nprint()", 1.0),
        ("print(2)", 1 / 3),
        ("print(2 * int(input())); raise SystemExit(1)", 0.0),
        ("print(2 * int(input())); import sys; sys.stdout.flush(); print('more')", 0.0),
        ("if __name__ == '__main__':\n    print(2 * int(input()))", 1.0),
    ],
)
def test_programs_are_judged_by_what_they_print(program, score):
    assert Code()(request(fenced(program), tests=PAIRS)) == score


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "import sys\nsys.stdout.write('passed')\nsys.exit()",
        "def double(x): import os; os._exit(0)",
        "def double(x:",
        "\0",
        "",
    ],
)
def test_leaving_early_passes_no_test(program):
    assert Code()(request(fenced(program), tests="assert double(4) == 8")) == 0.0


def test_what_a_test_prints_does_not_matter():
    assert Code()(request("print('a', end='')", tests="print('b', end='')")) == 1.0


def test_a_program_that_never_ends_fails():
    assert Code(timeout_s=1.0)(request("while True: pass", tests=PAIRS[:1])) == 0.0


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({}, "no 'tests' .* it has"),
        ({"tests": []}, "empty list"),
        ({"tests": [3]}, "a test is"),
        ({"tests": {"stdin": ""}}, "a test is"),
    ],
)
def test_missing_tests_are_an_error(info, complaint):
    with pytest.raises(ValueError, match=complaint):
        Code()(request("x = 1", **info))


@pytest.mark.parametrize("option", [{"language": "perl"}, {"timeout_s": 0}, {"memory_bytes": 1}, {"processes": 0}])
def test_a_wrong_option_is_refused(option):
    with pytest.raises(ConfigError, match=f"reward_options.{next(iter(option))}"):
        Code(**option)


def test_it_runs_in_the_processes_of_the_pool():
    async def main():
        pool = LocalPool(
            "local://rollart.rewards.code:Code", EndpointOptions(arguments={"timeout_s": 10.0}, max_concurrency=1)
        )
        function = Function("code", pool, CallPolicy(timeout_s=60))
        try:
            info = {"tests": PAIRS}
            call = {"task": "t", "seed": 0, "prompts": [], "responses": ["print(2 * int(input()))"], "info": info}
            assert await function.call(call) == 1.0
        finally:
            await pool.close()

    asyncio.run(main())
