"""Tiny random models in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


def save_model(folder: Path, kind: str) -> Path:
    """A model (`qwen3` with tied embeddings, `llama`, `mistral`, `qwen2`, `qwen3_moe`) and what stands for a tokenizer.

    The folder.
    """
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
        elif kind == "mistral":
            model = MistralForCausalLM(MistralConfig(**SHAPE, tie_word_embeddings=False))
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
        elif kind == "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
