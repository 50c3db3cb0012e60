"""One request inside a simulated engine: numbers where a real one has tokens.

Invariant: between engine steps nothing of a decoding request changes; what it gained is worked out when it stops, from
the number of steps and the decoding time since it joined. What this file leaves out: scheduling (`engines/simulated`).
"""

from __future__ import annotations

from rollart.types import FinishReason, GenRequest, GenResult

WAITING, READING, WRITING, ENDED = range(4)
"""Where a request is: queued, its prompt being read, decoding, no longer here."""


class Request:
    """`size`: tokens of prompt and answer so far; `pending`: those of them without KV; both, and `generated`, are as of
    engine step `joined` while it decodes. `received`: prompt tokens whose KV came from another engine. `ticket`: the
    number of its last admission, 0 before there was one. `queued_s`: since when it waits."""

    __slots__ = (
        *("cached", "clock_s", "decode_s", "finish", "generated", "joined", "limit", "name", "pending", "place"),
        *("prefill_s", "queue_s", "queued_s", "received", "size", "ticket", "trajectory", "versions"),
    )

    def __init__(self, request: GenRequest, limit: int, finish: FinishReason, received: int, now: float) -> None:
        self.name, self.trajectory = request.request_id, request.trajectory_id
        self.size = self.pending = len(request.prompt)
        self.limit, self.finish = limit, finish
        self.received, self.cached = received, 0
        self.generated = self.joined = self.ticket = 0
        self.place = WAITING
        self.versions: list[int] = []
        self.queued_s = now
        self.clock_s = self.queue_s = self.prefill_s = self.decode_s = 0.0

    def admitted(self, ticket: int, cached: int, now: float) -> None:
        """It has a slot, and `cached` tokens of KV beside those received."""
        if not self.ticket:
            self.cached = cached
        self.ticket = ticket
        self.pending = self.size - cached - self.received
        self.queue_s += now - self.queued_s

    def begin_writing(self, step: int, clock_s: float) -> None:
        """It decodes from the next engine step on."""
        self.place, self.pending = WRITING, 1
        self.joined, self.clock_s = step, clock_s

    def end_writing(self, step: int, clock_s: float, version: int) -> None:
        """It no longer decodes; `version` is that of the tokens it gained."""
        gained = step - self.joined
        self.size += gained
        self.generated += gained
        self.decode_s += clock_s - self.clock_s
        self.place = READING
        self.versions += [version] * (self.generated - len(self.versions))

    def set_back(self, now: float) -> None:
        """It waits again, with all its tokens to read."""
        self.place, self.pending, self.queued_s = WAITING, self.size, now

    def end(self, reason: FinishReason) -> GenResult:
        """It is gone; what the caller gets."""
        self.place = ENDED
        return GenResult(
            request_id=self.name,
            tokens=[0] * self.generated,
            logprobs=[0.0] * self.generated,
            versions=self.versions,
            finish_reason=reason,
            cached_tokens=self.cached,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )
