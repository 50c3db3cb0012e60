"""ShardedRunner: trajectories spread over shard processes; what stays here is who has which, and who must hear what.

Shards talk directly to inference, environment and reward workers. From the driver they get orders (starts, aborts) and
the steps of the weights protocol; they give news (progress, ended trajectories, how many are in which stage), in
batches that grow with the load.

Invariants: between `suspend` and `resume` no shard lets a request leave, and each hears the new version before it goes
on; aborts that an update causes reach a shard before it resumes; a trajectory whose shard dies ends as a generation
error, and its environments and requests are given up on the workers that hold them. Trajectories wait while there is
no shard. What this file leaves out: replacing a dead shard (`join` takes the new one).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from rollart.control.env_manager import Services, env_ids, request_ids
from rollart.control.ledger import StageClock
from rollart.control.runner import DRAIN_S, Listener
from rollart.errors import WorkerDied
from rollart.protocols import ShardHandle
from rollart.types import GroupSpec, ShardNews, StopReason, TaskSpec, Trajectory

log = logging.getLogger(__name__)


class _Member:
    """One shard: what runs on it, and what it is still to be told."""

    def __init__(self, handle: ShardHandle) -> None:
        self.handle = handle
        self.running: dict[str, GroupSpec] = {}
        self.aborting: dict[str, StopReason] = {}
        self.starts: dict[str, GroupSpec] = {}
        self.aborts: dict[str, StopReason] = {}
        self.ordered = asyncio.Event()
        self.sending = asyncio.Lock()
        self.number = 0
        self.stages: dict[str, int] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self) -> None:
        """Tell what there is to tell; when this returns the shard has heard it."""
        async with self.sending:
            self.ordered.clear()
            starts, self.starts = self.starts, {}
            aborts, self.aborts = self.aborts, {}
            if starts or aborts:
                await self.handle.order(starts, aborts)


class ShardedRunner:
    """`services` are the driver's own, through which it gives up what a dead shard held. `version`: of the weights."""

    def __init__(
        self,
        services: Services,
        clock: StageClock,
        tasks: Mapping[str, TaskSpec],
        version: int = 0,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._services = services
        self._clock = clock
        self._tasks = tasks
        self._version = version
        self._say = say
        self._suspended = False
        self._changing = asyncio.Lock()
        self._members: dict[str, _Member] = {}
        self._home: dict[str, _Member] = {}
        self._homes_of_groups: dict[str, list[_Member]] = {}
        self._homeless: dict[str, GroupSpec] = {}
        self._idle = asyncio.Event()
        self._failed = False
        self._listener: Listener

    @property
    def loads(self) -> dict[str, int]:
        """Trajectories per shard."""
        return {name: len(member.running) for name, member in self._members.items()}

    # ---------------------------------------------------------------------------------------- as `runner.Runner` says
    def listen(self, listener: Listener) -> None:
        """Called once, before the first start."""
        self._listener = listener

    def start(self, trajectory_id: str, spec: GroupSpec) -> None:
        """On the shard that runs fewest, or with the rest of its group where its reward sees the whole group.

        Without any shard: as soon as one joins.
        """
        if not self._members:
            self._homeless[trajectory_id] = spec
            return
        member = self._home_of_group(spec) or min(self._members.values(), key=lambda each: len(each.running))
        self._home[trajectory_id] = member
        self._homes_of_groups.setdefault(spec.group_id, []).append(member)
        member.running[trajectory_id] = spec
        member.starts[trajectory_id] = spec
        member.ordered.set()

    def abort(self, trajectory_id: str, reason: StopReason) -> None:
        """`aborted` follows when the shard says what it had."""
        if (spec := self._homeless.pop(trajectory_id, None)) is not None:
            self._listener.aborted(_empty(trajectory_id, spec, reason))
            return
        member = self._home[trajectory_id]
        if member.starts.pop(trajectory_id, None) is not None:
            self._listener.aborted(_empty(trajectory_id, self._forget(member, trajectory_id), reason))
            return
        member.aborting[trajectory_id] = member.aborts[trajectory_id] = reason
        member.ordered.set()

    async def close(self) -> None:
        """Wait until the shards have told the end of everything, and have closed what was left to close."""
        await self._each(_Member.send)
        self._idle.clear()
        if self._home and not self._failed:
            try:
                await asyncio.wait_for(self._idle.wait(), DRAIN_S)
            except TimeoutError:
                log.warning("%d trajectories had not ended %g s after their abort", len(self._home), DRAIN_S)
        with contextlib.suppress(TimeoutError):  # a shard that hangs is killed with its process
            await asyncio.wait_for(self._all(lambda shard: shard.close()), 2 * DRAIN_S)
        tasks = [task for member in self._members.values() for task in member.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members.values():
            self._clock.shift(member.stages, {})
            member.stages = {}
        await self._services.background.drain(DRAIN_S)

    # ------------------------------------------------------------------------------------------------------- shards
    async def join(self, shard: ShardHandle) -> None:
        """A new shard: it learns the version, then takes its share. Raises WorkerDied."""
        async with self._changing:
            await shard.update(self._version)
            if not self._suspended:
                await shard.resume()
            member = self._members[shard.name] = _Member(shard)
            loop = asyncio.get_running_loop()
            member.tasks = [
                loop.create_task(self._watched(member, self._send(member)), name=f"orders to {shard.name}"),
                loop.create_task(self._watched(member, self._receive(member)), name=f"news of {shard.name}"),
            ]
        homeless, self._homeless = self._homeless, {}
        for trajectory_id, spec in homeless.items():
            self.start(trajectory_id, spec)

    def lost(self, name: str) -> None:
        """A shard is dead: what ran on it has ended. Harmless when that is known."""
        member = self._members.pop(name, None)
        if member is None:
            return
        for task in member.tasks:
            task.cancel()
        self._clock.shift(member.stages, {})
        gone = {each: spec for each, spec in member.running.items() if each not in member.starts}
        if gone:
            self._services.background.spawn(self._give_up(gone), f"giving up what shard {name} held")
        while member.running:  # each end may abort others
            trajectory_id, spec = next(iter(member.running.items()))
            self._end(member, _empty(trajectory_id, spec, "generation_error", f"rollout shard {name} died"))

    # ------------------------------------------------------------------------------------------------------ weights
    async def suspend(self) -> None:
        """No shard lets a request leave until `resume`; every start version so far is known."""
        async with self._changing:
            self._suspended = True
            answers = await self._all(lambda shard: shard.suspend())
            for name, news in answers.items():
                if (member := self._members.get(name)) is not None:
                    self._hear(member, news)

    async def update(self, version: int) -> None:
        """The engines hold `version`."""
        async with self._changing:
            self._version = version
            await self._all(lambda shard: shard.update(version))

    async def resume(self) -> None:
        """Requests may leave, once the shards have heard what the update has ended."""
        async with self._changing:
            await self._each(_Member.send)
            await self._all(lambda shard: shard.resume())
            self._suspended = False

    # ------------------------------------------------------------------------------------------------------- inside
    async def _send(self, member: _Member) -> None:
        while True:
            await member.ordered.wait()
            await member.send()

    async def _receive(self, member: _Member) -> None:
        while True:
            self._hear(member, await member.handle.news())

    async def _watched(self, member: _Member, work: Awaitable[None]) -> None:
        try:
            await work
        except WorkerDied:
            self.lost(member.handle.name)
        except Exception as error:
            self._failed = True
            self._listener.failed(error)

    def _hear(self, member: _Member, news: ShardNews) -> None:
        """News may overtake each other: counts are those of the newest, and a trajectory ends once."""
        if news.number > member.number:
            self._clock.shift(member.stages, news.stages)
            member.number, member.stages = news.number, news.stages
        self._services.proxy.prefill.counts.update(news.counts)
        for line in news.said:
            self._say(f"{member.handle.name}: {line}")
        for trajectory_id, (start_version, num_tokens) in news.progress.items():
            if trajectory_id in member.running:
                self._listener.progress(trajectory_id, start_version, num_tokens)
        for trajectory in (*news.ended, *news.aborted):
            if trajectory.trajectory_id in member.running:
                self._end(member, trajectory)

    def _end(self, member: _Member, trajectory: Trajectory) -> None:
        """It may have ended by itself while its abort was on the way."""
        reason = member.aborting.get(trajectory.trajectory_id)
        self._forget(member, trajectory.trajectory_id)
        if reason is None:
            self._listener.ended(trajectory)
        else:
            trajectory.stop_reason = reason
            self._listener.aborted(trajectory)

    def _forget(self, member: _Member, trajectory_id: str) -> GroupSpec:
        del self._home[trajectory_id]
        member.aborting.pop(trajectory_id, None)
        member.aborts.pop(trajectory_id, None)
        if not self._home:
            self._idle.set()
        spec = member.running.pop(trajectory_id)
        homes = self._homes_of_groups[spec.group_id]
        homes.remove(member)
        if not homes:
            del self._homes_of_groups[spec.group_id]
        return spec

    def _home_of_group(self, spec: GroupSpec) -> _Member | None:
        homes = self._homes_of_groups.get(spec.group_id, ())
        return homes[0] if homes and self._tasks[spec.task].reward_scope == "group" else None

    async def _give_up(self, gone: Mapping[str, GroupSpec]) -> None:
        """End the environments and requests of trajectories that nobody runs any more, wherever they are."""
        tasks = {trajectory_id: self._tasks[spec.task] for trajectory_id, spec in gone.items()}
        await self._services.env.give_up(_flat(env_ids(each, task) for each, task in tasks.items()))
        await self._services.proxy.give_up(list(gone), _flat(request_ids(each, task) for each, task in tasks.items()))

    async def _all(self, call: Callable[[ShardHandle], Awaitable[Any]]) -> dict[str, Any]:
        return await self._each(lambda member: call(member.handle))

    async def _each(self, call: Callable[[_Member], Awaitable[Any]]) -> dict[str, Any]:
        """Call all shards at once; one that dies is left out, what else a call raises is raised when all have ended."""
        members = dict(self._members)
        answers = await asyncio.gather(*map(call, members.values()), return_exceptions=True)
        results: dict[str, Any] = {}
        for name, answer in zip(members, answers, strict=True):
            if isinstance(answer, WorkerDied):
                self.lost(name)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                results[name] = answer
        return results


def _empty(trajectory_id: str, spec: GroupSpec, reason: StopReason, cause: str = "") -> Trajectory:
    """A trajectory of which nothing came back."""
    return Trajectory(trajectory_id, spec.group_id, spec.task, spec.seed, stop_reason=reason, cause=cause)


def _flat(lists: Iterable[list[str]]) -> list[str]:
    return [each for inner in lists for each in inner]
