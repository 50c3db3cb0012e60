"""Writing files so that a reader never sees half of anything, and the folder of what is kept between runs.

Invariant: a file written by `write_atomic` is either the old or the new one; a file written by `Appender` holds whole
records only, whatever fails in between. Both raise OSError; whether a run goes on is decided by the caller.
`Opener` is the seam through which tests bring a disk that is full.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

Opener = Callable[[Path, str], BinaryIO]


def open_raw(path: Path, mode: str) -> BinaryIO:
    """Unbuffered, so that a failed write is known where it happens."""
    return cast(BinaryIO, open(path, mode, buffering=0))


def write_atomic(path: Path, data: bytes, opener: Opener = open_raw) -> None:
    """Write beside `path`, then rename. On failure nothing is left behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with opener(beside, "wb") as file:
            write_all(file, data)
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


class Appender:
    """Appends whole records to one file, of which it is the only writer.

    Records that could not be written are kept, newest first up to `backlog_bytes`, and tried again with the next one.
    """

    def __init__(self, path: Path, opener: Opener = open_raw, backlog_bytes: int = 1 << 20) -> None:
        self.path = path
        self.lost = 0
        self._opener = opener
        self._backlog_bytes = backlog_bytes
        self._backlog: deque[bytes] = deque()
        self._size = path.stat().st_size if path.exists() else 0

    def append(self, record: bytes) -> None:
        """Write the backlog and one more record. Raises OSError; the file then ends where it ended before."""
        self._backlog.append(record)
        data = b"".join(self._backlog)
        try:
            with self._opener(self.path, "ab") as file:
                self._cut(file)
                write_all(file, data)
        except OSError:
            self._forget_oldest()
            with suppress(OSError):
                os.truncate(self.path, min(self._size, self.path.stat().st_size))
            raise
        self._size += len(data)
        self._backlog.clear()

    def _cut(self, file: BinaryIO) -> None:
        """Remove what a failed write left; accept that someone shortened the file."""
        end = file.seek(0, os.SEEK_END)
        if end > self._size:
            file.truncate(self._size)
        self._size = min(self._size, end)

    def _forget_oldest(self) -> None:
        while sum(map(len, self._backlog)) > self._backlog_bytes:
            self._backlog.popleft()
            self.lost += 1


def cache_folder() -> Path:
    """`$ROLLART_CACHE`, else the user's cache folder."""
    base = os.environ.get("ROLLART_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"


def cut_half_line(path: Path, block_bytes: int = 1 << 16) -> None:
    """Remove a last line without its newline, as a process that was killed leaves it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - block_bytes)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write everything to an unbuffered file. Raises OSError."""
    view = memoryview(data)
    while view:
        written = file.write(view)
        if not written:
            raise OSError(f"{file.name}: nothing was written")
        view = view[written:]
