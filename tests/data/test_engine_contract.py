"""The contract of all engines over those that need nothing besides this package."""

from __future__ import annotations

import pytest

from rollart.data.engines import create_engine, engine_factory
from rollart.errors import ConfigError
from tests.data.engine_contract import *  # noqa: F403
from tests.data.engine_contract import Kind, MakeEngine


@pytest.fixture(params=["embedded"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


@pytest.fixture
def make_engine(kind: Kind) -> MakeEngine:
    return lambda folder, **options: create_engine(kind.name, folder, options)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'embedded'"):
        engine_factory("embeded")
