"""Trainers of several ranks on FSDP2: equal to the trainer of one process, whole again after a fault, or clearly ended.

All ranks are processes of this machine that talk by gloo. Tolerances: losses and gradient norms to 1e-4 of their size
(sums of float32 in another order), weights to 2e-4 after three steps of 1e-2 (Adam makes a full step of a gradient that
is next to nothing, whatever its sign).
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from msgspec import structs, to_builtins
from transformers import AutoModelForCausalLM

from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.errors import ConfigError, RewardError, RunFolderError, WorkerDied
from rollart.sections import TrainConfig
from rollart.types import Turn
from tests.data.trainers.batches import batch
from tests.data.trainers.rank_group import RankGroup

OPTIONS = TrainConfig(learning_rate=1e-2, lr_warmup_steps=0, micro_batch_tokens=16, collective_timeout_s=30)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = RankGroup(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def options(**changes):
    return structs.replace(OPTIONS, **changes)


def alone(folder, **changes):
    return EmbeddedTrainer(str(folder), options(**changes), temperature=1.0, seed=0)


def ranks(group, number, folder, **changes):
    return group.trainer(number, folder, **to_builtins(options(**changes)))


def batches(made, number=3):
    """Three groups of four: neither trajectories nor tokens divide by the ranks."""
    return [batch(made, step, groups=3) for step in range(number)]


def assert_same_report(got, expected, rel=1e-4):
    assert (got.step, got.trained_tokens, got.skipped) == (expected.step, expected.trained_tokens, expected.skipped)
    assert got.loss == pytest.approx(expected.loss, rel=rel, abs=1e-6)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=rel)
    for name in ("ratio", "entropy", "kl_behaviour", "importance_weight", "samples"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=rel, abs=1e-5), name


def assert_near(got, expected, atol=2e-4):
    assert list(got) == list(expected)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=atol, rtol=0, msg=lambda text: f"{name}: {text}")


def test_three_steps_on_two_ranks_are_those_of_one_process(trainer_model, group):
    changes = {"loss": "gspo", "minibatches": 3, "kl_coef": 0.1, "entropy_coef": 0.1}
    one, two = alone(trainer_model, **changes), ranks(group, 2, trainer_model, **changes)
    assert two.parameters() == one.parameters()
    for each in batches(one):
        assert_same_report(two.train_step(each), one.train_step(each))
    assert_near(two.weights(), dict(one.tensors()))
    assert two.logprobs([2, 3, 4, 8, 5]) == pytest.approx(one.logprobs([2, 3, 4, 8, 5]), abs=1e-3)


def test_two_ranks_that_split_every_matrix_are_one_process(trainer_model, group):
    changes = {"kl_coef": 0.1}
    one, two = alone(trainer_model, **changes), ranks(group, 2, trainer_model, tensor_parallel=2, **changes)
    assert two.parameters() == one.parameters()
    for each in batches(one):
        assert_same_report(two.train_step(each), one.train_step(each))
    assert_near(two.weights(), dict(one.tensors()))


def test_activations_that_are_computed_again_change_nothing(trainer_model, group):
    one, two = alone(trainer_model), ranks(group, 2, trainer_model, activation_checkpointing=True)
    again = alone(trainer_model, activation_checkpointing=True)
    for each in batches(one, 2):
        expected = one.train_step(each)
        assert_same_report(two.train_step(each), expected)
        assert_same_report(again.train_step(each), expected)
