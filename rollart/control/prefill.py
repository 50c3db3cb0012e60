"""Prefill: the side of an LLMProxy that lets prompts be read on workers of their own (paper section 6).

    1  a prefill worker reads what it does not keep of a request, and gives the next token        `read`
    2  the worker that the router has chosen takes the KV that it does not keep, and goes on      `decode` of its handle
    3  what loses its KV there, by an update, begins again at 1 with the tokens that it has

Invariants: a request is at one prefill worker at most; a prefill worker that dies hands its requests to another, and
without any the worker that decodes reads, which is said once. What this file leaves out: who decodes (`llm_proxy.py`),
and how KV travels (`data/handoff.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from rollart.errors import RollartError, WorkerDied
from rollart.protocols import PrefillHandle
from rollart.resource.readers import NOTHING, Prefix, Readers
from rollart.types import GenRequest, GenResult, Handoff

NOBODY = "no prefill worker was left"
GONE = "the KV did not come"
ENDED = ("stop", "length")


class PrefillReport(Struct, frozen=True):
    """For `summary.json`. `read`: requests by prefill workers, `again` those of them that had lost their KV;
    `received_tokens`: whose KV travelled. `by_decode_workers`: requests that these read themselves, by cause.
    """

    read: int
    again: int
    received_tokens: int
    by_decode_workers: dict[str, int]


class Prefill:
    """The prefill workers that a proxy knows. `say` hears when there is none left, and when there is one again.

    `counts` what the report says, in a shard until the driver is told.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.workers: dict[str, PrefillHandle] = {}
        self.apart = False
        """Whether prompts are read apart in this run, also while no worker for that is left."""
        self.counts: Counter[str] = Counter()
        self._say = say
        self._readers = Readers()
        self._reading: dict[str, tuple[str, int]] = {}
        self._held: dict[str, Prefix] = {}
        self._said = False

    # ----------------------------------------------------------------------------------------------------- workers
    def add(self, worker: PrefillHandle) -> None:
        """A worker with the weights of all others."""
        self._readers.add(worker.name)
        self.workers[worker.name] = worker
        self.apart = True
        if self._said:
            self._said = False
            self._tell(f"prompts are read by {worker.name} again")

    def lost(self, name: str) -> bool:
        """A worker is dead; False when it is none of these, or that is known."""
        if self.workers.pop(name, None) is None:
            return False
        self._readers.remove(name)
        return True

    def _tell(self, line: str) -> None:
        if self._say is not None:
            self._say(f"prefill: {line}")

    # ---------------------------------------------------------------------------------------------------- requests
    async def read(self, request: GenRequest, so_far: GenResult, decoder: str, version: int) -> Handoff:
        """The token after `so_far`, for the worker `decoder`, or why the request has ended.

        A handoff without KV when there is nobody to read. Raises GenerationError.
        """
        have = self._held.get(request.trajectory_id, NOTHING).serves(decoder, version)
        while self.workers:
            try:
                return await self._read_on_one(request, so_far, have, version)
            except WorkerDied:
                continue
        if not self._said:
            self._said = True
            self._tell("no prefill worker is left; workers that decode read prompts themselves")
        return Handoff(so_far)

    async def _read_on_one(self, request: GenRequest, so_far: GenResult, have: int, version: int) -> Handoff:
        """On the worker that will have read it first. Raises WorkerDied when that dies."""
        num_tokens = len(request.prompt) + len(so_far.tokens)
        name, unread = self._readers.choose(request.trajectory_id, num_tokens, version)
        self._reading[request.request_id] = name, unread
        try:
            handoff = await self.workers[name].prefill(request, so_far, have)
        except WorkerDied:
            self.lost(name)
            raise
        except RollartError as error:
            raise type(error)(f"inference worker {name!r}, prefill: {error}") from error
        finally:
            del self._reading[request.request_id]
            self._readers.finished(name, unread)
        self.counts["read"] += 1
        self.counts["again"] += bool(so_far.tokens)
        if handoff.result.finish_reason in (*ENDED, "handoff"):
            prefix = Prefix(name, handoff.result.versions[-1], num_tokens)
            self._readers.keeps(request.trajectory_id, prefix)
        return handoff

    def reads(self, request_id: str) -> str:
        """The worker at which a request is being read, or nothing."""
        return self._reading.get(request_id, ("", 0))[0]

    def decoded(self, request: GenRequest, handoff: Handoff, decoder: str, result: GenResult) -> GenResult:
        """A request comes back from the worker `decoder`; its result as if that worker's part were all there was."""
        received = result.received_tokens - handoff.result.received_tokens
        self.counts["received_tokens"] += received
        if result.finish_reason in ENDED:
            num_tokens = len(request.prompt) + len(result.tokens) - 1
            self._held[request.trajectory_id] = Prefix(decoder, result.versions[-1], num_tokens)
            if not received:
                self.counts[NOBODY if handoff.version < 0 else GONE] += 1
        before = handoff.result
        return replace(result, prefill_s=result.prefill_s - before.prefill_s, queue_s=result.queue_s - before.queue_s)

    def forget(self, trajectory_id: str) -> str | None:
        """A trajectory has ended; the worker that keeps something of it, where that still is."""
        self._held.pop(trajectory_id, None)
        return self._readers.forget(trajectory_id)

    def report(self) -> PrefillReport | None:
        """What was read and handed over; None where nothing is read apart."""
        if not self.apart:
            return None
        counts = self.counts
        causes = {cause: counts[cause] for cause in (NOBODY, GONE) if counts[cause]}
        return PrefillReport(counts["read"], counts["again"], counts["received_tokens"], causes)

    def check(self) -> None:
        """Assert the invariants."""
        self._readers.check(self._reading.values())
        assert len(self._readers) == len(self.workers)
