"""Where the weights of a run lie, before any worker is there."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rollart.config import parse
from rollart.data.stores.mooncake_service import key_prefix
from rollart.data.weights_folder import SHARED_MEMORY
from rollart.data.weights_place import in_folder, num_versions, weights_place
from rollart.errors import ConfigError, WeightsError
from rollart.sections import WeightsConfig


def place(tmp_path: Path, model_bytes: int, *overrides: str) -> Path:
    """Where they lay; checked while they did."""
    config = parse("[tasks.frozenlake]\n", ["runtime=ray", *overrides])

    async def scenario() -> Path:
        async with weights_place(config, tmp_path / "run", model_bytes) as options:
            return await asyncio.to_thread(looked_at, options)

    def looked_at(options: dict[str, Any]) -> Path:
        folder = Path(options["folder"])
        assert folder.is_dir()
        assert options == in_folder(config.weights, folder)
        return folder

    folder = asyncio.run(scenario())
    assert not folder.exists()
    return folder


def test_machines_that_share_no_memory_share_a_folder_in_the_run_which_is_gone_afterwards(tmp_path: Path) -> None:
    assert place(tmp_path, 10).parent == tmp_path / "run" / "weights"


def test_files_in_shared_memory_have_a_stand_in_in_the_run_which_is_gone_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    left = run / "weights" / "spare" / "v00000007"
    left.mkdir(parents=True)

    async def scenario() -> None:
        async with weights_place(parse("[tasks.frozenlake]\n", ["runtime=local"]), run, 10) as options:
            assert Path(options["folder"]).parent == SHARED_MEMORY
            assert options["spare"] == str(left.parent)
            assert not left.exists(), "what a killed process left"
            left.mkdir(parents=True)

    asyncio.run(scenario())
    assert not left.parent.exists()


def test_room_is_asked_for_what_differences_are_based_on(tmp_path: Path) -> None:
    assert num_versions(WeightsConfig()) == 3 + 1
    assert num_versions(WeightsConfig(keep=2, delta=8)) == 2 + 8
    with pytest.raises(WeightsError, match="no room for weights: 11 versions"):
        place(tmp_path, 1 << 60, "weights.delta=8")


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="mooncake is installed")
def test_a_missing_package_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mooncake' needs mooncake; .*\[mooncake\]"):
        place(tmp_path, 10, "weights.store=mooncake")


def test_a_run_and_what_resumes_it_have_one_prefix_and_no_other_run_has_it(tmp_path: Path) -> None:
    run = tmp_path / "maze 1"
    assert key_prefix(run) == key_prefix(tmp_path / "x" / ".." / "maze 1") != key_prefix(tmp_path / "maze_1")
    assert key_prefix(run).startswith("rollart/maze_1-")
