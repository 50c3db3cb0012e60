"""Weights under Megatron-Core's names and transformers': the same bits both ways, however many ranks share them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.data.trainers.megatron.names import Shape, cut, parts, restored
from rollart.data.trainers.megatron.words import shape_of
from rollart.errors import ConfigError
from tests.data.trainers.tiny import save_model

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def config_of(folder, **changes):
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_cut_for_all_ranks_is_put_together_again_bit_by_bit(folder, size):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape, weights = shape_of(model.config), dict(model.named_parameters())
    again = {}
    for part in parts(shape):
        sources = [weights[name] for name in part.sources]
        held = [cut(part, sources, shape, rank, size) for rank in range(size)]
        assert len({each.shape for each in held}) == 1
        again |= zip(part.sources, restored(part, held, shape), strict=True)
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(again[name], weight), name


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10_000))
def test_any_heads_and_vocabulary_survive_any_number_of_ranks_that_divides_them(size, groups, queries, rows, seed):
    shape = Shape(1, groups * size * queries, groups * size, rows, tied=True, head_norms=False, biases=True)
    generator = torch.Generator().manual_seed(seed)

    def made(name):
        heads = {"q": shape.heads, "k": shape.key_value_heads, "v": shape.key_value_heads}
        width = rows if "embed" in name else heads.get(name.split(".")[-2][0], 6) * 2
        return torch.randn(width, 2 * size, generator=generator)

    for part in parts(shape):
        if part.join in ("qkv", "rows"):
            sources = [made(name) for name in part.sources]
            whole = restored(part, [cut(part, sources, shape, rank, size) for rank in range(size)], shape)
            assert all(map(torch.equal, whole, sources))


def test_queries_keys_and_values_of_a_key_value_head_stand_together():
    shape = Shape(1, heads=4, key_value_heads=2, vocabulary=8, tied=True, head_norms=False, biases=False)
    part = next(each for each in parts(shape) if each.join == "qkv")
    query, key, value = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert cut(part, [query, key, value], shape, 0, 2).flatten().tolist() == [0, 1, 10, 20]
    assert cut(part, [query, key, value], shape, 1, 2).flatten().tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("mistral", {}, "knows llama, qwen2, qwen3, qwen3_moe, not 'mistral'; take trainer = 'fsdp2'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "plain rotary positions and Llama 3"),
        ("llama", {"attention_bias": True}, "the biases of Qwen2 alone"),
        ("llama", {"hidden_act": "gelu"}, "the activation silu, not 'gelu'"),
        ("qwen3", {"use_sliding_window": True}, "no sliding window"),
        ("qwen3", {"attention_bias": True}, "the biases of Qwen2 alone"),
        ("qwen3_moe", {"norm_topk_prob": False}, "experts in every layer, whose weights add up to 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "experts in every layer, whose weights add up to 1"),
    ],
)
def test_a_model_for_which_megatron_has_no_words_is_refused(kind, changes, line, tmp_path):
    config = config_of(save_model(tmp_path, kind), **changes)
    with pytest.raises(ConfigError, match=r"^trainer: 'megatron' knows") as caught:
        shape_of(config)
    assert line in str(caught.value)


def test_llama_3_stretches_its_positions_as_megatron_does(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    known = config_of(save_model(tmp_path, "llama"), rope_parameters=rope | {"original_max_position_embeddings": 8192})
    assert shape_of(known).layers == 2
    known.rope_parameters["high_freq_factor"] = 2.0
    with pytest.raises(ConfigError, match="plain rotary positions and Llama 3"):
        shape_of(known)
