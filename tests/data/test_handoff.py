"""The contract of engines that hand over, over those that need nothing besides this package."""

from __future__ import annotations

import pytest

from rollart.data.engines import create_engine
from tests.data.engine_contract import Kind, MakeEngine
from tests.data.handoff_contract import *  # noqa: F403


@pytest.fixture(params=["embedded"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


@pytest.fixture
def make_engine(kind: Kind) -> MakeEngine:
    return lambda folder, **options: create_engine(kind.name, folder, options)
