"""Simulating many configs at once: the processes of `rollart plan`.

Invariant: a process that dies costs the simulation that it was at, and no other; none outlives the search, not even one
that was killed. What this file leaves out: which configs are simulated (`planner.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType

from rollart.config import Config
from rollart.errors import RollartError
from rollart.simulation import Simulation

Simulate = Callable[[Config], Simulation]
Runner = Callable[[Sequence[Config]], Iterator[tuple[int, Simulation | str]]]
"""Simulates configs; (index, result, or why there is none) as they end, in any order."""


@contextmanager
def runner(simulate: Simulate, jobs: int) -> Iterator[Runner]:
    """Simulates in this process, or in `jobs` others, which are gone when this ends."""
    if jobs < 2:
        yield lambda configs: ((index, attempt(simulate, config)) for index, config in enumerate(configs))
        return
    processes = Processes(simulate, jobs)
    try:
        yield processes.run
    finally:
        processes.end()


class Processes:
    """`jobs` processes that simulate. When one dies all are begun anew, and what they had left is done one by one."""

    def __init__(self, simulate: Simulate, jobs: int) -> None:
        self._simulate, self._jobs = simulate, jobs
        self._before = set(multiprocessing.active_children())
        self._executor = self._new()

    def run(self, configs: Sequence[Config]) -> Iterator[tuple[int, Simulation | str]]:
        """Each config's place and what came of it, as they come."""
        futures, left = {}, []
        for index, config in enumerate(configs):
            try:
                futures[self._submit(config)] = index
            except BrokenProcessPool:
                left.append(index)
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                left.append(futures[future])
        if left:
            self._renew()
        for index in left:
            yield index, self._alone(configs[index])

    def end(self) -> None:
        """No more is begun, and what is at work is killed: it is deaf to the SIGTERM that a broken executor sends."""
        for child in set(multiprocessing.active_children()) - self._before:
            child.kill()
        self._executor.shutdown(cancel_futures=True)

    def _alone(self, config: Config) -> Simulation | str:
        try:
            return self._submit(config).result()
        except BrokenProcessPool:
            self._renew()
            return "the process that simulated it was killed (no memory left? --jobs 1 needs least)"

    def _submit(self, config: Config) -> Future[Simulation | str]:
        return self._executor.submit(attempt, self._simulate, config)

    def _renew(self) -> None:
        self.end()
        self._executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"), initializer=_prepare)


def attempt(simulate: Simulate, config: Config) -> Simulation | str:
    """A simulation, or why there is none. Of the module, so that another process finds it."""
    try:
        return simulate(config)
    except RollartError as error:
        return str(error)


def _prepare() -> None:
    """A signal may reach every process of a group: the one that searches decides. When that is gone, so is this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def as_interrupt() -> Iterator[None]:
    """SIGTERM, and a terminal that goes away, end the search as Ctrl-C does: with the best so far."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # no signal comes here
        yield
        return
    wanted = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in wanted}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
