"""A continuous-batching engine on modelled devices: the requests, their KV and the time, without a single number of a
model. PURE: time is passed in, and moves from event to event, never token by token.

The life of a request: `add` queues it; at a step's beginning it gets a slot and room for its KV, beside what its
trajectory's last turn left behind; steps read the rest of its prompt in chunks, while the others go on decoding, and
the last chunk gives its first token; each later step gives one more. When it ends, its KV is kept for the trajectory's
next turn, until others need the room. When decoding runs out of room, the request that joined last is set back and read
again later. After an update all KV is stale: what ran is read again.

A run is what the engine does until something else can happen: one step that reads prompts, or as many decode steps as
pass before a request ends or the room does. Whatever arrives meanwhile waits for the end of the step it falls into. A
run of n decode steps is an arithmetic series (`Pace.decode`), so it costs no more than one step to compute.

How long a request's answer is, is the last token of its prompt: that many tokens it generates, and then stops.

Invariants (`check`): every token of KV was read, decoded, found or received, and is held, left behind or thrown away;
KV is within the room between steps; every token generated is in one result; no request is in two places.
What this file leaves out: blocks of KV (room is counted in tokens), prefixes shared between trajectories, speculation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from rollart.data.simulated.device import Pace, series_seconds, series_steps
from rollart.data.simulated.kept import Kept
from rollart.data.simulated.model_shape import attended_tokens
from rollart.data.simulated.profile import Efficiency
from rollart.data.simulated.request import READING, WAITING, WRITING, Request
from rollart.errors import GenerationError
from rollart.types import EngineStats, FinishReason, GenRequest, GenResult

WATERMARK = 0.01
"""Share of the room that is left to those that run when another is let in, so that it is not set back at once."""
SHORTEST = 2
"""A prompt and an answer of a token each."""


class SimulatedEngine:
    """One engine at the pace of its devices.

    `slots`: requests that run at once, at most `efficiency.slots_max`. `max_model_tokens`: longest sequence, by default
    as long as the room for KV. `watch` is told ("prefill" or "decode", begin, end) of what the engine did, in seconds.
    Times never run back: one before that of an earlier command counts as the same moment.
    Raises ConfigError when the model, or one sequence beside it, does not fit.
    """

    def __init__(
        self, pace: Pace, efficiency: Efficiency, slots: int | None = None, max_model_tokens: int | None = None
    ) -> None:
        pace.check_room(max_model_tokens or SHORTEST)
        self.watch: Callable[[str, float, float], None] | None = None
        self.version, self.suspended, self.preemptions = 0, False, 0
        self._pace = pace
        self._slots = min(slots or efficiency.slots_max, efficiency.slots_max)
        self._chunk_tokens = efficiency.chunk_tokens
        self._room = pace.kv_capacity_tokens
        self._open_room = self._room - int(self._room * WATERMARK)
        self.max_model_tokens = min(max_model_tokens or self._room, self._room)
        # Requests: all by id; queued; admitted, in order; those of them whose prompt is being read, in order.
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._reading: deque[Request] = deque()
        self._due: list[tuple[int, int, Request]] = []
        """A heap of decoding requests by the step that ends them; an entry of an older ticket counts no more."""
        # KV in tokens: of trajectories between turns, and what running requests have or will need.
        self._kept = Kept()
        self._reading_kv = self._writing_kv = 0
        self._num_writing = self._pending_tokens = self._waiting_tokens = 0
        self._tickets = 0
        # Time: of the last command; decode steps and their seconds so far; the run under way.
        self._now, self._step, self._clock_s = -math.inf, 0, 0.0
        self._planned, self._steps_left = True, 0
        self._began_s = self._end_s = self._first_s = self._growth_s = self._decode_s = 0.0
        self._chunk: list[tuple[Request, int]] = []
        self._results: list[GenResult] = []
        # Counters.
        self._busy_s, self._steps = 0.0, 0
        self._generated = self._prefilled = self._cached = self._recomputed = 0
        self._decoded = self._received = self._left_behind = self._told = 0

    # ----------------------------------------------------------------------------------------------------- commands
    def add(self, request: GenRequest, now: float, received: int = 0) -> None:
        """Enqueue. `received`: prompt tokens whose KV came from another engine, beside those kept here; such a request
        decodes at once, and when its KV is lost it ends as aborted, for its KV to be made there again.

        Raises GenerationError when the request can never run.
        """
        self._move_to(now)
        limit, finish = self._answer(request, received)
        each = Request(request, limit, finish, received, self._now)
        enters = not self._waiting and len(self._running) < self._slots
        self._requests[each.name] = each
        self._waiting.append(each)
        self._waiting_tokens += each.size
        if enters:
            self._replan()

    def _answer(self, request: GenRequest, received: int) -> tuple[int, FinishReason]:
        """How many tokens the answer has, and why it ends there."""
        what, size, most = f"request {request.request_id}", len(request.prompt), request.sampling.max_tokens
        if not size or min(request.prompt[-1], most) < 1:
            raise GenerationError(f"{what}: its prompt must end with the number of tokens to answer, at least 1")
        if request.request_id in self._requests:
            raise GenerationError(f"{what}: this id is already running")
        if size >= self.max_model_tokens:
            raise GenerationError(f"{what}: a prompt of {size} tokens leaves no room in {self.max_model_tokens}")
        if received >= size:
            raise GenerationError(f"{what}: {received} tokens of KV were received for a prompt of {size}")
        wanted, most = request.prompt[-1], min(most, self.max_model_tokens - size)
        return (wanted, "stop") if wanted <= most else (most, "length")

    def abort(self, request_id: str, now: float) -> GenResult | None:
        """Cancel and free its KV; the partial result, or None when it is not here. The step under way takes its time
        all the same."""
        self._move_to(now)
        each = self._requests.get(request_id)
        if each is None:
            return None
        if each.place == WAITING:
            self._unqueue(each)
            self._kept.take(each.trajectory)
        else:
            self._left_behind += self._leave(each)
        self._replan()
        return self._closed(each, "abort")

    def release(self, trajectory_id: str, now: float) -> None:
        """Forget the KV kept for a trajectory between its turns."""
        self._move_to(now)
        self._kept.take(trajectory_id)

    def suspend(self, now: float) -> None:
        """No step begins until `resume`; the one under way ends (`next_event`)."""
        self._move_to(now)
        self.suspended = True
        self._replan()

    def update(self, version: int, now: float) -> list[GenResult]:
        """Other weights, between two steps; all KV is stale and what ran is read again. Returns what must be made
        elsewhere (`add`). Raises GenerationError while a step is under way."""
        self._move_to(now)
        if not self._planned:
            self._plan()
        if self._steps_left:
            raise GenerationError("weights change only between two steps: suspend the engine and let its step end")
        for each in self._running.values():
            self._end_writing(each)
            computed = each.size - each.pending
            self._recomputed += computed
            self._pending_tokens += computed
            each.pending = each.size
        self.version = version
        self._kept.clear()
        self._due.clear()
        self._reading = deque(self._running.values())
        lost = [self._eject(each) for each in list(self._requests.values()) if each.received]
        self._replan()
        return lost

    def resume(self, now: float) -> None:
        """Let steps begin again."""
        self._move_to(now)
        self.suspended = False
        self._replan()

    # --------------------------------------------------------------------------------------------------------- time
    def next_event(self) -> float | None:
        """When something happens by itself, for `advance`; None when nothing will."""
        if not self._planned:
            self._plan()
        if self._results:
            return self._now
        return self._end_s if self._steps_left else None

    def advance(self, now: float) -> list[GenResult]:
        """Let time pass up to and with `now`; the requests that ended."""
        now = max(now, self._now)
        if not self._planned:
            self._plan()
        while self._steps_left and self._end_s <= now:
            self._complete()
        self._move_to(now)
        results, self._results = self._results, []
        return results

    def _move_to(self, now: float) -> None:
        """Runs that end before `now` are over, and the steps of the next that have passed are done with."""
        if now <= self._now:
            return
        if not self._planned:
            self._plan()
        while self._steps_left and self._end_s < now:
            self._complete()
        self._now = now
        if self._steps_left > 1 and now - self._began_s >= self._first_s:
            self._split(min(series_steps(now - self._began_s, self._first_s, self._growth_s), self._steps_left - 1))

    def _split(self, number: int) -> None:
        """The first steps of a run are over; the rest is a run that began then."""
        seconds = series_seconds(number, self._first_s, self._growth_s)
        self._pass(number, seconds, seconds, "decode")
        self._began_s += seconds
        self._first_s += self._growth_s * number
        self._steps_left -= number
        self._kept.shrink(self._room - self._reading_kv - self._writing_kv)

    def _replan(self) -> None:
        """What runs next is decided anew: at once when no step has begun, else when the step under way has ended."""
        if not self._steps_left:
            if self._planned:
                self._began_s, self._planned = self._now, False
        elif self._began_s == self._now:
            self._steps_left, self._chunk, self._planned = 0, [], False
        elif self._steps_left > 1:
            self._steps_left, self._end_s = 1, self._began_s + self._first_s

    def _pass(self, number: int, seconds: float, decode_s: float, what: str) -> None:
        """Each decoding request gains `number` tokens, and `decode_s` of `seconds` is charged to them."""
        gained = number * self._num_writing
        self._step += number
        self._clock_s += decode_s
        self._writing_kv += gained
        self._generated += gained
        self._decoded += gained
        self._steps += number
        self._busy_s += seconds
        if self.watch is not None:
            self.watch(what, self._began_s, self._began_s + seconds)

    def _complete(self) -> None:
        """The run is over, and the next one is planned."""
        seconds, chunk = self._end_s - self._began_s, self._chunk
        if chunk:
            self._pass(1, seconds, self._decode_s, "prefill")
        else:
            self._kept.shrink(self._room - self._writing_kv - (self._steps_left - 1) * self._num_writing)
            self._pass(self._steps_left, seconds, seconds, "decode")
        while self._due and self._due[0][0] <= self._step:
            _, ticket, each = heappop(self._due)
            if each.place == WRITING and each.ticket == ticket:
                self._finish(each)
        if chunk:
            self._chunk = []
            self._read(chunk, seconds - self._decode_s)
        self._began_s, self._steps_left = self._end_s, 0
        self._plan()

    def _read(self, chunk: list[tuple[Request, int]], seconds: float) -> None:
        """The chunk is read; whose prompt is complete has its first token."""
        per_token_s = seconds / sum(number for _, number in chunk)
        for each, number in chunk:
            if each.place == READING:
                each.pending -= number
                each.prefill_s += per_token_s * number
                self._pending_tokens -= number
                self._prefilled += number
        while self._reading and not self._reading[0].pending:
            each = self._reading.popleft()
            self._reading_kv -= each.size
            each.size += 1
            each.generated += 1
            self._generated += 1
            self._begin_writing(each)
            if each.generated == each.limit:
                self._finish(each)

    # --------------------------------------------------------------------------------------------------------- plan
    def _plan(self) -> None:
        """What happens next, from `_began_s` on."""
        self._planned = True
        while self._reading_kv + self._writing_kv > self._room:
            self._set_back(next(reversed(self._running.values())))
        self._kept.shrink(self._room - self._reading_kv - self._writing_kv)
        if self.suspended:
            return
        while self._waiting and len(self._running) < self._slots and self._fits(self._waiting[0]):
            self._admit(self._waiting.popleft())
        if self._reading:
            self._plan_reading()
        elif self._num_writing:
            self._plan_writing()

    def _fits(self, each: Request) -> bool:
        """Whether there is room for all its tokens; KV between turns gives way."""
        room = self._open_room if self._running else self._room
        return self._reading_kv + self._writing_kv + each.size <= room

    def _admit(self, each: Request) -> None:
        self._waiting_tokens -= each.size
        self._tickets += 1
        cached = min(self._kept.take(each.trajectory), each.size - 1 - each.received)
        each.admitted(self._tickets, cached, self._began_s)
        self._cached += cached
        self._received += each.received
        self._running[each.name] = each
        if each.received and each.pending == 1:
            self._begin_writing(each)
        else:
            each.place = READING
            self._reading.append(each)
            self._reading_kv += each.size
            self._pending_tokens += each.pending
        self._kept.shrink(self._room - self._reading_kv - self._writing_kv)

    def _plan_reading(self) -> None:
        """One step that reads the next chunk of prompts, in order."""
        left, attended = self._chunk_tokens, 0
        for each in self._reading:
            number = min(each.pending, left)
            attended += attended_tokens(number, each.size - each.pending)
            self._chunk.append((each, number))
            left -= number
            if not left:
                break
        decoding, kv_tokens = self._num_writing, self._writing_kv
        seconds = self._pace.prefill_step(self._chunk_tokens - left, attended, decoding, kv_tokens)
        self._decode_s = self._pace.decode(decoding, kv_tokens)[0] if decoding else 0.0
        self._steps_left, self._end_s = 1, self._began_s + seconds

    def _plan_writing(self) -> None:
        """As many decode steps as pass until a request ends or its next token finds no room."""
        due = self._due
        while due[0][2].place != WRITING or due[0][2].ticket != due[0][1]:
            heappop(due)
        until_full = (self._room - self._writing_kv) // self._num_writing + 1
        self._steps_left = min(due[0][0] - self._step, until_full)
        self._first_s, self._growth_s = self._pace.decode(self._num_writing, self._writing_kv)
        self._end_s = self._began_s + series_seconds(self._steps_left, self._first_s, self._growth_s)

    # ------------------------------------------------------------------------------------------------- requests, KV
    def _begin_writing(self, each: Request) -> None:
        each.begin_writing(self._step, self._clock_s)
        self._num_writing += 1
        self._writing_kv += each.size
        heappush(self._due, (self._step + each.limit - each.generated, each.ticket, each))

    def _end_writing(self, each: Request) -> None:
        """From then on it counts among those that are being read, of which one token is left."""
        if each.place == WRITING:
            each.end_writing(self._step, self._clock_s, self.version)
            self._num_writing -= 1
            self._writing_kv -= each.size
            self._reading_kv += each.size
            self._pending_tokens += each.pending

    def _leave(self, each: Request) -> int:
        """It runs no more; how many tokens of KV it had."""
        if each.place == READING:
            self._reading.remove(each)
        self._end_writing(each)
        del self._running[each.name]
        self._reading_kv -= each.size
        self._pending_tokens -= each.pending
        return each.size - each.pending

    def _finish(self, each: Request) -> None:
        """Its KV is kept for the trajectory's next turn."""
        kept = self._leave(each)
        self._left_behind += kept
        self._kept.put(each.trajectory, kept)
        self._results.append(self._closed(each, each.finish))

    def _set_back(self, each: Request) -> None:
        """It gives up its KV and its slot."""
        self.preemptions += 1
        if each.received:
            self._results.append(self._eject(each))
            return
        self._recomputed += self._leave(each)
        each.set_back(self._began_s)
        self._waiting.appendleft(each)
        self._waiting_tokens += each.size

    def _eject(self, each: Request) -> GenResult:
        """A request whose KV came from elsewhere must get it there again."""
        if each.place == WAITING:
            self._unqueue(each)
        else:
            self._recomputed += self._leave(each)
        return self._closed(each, "abort")

    def _unqueue(self, each: Request) -> None:
        self._waiting.remove(each)
        self._waiting_tokens -= each.size
        each.queue_s += self._now - each.queued_s

    def _closed(self, each: Request, reason: FinishReason) -> GenResult:
        del self._requests[each.name]
        self._told += each.generated
        return each.end(reason)

    # ------------------------------------------------------------------------------------------------------ looking
    @property
    def unread_tokens(self) -> int:
        """Tokens that wait to be read, as far as is known."""
        return self._waiting_tokens + self._pending_tokens

    def kept_tokens(self, trajectory_id: str) -> int:
        """Tokens whose KV is kept for a trajectory between its turns."""
        return self._kept.look(trajectory_id)

    def stats(self, now: float) -> EngineStats:
        """Counters since the start; `busy_s` counts every step, also one that only reads part of a prompt."""
        self._move_to(now)
        return EngineStats(
            version=self.version,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            recomputed_tokens=self._recomputed,
            preempted=self.preemptions,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=self._held_kv + self._kept.tokens,
            suspended=self.suspended,
        )

    @property
    def _held_kv(self) -> int:
        """Tokens that running requests have KV of."""
        return self._reading_kv + self._writing_kv - self._pending_tokens - self._num_writing

    def check(self) -> None:
        """Assert the invariants."""
        reading = [each for each in self._running.values() if each.place == READING]
        writing = [each for each in self._running.values() if each.place == WRITING]
        gained = [self._step - each.joined for each in writing]
        assert list(self._reading) == reading
        assert len(reading) + len(writing) == len(self._running) <= self._slots
        assert {**{each.name: each for each in self._waiting}, **self._running} == self._requests
        assert len(self._waiting) + len(self._running) == len(self._requests)
        assert all(each.place == WAITING for each in self._waiting)
        assert self._waiting_tokens == sum(each.size for each in self._waiting)
        assert self._pending_tokens == sum(each.pending for each in reading)
        assert self._reading_kv == sum(each.size for each in reading)
        assert self._num_writing == len(writing)
        assert self._writing_kv == sum(each.size for each in writing) + sum(gained)
        assert all(each.generated + more < each.limit for each, more in zip(writing, gained, strict=True))
        self._kept.check()
        assert self._kept.tokens + self._reading_kv + self._writing_kv <= self._room
        made = self._prefilled + self._decoded + self._cached + self._received
        assert made == self._held_kv + self._left_behind + self._recomputed
        assert self._generated == self._told + sum(each.generated for each in self._requests.values()) + sum(gained)
