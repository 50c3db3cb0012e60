"""The folder of one run: what was asked, what was measured, what the model said, and where it can go on.

    config.toml                     the resolved config, with the command above it (and those that resumed the run)
    metrics.jsonl                   one line per step
    batches.jsonl                   one line per step: which groups and trajectories were trained on, and their ages
    tensorboard/                    the same as events
    trajectories/step-000010.txt    sampled conversations for people, .jsonl with tokens and masks for programs
    checkpoints/step-000050/        filled by `checkpoint.py`
    summary.json                    replaced whole
    run.log                         warnings and milestones with their time

Invariant: no reader ever sees half a line or half a file, and no failing disk ends a run that has begun: it is warned
of once per file or folder of files, listed in `problems`, and tried again with every later write. One process at a time
writes a folder.
What this file leaves out: what a checkpoint holds.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollart import __version__, event_file
from rollart.config import Config, load, to_toml
from rollart.errors import RunFolderError, boundary
from rollart.files import Appender, Opener, cut_half_line, open_raw, write_atomic
from rollart.transcript import as_jsonl, as_text, printable
from rollart.types import Group, Trajectory

Warn = Callable[[str], None]
Clock = Callable[[], float]


def to_stderr(text: str) -> None:
    """Where warnings go when nobody shows them better."""
    sys.stderr.write(f"rollart: warning: {text}\n")


def resolved_config(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config that a run was started with, plus overrides. Raises RunFolderError, ConfigError."""
    return load(_existing(Path(folder)) / "config.toml", overrides)


def checkpoints(folder: str | Path) -> list[int]:
    """Steps that have a checkpoint folder, oldest first."""
    names = (path.name for path in Path(folder, "checkpoints").glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """The folder of one checkpoint, whether it exists or not."""
    return Path(folder, "checkpoints", f"step-{step:06d}")


class RunFolder:
    """Writer of one run folder; make it with `create` or `open`, end it with `close`."""

    def __init__(self, path: Path, tensorboard: bool, opener: Opener, warn: Warn, clock: Clock) -> None:
        self.path = path
        self.problems: list[str] = []
        self._opener = opener
        self._warn = warn
        self._clock = clock
        self._failing: Counter[str] = Counter()
        self._lock = _locked(path)
        for name in ("metrics.jsonl", "batches.jsonl", "run.log"):
            cut_half_line(path / name)
        self._metrics = Appender(path / "metrics.jsonl", opener)
        self._batches = Appender(path / "batches.jsonl", opener)
        self._log = Appender(path / "run.log", opener)
        self._events = self._new_events() if tensorboard else None

    @classmethod
    def create(
        cls,
        config: Config,
        command: Sequence[str],
        *,
        opener: Opener = open_raw,
        warn: Warn = to_stderr,
        clock: Clock = time.time,
    ) -> RunFolder:
        """Make a folder of a new name. Raises RunFolderError, and then leaves none.

        `command`: as it was typed; its first `.toml` names the run unless `log.name` does.
        """
        parent = Path(config.log.folder)
        with boundary(RunFolderError, f"log.folder {config.log.folder!r}"):
            parent.mkdir(parents=True, exist_ok=True)
            path = _new_folder(parent, config.log.name or _default_name(command, clock()))
            try:
                write_atomic(path / "config.toml", _config_text(config, command), opener)
                return cls(path, config.log.tensorboard, opener, warn, clock)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise

    @classmethod
    def open(
        cls, path: str | Path, *, opener: Opener = open_raw, warn: Warn = to_stderr, clock: Clock = time.time
    ) -> RunFolder:
        """Go on writing an existing folder. Raises RunFolderError when it is none, or another process writes it."""
        folder = _existing(Path(path))
        with boundary(RunFolderError, f"run folder {str(path)!r}"):
            return cls(folder, resolved_config(folder).log.tensorboard, opener, warn, clock)

    def become_latest(self) -> None:
        """Point `latest` at this folder: its run has begun."""
        latest = self.path.parent / "latest"
        beside = latest.with_name(f".latest.{self.path.name}")
        try:
            beside.symlink_to(self.path.name)
            os.replace(beside, latest)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            self.note(f"{latest}: cannot point at {self.path.name}: {error.strerror or error}")

    def write_config(self, config: Config, command: Sequence[str]) -> bool:
        """Replace the config of a run that is resumed with another; the commands so far stay above it."""
        text = (self.path / "config.toml").read_text(encoding="utf-8")
        earlier = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
        return self.write("config.toml", "".join(earlier).encode() + _config_text(config, command))

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, with the time in seconds since 1970, and one TensorBoard event."""
        now = self._clock()
        self._append(self._metrics, msgspec.json.encode({"step": step, "time": now, **values}) + b"\n")
        if self._events:
            self._append(self._events, event_file.records(now, step, values))

    def write_batch(self, step: int, groups: Sequence[Group], version: int) -> None:
        """One line of batches.jsonl: the audit of what was trained on; `version`: at get_batch."""
        rows = [
            {
                "group": group.spec.group_id,
                "task": group.spec.task,
                "seed": group.spec.seed,
                "trajectories": [each.trajectory_id for each in group.trajectories],
                "rewards": [each.reward for each in group.trajectories],
                "ages": [version - (each.start_version or 0) for each in group.trajectories],
            }
            for group in groups
        ]
        self._append(self._batches, msgspec.json.encode({"step": step, "groups": rows}) + b"\n")

    def write_trajectories(self, step: int, trajectories: Sequence[Trajectory], label: str = "step") -> None:
        """`trajectories/<label>-<step>.txt` and `.jsonl`; those of label "step" were trained on."""
        stem = f"trajectories/{label}-{step:06d}"
        text = as_text(trajectories, trained=label == "step")
        self.write(f"{stem}.txt", text.encode("utf-8", "backslashreplace"))
        self.write(f"{stem}.jsonl", as_jsonl(trajectories))

    def write_summary(self, summary: Mapping[str, Any]) -> bool:
        """Replace summary.json; `problems` is added. False when it could not be written."""
        encoded = msgspec.json.encode({**summary, "problems": self.problems})
        return self.write("summary.json", msgspec.json.format(encoded, indent=2) + b"\n")

    def write(self, name: str, data: bytes) -> bool:
        """Replace a file of the folder whole. False when it could not be written; the run goes on."""
        path = self.path / name
        warned_of = name.partition("/")[0]  # once for all files of a folder
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data, self._opener)
        except OSError as error:
            self._failed(warned_of, error)
            return False
        self._worked(warned_of, 0 if name == warned_of else self._failing[warned_of])
        return True

    def log(self, text: str) -> None:
        """One line of run.log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        line = printable(text).replace("\n", "\n    ")
        self._append(self._log, f"{stamp} {line}\n".encode("utf-8", "backslashreplace"))

    def note(self, problem: str) -> None:
        """A warning: shown, logged, and listed in the summary."""
        self.problems.append(problem)
        self._warn(problem)
        self.log(f"warning: {problem}")

    def rewind(self, step: int) -> None:
        """Forget metrics and batches of later steps, before a resumed run makes them again. Raises RunFolderError."""
        self._metrics = self._rewound("metrics.jsonl", step)
        self._batches = self._rewound("batches.jsonl", step)

    def _rewound(self, name: str, step: int) -> Appender:
        path = self.path / name
        with boundary(RunFolderError, str(path)):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            kept = [line for line in lines if msgspec.json.decode(line)["step"] <= step]
            write_atomic(path, b"".join(kept), self._opener)
        return Appender(path, self._opener)

    def close(self) -> None:
        """Let another process write the folder. Closing twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _new_events(self) -> Appender:
        """Every process that writes the folder gets an event file of its own."""
        now = self._clock()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        folder = self.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        events = Appender(folder / name, self._opener)
        self._append(events, event_file.header(now))
        return events

    def _append(self, appender: Appender, record: bytes) -> None:
        name = str(appender.path.relative_to(self.path))
        try:
            appender.append(record)
        except OSError as error:
            self._failed(name, error)
        else:
            self._worked(name, appender.lost)
            appender.lost = 0

    def _failed(self, name: str, error: OSError) -> None:
        self._failing[name] += 1
        if self._failing[name] == 1:
            self.note(f"{self.path / name}: cannot be written: {error.strerror or error}; the run goes on without it")

    def _worked(self, name: str, lost: int) -> None:
        if self._failing.pop(name, 0):
            self.note(f"{self.path / name}: can be written again; {lost} records were lost")


def _config_text(config: Config, command: Sequence[str]) -> bytes:
    heading = f"# rollart {__version__}\n# {' '.join(printable(shlex.join(command)).split())}\n"
    return (heading + to_toml(config)).encode()


def _existing(folder: Path) -> Path:
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{str(folder)!r} is not a run folder: it has no config.toml")
    return folder


def _default_name(command: Sequence[str], now: float) -> str:
    stem = next((Path(word).stem for word in command if word.endswith(".toml")), "run")
    stem = "".join("_" if "\ud800" <= char <= "\udfff" else char for char in stem)  # a path may be any bytes
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def _new_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first free of `name-2`, `name-3` ...; mkdir decides between two processes."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _locked(path: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed."""
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFolderError(f"{path}: another process writes this run folder") from None
    except OSError:
        pass  # Some network file systems have no locks.
    return descriptor
