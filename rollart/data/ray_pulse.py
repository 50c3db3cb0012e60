"""Whether the servers of Ray that a process depends on still live: its raylet, and the GCS of the head. Imports no Ray.

Ray itself ends a process that has lost them, at once or after a minute, and without a word that reaches the run; who
listens here hears of it before. Invariant: `silence` returns only when nobody takes connections at an address. What
this file leaves out: what becomes of the run (`ray_runtime.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

UNIX = "unix:"
CONNECT_S = 10.0
LOOK_S = 10.0
"""How often a server on another machine is asked anew: one without power closes no connection."""
AGAIN_S = 0.5
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_S = 60.0
"""Ray's default: for so long it waits for a GCS that is gone, and then ends the process."""


class Home(Struct, frozen=True):
    """The servers of one process: addresses, and where their logs are on this machine."""

    raylet: str
    gcs: str
    logs: Path

    @classmethod
    def of(cls, node: Mapping[str, object], gcs: str) -> Home:
        """`node`: the entry of `ray.nodes()` that this process belongs to."""
        socket = Path(str(node["RayletSocketName"]))
        return cls(f"{UNIX}{socket}", gcs, socket.parents[1] / "logs")

    async def raylet_lost(self) -> str:
        """What to say, once the raylet is dead."""
        await silence(self.raylet)
        return f"Ray's raylet on this machine has died, and all workers of the run with it; log: {self.logs}/raylet.out"

    async def gcs_lost(self, patience_s: float) -> str:
        """What to say, once the GCS has been away for so long: one that is fault tolerant comes back."""
        await silence(self.gcs, patience_s)
        return (
            f"Ray's head does not answer any more: the GCS at {self.gcs} is gone; "
            f"its log, on the head: {self.logs}/gcs_server.out"
        )


def patience_s(environ: Mapping[str, str]) -> float:
    """A third of what Ray has before it ends the process: what is left is for a checkpoint."""
    try:
        return float(environ.get(RECONNECT, RECONNECT_S)) / 3
    except ValueError:
        return RECONNECT_S / 3


async def silence(address: str, patience_s: float = 0.0) -> None:
    """Return when nobody has taken connections at `address` (unix:PATH or HOST:PORT) for so long.

    A connection is held, so that the end of a server is heard at once.
    """
    loop = asyncio.get_running_loop()
    heard = loop.time()
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await _connect(address)
        except (OSError, TimeoutError):
            if loop.time() - heard >= patience_s:
                return
            await asyncio.sleep(AGAIN_S)
            continue
        heard = loop.time()
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(None if address.startswith(UNIX) else LOOK_S):
                await reader.read()  # nothing of interest: until the server is gone, or is tired of us


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith(UNIX):
        return await asyncio.open_unix_connection(address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))
