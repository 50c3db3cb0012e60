"""Mathematical answers, compared with the expected one by `math-verify` (extra `math`).

The library simplifies what a model wrote, which may take for ever. Invariants: a verification ends within `timeout_s`
of computing, however busy the machine is, and scores 0 when that is not enough; what is read of an answer is bounded.
The alarm needs the main thread of a process, as `local://` has. What this file leaves out: who ends a process whose
alarm does not ring (the pool, at the call's time limit).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from rollart.checks import check
from rollart.errors import ConfigError, to_install
from rollart.types import RewardRequest

AGAIN_S = 0.25
"""The alarm rings again, as code that ignores all exceptions may swallow it once."""


class Math(Struct, frozen=True, kw_only=True):
    """1.0 where the answer in the last response equals the expected one, else 0.0. Raises ConfigError.

    The answer is the last `\\boxed{...}`, formula or number, as math-verify finds it.
    """

    scope: ClassVar[str] = "trajectory"
    needs_main_thread: ClassVar[bool] = True

    answer: str = "answer"
    """Key of the expected answer in what the environment said (`info`): LaTeX, text or a number."""
    max_chars: Annotated[int, Meta(ge=1)] = 2000
    """Of the response only the end is read, where its answer stands."""
    max_nesting: Annotated[int, Meta(ge=1)] = 40
    """Brackets and braces nested deeper score 0."""
    timeout_s: Annotated[float, Meta(gt=0)] = 3.0
    """Processor time of one verification."""

    @staticmethod
    def check_options(options: dict[str, Any], key: str) -> None:
        """Raises ConfigError."""
        check(Math, options, f"{key}.")

    def __post_init__(self) -> None:
        self.check_options(asdict(self), "reward_options")
        _library()

    def __call__(self, request: RewardRequest) -> float:
        """Raises ValueError without a readable expected answer, RuntimeError outside the main thread."""
        expected = _expected(request, self.answer)
        text = request.responses[-1][-self.max_chars :] if request.responses else ""
        if not text or _nesting(text) > self.max_nesting:
            return 0.0
        library = _library()
        try:
            with _alarm(self.timeout_s):
                truth = library.parse(expected, parsing_timeout=None)
                if truth:
                    given = library.parse(text, parsing_timeout=None)
                    return float(library.verify(truth, given, timeout_seconds=None))
        except _OutOfTimeError:
            return 0.0
        raise ValueError(f"the expected answer {expected!r} is no mathematics that can be read")


class _OutOfTimeError(BaseException):
    """No Exception: the library takes those for answers that cannot be read."""


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raise _OutOfTimeError in the block after a time. Raises RuntimeError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("rollart.rewards.math: its alarm needs the main thread of a process; take local://")

    def ring(*_: Any) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGPROF, ring)
    try:
        signal.setitimer(signal.ITIMER_PROF, timeout_s, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@functools.cache
def _library() -> Any:
    """math-verify, over integers of Python: those of gmpy2 hear no alarm."""
    os.environ.setdefault("SYMPY_GROUND_TYPES", "python")
    os.environ.setdefault("MPMATH_NOGMPY", "1")
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError(f"rollart.rewards.math needs more packages ({error}); {to_install('math')}") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off
    _warm_up(math_verify)
    return math_verify


def _warm_up(library: Any) -> None:
    """What a first verification imports and caches shall not count as the time of an answer."""
    left, right = (library.parse(text, parsing_timeout=None) for text in ("$(x+1)^2$", r"$x^2 + 2x + \frac{2}{2}$"))
    library.verify(left, right, timeout_seconds=None)


def _expected(request: RewardRequest, key: str) -> str:
    if key not in request.info:
        raise ValueError(f"info has no {key!r} with the expected answer; it has {sorted(request.info)}")
    text = str(request.info[key]).strip()
    if not text:
        raise ValueError(f"the expected answer in info[{key!r}] is empty")
    return text if any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")) else f"${text}$"


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "([{":
            deepest = max(deepest, depth := depth + 1)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest
