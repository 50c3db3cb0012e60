"""The contract of all engines over vLLM on the CPU."""

from __future__ import annotations

import pytest

from tests.data.engine_contract import *  # noqa: F403
from tests.data.engine_contract import Kind, MakeEngine
from tests.production.conftest import SMALL, Cores

KEEPS = "vLLM evicts what was not used for longest; what trajectories leave behind counts as free at once"


@pytest.fixture
def kind() -> Kind:
    return Kind("vllm", SMALL["block_size"], KEEPS, forget=lambda engine, _: engine.forget())


@pytest.fixture
def make_engine(cores: Cores) -> MakeEngine:
    return cores.engine
