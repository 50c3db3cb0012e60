"""Where weights lie: own folder per run, in shared memory if there is room, removed when its owner is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollart.data.weights_folder import LOCK, PREFIX, WeightsFolder, default_folder, sweep_stale
from rollart.errors import WeightsError


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_behind(parent, pid):
    folder = parent / f"{PREFIX}maze-{pid}-abc"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "v00000001").mkdir()
    return folder


def test_weights_go_to_shared_memory_when_they_fit(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    with default_folder("maze run/1", tmp_path / "run", model_bytes=10, num_versions=3, shared_memory=shared) as folder:
        assert folder.path.parent == shared
        assert folder.path.name.startswith(f"{PREFIX}maze_run_1-{os.getpid()}-")


def test_weights_go_to_the_run_folder_without_shared_memory(tmp_path):
    with default_folder("maze", tmp_path / "run", 10, num_versions=3, shared_memory=tmp_path / "none") as folder:
        assert folder.path.parent == tmp_path / "run"


def test_without_room_anywhere_the_error_names_the_places_and_sizes(tmp_path):
    with pytest.raises(WeightsError, match=rf"no room for weights: 3 versions .* in {tmp_path / 'run'}; lower"):
        default_folder("maze", tmp_path / "run", 1 << 60, num_versions=3, shared_memory=tmp_path / "none")


def test_two_runs_of_one_name_have_two_folders_and_close_removes_only_its_own(tmp_path):
    with WeightsFolder(tmp_path, "maze") as kept:
        gone = WeightsFolder(tmp_path, "maze")
        assert gone.path != kept.path
        gone.close()
        gone.close()
        assert not gone.path.exists()
        assert kept.path.exists()


def test_folders_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path):
    stale, alive = left_behind(tmp_path, dead_pid()), left_behind(tmp_path, os.getpid())
    foreign = tmp_path / "other-99999999-x"
    foreign.mkdir()
    with default_folder("maze-2", tmp_path, 10, num_versions=3, shared_memory=tmp_path / "none") as mine:
        assert not stale.exists()
        assert alive.exists()
        assert foreign.exists()
        assert mine.path.exists()


def test_a_locked_folder_stays_even_if_its_process_is_not_visible_here(tmp_path):
    with WeightsFolder(tmp_path, "maze") as folder:
        hidden = folder.path.rename(tmp_path / f"{PREFIX}maze-{dead_pid()}-xyz")
        sweep_stale(tmp_path)
        assert hidden.exists()
    sweep_stale(tmp_path)
    assert not hidden.exists()


def test_a_parent_that_cannot_be_made_is_a_weights_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="making a folder for weights"):
        WeightsFolder(tmp_path / "file" / "below", "maze")
