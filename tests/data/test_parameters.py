"""Names and shapes from a folder's files, and what is said of weights that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from rollart.data.engines import create_engine
from rollart.data.engines.parameters import of_checkpoint, vetted
from rollart.errors import ConfigError, WeightsError
from rollart.types import ParameterInfo
from tests.data.tiny_models import TinyModel

OWN = {name: ParameterInfo(name, (2,), "float32") for name in "abcde"}


def folder(place: Path, files: dict[str, list[str]], tied: bool = False, index: bool = False) -> str:
    for file, names in files.items():
        safetensors.torch.save_file({name: torch.zeros(2, 3) for name in names}, place / file)
    (place / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if index:
        names = {name: file for file, each in files.items() for name in each if file.startswith("model-")}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return str(place)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_names_and_shapes_of_a_checkpoint_are_those_of_the_trainer(
    kind: str, tiny_models: dict[str, TinyModel]
) -> None:
    model = tiny_models[kind]
    listed = {info.name: (info.shape, info.dtype) for info in of_checkpoint(model.folder, "float32")}
    assert listed == {name: (tuple(tensor.shape), "float32") for name, tensor in model.weights()}


def test_a_checkpoint_of_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    files = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"], "consolidated.safetensors": ["x"]}
    listed = of_checkpoint(folder(tmp_path, files, index=True), "bfloat16")
    assert [info.name for info in listed] == ["a", "b", "c"]
    assert listed[0] == ParameterInfo("a", (2, 3), "bfloat16")


@pytest.mark.parametrize(("tied", "expected"), [(True, ["a"]), (False, ["a", "lm_head.weight"])])
def test_a_tied_head_and_what_is_computed_are_no_parameters(tmp_path: Path, tied: bool, expected: list[str]) -> None:
    names = ["a", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    listed = of_checkpoint(folder(tmp_path, {"model.safetensors": names}, tied), "float32")
    assert [info.name for info in listed] == expected


def test_a_folder_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        of_checkpoint(folder(tmp_path, {}), "float32")
    with pytest.raises(ConfigError, match=r"reading the model in .*nowhere"):
        of_checkpoint(str(tmp_path / "nowhere"), "float32")


def test_what_comes_one_by_one_is_checked_one_by_one() -> None:
    def stream() -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.zeros(2)) for name in "ab"]

    checked = vetted(OWN, iter([*stream(), *stream()]))
    assert [next(checked)[0], next(checked)[0]] == ["a", "b"]
    with pytest.raises(WeightsError, match="a is unknown to the model, or there twice"):
        next(checked)
    with pytest.raises(WeightsError, match="c is missing; d is missing; e is missing"):
        list(vetted(OWN, iter(stream())))


def test_more_faults_than_are_shown_are_counted() -> None:
    with pytest.raises(WeightsError, match="a is missing; b is missing; c is missing and 2 more"):
        next(vetted(OWN, []))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefil_tokens": 3}, "engine_options.prefil_tokens: unknown option; did you mean 'prefill_tokens'"),
        ({"prefill_tokens": "3"}, "engine_options.prefill_tokens: Expected `int`, got `str`"),
    ],
)
@pytest.mark.parametrize("engine", ["embedded", "emulated"])
def test_a_wrong_option_of_an_engine_is_named(
    engine: str, options: dict[str, object], message: str, tiny_models: dict[str, TinyModel]
) -> None:
    pace: dict[str, object] = {"device_class": "H20"} if engine == "emulated" else {}
    with pytest.raises(ConfigError, match=message):
        create_engine(engine, tiny_models["llama"].folder, options | pace)
