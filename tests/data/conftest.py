"""Fixtures of the data plane's tests."""

from __future__ import annotations

import pytest

from tests.data.tiny_models import TinyModel, make_tiny_models

pytest.register_assert_rewrite("tests.data.engine_contract", "tests.data.handoff_contract")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """`llama` (untied head) and `qwen3` (tied head)."""
    return make_tiny_models(tmp_path_factory.mktemp("models"))
