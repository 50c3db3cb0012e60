"""Adapters on the engine's side: what arrives is merged with the weights as they were read, exactly and every time."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.engines.emulated import emulated_engine
from rollart.data.weights import BucketStore
from rollart.errors import ConfigError, WeightsError
from rollart.protocols import FrozenTensors
from rollart.types import ParameterInfo
from tests.data.memory_shelf import MemoryShelf
from tests.data.tiny_models import TinyModel

LORA = {"r": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def engine(model: TinyModel, **changes: object) -> EmbeddedEngine:
    return EmbeddedEngine(model.folder, slots=2, max_model_tokens=32, lora={**LORA, **changes})


def version(infos: list[ParameterInfo], seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {info.name: torch.randn(info.shape, generator=rng) / 4 for info in infos}


@torch.no_grad()
def expected(model: TinyModel, parts: dict[str, torch.Tensor]) -> list[float]:
    """By a plain forward pass of transformers' model, every adapted matrix put in place by hand."""
    plain = AutoModelForCausalLM.from_pretrained(model.folder).eval()
    for name, module in plain.named_modules():
        if name.rpartition(".")[2] in LORA["targets"]:
            module.weight += 3.0 * parts[f"{name}.lora_B.weight"] @ parts[f"{name}.lora_A.weight"]
    logits = plain(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logits[place, token]) for place, token in enumerate(TOKENS[1:])]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_version_is_merged_with_the_weights_that_were_read(kind: str, tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models[kind]
    made = engine(model)
    infos = made.parameters()
    assert [(info.name, info.shape, info.dtype) for info in infos[:2]] == [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (2, 32), "float32"),
        ("model.layers.0.self_attn.q_proj.lora_B.weight", (32, 2), "float32"),
    ]
    assert len(infos) == 2 * 2 * 2
    for number in (1, 2):
        parts = version(infos, number)
        made.update(number, FrozenTensors(parts.items()) if number == 1 else list(parts.items()))
        assert made.logprobs(TOKENS) == pytest.approx(expected(model, parts), abs=1e-4)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in parts.items()}
    made.update(3, list(zeros.items()))
    assert made.logprobs(TOKENS) == EmbeddedEngine(model.folder, slots=2, max_model_tokens=32).logprobs(TOKENS)


@pytest.mark.parametrize("delta", [0, 3])
def test_an_adapter_comes_through_a_store_whole_or_as_what_changed(
    delta: int, tiny_models: dict[str, TinyModel]
) -> None:
    model, shelf = tiny_models["qwen3"], MemoryShelf()
    writer, reader = (BucketStore(shelf, bucket_bytes=1024, keep=2, delta=delta) for _ in range(2))
    made = emulated_engine(model.folder, "H20", slowdown=0.0, slots=2, max_model_tokens=32, lora=LORA)
    infos = made.parameters()
    parts = version(infos, 1)
    for number in (1, 2, 3):
        parts[infos[number].name] += 0.1
        manifest = writer.publish(number, parts.items())
        assert (manifest.base is not None) == (delta > 0 and number > 1)
        made.update(number, FrozenTensors(reader.fetch(number, infos)))
        assert made.logprobs(TOKENS) == pytest.approx(expected(model, parts), abs=1e-4)
    with pytest.raises(WeightsError, match="is of another model"):
        reader.fetch(3, EmbeddedEngine(model.folder, slots=2, max_model_tokens=32).parameters())


def test_an_adapter_of_another_shape_changes_nothing(tiny_models: dict[str, TinyModel]) -> None:
    made = engine(tiny_models["llama"])
    before = made.logprobs(TOKENS)
    other = version(engine(tiny_models["llama"], r=3).parameters(), 0)
    with pytest.raises(WeightsError, match=r"lora_A\.weight is float32 \[3, 32\], not float32 \[2, 32\]"):
        made.update(1, list(other.items()))
    assert made.logprobs(TOKENS) == before


def test_a_target_that_no_layer_has_is_refused_with_the_nearest(tiny_models: dict[str, TinyModel]) -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.targets: no linear layer .*'qproj'; did you mean 'q_proj'"):
        engine(tiny_models["llama"], targets=["qproj"])


def test_a_matrix_that_two_layers_share_is_not_adapted_in_one_of_them(tiny_models: dict[str, TinyModel]) -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.targets: 'lm_head' shares its matrix with another layer"):
        engine(tiny_models["qwen3"], targets=["q_proj", "lm_head"])
    engine(tiny_models["llama"], targets=["q_proj", "lm_head"])  # has a head of its own
