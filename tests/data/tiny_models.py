"""Tiny random models on disk, with a tokenizer of single characters and a few pairs, and an independent reference."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*LETTERS, *LETTERS.upper(), *"0123456789", *[first + second for first in "ab" for second in "cdefg"]]
SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}


@dataclass
class TinyModel:
    """A model folder, and the same architecture with other weights."""

    folder: str
    other_folder: str
    _loaded: dict[str, torch.nn.Module] = field(default_factory=dict)

    def _load(self, folder: str) -> torch.nn.Module:
        if folder not in self._loaded:
            self._loaded[folder] = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        return self._loaded[folder]

    def weights(self, other: bool = False) -> list[tuple[str, torch.Tensor]]:
        """What a weight store would hand out."""
        model = self._load(self.other_folder if other else self.folder)
        return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]

    @torch.no_grad()
    def logprobs(self, tokens: list[int], other: bool = False) -> torch.Tensor:
        """Log-probabilities [len(tokens), V] of the token after each, by a plain eager forward pass."""
        model = self._load(self.other_folder if other else self.folder)
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)

    def score(self, prompt: list[int], tokens: list[int], other: bool = False) -> list[float]:
        """Log-probability of each generated token."""
        table = self.logprobs(prompt + tokens, other)
        return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


def make_tiny_models(root: Path, **changes: int) -> dict[str, TinyModel]:
    """`llama` (untied head) and `qwen3` (tied head)."""
    torch.set_num_threads(1)
    return {
        kind: TinyModel(
            save_tiny_model(root / kind, kind, 1, **changes),
            save_tiny_model(root / f"{kind}_other", kind, 2, **changes),
        )
        for kind in ("llama", "qwen3")
    }


def save_tiny_model(folder: Path, kind: str, seed: int, **changes: int) -> str:
    """Make a model folder, of `SHAPE` but for `changes`; returns its path."""
    torch.manual_seed(seed)
    shape = SHAPE | changes
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
