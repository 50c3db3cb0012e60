"""Whether a model divides among ranks is said before any of them starts."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from rollart.config import Layout, parse
from rollart.data.trainers import check_installed, trainer_factory
from rollart.data.trainers.fit import check_divides, check_fits
from rollart.errors import ConfigError
from tests.data.trainers.tiny import SHAPE

MIXTURE = {**SHAPE, "num_experts": 6, "moe_intermediate_size": 10, "intermediate_size": 7}


TENSOR, PIPELINE, EXPERT = "train.tensor_parallel", "train.megatron.pipeline_parallel", "train.megatron.expert_parallel"


@pytest.mark.parametrize(
    ("model", "layout", "key", "line"),
    [
        (SHAPE, Layout(3, tensor=3), TENSOR, "3 does not divide the model's num_attention_heads 4; take 2"),
        (SHAPE, Layout(4, tensor=4), TENSOR, "4 does not divide the model's num_key_value_heads 2; take 2"),
        (
            {**SHAPE, "intermediate_size": 65},
            Layout(2, tensor=2),
            TENSOR,
            "2 does not divide the model's intermediate_size 65; take 1",
        ),
        (
            {**SHAPE, "num_hidden_layers": 24},
            Layout(5, pipeline=5),
            PIPELINE,
            "5 does not divide the model's num_hidden_layers 24; take 4",
        ),
        (MIXTURE, Layout(4, expert=4), EXPERT, "4 does not divide the model's num_experts 6; take 3"),
        (SHAPE, Layout(2, expert=2), EXPERT, "2 does not divide the model's num_experts 1; take 1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(model, layout, key, line):
    with pytest.raises(ConfigError) as caught:
        check_divides(model, layout)
    assert str(caught.value) == f"{key}: {line}"


def test_what_divides_is_taken():
    check_divides(MIXTURE, Layout(24, tensor=2, pipeline=2, context=3, expert=6))
    check_divides({"text_config": MIXTURE, "num_hidden_layers": 3}, Layout(2, pipeline=2))
    check_divides({**SHAPE, "num_local_experts": 4, "moe_intermediate_size": 8}, Layout(4, expert=4))


def run_of(model, *words):
    return parse(f"[model]\nname = {json.dumps(str(model))}\n[tasks.frozenlake]", ["trainer=megatron", *words])


def test_a_model_on_this_machine_is_looked_at_before_the_run(tmp_path):
    words = ("roles.actor_train.workers=3", "train.megatron.pipeline_parallel=3")
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel: 3 does not divide the model's num_hidden_layers 2; take 2"
    ):
        check_fits(run_of("tiny", *words))
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 3}))
    check_fits(run_of(tmp_path, *words))
    check_fits(run_of("nobody/has-this-model-here", *words))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.name: reading"):
        check_fits(run_of(tmp_path, *words))


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_without_megatron_core_the_error_names_the_extra():
    with pytest.raises(ConfigError, match=r"trainer: 'megatron' needs an extra; .*pip install -e '\.\[megatron\]'"):
        check_installed(run_of("tiny"))
    with pytest.raises(ConfigError, match=r"needs an extra"):
        trainer_factory("megatron")
