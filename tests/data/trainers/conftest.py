"""Tiny random models in Hugging Face format."""

from __future__ import annotations

import pytest
import torch

from tests.data.trainers.tiny import save_model

torch.set_num_threads(1)  # two would fight for the cores


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def trainer_model(request, tmp_path_factory):
    """A folder with a model (Qwen3 with tied embeddings), and files that stand for its tokenizer."""
    return save_model(tmp_path_factory.mktemp(request.param), request.param)
