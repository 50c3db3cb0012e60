"""Fixtures of the end-to-end tests. Every test ends with a look for what its runs left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rollart.pipeline import train
from tests.e2e.laboratory import Laboratory

EASY = """
steps = 14
[tasks.shouting]
env = "tests.e2e.hostile:Shouting"
max_turn_tokens = 8
[rollout]
groups_per_batch = 4
group_size = 6
engine_slots = 32
[train]
learning_rate = 2e-2
lr_warmup_steps = 0
[eval]
every = 0
episodes = 4
[log]
checkpoint_every = 10
trajectories_every = 7
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """A place for runs; afterwards no process of theirs and no weights in shared memory are left."""
    yield from watched(Laboratory(tmp_path))


@pytest.fixture(scope="package")
def first_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The place of the run that several tests look at."""
    yield from watched(Laboratory(tmp_path_factory.mktemp("first")))


def watched(place: Laboratory) -> Iterator[Laboratory]:
    """The place; its runs are then ended, and nothing of them may be left."""
    torch.set_num_threads(1)
    try:
        yield place
    finally:
        for process in place.processes:
            process.end()
    assert place.weights() == []
    assert psutil.Process().children(recursive=True) == []


@pytest.fixture(scope="package")
def trained(first_lab: Laboratory) -> Path:
    """The folder of a run with a process per worker, long enough to learn an easy task."""
    assert train(first_lab.config(text=EASY)) == 0
    return first_lab.run
