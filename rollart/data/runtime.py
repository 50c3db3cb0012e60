"""Runtimes: where workers live. `LocalRuntime` gives each a process of its own, `InlineRuntime` none.

Invariants: a call either returns, raises our error with the worker's name, or raises WorkerDied once the process is
gone, so nothing ever waits on a dead worker; no fixed port or path is used, so that runs on one host never meet.
What this file leaves out: remote machines (`ray_runtime.py`), and which devices (`resource/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollart.data.channel import STREAM_LIMIT, Channel
from rollart.data.handshake import greeting
from rollart.data.listener import Listener
from rollart.data.wire import Call, encode
from rollart.data.worker import Host, answer, build
from rollart.errors import WorkerDied, WorkerError
from rollart.protocols import Runtime, WorkerHandle
from rollart.resource.devices import environment_of, this_node
from rollart.types import Binding, NodeInfo

STOP_TIMEOUT_S = 5.0
LAST_WORDS_S = 1.0
"""How long answers that a process left behind may take to be read."""
LOG_TAIL_BYTES = 2000


def open_runtime(kind: str, log_folder: Path) -> Runtime:
    """The runtime of a config's `runtime` key; workers' output goes to `log_folder`. Raises ConfigError."""
    if kind == "ray":
        from rollart.data.ray_runtime import RayRuntime

        return RayRuntime(log_folder)
    return InlineRuntime() if kind == "inline" else LocalRuntime(log_folder)


class LocalRuntime:
    """One process per worker on this machine, each with one compute thread."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._greeting = greeting()
        self._sockets = Sockets()
        self._workers: list[ProcessWorker] = []

    async def nodes(self) -> list[NodeInfo]:
        """This machine."""
        return [this_node()]

    async def spawn(
        self, name: str, target: str, kwargs: Mapping[str, Any], binding: Binding | None = None
    ) -> WorkerHandle:
        """Start a process and build `target(**kwargs)` in it. Raises what the construction raised."""
        visible = environment_of(binding, os.environ)
        worker = await ProcessWorker.launch(name, self._log_folder / f"{name}.log", self._sockets, visible)
        self._workers.append(worker)
        await worker.call("__build__", target, dict(kwargs), self._greeting)
        return worker

    async def shutdown(self) -> None:
        """End all processes; those that do not answer are killed."""
        await asyncio.gather(*(worker.stop() for worker in self._workers), return_exceptions=True)
        self._sockets.remove()


class Sockets:
    """Where workers of a run listen for each other: a folder that only this user can enter, made when first needed."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._paths: dict[str, str] = {}

    def path(self, worker: str) -> str:
        """The socket of a worker. Short, as the system cuts such paths at about 100 bytes."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rollart-"))
        return self._paths.setdefault(worker, str(self._folder / f"{len(self._paths)}"))

    def remove(self) -> None:
        """No worker listens any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class ProcessWorker:
    """Driver's side of one worker process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, connection: socket.socket, log: Path, sockets: Sockets
    ) -> None:
        self.name = name
        self.process = process
        self._connection = connection
        self._log = log
        self._sockets = sockets
        self._channel: Channel
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls, name: str, log: Path, sockets: Sockets, visible: Mapping[str, str] | None = None
    ) -> ProcessWorker:
        """Start the process; nothing is built in it yet."""
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        environment |= visible or {}
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollart.data.worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        worker = cls(name, process, ours, log, sockets)
        reader, worker._writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)
        worker._channel = Channel(name, worker._writer)
        worker._reading = asyncio.create_task(worker._read_until_death(reader), name=f"read {name}")
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the object in the process."""
        return await self._channel.call(method, *args, returns=returns)

    async def address(self) -> str:
        """Where other workers of the run reach it; it begins to listen when first asked."""
        return str(await self._channel.call("__listen__", self._sockets.path(self.name), returns=str))

    async def wait_dead(self) -> str:
        """The reason, once the process is gone."""
        return await self._channel.wait_dead()

    async def stop(self) -> None:
        """Ask the process to end, kill it when it does not."""
        if not self._channel.is_dead:
            try:
                await asyncio.wait_for(self.call("__stop__"), STOP_TIMEOUT_S)
            except (TimeoutError, WorkerError):
                self.kill()
        await self._finish()
        self.kill()  # what its environments started must not outlive it

    def kill(self) -> None:
        """SIGKILL to the worker and whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies with the second
            return

    async def _finish(self) -> None:
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()
        if self._reading is not None:
            await self._reading
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read_until_death(self, reader: asyncio.StreamReader) -> None:
        """Take answers to the end of the process, which is not always that of the stream: its children may hold it."""
        reading = asyncio.ensure_future(self._channel.read(reader))
        exiting = asyncio.ensure_future(self.process.wait())
        await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
        code = await exiting
        await asyncio.wait({reading}, timeout=LAST_WORDS_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._channel.bury(_describe_exit(code, self._log))


def _describe_exit(code: int, log: Path) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its process was {how}{last_output(log)}"


def last_output(log: Path) -> str:
    """The end of a worker's log, introduced, for an error message; nothing where there is none."""
    try:
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        tail = ""
    return f"; its last output ({log}):\n{tail}" if tail else ""


class InlineRuntime:
    """All workers as objects in this process: no overlap of computation, but one debugger and one traceback."""

    def __init__(self) -> None:
        self._workers: list[InlineWorker] = []
        self._sockets = Sockets()
        self._building = asyncio.Lock()

    async def nodes(self) -> list[NodeInfo]:
        """This machine."""
        return [this_node()]

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any],
        binding: Binding | None = None,  # noqa: ARG002
    ) -> WorkerHandle:
        """Build `target(**kwargs)` here, one at a time, as transformers cannot load two models at once in a process.

        Raises what the construction raised.
        """
        async with self._building:
            subject = await asyncio.to_thread(build, target, kwargs)
        host = Host(subject)
        await host.start()
        worker = InlineWorker(name, host, self._sockets)
        self._workers.append(worker)
        return worker

    async def shutdown(self) -> None:
        """Close all workers."""
        await asyncio.gather(*(worker.stop() for worker in self._workers), return_exceptions=True)
        self._sockets.remove()


class InlineWorker:
    """A worker without a process. Values still pass through MessagePack, so that nothing is shared by accident."""

    def __init__(self, name: str, host: Host, sockets: Sockets) -> None:
        self.name = name
        self._host = host
        self._sockets = sockets
        self._listener = Listener(partial(answer, host))
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch(), name=f"watch {name}")

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the object."""
        if self._death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {self._death.result()}")
        reply = await answer(self._host, Call(0, method, [msgspec.Raw(encode(argument)) for argument in args]))
        if reply.failure is not None:
            raise reply.failure.raised_by(self.name, method)
        return msgspec.msgpack.decode(reply.result, type=returns)

    async def address(self) -> str:
        """Where other workers of the run reach it: a socket of this process."""
        return await self._listener.open(self._sockets.path(self.name))

    async def wait_dead(self) -> str:
        """Return once it was stopped."""
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        """Close the object."""
        if self._death.done():
            await self._watching
            return
        self._watching.cancel()
        await self._close("it was stopped")

    async def _watch(self) -> None:
        await self._close(await self._host.lost())

    async def _close(self, reason: str) -> None:
        self._death.set_result(reason)
        self._listener.close()
        await self._host.close()
