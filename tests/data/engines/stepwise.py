"""What a simulated engine must do, written the slow way: one step at a time, every request looked at in each."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.data.engines.simulated import WATERMARK
from rollart.data.simulated.device import Pace
from rollart.data.simulated.model_shape import attended_tokens
from rollart.data.simulated.profile import Efficiency
from rollart.types import FinishReason, GenRequest, GenResult


@dataclass(eq=False)
class Slow:
    request: GenRequest
    limit: int
    finish: FinishReason
    received: int
    since: float
    kv: int = 0
    cached: int = 0
    started: bool = False
    writing: bool = False
    versions: list[int] = field(default_factory=list)
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def trajectory(self) -> str:
        return self.request.trajectory_id

    @property
    def size(self) -> int:
        return len(self.request.prompt) + len(self.versions)

    def result(self, reason: FinishReason) -> GenResult:
        number = len(self.versions)
        times = self.queue_s, self.prefill_s, self.decode_s
        return GenResult(self.name, [0] * number, [0.0] * number, self.versions, reason, self.cached, "", *times)


class StepwiseEngine:
    """The same commands as `SimulatedEngine`, for valid requests."""

    def __init__(self, pace: Pace, efficiency: Efficiency, slots: int, max_model_tokens: int) -> None:
        self.pace, self.efficiency, self.slots, self.longest = pace, efficiency, slots, max_model_tokens
        self.room = pace.kv_capacity_tokens
        self.version, self.suspended = 0, False
        self.waiting: list[Slow] = []
        self.running: list[Slow] = []
        self.kept: dict[str, int] = {}
        self.now = self.began = 0.0
        self.planned = True
        self.end: float | None = None
        self.chunk: list[tuple[Slow, int]] = []
        self.decoding: list[Slow] = []
        self.decode_s = 0.0
        self.results: list[GenResult] = []
        self.prefilled = self.recomputed = self.generated = self.cached = self.preemptions = 0

    # commands
    def add(self, request: GenRequest, now: float, received: int = 0) -> None:
        self.move_to(now)
        most = min(request.sampling.max_tokens, self.longest - len(request.prompt))
        wanted = request.prompt[-1]
        finish: FinishReason = "stop" if wanted <= most else "length"
        each = Slow(request, min(wanted, most), finish, received, self.now)
        self.waiting.append(each)
        self.replan()

    def abort(self, request_id: str, now: float) -> GenResult | None:
        self.move_to(now)
        for each in [*self.waiting, *self.running]:
            if each.name == request_id:
                if each in self.waiting:
                    self.waiting.remove(each)
                    each.queue_s += self.now - each.since
                    self.kept.pop(each.trajectory, None)
                else:
                    self.running.remove(each)
                self.replan()
                return each.result("abort")
        return None

    def release(self, trajectory_id: str, now: float) -> None:
        self.move_to(now)
        self.kept.pop(trajectory_id, None)

    def suspend(self, now: float) -> None:
        self.move_to(now)
        self.suspended = True
        self.replan()

    def resume(self, now: float) -> None:
        self.move_to(now)
        self.suspended = False
        self.replan()

    def update(self, version: int, now: float) -> list[GenResult]:
        self.move_to(now)
        assert self.next_event() is None
        self.version = version
        self.kept.clear()
        for each in self.running:
            self.recomputed += each.kv
            each.kv, each.writing = 0, False
        lost = []
        for each in [*self.running, *self.waiting]:
            if each.received:
                if each in self.waiting:
                    self.waiting.remove(each)
                    each.queue_s += self.now - each.since
                else:
                    self.running.remove(each)
                lost.append(each.result("abort"))
        self.replan()
        return lost

    # time
    def next_event(self) -> float | None:
        if not self.planned:
            self.plan()
        return self.now if self.results else self.end

    def advance(self, now: float) -> list[GenResult]:
        self.move_to(now)
        if not self.planned:
            self.plan()
        while self.end is not None and self.end <= self.now:
            self.complete()
        results, self.results = self.results, []
        return results

    def move_to(self, now: float) -> None:
        if now > self.now:
            if not self.planned:
                self.plan()
            while self.end is not None and self.end < now:
                self.complete()
            self.now = now

    def replan(self) -> None:
        if self.end is None:
            if self.planned:
                self.began, self.planned = self.now, False
        elif self.began == self.now:
            self.end, self.planned = None, False

    def plan(self) -> None:
        self.planned = True
        while self.size() > self.room:
            self.set_back(self.running[-1])
        self.shrink()
        if self.suspended:
            return
        while self.waiting and len(self.running) < self.slots and self.fits(self.waiting[0]):
            self.admit(self.waiting.pop(0))
        self.decoding = [each for each in self.running if each.writing]
        reading = [each for each in self.running if not each.writing]
        self.chunk, left, attended = [], self.efficiency.chunk_tokens, 0
        for each in reading:
            number = min(left, each.size - each.kv)
            if number:
                self.chunk.append((each, number))
                attended += attended_tokens(number, each.kv)
                left -= number
        kv_tokens = sum(each.size for each in self.decoding)
        self.decode_s = self.pace.decode(len(self.decoding), kv_tokens)[0] if self.decoding else 0.0
        if self.chunk:
            new = self.efficiency.chunk_tokens - left
            self.end = self.began + self.pace.prefill_step(new, attended, len(self.decoding), kv_tokens)
        elif self.decoding:
            self.end = self.began + self.decode_s

    def complete(self) -> None:
        assert self.end is not None
        read_s, chunk, self.chunk = self.end - self.began - self.decode_s, self.chunk, []
        if not chunk:
            read_s, self.decode_s = 0.0, self.end - self.began
        decoding = [each for each in self.decoding if each in self.running]
        for each in decoding:
            each.kv += 1
            each.decode_s += self.decode_s
            self.gain(each)
        total = sum(number for _, number in chunk)
        for each, number in chunk:
            if each in self.running:
                each.kv += number
                each.prefill_s += read_s * number / total
                self.prefilled += number
                if each.kv == each.size:
                    each.writing = True
                    self.gain(each)
        self.began, self.end = self.end, None
        self.plan()

    def gain(self, each: Slow) -> None:
        each.versions.append(self.version)
        self.generated += 1
        if len(each.versions) == each.limit:
            self.running.remove(each)
            self.kept.pop(each.trajectory, None)
            self.kept[each.trajectory] = each.kv
            self.results.append(each.result(each.finish))

    # room
    def size(self) -> int:
        return sum(each.size for each in self.running)

    def fits(self, each: Slow) -> bool:
        room = self.room - int(self.room * WATERMARK) if self.running else self.room
        return self.size() + each.size <= room

    def shrink(self) -> None:
        while self.kept and sum(self.kept.values()) + self.size() > self.room:
            del self.kept[next(iter(self.kept))]

    def admit(self, each: Slow) -> None:
        cached = min(self.kept.pop(each.trajectory, 0), each.size - 1 - each.received)
        if not each.started:
            each.cached, each.started = cached, True
        self.cached += cached
        each.queue_s += self.began - each.since
        each.kv = cached + each.received
        each.writing = bool(each.received) and each.kv == each.size - 1
        self.running.append(each)
        self.shrink()

    def set_back(self, each: Slow) -> None:
        self.preemptions += 1
        self.running.remove(each)
        self.recomputed += each.kv
        each.kv, each.writing, each.since = 0, False, self.began
        if each.received:
            self.results.append(each.result("abort"))
        else:
            self.waiting.insert(0, each)
