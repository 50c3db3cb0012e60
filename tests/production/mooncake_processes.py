"""A Mooncake store of real processes, some of which tests kill."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from rollart.data.stores.mooncake_shelf import MooncakeShelf
from rollart.data.weights import BucketStore

MODULE = "rollart.data.stores.mooncake_node"
HOST = "127.0.0.1"
CLIENT_TTL_S = 3
PATIENCE_S = CLIENT_TTL_S + 2.0


def have_mooncake() -> bool:
    """Whether Mooncake is installed, with all libraries that it needs."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError:
        return False
    return True


class Store:
    """One master, and nodes of `segment_bytes` each."""

    def __init__(self, logs: Path, segment_bytes: int, num_nodes: int = 1) -> None:
        self.logs = logs
        self.logs.mkdir(parents=True, exist_ok=True)
        self.address = f"{HOST}:{free_port()}"
        self.master = self._start("master", self.address, str(free_port()), "--client-ttl-s", str(CLIENT_TTL_S))
        self.nodes = [self._start("node", self.address, str(segment_bytes)) for _ in range(num_nodes)]

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.logs / "mooncake.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *words, "--guarded"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", (self.logs / "mooncake.log").read_text()[-2000:]
        return process

    def shelf(self, prefix: str = "test", **options: Any) -> MooncakeShelf:
        """As another process has one."""
        return MooncakeShelf(self.address, prefix, **{"patience_s": PATIENCE_S, **options})

    def buckets(self, prefix: str = "test", **changes: Any) -> BucketStore:
        """A store on it."""
        return BucketStore(self.shelf(prefix), **{"bucket_bytes": 1024, "keep": 2, **changes})

    def kill_node(self, number: int = 0) -> None:
        """SIGKILL, without a word."""
        self.nodes[number].kill()
        self.nodes[number].wait()

    def kill_master(self) -> None:
        """SIGKILL to the master itself."""
        for child in psutil.Process(self.master.pid).children():
            child.kill()
        self.master.wait()

    def close(self) -> None:
        """End everything."""
        processes = [*self.nodes, self.master]
        for process in processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def free_port() -> int:
    """A port that was free a moment ago."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
