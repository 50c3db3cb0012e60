"""Circuit breaker: leaves an endpoint alone for a while after several failures in a row. Pure: time is an argument.

closed --`failures` in a row--> open --`open_s` later--> half open: one call goes through; its end closes or opens
again."""

from __future__ import annotations


class Breaker:
    """`failures`: in a row, until it opens. `open_s`: seconds until the endpoint is tried again."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._failed = 0
        self._until = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether it holds calls back, apart from one that tries."""
        return self._failed >= self._limit

    def wait_s(self, now: float) -> float:
        """Seconds until a call may be tried; 0: now, and then `admit` it."""
        if not self.is_open:
            return 0.0
        return self._open_s if self._probing else max(0.0, self._until - now)

    def admit(self) -> None:
        """A call goes through."""
        self._probing = self.is_open

    def succeeded(self) -> None:
        """The endpoint answered, whatever the function said."""
        self._failed, self._probing = 0, False

    def failed(self, now: float) -> None:
        """The endpoint could not be reached or turned the call away."""
        self._failed += 1
        self._until, self._probing = now + self._open_s, False

    def abandoned(self) -> None:
        """The call that was let through ended without telling anything, for example cancelled."""
        self._probing = False
