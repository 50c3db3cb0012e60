"""What a turn of a task costs on a device class, from what engines say of each request. PURE.

Tokens per turn belong to the task alone, seconds per token to the task on a class; a turn's seconds are their product.
So a class that got long answers by chance does not look slow, and answers that grow longer during training change the
estimate for every class at once.

Invariant: older requests weigh less, those of one task on one class among themselves, so that a class which a task has
left keeps what was measured there. What this file leaves out: what follows from it (`affinity.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct, field

from rollart.types import GenResult

MEMORY = 64
"""Requests after which an old one weighs 1/e."""
KEEP = 1 - 1 / MEMORY
START_S = 1.0
"""What ends so soon after the first request of a task on a class is not measured: engines that start are slow."""
ENOUGH, ENOUGH_S = 16, 2.0
"""Requests measured of a task on a class, and seconds since its first there, from which its seconds are an estimate:
few requests are chance, and many at one moment say what that moment was like."""


class OnClass(Struct):
    """Decaying sums of one task on one class; `num_requests` counts all, `span_s`: seconds since its first there."""

    span_s: float = 0.0
    num_requests: int = 0
    requests: float = 0.0
    prefilled_tokens: float = 0.0
    response_tokens: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class OfTask(Struct):
    """Decaying sums of one task. `share`: its part of all turns lately, not yet divided by the others'. `first_s`: when
    its first request on each class ended."""

    share: float = 0.0
    turns: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    response_tokens: float = 0.0
    first_s: dict[str, float] = field(default_factory=dict)
    on: dict[str, OnClass] = field(default_factory=dict)


class Turn(Struct, frozen=True):
    """Seconds of one turn: `prefill_s` keeps a worker busy, `decode_s` passes while it serves other requests too."""

    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        """Both, without waiting for a slot."""
        return self.prefill_s + self.decode_s


class Profile:
    """Per task tag and device class. `in_flight`: requests at once; `unmeasured`: whose engine gave no times."""

    def __init__(self) -> None:
        self.in_flight = 0.0
        self.unmeasured = 0
        self._tasks: dict[str, OfTask] = {}

    def observe(
        self, tag: str, device_class: str, num_prompt_tokens: int, result: GenResult, in_flight: int, now_s: float
    ) -> None:
        """One request has ended, with `in_flight` there at that moment. Aborted, failed, untimed ones do not count."""
        if result.finish_reason not in ("stop", "length"):
            return
        if result.prefill_s + result.decode_s <= 0:
            self.unmeasured += 1
            return
        self.in_flight += (in_flight - self.in_flight) / MEMORY if self._tasks else in_flight
        for each in self._tasks.values():
            each.share *= KEEP
        task = self._tasks.setdefault(tag, OfTask())
        task.share += 1
        task.turns = task.turns * KEEP + 1
        task.prompt_tokens = task.prompt_tokens * KEEP + num_prompt_tokens
        task.cached_tokens = task.cached_tokens * KEEP + result.cached_tokens
        task.response_tokens = task.response_tokens * KEEP + len(result.tokens)
        span_s = now_s - task.first_s.setdefault(device_class, now_s)
        if span_s >= START_S:
            there = task.on.setdefault(device_class, OnClass())
            there.span_s = span_s
            _add(there, num_prompt_tokens, result)

    @property
    def tags(self) -> list[str]:
        """Tasks with any measurement."""
        return list(self._tasks)

    def knows(self, tag: str, classes: Collection[str]) -> bool:
        """Whether a task's seconds can be estimated on all of these classes."""
        task = self._tasks.get(tag)
        return task is not None and all(name in task.on and _is_enough(task.on[name]) for name in classes)

    def share(self, tag: str) -> float:
        """Its part of all turns."""
        return self._tasks[tag].share / sum(task.share for task in self._tasks.values())

    def turn(self, tag: str, device_class: str) -> Turn:
        """The mean turn of a task on a class that `knows` it."""
        task, there = self._tasks[tag], self._tasks[tag].on[device_class]
        to_prefill = (task.prompt_tokens - task.cached_tokens) / task.turns
        return Turn(
            prefill_s=there.prefill_s / max(1.0, there.prefilled_tokens) * to_prefill,
            decode_s=there.decode_s / max(1.0, there.response_tokens) * task.response_tokens / task.turns,
        )

    def report(self) -> dict[str, dict[str, object]]:
        """Per task and class, for people."""
        return {tag: self._row(tag, task) for tag, task in self._tasks.items()}

    def _row(self, tag: str, task: OfTask) -> dict[str, object]:
        return {
            "share_of_turns": self.share(tag),
            "prompt_tokens_per_turn": task.prompt_tokens / task.turns,
            "response_tokens_per_turn": task.response_tokens / task.turns,
            "prefix_hit_rate": task.cached_tokens / max(1.0, task.prompt_tokens),
            "on": {
                name: {
                    "requests": there.num_requests,
                    "measured_s": there.span_s,
                    "queue_s": there.queue_s / there.requests,
                    "prefill_s": self.turn(tag, name).prefill_s,
                    "decode_s": self.turn(tag, name).decode_s,
                }
                for name, there in task.on.items()
            },
        }


def _is_enough(there: OnClass) -> bool:
    return there.num_requests >= ENOUGH and there.span_s >= ENOUGH_S


def _add(there: OnClass, num_prompt_tokens: int, result: GenResult) -> None:
    there.num_requests += 1
    there.requests = there.requests * KEEP + 1
    there.prefilled_tokens = there.prefilled_tokens * KEEP + num_prompt_tokens - result.cached_tokens
    there.response_tokens = there.response_tokens * KEEP + len(result.tokens)
    there.queue_s = there.queue_s * KEEP + result.queue_s
    there.prefill_s = there.prefill_s * KEEP + result.prefill_s
    there.decode_s = there.decode_s * KEEP + result.decode_s
