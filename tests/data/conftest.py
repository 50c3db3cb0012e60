"""Fixtures of the data plane's tests."""

from __future__ import annotations

import pytest
import torch

from tests.data.tiny_models import TinyModel, save_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """`llama` (untied head) and `qwen3` (tied head)."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {
        kind: TinyModel(save_tiny_model(root / kind, kind, 1), save_tiny_model(root / f"{kind}_other", kind, 2))
        for kind in ("llama", "qwen3")
    }
