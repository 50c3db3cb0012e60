"""A process of the elastic pool: one function, one call at a time, in the order of arrival, on the main thread.

    pool -> process    first {"target", "options", "path", "memory_bytes"}, then [time limit in seconds, event] per call
    process -> pool    first why it cannot serve, if so, then the encoded reply per call; each after SECONDS it took

Invariant: the process never outlives its pool. Its end of the socket is its lifeline: when that closes, it ends with
everything it started, even in the middle of a call; where the function holds the interpreter in C code, a watchdog ends
it soon after the call's time limit. What this file leaves out: who starts it (`function_process.py`), the
function's contract (`handler.py`).

Imports are few, as they are part of every cold start.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, NoReturn

import msgspec

from rollart.data.serverless.handler import Handler, make_handler

HEADER = struct.Struct("!Q")
SECONDS = struct.Struct("!d")
PR_SET_CHILD_SUBREAPER = 36
"""So that what a function's process leaves behind stays below this one, and ends with it."""
GRACE_S = 10.0
"""How long after a call's time limit the watchdog ends a process whose pool is gone."""

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def main() -> None:
    """Entry: `python -m rollart.data.serverless.child FD LIFELINE`."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    requests = _Requests(connection)
    first = decode(requests.next())
    try:
        handler = _build(first)
    except BaseException as error:  # a module may do anything, sys.exit included
        _write(connection, 0.0, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
        return
    _write(connection, 0.0, b"")
    _serve(connection, requests, handler)


def _build(first: dict[str, Any]) -> Handler:
    sys.path[:] = first["path"]
    if first["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (first["memory_bytes"], first["memory_bytes"]))
    from rollart.data.targets import named

    return make_handler(named(first["target"], "reward"), first["options"])


def _serve(connection: socket.socket, requests: _Requests, handler: Handler) -> None:
    home, watchdog, watched_until = os.getpid(), open(os.devnull, "w"), 0.0  # noqa: SIM115 - held as long as the process
    while True:
        if not requests.has_next():
            faulthandler.cancel_dump_traceback_later()
            watched_until = 0.0
        limit_s, event = decode(requests.next())
        now = time.monotonic()
        if watched_until < now + limit_s + GRACE_S / 2:  # not anew for each call: it takes longer than short calls
            watched_until = now + limit_s + GRACE_S
            faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=watchdog)
        reply = encode(handler(event, None))
        if os.getpid() != home:
            os._exit(0)  # a process that the function forked ends where the call ends
        _write(connection, time.monotonic() - now, reply)


def _end_with(lifeline: int) -> None:
    """Wait until the pool is gone; then end this process and all that it started."""
    os.read(lifeline, 1)
    _end()


def _end() -> NoReturn:
    from rollart.data.serverless.function_process import kill_tree  # not before: it would be part of every cold start

    kill_tree(os.getpid())
    os._exit(1)


class _Requests:
    """The frames that arrive, read ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = bytearray()

    def has_next(self) -> bool:
        """Whether the next frame is here."""
        return len(self._read) >= HEADER.size and len(self._read) >= self._next_ends()

    def next(self) -> bytes:
        """The next frame; the process ends with the stream."""
        while not self.has_next():
            if not (part := self._connection.recv(1 << 20)):
                _end()
            self._read += part
        end = self._next_ends()
        frame = bytes(self._read[HEADER.size : end])
        del self._read[:end]
        return frame

    def _next_ends(self) -> int:
        return HEADER.size + int(HEADER.unpack_from(self._read)[0])


def _write(connection: socket.socket, took_s: float, body: bytes) -> None:
    connection.sendall(HEADER.pack(SECONDS.size + len(body)) + SECONDS.pack(took_s) + body)


if __name__ == "__main__":
    main()
