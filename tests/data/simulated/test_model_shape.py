"""Sizes of models: against what is published of them, and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.data.simulated.model_shape import ModelShape, attended_tokens, load_shape
from rollart.errors import ConfigError

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def written(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder)


@pytest.mark.parametrize(("name", "gib"), [("Qwen3-8B", 15.26), ("Qwen3-14B", 27.51), ("Qwen3-32B", 61.02)])
def test_shipped_models_weigh_what_the_paper_moved(name: str, gib: float) -> None:
    assert load_shape(name).weight_bytes / 2**30 == pytest.approx(gib, rel=5e-4)


def test_the_model_with_experts_has_its_published_parameters() -> None:
    """30.5 billion in all; 3.3 billion active with the embedding's look-up, which multiplies nothing."""
    shape = load_shape("Qwen3-30B-A3B")
    assert shape.params == pytest.approx(30.5e9, rel=2e-3)
    assert shape.active_params + shape.vocab_size * shape.hidden_size == pytest.approx(3.35e9, rel=5e-3)


def test_kv_of_a_token_counts_keys_and_values_of_every_layer() -> None:
    assert load_shape("Qwen3-8B").kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert load_shape("Qwen3-30B-A3B").kv_bytes_per_token == 2 * 48 * 4 * 128 * 2


def test_a_folder_is_read_with_defaults_for_what_is_left_out(tmp_path: Path) -> None:
    shape = load_shape(written(tmp_path))
    attention, mlp, table = 4 * 8 * 8, 3 * 8 * 16, 100 * 8
    assert (shape.num_kv_heads, shape.head_dim, shape.name) == (2, 4, tmp_path.name)
    assert shape.params == 2 * (attention + mlp) + 2 * table
    assert shape.active_params == shape.params - table
    assert load_shape(written(tmp_path, tie_word_embeddings=True)).params == shape.params - table


def test_a_file_and_a_nested_language_part_are_read(tmp_path: Path) -> None:
    whole = load_shape(written(tmp_path))
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"text_config": TINY, "vision_config": {"hidden_size": 3}}))
    assert load_shape(str(path)).params == whole.params


def test_layers_without_experts_count_as_dense(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    shape = load_shape(written(tmp_path, **experts, mlp_only_layers=[0]))
    attention, mlp, router, expert, table = 4 * 8 * 8, 3 * 8 * 16, 8 * 4, 3 * 8 * 5, 100 * 8
    assert shape.params == 2 * attention + mlp + router + 4 * expert + 2 * table
    assert shape.active_params == 2 * attention + mlp + router + 2 * expert + table
    assert shape.expert_params == 4 * expert


def test_a_step_reads_the_experts_that_its_tokens_chose() -> None:
    shape = load_shape("Qwen3-30B-A3B")
    assert shape.read_params(1) == pytest.approx(shape.active_params)
    reads = [shape.read_params(number) for number in (1, 2, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[-1] == pytest.approx(shape.dense_params + shape.expert_params)
    distinct = 128 * (1 - (120 / 128) ** 8)
    assert reads[2] == pytest.approx(shape.dense_params + shape.expert_params * distinct / 128)
    dense = load_shape("Qwen3-8B")
    assert dense.read_params(1) == dense.read_params(1000) == dense.active_params


def test_flops_of_attention_grow_with_what_is_attended_to() -> None:
    shape = load_shape("Qwen3-8B")
    assert shape.attention_flops(attended_tokens(1, 999)) == 4 * 36 * 32 * 128 * 1000
    assert attended_tokens(100, 50) == sum(50 + each for each in range(1, 101))


def test_training_costs_eight_flops_per_parameter_and_token_beside_attention() -> None:
    shape = ModelShape("flat", 1, 1, 0, 1, 1, 1, 1e9, 1e9)
    assert shape.training_flops([1000, 500]) == pytest.approx(8 * 1e9 * 1500)
    real = load_shape("Qwen3-8B")
    assert real.training_flops([2000]) > real.training_flops([1000, 1000])


def test_what_is_neither_shipped_nor_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'Qwen3-8B'"):
        load_shape("Qwen3-8b")
    with pytest.raises(ConfigError, match="neither a shipped model nor a folder"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "8"}, "hidden_size is '8', not a whole number above 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_experts": 4}, "has no num_experts_per_tok"),
    ],
)
def test_a_config_without_a_dimension_is_refused(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_shape(written(tmp_path, **changes))


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_shape(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, not a table"):
        load_shape(str(path))
