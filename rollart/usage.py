"""What a run costs its machine: CPU seconds and peak memory of the driver and everything it started.

Invariant: a process that ended still counts with the CPU time that was last seen of it. Memory is the sum of resident
sizes, so pages shared between processes count more than once: an upper bound. What this file leaves out: GPUs.
"""

from __future__ import annotations

import contextlib

import psutil


class Usage:
    """Call `sample` now and then; the figures grow and never shrink."""

    def __init__(self) -> None:
        self._driver = psutil.Process()
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._before_s = _cpu_s(self._driver)
        self.peak_rss_bytes = 0

    def sample(self) -> None:
        """Look at the driver and all its descendants."""
        rss_bytes = 0
        for process in [self._driver, *self._driver.children(recursive=True)]:
            with contextlib.suppress(psutil.Error), process.oneshot():
                rss_bytes += process.memory_info().rss
                self._cpu_s[process.pid, process.create_time()] = _cpu_s(process)
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)

    @property
    def cpu_s(self) -> float:
        """User and system seconds since this object was made."""
        return sum(self._cpu_s.values()) - self._before_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
