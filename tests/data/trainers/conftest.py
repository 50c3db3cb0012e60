"""Tiny random models in Hugging Face format."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)  # two would fight for the cores

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def trainer_model(request, tmp_path_factory):
    """A folder with a model (Qwen3 with tied embeddings), and files that stand for its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if request.param == "llama":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
