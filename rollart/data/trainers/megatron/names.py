"""Weights of Llama and Qwen3, dense or with experts, under transformers' names and under Megatron-Core's, both ways.

Megatron joins what is multiplied together and splits the result over ranks: query, key and value, interleaved by
key-value head; gate and up. Embeddings and head get rows up to a multiple of the ranks.

Invariants: `restored` of what `cut` made for all ranks are the same bits; every weight of transformers is in just one
`Part`. What this file leaves out: which rank holds which layers and experts, and moving tensors between ranks.

Shape suffixes are left out: a weight is [outputs, inputs], experts have one more dimension in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

Join = Literal["", "qkv", "gate_up", "rows", "experts"]


class Shape(Struct, frozen=True):
    """What of a model the names depend on. `experts`: 0 for a dense model."""

    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    head_norms: bool
    biases: bool
    experts: int = 0


class Part(Struct, frozen=True):
    """One weight of Megatron. `layer`: None outside of the layers; `split`: the dimension that ranks share, if any.

    `join` "experts": `name` has a place for the number of the expert, of which a rank has several.
    """

    name: str
    sources: tuple[str, ...]
    layer: int | None = None
    split: int | None = None
    join: Join = ""


def parts(shape: Shape) -> Iterator[Part]:
    """All of them, in transformers' order but for biases. A name within a layer is that of the layer's module."""
    yield Part("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), split=0, join="rows")
    for layer in range(shape.layers):
        yield from _layer(shape, layer)
    yield Part("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not shape.tied:
        yield Part("output_layer.weight", ("lm_head.weight",), split=0, join="rows")


def _layer(shape: Shape, layer: int) -> Iterator[Part]:
    def part(name: str, *sources: str, split: int | None = None, join: Join = "") -> Part:
        return Part(name, tuple(f"model.layers.{layer}.{source}" for source in sources), layer, split, join)

    for kind in ("weight", "bias") if shape.biases else ("weight",):
        heads = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
        yield part(f"self_attention.linear_qkv.{kind}", *heads, split=0, join="qkv")
    yield part("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split=1)
    if shape.head_norms:
        yield part("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
        yield part("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
    if shape.experts:
        yield part("mlp.experts.local_experts.{}.linear_fc1.weight", "mlp.experts.gate_up_proj", join="experts")
        yield part("mlp.experts.local_experts.{}.linear_fc2.weight", "mlp.experts.down_proj", join="experts")
        yield part("mlp.router.weight", "mlp.gate.weight")
    else:
        yield part("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", split=0, join="gate_up")
        yield part("mlp.linear_fc2.weight", "mlp.down_proj.weight", split=1)
    yield part("input_layernorm.weight", "input_layernorm.weight")
    yield part("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")


def cut(part: Part, sources: Sequence[Tensor], shape: Shape, rank: int, size: int) -> Tensor:
    """What rank `rank` of `size` holds of a part, from transformers' weights. Experts: those of the rank, stacked."""
    if part.join == "gate_up":
        return torch.cat([each.chunk(size)[rank] for each in sources])
    if part.join == "qkv":
        groups = [each.unflatten(0, (shape.key_value_heads, -1)) for each in sources]
        return torch.cat(groups, 1).chunk(size)[rank].flatten(0, 1)
    (whole,) = sources
    if part.join == "experts":
        return whole.chunk(size)[rank]
    if part.join == "rows":
        width = -(-len(whole) // size)
        rows = whole[rank * width : (rank + 1) * width]
        return torch.cat([rows, rows.new_zeros(width - len(rows), *rows.shape[1:])])
    return whole if part.split is None else whole.chunk(size, part.split)[rank]


def restored(part: Part, held: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """Transformers' weights, in the order of `part.sources`, from what all ranks hold of a part."""
    if part.join == "gate_up":
        halves = [each.chunk(2) for each in held]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
    if part.join == "qkv":
        queries = shape.heads // shape.key_value_heads
        groups = torch.cat(list(held)).unflatten(0, (shape.key_value_heads, queries + 2, -1))
        pieces = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
        return [pieces[0].flatten(0, 2), *(each.flatten(0, 1) for each in pieces[1:])]
    if part.join == "rows":
        return [torch.cat(list(held))[: shape.vocabulary]]
    if part.join == "experts":
        return [torch.cat(list(held))]
    return [held[0] if part.split is None else torch.cat(list(held), part.split)]
