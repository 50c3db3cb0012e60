"""MooncakeShelf: versions in a Mooncake store. The only file that imports mooncake.

    PREFIX/7/bucket-0000.safetensors ...   pushed one after the other through one buffer
    PREFIX/7/manifest                      put last: from then on the version is there

Keys carry the version, since a value never changes. Store-node processes own all memory (`mooncake_service.py`); this
client gives none, so that neither trainer nor engine takes any weights with it when it dies. Every value is pinned:
the master may not evict it, and what is too much for the store is refused instead.

Invariants: a failure of the store is a WeightsError with its reason; nothing waits for a dead node longer than
`patience_s`. What this file leaves out: what stands in for the store (`fallback.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollart.data.stores.checksum import Buffer
from rollart.errors import ConfigError, WeightsError, boundary, to_install

MANIFEST = "manifest"
LOCAL_BUFFER_BYTES = 16 << 20
MISSING, UNREADY, EXPIRED, UNREACHABLE = -704, -703, -707, -800
REASONS = {
    -101: "the store has no node",
    -200: "the store has no room: its nodes are full, or dead; give it more memory, or lower weights.keep",
    UNREADY: "it is not written to its end",
    EXPIRED: "it took longer than the master's lease, so that it may have been removed meanwhile",
    UNREACHABLE: "the store node that holds it cannot be reached",
    -900: "the master cannot be reached",
}
AGAIN = frozenset({UNREADY, EXPIRED, UNREACHABLE})
"""What another try may mend, until the master has noticed who is dead."""
FIRST_DELAY_S = 0.1
CONNECT_TIMEOUT_S = 5.0

Memory = NDArray[np.uint8]


class MooncakeShelf:
    """Implements `shelf.Shelf`.

    `master`: host:port. `prefix`: of all keys, unique to the run. `replicas`: copies, each on another node.
    `patience_s`: how long a node that does not answer is asked again, a little longer than the master takes to notice.
    `client`: one that is connected already; otherwise that is done when it is first needed.
    Raises ConfigError when mooncake is not installed.
    """

    near = False

    def __init__(
        self,
        master: str,
        prefix: str,
        protocol: str = "tcp",
        replicas: int = 1,
        patience_s: float = 12.0,
        client: Any = None,
    ) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(f"weights.store: 'mooncake' needs mooncake; {to_install('mooncake')}")
        self._master, self._prefix, self._protocol = master, prefix, protocol
        self._replicas, self._patience_s = replicas, patience_s
        self._connected = client
        self._connecting = threading.Lock()
        self._staging: Memory | None = None
        self._sealed: set[int] = set()

    @property
    def where(self) -> str:
        """The master's address."""
        return f"the Mooncake store at {self._master}"

    # --------------------------------------------------------------------------------------------------------- writing
    def write(self, version: int, key: str, num_bytes: int, parts: Iterable[memoryview]) -> None:
        """Copy the parts into one registered buffer, and push that."""
        staging, end = self._stage(num_bytes), 0
        view = staging.data
        for part in parts:
            view[end : end + part.nbytes] = part
            end += part.nbytes
        address, name = staging.ctypes.data, self._key(version, key)
        config = self._config()
        self._ask(f"putting {name}", lambda client: client.put_from(name, address, num_bytes, config))

    def seal(self, version: int, manifest: bytes) -> None:
        """Put the manifest."""
        self.write(version, MANIFEST, len(manifest), [memoryview(manifest)])
        self._sealed.add(version)

    def drop(self, version: int) -> None:
        """Remove all of it, whoever reads it: what was read is the reader's own."""
        self._sealed.discard(version)
        pattern = f"^{re.escape(self._key(version, ''))}"
        self._ask(f"removing {pattern}", lambda client: client.remove_by_regex(pattern, True))

    def remove(self, version: int, key: str) -> None:
        """Remove one value."""
        name = self._key(version, key)
        self._ask(f"removing {name}", lambda client: client.remove(name, True))

    def _stage(self, num_bytes: int) -> Memory:
        """Registered memory, at least so much. It is unregistered before it is freed: others may be given its place."""
        if self._staging is None or self._staging.size < num_bytes:
            client = self._client()
            self._staging = None
            staging = _pages(num_bytes)
            address = staging.ctypes.data
            _check(client.register_buffer(address, num_bytes), "registering a buffer")
            weakref.finalize(staging, client.unregister_buffer, address).atexit = False
            self._staging = staging
        return self._staging

    def _config(self) -> Any:
        config = importlib.import_module("mooncake.store").ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = True
        return config

    # --------------------------------------------------------------------------------------------------------- reading
    def manifest(self, version: int) -> bytes | None:
        """Its bytes."""
        name = self._key(version, MANIFEST)
        size = self._ask(f"looking for {name}", lambda client: client.get_size(name))
        data = self.read(version, MANIFEST, size) if size is not None else None
        return bytes(data) if data is not None else None

    def read(self, version: int, key: str, num_bytes: int) -> Buffer | None:
        """Pull a value into memory of its own."""
        name, buffer = self._key(version, key), _pages(num_bytes)
        address = buffer.ctypes.data
        client = self._client()
        _check(client.register_buffer(address, num_bytes), "registering a buffer")
        try:
            got = self._ask(f"getting {name}", lambda client: client.get_into(name, address, num_bytes))
        finally:
            client.unregister_buffer(address)
        return buffer.data[:got] if got is not None else None

    def versions(self) -> list[int]:
        """Those that this process has published."""
        return sorted(self._sealed)

    # ---------------------------------------------------------------------------------------------------------- inside
    def _key(self, version: int, key: str) -> str:
        return f"{self._prefix}/{version}/{key}"

    def _ask(self, what: str, call: Callable[[Any], int]) -> int | None:
        """The answer, None where there is nothing; asks again what another try may mend. Raises WeightsError."""
        client = self._client()
        delay_s, deadline = FIRST_DELAY_S, time.monotonic() + self._patience_s
        while (code := call(client)) in AGAIN and time.monotonic() < deadline:
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)
        return None if code == MISSING else _check(code, what)

    def _client(self) -> Any:
        with self._connecting:
            if self._connected is None:
                self._connected = connect(self._master, self._protocol, 0, LOCAL_BUFFER_BYTES)
            return self._connected


def connect(master: str, protocol: str, segment_bytes: int, buffer_bytes: int) -> Any:
    """A client of the store that gives it so much memory. Raises WeightsError when the master does not answer."""
    what = f"connecting to the Mooncake store at {master}"
    with boundary(WeightsError, what):
        library = importlib.import_module("mooncake.store")
        host = own_address(master)  # known within seconds; without a master, mooncake tries for minutes
        client = library.MooncakeDistributedStore()
        _check(client.setup(host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, "", master), what)
    return client


def own_address(master: str) -> str:
    """This machine's address as the machine at this host:port sees it. Raises OSError when nobody listens there."""
    host, _, port = master.rpartition(":")
    with contextlib.closing(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)) as connection:
        return str(connection.getsockname()[0])


def _pages(num_bytes: int) -> Memory:
    """New memory that begins with a page."""
    return np.frombuffer(mmap.mmap(-1, max(1, num_bytes)), np.uint8)[:num_bytes]


def _check(code: int, what: str) -> int:
    if code < 0:
        raise WeightsError(f"{what}: {REASONS.get(code, 'it failed')} (Mooncake code {code})")
    return code
