"""Clusters: a group of workers of one role as one object (paper section 3).

    cluster = await start(JudgeWorker, ...)          spawn on bindings, one process or actor per worker
    await cluster.score(["a", "b"])                  a declared method, spread as its declaration says
    await cluster.call(JudgeWorker.score, ["a"])     the same, known to the type checker

Invariants: a call reaches only workers that are alive; what a worker raises arrives as ours, with the worker, its
binding and the remote traceback; a worker that died is never called again. What this file leaves out: choosing devices
(`resource/`) and starting processes (`runtime.py`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast, get_type_hints

from msgspec import Struct

from rollart.checks import nearest
from rollart.declarations import (
    DEFAULT_TAG,
    TAG_NAME,
    Declaration,
    P,
    Registered,
    declaration_of,
    declared_methods,
)
from rollart.errors import ConfigError, ResourceError, RollartError, WorkerDied, WorkerError
from rollart.protocols import Runtime, WorkerHandle
from rollart.resource.routing import Router
from rollart.types import Binding

Out = TypeVar("Out")
R = TypeVar("R")
W = TypeVar("W")

PROGRESS_S = 15.0
"""Between two words of who is not there yet."""
NAMED = 4
"""Workers that such a word names at most."""

REDUCE: dict[str, Callable[[list[tuple[Any, int]]], Any]] = {
    "concat": lambda parts: [entry for result, _ in parts for entry in result],
    "list": lambda parts: [result for result, _ in parts],
    "sum": lambda parts: sum(result for result, _ in parts),
    "min": lambda parts: min(result for result, _ in parts),
    "max": lambda parts: max(result for result, _ in parts),
    "mean": lambda parts: sum(result * weight for result, weight in parts) / sum(weight for _, weight in parts),
}
"""From (result, length of its share) of each worker to one value."""


class Member(Struct, frozen=True):
    """One worker and what it runs on."""

    handle: WorkerHandle
    binding: Binding

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.handle.name


async def spawn(
    runtime: Runtime,
    wanted: Iterable[tuple[Binding, str, Mapping[str, Any]]],
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Member]:
    """Start workers (binding, target, kwargs), all at once; nobody is left behind when one fails to start.

    say: hears now and then who is not there yet.
    """
    wanted = list(wanted)
    starting = [
        asyncio.ensure_future(runtime.spawn(binding.worker, target, kwargs, binding))
        for binding, target, kwargs in wanted
    ]
    try:
        async with asyncio.timeout(timeout_s):
            handles = await _all_there(starting, [binding.worker for binding, _, _ in wanted], say)
    except BaseException:
        for task in starting:
            task.cancel()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in ended if not isinstance(each, BaseException)))
        raise
    return [Member(handle, binding) for handle, (binding, _, _) in zip(handles, wanted, strict=True)]


async def _all_there(
    starting: Sequence[asyncio.Future[WorkerHandle]], names: Sequence[str], say: Callable[[str], None]
) -> list[WorkerHandle]:
    left: Iterable[asyncio.Future[WorkerHandle]] = starting
    while left:
        ended, left = await asyncio.wait(left, timeout=PROGRESS_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()  # of the first that failed, its error
        if missing := [name for name, task in zip(names, starting, strict=True) if not task.done()]:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            say(f"still starting: {', '.join(missing[:NAMED])}{more}")
    return [task.result() for task in starting]


class Cluster(Generic[W]):
    """The proxy of `members`, which all hold an object of class `worker`.

    Declared methods appear on the cluster under their names. `fallback`: class -> classes that stand in for it.
    Raises ConfigError when a method's affinity names a class that no member, or none of a compatible class, is on.
    """

    def __init__(
        self, worker: type[W], members: Sequence[Member], fallback: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.worker = worker
        self._declared = declared_methods(worker)
        self._members = {member.name: member for member in members}
        self._fallback = dict(fallback or {})
        self._routers: dict[str, Router] = {}
        self._calls = 0
        check_affinity(worker, {member.binding.device_class for member in members}, self._fallback)

    @property
    def members(self) -> list[Member]:
        """The workers that are alive, in the order in which they were started."""
        return list(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        declared = self.__dict__.get("_declared", {})
        if name not in declared:
            raise AttributeError(_no_such_method(self.__dict__.get("worker", object), name, list(declared)))

        async def collective(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, args, kwargs)

        collective.__name__ = name
        return collective

    async def call(self, method: Registered[W, P, Any, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
        """As `cluster.method(...)`, checked by the type checker. Raises what the worker raised, or WorkerDied."""
        name = getattr(method, "__name__", "")
        if self._declared.get(name) is None or declaration_of(method) is None:
            raise ConfigError(_no_such_method(self.worker, name or repr(method), list(self._declared)))
        return cast(Out, await self._call(name, args, kwargs))

    async def stop(self) -> None:
        """End all workers."""
        await asyncio.gather(*(member.handle.stop() for member in self._members.values()))
        self._members.clear()

    # ------------------------------------------------------------------------------------------------------ inside
    async def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        method, declared = getattr(self.worker, name), self._declared[name]
        values, tag = _bound(method, args, kwargs)
        if declared.url and not declared.mode and not declared.affinity:
            declared = Declaration(mode="execute_first")
        if declared.mode is None:
            return await self._on_one(name, method, declared, values, tag)
        members = self._of_class(declared, tag)
        if declared.mode == "execute_first":
            return await self._on(members[0], name, method, values)
        if declared.mode == "split":
            return await self._scatter(members, name, method, declared, values)
        return await _all(self._on(member, name, method, values) for member in members)

    async def _on_one(
        self, name: str, method: Callable[..., Any], declared: Declaration, values: dict[str, Any], tag: str
    ) -> Any:
        """The least loaded worker of the tag's class, else of a compatible one (`hw_mapping`)."""
        router = self._routers.get(name)
        if router is None:
            router = self._routers[name] = Router(declared.affinity, self._fallback)
            for member in self._members.values():
                router.add(member.name, member.binding.device_class)
        self._calls += 1
        call = f"{self._calls}"
        chosen = router.choose(call, tag, 1)
        try:
            return await self._on(self._members[chosen], name, method, values)
        finally:
            router.forget(call)
            router.finished(chosen, 1)

    async def _scatter(
        self,
        members: list[Member],
        name: str,
        method: Callable[..., Any],
        declared: Declaration,
        values: dict[str, Any],
    ) -> Any:
        lengths = {each: _length(method, each, values) for each in declared.split if each in values}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"{method.__qualname__}: lists to split differ in length: {lengths}")
        total = next(iter(lengths.values()))
        if total == 0:
            if declared.reduce in ("concat", "list"):
                return []
            raise ConfigError(f"{method.__qualname__}: nothing to split, and {declared.reduce!r} of nothing is nothing")
        cuts = [total * number // len(members) for number in range(len(members) + 1)]
        shares = [
            (member, {**values, **{each: values[each][start:end] for each in lengths}}, end - start)
            for member, start, end in zip(members, cuts, cuts[1:], strict=False)
            if end > start
        ]
        results = await _all(self._on(member, name, method, share) for member, share, _ in shares)
        return REDUCE[declared.reduce]([(result, size) for result, (_, _, size) in zip(results, shares, strict=True)])

    def _of_class(self, declared: Declaration, tag: str) -> list[Member]:
        """All workers that a collective call goes to, at least one."""
        members = self.members
        if not members:
            raise ResourceError(f"no worker of {self.worker.__name__} is left")
        if not declared.affinity:
            return members
        wanted = declared.affinity.get(tag) or declared.affinity.get(DEFAULT_TAG)
        if wanted is None:
            return members
        for name in (wanted, *self._fallback.get(wanted, ())):
            if chosen := [member for member in members if member.binding.device_class == name]:
                return chosen
        raise ResourceError(f"no worker of {self.worker.__name__} is left on class {wanted!r} or one compatible")

    async def _on(self, member: Member, name: str, method: Callable[..., Any], values: dict[str, Any]) -> Any:
        where = f"{self.worker.__name__}.{name} on worker {member.name} ({member.binding})"
        try:
            return await member.handle.call(name, *values.values(), returns=_returns(method))
        except WorkerDied as error:
            self._bury(member)
            raise WorkerDied(f"{where}: {error}") from error
        except RollartError as error:
            named = error if type(error) is not WorkerError else WorkerError(f"{where}: {error}")
            named.add_note(f"raised by {where}")
            raise named from error.__cause__

    def _bury(self, member: Member) -> None:
        if self._members.pop(member.name, None) is not None:
            for router in self._routers.values():
                router.remove(member.name)


def check_affinity(worker: type, classes: set[str], fallback: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError when a declared class has no worker, nor any that may stand in for it."""
    for name, declared in declared_methods(worker).items():
        for tag, wanted in declared.affinity.items():
            if not classes & {wanted, *fallback.get(wanted, ())}:
                raise ConfigError(
                    f"{worker.__name__}.{name}: hw_affinity of {tag!r}: no worker is on class {wanted!r} or one "
                    f"compatible with it; they are on {', '.join(sorted(classes)) or 'nothing'}"
                )


async def _all(calls: Iterable[Awaitable[R]]) -> list[R]:
    """Wait until every call has ended, then raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[R]", results)


def _bound(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The values by parameter, in order and without holes, and the task tag. Raises TypeError as a call would."""
    signature = _signature(method)
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{method.__qualname__}: {error}") from None
    if kwargs:
        bound.apply_defaults()
    values = dict(list(bound.arguments.items())[1:])
    default = signature.parameters[TAG_NAME].default if TAG_NAME in signature.parameters else DEFAULT_TAG
    tag = values.get(TAG_NAME, default)
    return values, tag if isinstance(tag, str) else DEFAULT_TAG


@functools.lru_cache(4096)
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


@functools.lru_cache(4096)
def _returns(method: Callable[..., Any]) -> Any:
    """The annotated result, by which the answer is decoded."""
    return get_type_hints(method).get("return", Any)


def _length(method: Callable[..., Any], name: str, values: Mapping[str, Any]) -> int:
    value = values[name]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{method.__qualname__}: {name} is split and must be a list, not {type(value).__name__}")
    return len(value)


def _no_such_method(worker: type, name: str, declared: list[str]) -> str:
    if not declared:
        return f"{worker.__name__} declares no method; decorate one with @rdist.register(...)"
    if callable(getattr(worker, name, None)):
        return f"{worker.__name__}.{name} is not declared; decorate it with @rdist.register(...)"
    return f"{worker.__name__} has no method {name!r}{nearest(name, declared)}"
