"""Metadata stores: where the view of all pools lives, so that runs on one store see what the others hold.

A store keeps small documents, each with a revision, and leases. `swap` writes only over the revision that was read, so
two runs never both win a device; whoever loses reads again. A lease is a name that goes away unless it is renewed.

Invariant: a document is either as it was or as it was swapped in, also after kill -9 in the middle. What this file
leaves out: what the documents mean (`manager.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from rollart.errors import ConfigError, ResourceError, boundary, to_install

REDIS_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 5.0
LOCK_WAIT_S = 0.02


class MetadataStore(Protocol):
    """Blocking, safe to call from several processes. Every method raises ResourceError when the store is not there."""

    def read(self, key: str) -> tuple[int, bytes]:
        """(revision, document); revision 0 and nothing when there is none."""
        ...

    def swap(self, key: str, revision: int, document: bytes) -> bool:
        """Write, if the revision is still the one given; whether it was."""
        ...

    def renew(self, lease: str, seconds: float) -> None:
        """Hold a lease from now on for so long."""
        ...

    def drop(self, lease: str) -> None:
        """Give a lease up. Harmless when it is not held."""
        ...

    def held(self, leases: list[str]) -> list[bool]:
        """Which of these leases are held, in order."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


def open_store(url: str) -> MetadataStore:
    """The store of a `resources.store` value: memory, file:/path, redis://host:port/0 (or rediss://).

    Raises ConfigError when the value names no store, ResourceError when the store cannot be reached.
    """
    if (folder := folder_of(url)) is not None:
        return FileStore(folder)
    return MemoryStore() if url == "memory" else RedisStore(url)


def folder_of(url: str) -> Path | None:
    """The folder of a `resources.store` value, if it is one in files. Raises ConfigError when it names no store."""
    if url == "memory":
        return None
    with boundary(ConfigError, f"resources.store {url!r}"):
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    path = url.removeprefix("file:").removeprefix("//")
    if parts.scheme == "file" and path:
        return Path(path).expanduser()
    if parts.scheme in ("redis", "rediss") and host:
        return None
    raise ConfigError(
        f"resources.store: {url!r} is not a store; take memory, file:/path/to/folder or redis://host:6379/0"
    )


class _Entry(Struct):
    revision: int = 0
    document: bytes = b""


class _Contents(Struct):
    documents: dict[str, _Entry] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)


class MemoryStore:
    """In this process: one run, seen by nobody else."""

    def __init__(self) -> None:
        self._contents = _Contents()

    def read(self, key: str) -> tuple[int, bytes]:
        """See `MetadataStore`."""
        entry = self._contents.documents.get(key, _Entry())
        return entry.revision, entry.document

    def swap(self, key: str, revision: int, document: bytes) -> bool:
        """See `MetadataStore`."""
        return _swap(self._contents, key, revision, document)

    def renew(self, lease: str, seconds: float) -> None:
        """See `MetadataStore`."""
        self._contents.leases[lease] = time.monotonic() + seconds

    def drop(self, lease: str) -> None:
        """See `MetadataStore`."""
        self._contents.leases.pop(lease, None)

    def held(self, leases: list[str]) -> list[bool]:
        """See `MetadataStore`."""
        now = time.monotonic()
        return [self._contents.leases.get(lease, 0.0) > now for lease in leases]

    def close(self) -> None:
        """Nothing to give back."""


class FileStore:
    """A folder on a file system that all runs share and that knows locks (local disks, NFSv4).

    One file holds everything; it is replaced by a rename under a lock. Leases end by the wall clock of the machines.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "rollart-resources.msgpack"
        self._lock = folder / "rollart-resources.lock"
        with self._reached():
            folder.mkdir(parents=True, exist_ok=True)
        self.held([])

    def read(self, key: str) -> tuple[int, bytes]:
        """See `MetadataStore`."""
        with self._locked() as contents:
            entry = contents.documents.get(key, _Entry())
            return entry.revision, entry.document

    def swap(self, key: str, revision: int, document: bytes) -> bool:
        """See `MetadataStore`."""
        with self._locked() as contents:
            done = _swap(contents, key, revision, document)
            if done:
                self._write(contents)
            return done

    def renew(self, lease: str, seconds: float) -> None:
        """See `MetadataStore`."""
        now = time.time()
        with self._locked() as contents:
            contents.leases = {name: until for name, until in contents.leases.items() if until > now}
            contents.leases[lease] = now + seconds
            self._write(contents)

    def drop(self, lease: str) -> None:
        """See `MetadataStore`."""
        with self._locked() as contents:
            if contents.leases.pop(lease, None) is not None:
                self._write(contents)

    def held(self, leases: list[str]) -> list[bool]:
        """See `MetadataStore`."""
        now = time.time()
        with self._locked() as contents:
            return [contents.leases.get(lease, 0.0) > now for lease in leases]

    def close(self) -> None:
        """Nothing to give back: the lock is held only inside a call."""

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        with boundary(ResourceError, f"metadata store {self._file.parent}"):
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[_Contents]:
        with self._reached(), self._lock.open("ab") as lock:
            self._take(lock)
            yield self._contents()

    def _take(self, lock: IO[bytes]) -> None:
        """The lock is held for milliseconds, unless its holder is frozen or the file system is away."""
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ResourceError(
                        f"{self._lock} is held by another process for more than {LOCK_TIMEOUT_S:g} s; is one stopped?"
                    ) from None
                time.sleep(LOCK_WAIT_S)

    def _contents(self) -> _Contents:
        try:
            return msgspec.msgpack.decode(self._file.read_bytes(), type=_Contents)
        except FileNotFoundError:
            return _Contents()
        except msgspec.MsgspecError as error:
            raise ResourceError(
                f"{self._file} is damaged ({error}); when no run uses this store, delete the file"
            ) from error

    def _write(self, contents: _Contents) -> None:
        part = self._file.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.msgpack.encode(contents))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)


def _swap(contents: _Contents, key: str, revision: int, document: bytes) -> bool:
    entry = contents.documents.setdefault(key, _Entry())
    if entry.revision != revision:
        return False
    entry.revision, entry.document = revision + 1, document
    return True


_SWAP = """
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if revision ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'revision', revision + 1, 'document', ARGV[2])
return 1
"""


class RedisStore:
    """A Redis server. A document is one hash, written by a script that compares and sets at once; a lease is a key."""

    def __init__(self, url: str) -> None:
        try:
            redis = importlib.import_module("redis")
        except ImportError:
            raise ConfigError(f"resources.store: Redis needs an extra; {to_install('redis')}") from None
        self._where = _without_password(url)
        with self._reached():
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
            )
            self._client.ping()
        self._script = self._client.register_script(_SWAP)

    def read(self, key: str) -> tuple[int, bytes]:
        """See `MetadataStore`."""
        with self._reached():
            revision, document = self._client.hmget(_key("document", key), "revision", "document")
            return int(revision or 0), bytes(document or b"")

    def swap(self, key: str, revision: int, document: bytes) -> bool:
        """See `MetadataStore`."""
        with self._reached():
            return bool(self._script(keys=[_key("document", key)], args=[revision, document]))

    def renew(self, lease: str, seconds: float) -> None:
        """See `MetadataStore`."""
        with self._reached():
            self._client.set(_key("lease", lease), b"", px=max(1, round(seconds * 1000)))

    def drop(self, lease: str) -> None:
        """See `MetadataStore`."""
        with self._reached():
            self._client.delete(_key("lease", lease))

    def held(self, leases: list[str]) -> list[bool]:
        """See `MetadataStore`."""
        with self._reached():
            asked = self._client.pipeline(transaction=False)
            for lease in leases:
                asked.exists(_key("lease", lease))
            return [bool(each) for each in asked.execute()]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        hint = "(is Redis running there, and does resources.store name its host, port and password?)"
        with boundary(ResourceError, f"metadata store {self._where} {hint}"):
            yield


def _key(kind: str, name: str) -> str:
    return f"rollart:{kind}:{name}"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
