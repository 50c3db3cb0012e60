"""What the size of a model's work follows from: its dimensions, as a Hugging Face `config.json` states them.

Four shapes are shipped under `models/`; their parameters in bf16 are the 15.26, 27.51 and 61.02 GiB of weights that
RollArt moves (OSDI 2026, weight transfer by Mooncake). Any other decoder with full attention and gated MLPs, dense or
with experts, can be read from its folder.
Invariant: everything here is a count; how fast it is done is `device.py`.
What this file leaves out: norms, biases and the router's small change (below 1e-4 of the parameters), shared experts,
sliding windows, low-rank attention, quantisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rollart.checks import nearest
from rollart.errors import ConfigError

BF16 = 2
"""Bytes of a number."""
SHIPPED = Path(__file__).parent / "models"


def attended_tokens(new_tokens: int, context_tokens: int = 0) -> int:
    """Pairs of a new token and one that it attends to, under a causal mask: itself, those before it and the context.

    >>> attended_tokens(3), attended_tokens(1, 10)
    (6, 11)
    """
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2


class ModelShape(Struct, frozen=True):
    """A decoder. `params`: all; `active_params`: those that one token is multiplied with, which leaves out the look-up
    of its embedding and the experts that it does not choose; `expert_params`: of all experts of all layers."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    params: float
    active_params: float
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """Of all weights in bf16."""
        return BF16 * self.params

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, in bf16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BF16

    @property
    def dense_params(self) -> float:
        """Active parameters outside the experts."""
        return self.active_params - self.expert_params * self.chosen_share

    @property
    def chosen_share(self) -> float:
        """Share of the experts that one token goes through."""
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0

    def read_params(self, num_tokens: int) -> float:
        """Parameters that a step of `num_tokens` tokens reads, expected: those outside the experts, and the experts
        that any token chose.

        An expert is left alone by one token with probability 1 - k / E, and by all of them with its power: the mean
        number of distinct experts is E (1 - (1 - k / E) ^ tokens), where each token chooses k of E evenly (occupancy
        problem; Feller, An Introduction to Probability Theory, volume 1, chapter IV).
        """
        return self.dense_params + self.expert_params * (1 - (1 - self.chosen_share) ** num_tokens)

    def linear_flops(self, num_tokens: int) -> float:
        """Forward FLOPs outside attention: 2 per parameter and token (Kaplan et al. 2020, section 2.1)."""
        return 2 * self.active_params * num_tokens

    def attention_flops(self, attended: float) -> float:
        """Forward FLOPs of scores and of the sum of values over `attended` pairs of tokens: 4 x layers x heads x head
        size each (Kaplan et al. 2020, table 1; both products, 2 FLOPs per multiply-add)."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * attended

    def training_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of one pass over sequences of these lengths with activations computed again.

        Backward costs twice the forward pass (Kaplan et al. 2020), 6 x parameters x tokens in all; full recomputation
        adds another forward pass, hence x 4/3 (Narayanan et al., Megatron-LM, 2021, section 3.5).
        """
        forward = self.linear_flops(sum(lengths)) + self.attention_flops(sum(map(attended_tokens, lengths)))
        return 4 / 3 * 3 * forward


def load_shape(name_or_path: str) -> ModelShape:
    """A shipped shape by name, or one from a folder with a `config.json`, or such a file.

    Raises ConfigError for a name that is neither, and for a file that lacks a dimension.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}
    path = shipped.get(name_or_path, Path(name_or_path))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"simulate.model: {name_or_path!r} is neither a shipped model nor a folder or file with a config.json"
            f"{nearest(name_or_path, list(shipped))}"
        )
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    return _shape(name, _Fields(path))


class _Fields:
    """The numbers of a `config.json`, those of the language part where there are several."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"simulate.model: {path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"simulate.model: {path} holds a {type(values).__name__}, not a table")
        nested = values.get("text_config")
        self.values: Mapping[str, Any] = nested if isinstance(nested, dict) else values

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there. Raises ConfigError when none is, or it is not a number above 0."""
        value = next((self.values[name] for name in names if self.values.get(name) is not None), default)
        if value is None:
            raise ConfigError(f"simulate.model: {self._path} has no {names[0]}")
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
            raise ConfigError(f"simulate.model: {self._path}: {names[0]} is {value!r}, not a whole number above 0")
        return value

    def flag(self, name: str) -> bool:
        """Whether it is there and true."""
        return self.values.get(name) is True


def _shape(name: str, fields: _Fields) -> ModelShape:
    num_layers, hidden_size = fields.number("num_hidden_layers"), fields.number("hidden_size")
    num_heads = fields.number("num_attention_heads")
    num_kv_heads = fields.number("num_key_value_heads", default=num_heads)
    head_dim = fields.number("head_dim", default=hidden_size // num_heads)
    embedding = fields.number("vocab_size") * hidden_size
    attention = 2 * hidden_size * head_dim * (num_heads + num_kv_heads)
    num_experts = fields.number("num_experts", "num_local_experts", default=0)
    chosen = fields.number("num_experts_per_tok") if num_experts else 0
    with_experts = _layers_with_experts(fields, num_layers) if num_experts else 0
    router = hidden_size * num_experts
    inner = fields.number("intermediate_size") if with_experts < num_layers else 0
    expert_inner = fields.number("moe_intermediate_size", "intermediate_size") if num_experts else 0
    experts = with_experts * num_experts * 3 * hidden_size * expert_inner
    dense = num_layers * attention + (num_layers - with_experts) * 3 * hidden_size * inner + with_experts * router
    tables = 1 if fields.flag("tie_word_embeddings") else 2
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.number("vocab_size"),
        params=float(tables * embedding + dense + experts),
        active_params=embedding + dense + (experts * chosen / num_experts if num_experts else 0.0),
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_params=float(experts),
    )


def _layers_with_experts(fields: _Fields, num_layers: int) -> int:
    every = fields.number("decoder_sparse_step", default=1) or 1
    dense = fields.values.get("mlp_only_layers") or []
    return sum(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
