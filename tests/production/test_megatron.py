"""The trainer on Megatron-Core against the embedded one, on a CPU that stands for GPUs, with two ranks over gloo.

Tolerances: log-probabilities to 1e-5, losses and gradient norms to 1e-4 of their size (sums of float32 in another
order), weights to 2e-4 after three steps of 1e-2.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from msgspec import structs, to_builtins

from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.errors import ConfigError
from rollart.sections import MegatronConfig, TrainConfig
from tests.data.trainers.batches import batch
from tests.data.trainers.rank_group import RankGroup
from tests.data.trainers.tiny import save_model
from tests.production.cpu_for_gpu import TARGET

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: make test-production"),
    pytest.mark.timeout(600),
]
OPTIONS = TrainConfig(learning_rate=1e-2, lr_warmup_steps=0, micro_batch_tokens=16, collective_timeout_s=60)
TOKENS = [2, 3, 4, 8, 5, 9, 1]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = RankGroup(tmp_path_factory.mktemp("ranks"), TARGET)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "qwen3", "qwen3_moe")}


def alone(folder, **changes):
    return EmbeddedTrainer(str(folder), structs.replace(OPTIONS, **changes), temperature=1.0, seed=0)


def ranks(group, number, folder, **changes):
    return group.trainer(number, folder, "megatron", **to_builtins(structs.replace(OPTIONS, **changes)))


def assert_same_steps(got, expected, batches):
    for each in batches:
        ours, theirs = got.train_step(each), expected.train_step(each)
        assert (ours.trained_tokens, ours.skipped) == (theirs.trained_tokens, theirs.skipped)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        for name in ("ratio", "entropy", "kl_behaviour", "clip_fraction", "samples"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-5), name
    published, plain = got.weights(), dict(expected.tensors())
    assert published.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(published[name], tensor, atol=2e-4, rtol=0)


LAYOUTS = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"megatron": MegatronConfig(pipeline_parallel=2)},
    "context": {"megatron": MegatronConfig(context_parallel=2)},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", "data"), *(("qwen3", layout) for layout in LAYOUTS), ("llama", "tensor"), ("llama", "pipeline")],
)
def test_two_ranks_step_as_one_process_does(kind, layout, folders, group):
    changes = {"loss": "gspo", "minibatches": 3, "kl_coef": 0.1, "entropy_coef": 0.1}
    one = alone(folders[kind], **changes)
    two = ranks(group, 2, folders[kind], **changes, **LAYOUTS[layout])
    assert two.parameters() == one.parameters()
    assert two.logprobs(TOKENS) == pytest.approx(one.logprobs(TOKENS), abs=1e-5)
    assert_same_steps(two, one, [batch(one, step, groups=3) for step in range(3)])


@pytest.mark.parametrize("megatron", [MegatronConfig(), MegatronConfig(expert_parallel=2)], ids=["whole", "shared"])
def test_experts_are_held_by_every_rank_or_shared_out(megatron, folders, group):
    one, two = alone(folders["qwen3_moe"]), ranks(group, 2, folders["qwen3_moe"], megatron=megatron)
    assert two.parameters() == one.parameters()
    assert two.logprobs(TOKENS) == pytest.approx(one.logprobs(TOKENS), abs=1e-5)
    assert_same_steps(two, one, [batch(one, step, groups=3) for step in range(3)])


def test_a_model_or_layout_that_megatron_cannot_hold_is_refused(folders, group):
    with pytest.raises(ConfigError, match=r"train\.tensor_parallel: 3 does not divide the model's 4 attention"):
        ranks(group, 3, folders["llama"], tensor_parallel=3)
