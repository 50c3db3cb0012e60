"""Programs that a model wrote, run against tests in a sandbox.

Invariants: code of a model runs in a sandbox or not at all; each test has a sandbox of its own, so that none sees what
another left; what a program should print never enters its sandbox. Test code shares its process with the code it tests:
leaving early does not pass it, but code written to deceive it can, which pairs of stdin and stdout rule out. What this
file leaves out: the sandbox (`sandbox.py`).
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from rollart.checks import check
from rollart.rewards.sandbox import Sandbox
from rollart.types import RewardRequest

Test = Callable[[Sandbox, str], bool]
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)

RUN_TEST = """
def run(sources):
    import sys
    mark = sys.stdin.readline()
    scope = {{"__name__": "solution"}}
    for name, source in sources:
        exec(compile(source, name, "exec"), scope)
    sys.__stdout__.write(mark)
    sys.__stdout__.flush()

run({sources!r})
"""


class Code(Struct, frozen=True, kw_only=True):
    """The share of tests that the last fenced block of the last response passes; without a block, the whole response.

    A test is test code (asserts that run after the program, in its namespace; passed when its end is reached), or a
    pair {"stdin": text, "stdout": text} (passed when the program prints that, blanks at ends of lines aside). Raises
    ConfigError without bubblewrap.
    """

    scope: ClassVar[str] = "trajectory"

    tests: str = "tests"
    """Key of the tests in what the environment said (`info`): one test, or a list."""
    language: Literal["python"] = "python"
    all_or_nothing: bool = False
    """1.0 where all tests pass, else 0.0; stops at the first that fails."""
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Of one test."""
    memory_bytes: Annotated[int, Meta(ge=64 << 20)] = 1 << 30
    """Of each process."""
    processes: Annotated[int, Meta(ge=1)] = 16
    """Processes and threads at once."""

    @staticmethod
    def check_options(options: dict[str, Any], key: str) -> None:
        """Raises ConfigError."""
        check(Code, options, f"{key}.")

    def __post_init__(self) -> None:
        self.check_options(asdict(self), "reward_options")
        _sandbox(self.timeout_s, self.memory_bytes, self.processes)

    def __call__(self, request: RewardRequest) -> float:
        """Raises ValueError without tests, RuntimeError when a sandbox does not start."""
        tests = _tests(request, self.tests)
        program = _program(request.responses[-1] if request.responses else "")
        if not program.strip():
            return 0.0
        sandbox = _sandbox(self.timeout_s, self.memory_bytes, self.processes)
        if self.all_or_nothing:
            return float(all(test(sandbox, program) for test in tests))
        return sum(test(sandbox, program) for test in tests) / len(tests)


@functools.cache
def _sandbox(timeout_s: float, memory_bytes: int, processes: int) -> Sandbox:
    """Tried out once."""
    return Sandbox(timeout_s=timeout_s, memory_bytes=memory_bytes, processes=processes)


def _program(response: str) -> str:
    blocks = BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _tests(request: RewardRequest, key: str) -> list[Test]:
    if key not in request.info:
        raise ValueError(f"info has no {key!r} with tests; it has {sorted(request.info)}")
    found = request.info[key]
    tests = [_test(each, key) for each in (found if isinstance(found, list) else [found])]
    if not tests:
        raise ValueError(f"info[{key!r}] is an empty list; a program without tests has no score")
    return tests


def _test(test: Any, key: str) -> Test:
    if isinstance(test, str):
        return functools.partial(_passes_code, test)
    if (
        isinstance(test, dict)
        and test.keys() == {"stdin", "stdout"}
        and all(isinstance(each, str) for each in test.values())
    ):
        return functools.partial(_prints, test["stdin"], test["stdout"])
    raise ValueError(f"info[{key!r}]: a test is code, or a pair {{stdin, stdout}} of texts; got {test!r:.80}")


def _passes_code(test: str, sandbox: Sandbox, program: str) -> bool:
    mark = secrets.token_hex()
    sources = [("solution.py", program), ("test.py", test)]
    outcome = sandbox.run(RUN_TEST.format(sources=sources), f"{mark}\n".encode())
    return outcome.status == 0 and outcome.stdout.endswith(f"{mark}\n".encode())


def _prints(stdin: str, expected: str, sandbox: Sandbox, program: str) -> bool:
    outcome = sandbox.run(program, stdin.encode())
    return outcome.status == 0 and _lines(outcome.stdout.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
