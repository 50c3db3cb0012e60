"""The run folder: what is in it, and that a failing disk neither ends a run nor leaves half of anything."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from rollart.config import Config, parse
from rollart.errors import ConfigError, RunFolderError
from rollart.files import Appender, cut_half_line, open_raw, write_atomic
from rollart.run_folder import RunFolder, checkpoint_path, checkpoints, resolved_config
from rollart.transcript import as_jsonl, as_text
from rollart.types import Trajectory, Turn


class Disk:
    """An opener whose disk holds `free` more bytes; what does not fit is written in part, then refused."""

    def __init__(self, free: int | None = None, reason: int = errno.ENOSPC) -> None:
        self.free = free
        self.reason = reason

    def __call__(self, path: Path, mode: str) -> BinaryIO:
        if self.reason == errno.EROFS:
            raise OSError(self.reason, os.strerror(self.reason))
        return cast(BinaryIO, _File(path, mode, self))


class _File(io.FileIO):
    def __init__(self, path: Path, mode: str, disk: Disk) -> None:
        super().__init__(path, mode)
        self.disk = disk

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        free = self.disk.free
        if free is None:
            return super().write(data)
        if not free:
            raise OSError(self.disk.reason, os.strerror(self.disk.reason))
        written = super().write(data[:free])
        self.disk.free = free - written
        return written


def config(folder: Path, *overrides: str) -> Config:
    return parse("[tasks.frozenlake]\n", [f"log.folder={folder}", *overrides])


def lines(path: Path) -> list[dict[str, object]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def trajectory(**changes: object) -> Trajectory:
    turns = [
        Turn([1, 2, 3], [4, 5], [-0.5, -0.25], [3, 4], "You are at\nthe start.", "go \x1b[2J==== right", reward=0.5),
        Turn([6], [7], [-1.0], [4], "You fell.", "stay", finish_reason="length"),
    ]
    values = {"turns": turns, "reward": 0.5, "stop_reason": "done", **changes}
    return Trajectory("g1-m0", "g1", "frozenlake", 11, **values)  # type: ignore[arg-type]


def test_a_new_run_writes_its_config_and_becomes_the_latest_when_it_has_begun(tmp_path: Path) -> None:
    wanted = config(tmp_path, "steps=7")
    command = ["rollart", "train", "configs/quick.toml", "log.name=a\nb"]
    with RunFolder.create(wanted, command, clock=lambda: 0.0) as folder:
        assert folder.path.name.startswith("quick-1")
        assert not (tmp_path / "latest").is_symlink()
        folder.become_latest()
        assert (tmp_path / "latest").resolve() == folder.path
        assert os.readlink(tmp_path / "latest") == folder.path.name
        assert resolved_config(tmp_path / "latest") == wanted
        assert resolved_config(folder.path, ["steps=9"]).steps == 9
        assert "# rollart train configs/quick.toml 'log.name=a b'" in (folder.path / "config.toml").read_text()


def test_two_runs_started_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with (
        RunFolder.create(config(tmp_path), ["x.toml"], clock=lambda: 0.0) as first,
        RunFolder.create(config(tmp_path), ["x.toml"], clock=lambda: 0.0) as second,
    ):
        assert second.path.name == f"{first.path.name}-2"
        for folder in (first, second):
            folder.become_latest()
            assert (tmp_path / "latest").resolve() == folder.path


def test_a_run_is_named_in_utf8_whatever_the_bytes_of_its_configs_name(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), ["b\udcff\u03a9.toml"], clock=lambda: 0.0) as folder:
        assert folder.path.name.startswith("b_\u03a9-1970")


def test_a_named_run_never_overwrites_an_older_one(tmp_path: Path) -> None:
    for name in ("exp", "exp-2", "exp-3"):
        with RunFolder.create(config(tmp_path, "log.name=exp"), []) as folder:
            assert folder.path.name == name


@pytest.mark.parametrize("name", ["../out", "latest", "..", "a\tb"])
def test_a_run_cannot_be_named_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.name"):
        config(tmp_path, f"log.name={name}")


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"log\.folder '.*file/runs': NotADirectoryError"):
        RunFolder.create(config(tmp_path / "file" / "runs"), [])


def test_a_disk_that_is_full_when_a_run_starts_is_a_clear_error_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"log\.folder '.*': OSError: .*No space left on device"):
        RunFolder.create(config(tmp_path), [], opener=Disk(free=3))
    assert list(tmp_path.iterdir()) == []


def test_a_latest_that_is_a_real_folder_is_left_alone_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    warnings: list[str] = []
    with RunFolder.create(config(tmp_path), [], warn=warnings.append) as folder:
        folder.become_latest()
        assert "cannot point at" in warnings[0]
        assert folder.problems == warnings
    assert not [path for path in tmp_path.iterdir() if path.is_symlink()]


def test_only_one_process_writes_a_folder_at_a_time(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), []) as folder:
        with pytest.raises(RunFolderError, match="another process writes"):
            RunFolder.open(folder.path)
        assert resolved_config(folder.path).steps == 100
    RunFolder.open(folder.path).close()
    folder.close()


def test_opening_what_is_no_run_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_metrics_are_one_line_and_one_tensorboard_event_per_step(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), [], clock=lambda: 5.0) as folder:
        folder.write_metrics(1, {"loss": 0.5, "reward/maze": 1e300})
        folder.write_metrics(300, {"loss": 0.25})
    assert lines(folder.path / "metrics.jsonl") == [
        {"step": 1, "time": 5.0, "loss": 0.5, "reward/maze": 1e300},
        {"step": 300, "time": 5.0, "loss": 0.25},
    ]
    assert scalars(folder.path / "tensorboard", "loss") == [(1, 0.5), (300, 0.25)]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard itself reads them; in a process of its own, since its imports warn."""
    script = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]).Reload()\n"
        "print(json.dumps([(e.step, e.value) for e in events.Scalars(sys.argv[2])]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder), tag]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(step, value) for step, value in json.loads(done.stdout)]


def test_tensorboard_can_be_switched_off(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path, "log.tensorboard=false"), []) as folder:
        folder.write_metrics(1, {"loss": 0.5})
    assert not (folder.path / "tensorboard").exists()


def test_a_full_disk_is_warned_of_once_and_the_numbers_come_when_there_is_room(tmp_path: Path) -> None:
    disk, warnings = Disk(), list[str]()
    with RunFolder.create(config(tmp_path), [], opener=disk, warn=warnings.append) as folder:
        folder.write_metrics(1, {"loss": 1.0})
        disk.free = 20
        for step in (2, 3):
            folder.write_metrics(step, {"loss": 1.0})
            assert [line["step"] for line in lines(folder.path / "metrics.jsonl")] == [1]
        folder.write_trajectories(3, [trajectory()])
        assert not list((folder.path / "trajectories").iterdir())
        assert not folder.write_summary({"steps": 3})
        disk.free = None
        folder.write_metrics(4, {"loss": 1.0})
        folder.write_trajectories(4, [trajectory()])
        assert folder.write_summary({"steps": 4})
    assert [line["step"] for line in lines(folder.path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert scalars(folder.path / "tensorboard", "loss") == [(step, 1.0) for step in (1, 2, 3, 4)]
    about_metrics = [text for text in warnings if "metrics.jsonl" in text]
    assert about_metrics == [
        f"{folder.path}/metrics.jsonl: cannot be written: No space left on device; the run goes on without it",
        f"{folder.path}/metrics.jsonl: can be written again; 0 records were lost",
    ]
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["steps"] == 4
    assert set(about_metrics) <= set(summary["problems"])
    assert "No space left" in (folder.path / "run.log").read_text()


def test_a_disk_that_turns_read_only_does_not_end_the_run(tmp_path: Path) -> None:
    disk, warnings = Disk(), list[str]()
    with RunFolder.create(config(tmp_path), [], opener=disk, warn=warnings.append) as folder:
        disk.reason = errno.EROFS
        folder.write_metrics(1, {"loss": 1.0})
        folder.log("still here")
    assert any("Read-only file system" in text for text in warnings)
    assert len(warnings) == len(set(warnings))


def test_the_limit_of_a_real_file_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rollart.files import Appender\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 100))\n"
        "appender = Appender(Path(sys.argv[1]))\n"
        "for index in range(9):\n"
        "    try:\n"
        "        appender.append(b'x' * 19 + b'\\n')\n"
        "    except OSError:\n"
        "        pass\n"
        "assert Path(sys.argv[1]).read_bytes() == (b'x' * 19 + b'\\n') * 2\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lines")], check=True)
    assert (tmp_path / "lines").read_bytes() == (b"x" * 19 + b"\n") * 2


def test_a_backlog_is_bounded_and_counts_what_it_forgets(tmp_path: Path) -> None:
    disk = Disk(free=0)
    appender = Appender(tmp_path / "log", disk, backlog_bytes=10)
    for word in (b"one\n", b"two\n", b"three\n"):
        with pytest.raises(OSError, match="No space"):
            appender.append(word)
    disk.free = None
    appender.append(b"four\n")
    assert (tmp_path / "log").read_bytes() == b"two\nthree\nfour\n"
    assert appender.lost == 1


def test_what_a_failed_cut_left_is_cut_before_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    appender = Appender(path)
    appender.append(b"whole\n")
    with path.open("ab") as file:
        file.write(b"ha")
    appender.append(b"next\n")
    assert path.read_bytes() == b"whole\nnext\n"
    path.write_bytes(b"")
    appender.append(b"anew\n")
    assert path.read_bytes() == b"anew\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"a\n", b"a\n"), (b"a\nhalf", b"a\n"), (b"half", b""), (b"a\n" + b"x" * 9, b"a\n")],
)
def test_the_half_line_of_a_killed_process_is_cut(before: bytes, after: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(before)
    cut_half_line(tmp_path / "f", block_bytes=4)
    assert (tmp_path / "f").read_bytes() == after


def test_an_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"old")
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "f", b"longer than the disk", Disk(free=3))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"
    write_atomic(tmp_path / "f", b"new", open_raw)
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_resumed_run_forgets_the_metrics_it_will_make_again(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), []) as folder:
        for step in (1, 2, 3):
            folder.write_metrics(step, {"loss": float(step)})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo')
    with RunFolder.open(folder.path) as again:
        again.rewind(2)
        again.write_metrics(3, {"loss": 9.0})
    assert [line["loss"] for line in lines(folder.path / "metrics.jsonl")] == [1.0, 2.0, 9.0]


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for step in (100, 50, 1_000_000):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000070.tmp").mkdir()
    assert checkpoints(tmp_path) == [50, 100, 1_000_000]
    assert checkpoint_path(tmp_path, 50).name == "step-000050"


def test_a_transcript_shows_masks_versions_reward_and_the_end(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), []) as folder:
        folder.write_trajectories(10, [trajectory(cause="", reward=0.5)])
    text = (folder.path / "trajectories" / "step-000010.txt").read_text()
    assert text == (
        "==== frozenlake, seed 11: reward 0.500, done\n"
        "     g1-m0 of g1, 2 turns, 7 tokens, 3 of them trained on\n"
        "[1] environment, 3 tokens, mask 0\n"
        "  | You are at\n"
        "  | the start.\n"
        "[1] model, 2 tokens, mask 1, version 3-4, reward +0.500\n"
        "  > go \\x1b[2J==== right\n"
        "[2] environment, 1 token, mask 0\n"
        "  | You fell.\n"
        "[2] model, 1 token, mask 1, version 4, reward +0.000, ended by length\n"
        "  > stay\n"
    )
    (line,) = lines(folder.path / "trajectories" / "step-000010.jsonl")
    assert line["tokens"] == [1, 2, 3, 4, 5, 6, 7]
    assert line["loss_mask"] == [0, 0, 0, 1, 1, 0, 1]
    assert line["versions"] == [-1, -1, -1, 3, 4, -1, 4]
    assert line["logprobs"] == [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -1.0]


def test_a_trajectory_without_turns_or_with_odd_text_is_written_too() -> None:
    empty = trajectory(turns=[], stop_reason="env_error", cause="reset: boom\x07\udcff")
    assert "env_error (reset: boom\\x07\\udcff)" in as_text([empty])
    assert json.loads(as_jsonl([empty]))["cause"] == "reset: boom\x07\\udcff"
    assert json.loads(as_jsonl([empty]))["tokens"] == []


def test_a_transcript_of_an_evaluation_says_nothing_of_training(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), []) as folder:
        folder.write_trajectories(10, [trajectory()], label="eval")
    text = (folder.path / "trajectories" / "eval-000010.txt").read_text()
    assert "7 tokens, 3 of them generated\n" in text
    assert "[1] environment, 3 tokens\n" in text
    assert "[1] model, 2 tokens, version 3-4" in text
    assert "trained" not in text
    assert "mask" not in text
