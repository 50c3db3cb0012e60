"""Keys and values on their way between two workers of one machine: a file in shared memory per request.

Invariants: a file is made by the worker that read the request, before it says so, and has its name until the worker
that decodes has mapped it, or until any worker of the run hears of the request's abort; whoever maps it keeps it. The
folder goes with its run (`weights_folder.py`). What this file leaves out: other machines (`handoff.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from pathlib import Path

from rollart.protocols import Payload

log = logging.getLogger(__name__)


class Parcels:
    """The files in `folder`; "": there is none, and nothing can be put."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None

    def put(self, request_id: str, payload: Payload) -> bool:
        """Write the file of a request; False where that cannot be, such as without room, which the log then says."""
        if self._folder is None:
            return False
        path = self._path(self._folder, request_id)
        try:
            path.write_bytes(payload)
        except OSError as error:
            path.unlink(missing_ok=True)
            log.warning("%d bytes of keys and values find no place in %s: %s", len(payload), self._folder, error)
            return False
        return True

    def take(self, request_id: str) -> Payload | None:
        """What the file of a request holds, without copying it; from then on nobody else finds it. None: no file."""
        if self._folder is None:
            return None
        path = self._path(self._folder, request_id)
        try:
            with path.open("rb") as file:
                path.unlink()
                size = os.fstat(file.fileno()).st_size
                return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)) if size else b""
        except FileNotFoundError:
            return None

    def drop(self, request_id: str) -> None:
        """Remove the file of a request, if it is there."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(self._folder, request_id).unlink()

    def _path(self, folder: Path, request_id: str) -> Path:
        return folder / hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()
