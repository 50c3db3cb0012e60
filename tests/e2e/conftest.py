"""Fixtures of the end-to-end tests. Every test ends with a look for what its runs left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.laboratory import Laboratory


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """A place for runs; afterwards no process of theirs and no weights in shared memory are left."""
    yield from _watched(Laboratory(tmp_path))


@pytest.fixture(scope="package")
def first_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The place of the run that several tests look at."""
    yield from _watched(Laboratory(tmp_path_factory.mktemp("first")))


def _watched(place: Laboratory) -> Iterator[Laboratory]:
    torch.set_num_threads(1)
    try:
        yield place
    finally:
        for process in place.processes:
            process.end()
    assert place.weights() == []
    assert psutil.Process().children(recursive=True) == []
