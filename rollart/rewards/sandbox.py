"""Running code that nobody trusts, in bubblewrap (`bwrap`): one fresh sandbox per run, nothing kept.

Promised: no network; of this machine's files only /usr, the C library's and this interpreter's own folder, read-only;
an emptied environment; processes, memory per process, processor time, sizes of files and output, and wall-clock time
limited; when a run ends, by whatever end, all its processes end. Without bubblewrap nothing runs.

Not promised: a boundary against faults of the kernel; a limit on the memory of all processes together below
`processes` x `memory_bytes`. Linux only. Started by root, a run takes a user number of its own, as the kernel counts no
processes of root. What this file leaves out: what is run, and what its output means (`code.py`).
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct

from rollart.errors import ConfigError

BLOCK = 1 << 16
START_TIMEOUT_S = 30.0
"""Of bwrap and Python; the time of a program begins after it."""
USERS = range(1 << 30, 1 << 31)
"""Numbers that no account has."""

LAUNCHER = """
import os, resource, runpy, sys
ready, user, *limits = map(int, sys.argv[1:])
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for name, limit in zip(("AS", "CPU", "NPROC", "FSIZE", "CORE"), limits, strict=True):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
os.write(ready, b"1")
os.close(ready)
del sys.argv[1:]
runpy.run_path("/program.py", run_name="__main__")
"""


class Outcome(Struct, frozen=True):
    """How a run ended. `status`: what the program exited with, 128 + n for signal n; None where it was ended from here:
    `timed_out`, or `too_long` when it printed more than `output_bytes`."""

    status: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    too_long: bool = False


class Sandbox(Struct, frozen=True, kw_only=True):
    """Limits of each run. Raises ConfigError where there is no bubblewrap, or where it may not work."""

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    processes: int = 16
    """Processes and threads at once."""
    files_bytes: int = 64 << 20
    """Of /tmp, and of each file."""
    output_bytes: int = 1 << 20
    """Of stdout and of stderr."""

    def __post_init__(self) -> None:
        if shutil.which("bwrap") is None:
            raise ConfigError("code of a model runs in bubblewrap or not at all; install it: apt install bubblewrap")
        if not _interpreter().is_file():
            raise ConfigError(f"a sandbox needs this interpreter at {_interpreter()}, where nothing is")
        try:
            outcome = self.run("print('here')")
        except RuntimeError as error:
            raise ConfigError(f"bubblewrap does not work here: {error}; are user namespaces allowed?") from error
        if outcome.stdout != b"here\n":
            raise ConfigError(f"this interpreter does not work in a sandbox of these limits: {outcome}")

    def run(self, program: str, stdin: bytes = b"") -> Outcome:
        """Run a Python program to its end or to a limit. Raises RuntimeError when the sandbox did not start."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_file(program.encode("utf-8", "backslashreplace")))
            given = stack.enter_context(_file(stdin))
            ready, theirs = os.pipe()
            stack.callback(os.close, ready)
            try:
                process = subprocess.Popen(
                    [*_walls(source, self.files_bytes), *self._command(theirs)],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(source, theirs),
                    env={},
                )
            finally:
                os.close(theirs)
            stack.enter_context(process)
            # Not before it is ready: a bwrap that is killed while it starts leaves what it started.
            started = select.select([ready], [], [], START_TIMEOUT_S)[0] and os.read(ready, 1)
            outcome = self._watch(process)
            if not started:
                raise RuntimeError(outcome.stderr.decode(errors="replace").strip() or f"no start: {outcome}")
            return outcome

    def _command(self, ready: int) -> list[str]:
        user = random.choice(USERS) if os.geteuid() == 0 else 0
        cpu_s = int(self.timeout_s) + 1
        limits = (ready, user, self.memory_bytes, cpu_s, self.processes, self.files_bytes, 0)
        return [str(_interpreter()), "-I", "-c", LAUNCHER, *map(str, limits)]

    def _watch(self, process: subprocess.Popen[bytes]) -> Outcome:
        """Read what it prints, until its end or a limit. Killing bwrap ends everything inside."""
        deadline = time.monotonic() + self.timeout_s
        streams = [stream for stream in (process.stdout, process.stderr) if stream]
        printed = {stream: bytearray() for stream in streams}
        try:
            for stream, part in _parts(streams, deadline):
                printed[stream] += part
                if len(printed[stream]) > self.output_bytes:
                    break
            status = _ended(process, deadline) if all(map(self._fits, printed.values())) else None
        finally:
            process.kill()
        process.wait()
        too_long = not all(map(self._fits, printed.values()))
        stdout, stderr = (bytes(each[: self.output_bytes]) for each in printed.values())
        return Outcome(status, stdout, stderr, status is None and not too_long, too_long)

    def _fits(self, printed: bytearray) -> bool:
        return len(printed) <= self.output_bytes


def _walls(source: int, files_bytes: int) -> list[str]:
    """bwrap and its arguments. Links such as /bin -> usr/bin are made again; the interpreter stands at its own path."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        else:
            command += ["--ro-bind-try", folder, folder]
    for parent in [*reversed(Path(sys.base_prefix).parents)][1:]:
        command += ["--perms", "0755", "--dir", str(parent)]  # those that bwrap makes by itself are for root alone
    command += ["--ro-bind", sys.base_prefix, sys.base_prefix, "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--size", str(files_bytes), "--perms", "1777", "--tmpfs", folder]
    command += ["--perms", "0444", "--file", str(source), "/program.py", "--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}.items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", "/tmp", "--"]


def _interpreter() -> Path:
    """Not sys.executable, which in a virtual environment is a link that a sandbox cannot follow."""
    return Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A file without a name, at its beginning."""
    descriptor = os.memfd_create("rollart")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _parts(streams: Sequence[IO[bytes]], deadline: float) -> Iterator[tuple[IO[bytes], bytes]]:
    """What comes out of the streams, until all are closed or the deadline."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ, stream)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if part := os.read(key.fd, BLOCK):
                    yield key.data, part
                else:
                    selector.unregister(key.data)


def _ended(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
