"""A process of the elastic pool: one function, one call at a time, on the main thread.

    pool -> process    first {"target", "options", "path", "memory_bytes"}, then [time limit in seconds, event] per call
    process -> pool    first "" or why it cannot serve, then the encoded reply per call

Invariant: the process never outlives its pool. Its end of the socket is its lifeline: when that closes, it ends with
everything it started, even in the middle of a call; where the function holds the interpreter in C code, a watchdog ends
it soon after the call's time limit. What this file leaves out: who starts it (`local.py`), the function's contract
(`handler.py`).

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
from typing import Any, NoReturn

import msgspec

from rollart.data.serverless.handler import Handler, make_handler

HEADER = struct.Struct("!Q")
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
    first = decode(_read(connection))
    try:
        handler = _build(first)
    except BaseException as error:  # a module may do anything, sys.exit included
        _write(connection, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
        return
    _write(connection, b"")
    _serve(connection, handler)


def _build(first: dict[str, Any]) -> Handler:
    sys.path[:] = first["path"]
    if first["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (first["memory_bytes"], first["memory_bytes"]))
    from rollart.data.targets import named

    return make_handler(named(first["target"], "reward"), first["options"])


def _serve(connection: socket.socket, handler: Handler) -> None:
    home, watchdog = os.getpid(), open(os.devnull, "w")  # noqa: SIM115 - held as long as the process
    while True:
        limit_s, event = decode(_read(connection))
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=watchdog)
        reply = encode(handler(event, None))
        faulthandler.cancel_dump_traceback_later()
        if os.getpid() != home:
            os._exit(0)  # a process that the function forked ends where the call ends
        _write(connection, reply)


def _end_with(lifeline: int) -> None:
    """Wait until the pool is gone; then end this process and all that it started."""
    os.read(lifeline, 1)
    _end()


def _end() -> NoReturn:
    from rollart.data.serverless.local import kill_tree  # not before: it would be part of every cold start

    kill_tree(os.getpid())
    os._exit(1)


def _read(connection: socket.socket) -> bytes:
    (size,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            _end()
        parts += part
    return bytes(parts)


def _write(connection: socket.socket, body: bytes) -> None:
    connection.sendall(HEADER.pack(len(body)) + body)


if __name__ == "__main__":
    main()
