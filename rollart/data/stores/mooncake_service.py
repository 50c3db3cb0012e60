"""A run's Mooncake store as its driver sees it: the one that the config names, or a master and store nodes of its own.

Invariants: what is started here ends with the run, also when the driver is killed, as each process ends when its
standard input does (`mooncake_node.py`); keys of a run are cleared before and after it from a store that outlives it.
What this file leaves out: mooncake itself, so that a driver never imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rollart.errors import ConfigError, WeightsError, to_install
from rollart.sections import WeightsConfig

NODE = "rollart.data.stores.mooncake_node"
CLIENT_TTL_S = 10
"""How long a silent node counts as alive."""
PATIENCE_S = CLIENT_TTL_S + 2.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
SLACK = 1.05
"""Room for what the store's allocator leaves between values."""
SLACK_BYTES = 64 << 20
MASTER_TRIES = 3
"""The port that was free may be taken by somebody else."""
LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def mooncake_store(
    weights: WeightsConfig, run: Path, num_bytes: int, local: bool
) -> AsyncIterator[dict[str, Any]]:
    """The arguments of `MooncakeShelf` for a store with room for `num_bytes` per replica.

    `local`: reachable from this machine alone.
    Raises ConfigError without mooncake, WeightsError when the store does not start.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(f"weights.store: 'mooncake' needs mooncake; {to_install('mooncake')}")
    prefix = key_prefix(run)
    options = {
        "prefix": prefix,
        "protocol": weights.protocol,
        "replicas": weights.replicas,
        "patience_s": PATIENCE_S,
    }
    if weights.master:
        await _clear(weights.master, prefix)
        try:
            yield {"master": weights.master, **options}
        finally:
            with contextlib.suppress(WeightsError):
                await asyncio.shield(_clear(weights.master, prefix))
        return
    async with Processes(run / "logs") as processes:
        master = await processes.start_master(LOOPBACK if local else _address())
        segment = int(SLACK * num_bytes) + SLACK_BYTES
        for number in range(weights.replicas):
            await processes.start_node(f"mooncake-node-{number}", master, segment, weights.protocol)
        yield {"master": master, **options}


def key_prefix(run: Path) -> str:
    """Of all keys of a run, now and when it is resumed; unlike that of any other run."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", run.name)
    return f"rollart/{name}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"


class Processes:
    """Master and nodes; a context manager that ends them. Their output goes to `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.shield(asyncio.gather(*map(_end, self.running.values())))

    async def start_master(self, host: str) -> str:
        """Its host:port, which is free now. Raises WeightsError."""
        for _ in range(MASTER_TRIES - 1):
            with contextlib.suppress(WeightsError):
                return await self._start_master(host)
        return await self._start_master(host)

    async def _start_master(self, host: str) -> str:
        address, metrics_port = f"{host}:{_free_port(host)}", str(_free_port(host))
        await self._start("mooncake-master", "master", address, metrics_port, "--client-ttl-s", str(CLIENT_TTL_S))
        return address

    async def start_node(self, name: str, master: str, segment_bytes: int, protocol: str = "tcp") -> None:
        """A node that owns so much memory. Raises WeightsError."""
        await self._start(name, "node", master, str(segment_bytes), "--protocol", protocol)

    async def _start(self, name: str, *words: str) -> None:
        """Start a process, and wait until it says that it is ready."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", NODE, *words, "--guarded"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self.running[name] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            await _end(process)
            del self.running[name]
            raise WeightsError(f"{name} did not start{_tail(log)}")


async def _clear(master: str, prefix: str) -> None:
    """Remove what an earlier process of this run left in a store that is not the run's own. Raises WeightsError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", NODE, "clear", master, prefix),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            _, err = await process.communicate()
    except TimeoutError:
        raise WeightsError(f"weights.master: {master} does not answer within {START_TIMEOUT_S:g} s") from None
    finally:
        await _end(process)
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise WeightsError(f"weights.master: {lines[-1] if lines else f'{master} cannot be used'}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let it see the end of its input; make sure."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_port(host: str) -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _address() -> str:
    """Where other machines reach this one; loopback where there is no way to any."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # nothing is sent: the system only says which of its addresses it would take
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    return "; its last output:\n" + "\n".join(lines) if lines else ""
