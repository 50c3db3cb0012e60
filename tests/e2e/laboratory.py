"""What the end-to-end tests share: small configs, the command line as a process, and a look at what a run left."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from rollart.config import Config, parse
from rollart.data.weights_folder import SHARED_MEMORY

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 150.0
"""Only against hanging: a busy machine may take long to start a process."""

SMALL = """
steps = 3
runtime = "inline"
[tasks.friendly]
env = "tests.e2e.hostile:Friendly"
max_turn_tokens = 4
[rollout]
groups_per_batch = 2
group_size = 3
engine_slots = 16
[train]
learning_rate = 1e-4
[eval]
every = 0
episodes = 1
[weights]
bucket_bytes = 262144
[log]
checkpoint_every = 0
tensorboard = false
"""


class Process:
    """`rollart` at work in a process of its own; `prefix` is a command that runs it."""

    def __init__(self, words: Sequence[str], output: Path, prefix: Sequence[str] = ()) -> None:
        self.output = output
        with output.open("ab") as file:
            self._popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "rollart", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                preexec_fn=as_in_a_terminal,
            )
        self.pid = self._popen.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the driver."""
        self._popen.send_signal(number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code. Fails the test, with what was printed, when the process hangs."""
        try:
            return self._popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rollart hangs:\n{self.text()}") from None

    def text(self) -> str:
        """All that it printed."""
        return self.output.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        return psutil.Process(self.pid).children(recursive=True)

    def worker(self, name: str) -> psutil.Process:
        """The worker that writes `NAME.log`."""
        return next(each for each in self.workers() if f"{name}.log" in _standard_output(each))

    def until(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for something that the running process brings about."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert self._popen.poll() is None, f"rollart ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"rollart does not come to {what}:\n{self.text()}"
            time.sleep(0.05)

    def end(self) -> None:
        """For fixtures: nothing of it is left, whatever the test did."""
        if self._popen.poll() is None:
            for each in [*self.workers(), psutil.Process(self.pid)]:
                each.kill()
        self._popen.wait()


class Laboratory:
    """A place for the runs of one test, with a name that no other run on this machine has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"e2e_{os.getpid()}_{time.monotonic_ns()}"
        self.processes: list[Process] = []

    def overrides(self, *more: str) -> list[str]:
        """The overrides that put a run here."""
        return [f"log.folder={json.dumps(str(self.folder / 'runs'))}", f"log.name={self.name}", *more]

    def config(self, *overrides: str, text: str = SMALL) -> Config:
        """`text` as the config of a run here."""
        return parse(text, self.overrides(*overrides))

    @property
    def run(self) -> Path:
        """The folder of the first run."""
        return self.folder / "runs" / self.name

    def start(self, *words: str, text: str = SMALL, prefix: Sequence[str] = ()) -> Process:
        """`rollart train` on `text` with overrides, in a process of its own."""
        toml = self.folder / "config.toml"
        toml.write_text(text)
        return self.launch("train", str(toml), *self.overrides(*words), prefix=prefix)

    def launch(self, *words: str, prefix: Sequence[str] = ()) -> Process:
        """`rollart` with these words, in a process of its own."""
        process = Process(words, self.folder / f"output-{len(self.processes)}.txt", prefix)
        self.processes.append(process)
        return process

    def weights(self) -> list[Path]:
        """Folders in shared memory that belong to runs of this place."""
        return list(SHARED_MEMORY.glob(f"rollart-weights-{self.name}*"))


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file; fails on a half line."""
    text = path.read_text()
    assert text.endswith("\n") or not text, f"{path} ends in the middle of a line"
    return [json.loads(line) for line in text.splitlines()]


def steps_done(run: Path) -> int:
    """How many batches a run that goes on has recorded."""
    path = run / "batches.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def batches(run: Path) -> list[dict[str, Any]]:
    """The audit of a run that has ended."""
    return lines(run / "batches.jsonl")


def summary(run: Path) -> dict[str, Any]:
    """Its summary."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def check_audit(run: Path, steps: int, alpha: float) -> None:
    """Steps 1 to `steps` once each; nothing is trained twice; the age bound holds, for its fraction as well."""
    found = batches(run)
    assert [batch["step"] for batch in found] == list(range(1, steps + 1))
    groups = [group for batch in found for group in batch["groups"]]
    trajectories = [trajectory for group in groups for trajectory in group["trajectories"]]
    assert len({group["group"] for group in groups}) == len(groups)
    assert len(set(trajectories)) == len(trajectories)
    for batch in found:
        oldest = [max(group["ages"]) for group in batch["groups"]]
        assert min(age for group in batch["groups"] for age in group["ages"]) >= 0
        assert max(oldest) <= math.ceil(alpha)
        assert sum(age > math.floor(alpha) for age in oldest) <= (alpha % 1) * len(oldest)


def as_in_a_terminal() -> None:
    """Tests that run under nohup hand down a deaf ear, and rollart respects it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _standard_output(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
