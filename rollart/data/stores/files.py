"""FileShelf: versions as files, in shared memory or on any file system that writer and readers share.

    FOLDER/v00000007/bucket-0000.safetensors ...   each written under another name, then renamed
    FOLDER/v00000007/manifest.json                 renamed into place last: from then on the version is there

In shared memory a reader maps a bucket instead of copying it, and a file that nobody has mapped any more is written
over by the next version: memory that is at hand costs half of memory that must first be found and zeroed.

Invariants: a mapped bucket stays as it is, dropped or not: a reader holds a shared lock on each for as long as it is
mapped, and only a file whose lock nobody holds is written over, after it has lost its name. Removal drops the manifest
first, so a reader that comes too late is told so. What this file leaves out: where the folder lies
(`data/weights_folder.py`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rollart.data.stores.checksum import Buffer
from rollart.errors import WeightsError
from rollart.files import Opener, open_raw, write_all

MANIFEST = "manifest.json"
SPARE = "spare-"
MOUNTS = Path("/proc/self/mountinfo")


class FileShelf:
    """Implements `shelf.Shelf`. No fsync: the folder is in shared memory, or lost with its run.

    `mapped`: readers map the files (default: where the folder lies in memory; on a network file system, a file that
    another machine removes would take the mapping with it). `opener`: how a file is opened for writing.
    """

    def __init__(self, folder: str | Path, mapped: bool | None = None, opener: Opener = open_raw) -> None:
        self.folder = Path(folder)
        self._mapped = in_memory(self.folder) if mapped is None else mapped
        self._opener = opener

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def near(self) -> bool:
        """A file of this machine or its network."""
        return True

    # --------------------------------------------------------------------------------------------------------- writing
    def write(self, version: int, key: str, num_bytes: int, parts: Iterable[memoryview]) -> None:
        """One file. Raises WeightsError, which says how much room there is when there is none."""
        place = self._place(version)
        try:
            place.mkdir(parents=True, exist_ok=True)
            temporary = place / f"{key}.tmp"
            mode = "r+b" if self._take_spare(key, num_bytes, temporary) else "wb"
            with self._opener(temporary, mode) as file:
                for part in parts:
                    write_all(file, part)
            temporary.replace(place / key)
        except OSError as error:
            raise self._explained(error, version) from error

    def seal(self, version: int, manifest: bytes) -> None:
        """Write the manifest."""
        self.write(version, MANIFEST, len(manifest), [memoryview(manifest)])

    def drop(self, version: int) -> None:
        """Remove the files; those that nobody reads stay, nameless, for the next version."""
        place = self._place(version)
        (place / MANIFEST).unlink(missing_ok=True)
        if self._mapped and place.exists():
            self._remove_spares()
            for path in place.glob("*.safetensors"):
                self._spare(path)
        shutil.rmtree(place, ignore_errors=True)

    def clear(self) -> None:
        """Drop all versions, and what was kept for the next one."""
        for version in self.versions():
            self.drop(version)
        self._remove_spares()

    def _spare(self, path: Path) -> None:
        with path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(self.folder / f"{SPARE}{path.name}")

    def _take_spare(self, key: str, num_bytes: int, path: Path) -> bool:
        """Give the spare file of this key another name, if there is one, and it is of this size."""
        spare = self.folder / f"{SPARE}{key}"
        if not self._mapped or not spare.exists() or spare.stat().st_size != num_bytes:
            return False
        spare.rename(path)
        return True

    def _remove_spares(self) -> None:
        for spare in self.folder.glob(f"{SPARE}*"):
            spare.unlink()

    def _explained(self, error: OSError, version: int) -> WeightsError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return WeightsError(f"publishing version {version} in {self.folder}: {type(error).__name__}: {error}")
        kept = self.versions()
        held = sum(path.stat().st_size for old in kept for path in self._place(old).glob("*"))
        free = shutil.disk_usage(self.folder).free
        return WeightsError(
            f"no room for version {version} in {self.folder}: {len(kept)} versions there take {held:,} bytes, "
            f"{free:,} bytes are free; free some space, lower weights.keep, or choose another folder"
        )

    # --------------------------------------------------------------------------------------------------------- reading
    def manifest(self, version: int) -> bytes | None:
        """The file's bytes."""
        try:
            return (self._place(version) / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsError(f"reading the manifest of version {version} in {self.folder}: {error}") from error

    def read(self, version: int, key: str, num_bytes: int) -> Buffer | None:  # noqa: ARG002
        """The file, mapped where that is safe, else copied."""
        path = self._place(version) / key
        try:
            with open(path, "rb", buffering=0) as file:
                if not self._mapped:
                    return _copied(file)
                return _mapped(file, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsError(f"reading {key} of version {version} in {self.folder}: {error}") from error

    def versions(self) -> list[int]:
        """All that have a manifest, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.folder.glob(f"v[0-9]*/{MANIFEST}"))

    def _place(self, version: int) -> Path:
        return self.folder / f"v{version:08d}"


def _copied(file: BinaryIO) -> bytearray:
    data = bytearray(os.fstat(file.fileno()).st_size)
    view = memoryview(data)
    while view and (count := file.readinto(view)):  # type: ignore[attr-defined]
        view = view[count:]
    return data if not view else data[: len(data) - len(view)]


def _mapped(file: BinaryIO, path: Path) -> Buffer | None:
    """A private mapping that holds the file's lock for as long as it lives; None when the version is being dropped.

    A mapping keeps a duplicate of the file's descriptor, and with it the lock. What is written to it stays in it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    found = os.fstat(file.fileno())
    if path.stat().st_ino != found.st_ino:
        return None
    if found.st_size == 0:
        return bytearray()
    return mmap.mmap(file.fileno(), found.st_size, access=mmap.ACCESS_COPY)


def in_memory(folder: Path) -> bool:
    """Whether a folder, or the nearest one above it that exists, lies in a file system of this machine's memory."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    kinds = (line.partition(" - ")[2].split(" ", 1)[0] for line in lines if line.split(" ", 3)[2] == device)
    return any(kind in ("tmpfs", "ramfs") for kind in kinds)
