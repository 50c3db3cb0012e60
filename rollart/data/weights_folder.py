"""A run's own folder for weights: in shared memory when they fit there, else inside the run folder.

Invariants: no two runs share a folder, and a folder is removed by its owner, or by a later run once its owner is gone.
An owner is gone when nobody holds the lock in its folder and no process has the id in its name; the lock also speaks
for owners in other containers. What this file leaves out: what lies in the folder (`data/weights.py`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

from rollart.errors import WeightsError, boundary

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rollart-weights-"
LOCK = "owner.lock"


class WeightsFolder:
    """An owned folder; `close()` removes it. Also a context manager. Raises WeightsError when it cannot be made."""

    def __init__(self, parent: Path, run_name: str) -> None:
        safe_name = re.sub(r"[^A-Za-z0-9_.]+", "_", run_name)
        with boundary(WeightsError, f"making a folder for weights in {parent}"):
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{safe_name}-{os.getpid()}-", dir=parent))
            self._lock = (self.path / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder; closing twice is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> WeightsFolder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def default_folder(
    run_name: str, run_folder: Path, model_bytes: int, num_versions: int, shared_memory: Path = SHARED_MEMORY
) -> WeightsFolder:
    """A new folder in shared memory if it has room for so many versions, else in `run_folder`.

    Also removes what dead runs left in the place chosen. Raises WeightsError when neither has room.
    """
    needed = num_versions * model_bytes
    free: dict[Path, int] = {}
    for parent in (shared_memory, run_folder):
        if parent == run_folder:
            parent.mkdir(parents=True, exist_ok=True)
        elif not os.access(parent, os.W_OK):
            continue
        sweep_stale(parent)
        free[parent] = shutil.disk_usage(parent).free
        if free[parent] >= needed:
            return WeightsFolder(parent, run_name)
    raise WeightsError(
        f"no room for weights: {num_versions} versions of {model_bytes:,} bytes are {needed:,} bytes, but free are "
        + " and ".join(f"{num_bytes:,} bytes in {parent}" for parent, num_bytes in free.items())
        + "; lower weights.keep or weights.delta, or free some space"
    )


def sweep_stale(parent: Path) -> None:
    """Remove the folders of owners that are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.split("-")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and not _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> bool:
    """Whether somebody holds the folder's lock, or it is not ours to ask."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
