"""The trainer on Megatron-Core against the embedded one, on a CPU that stands for GPUs, with two ranks over gloo.

Tolerances: log-probabilities to 1e-5, losses and gradient norms to 1e-4 of their size (sums of float32 in another
order), weights to 2e-4 after three steps of 1e-2.
"""

from __future__ import annotations

import math

import pytest
import torch
from msgspec import structs, to_builtins
from transformers import AutoModelForCausalLM

from rollart.data.devices import STAND_IN
from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.errors import ConfigError, RewardError, RunFolderError
from rollart.run_folder import checkpoints
from rollart.sections import MegatronConfig, TrainConfig
from tests.data.trainers.batches import batch
from tests.data.trainers.rank_group import RankGroup
from tests.data.trainers.tiny import save_model
from tests.e2e.laboratory import REPOSITORY, Laboratory, check_audit, summary
from tests.production.cpu_for_gpu import IN_PATH, TARGET

OPTIONS = TrainConfig(
    learning_rate=1e-2, lr_warmup_steps=0, micro_batch_tokens=16, weight_decay=0.1, collective_timeout_s=60
)
TOKENS = [2, 3, 4, 8, 5, 9, 1]
DATA: dict[str, object] = {}
TENSOR = {"tensor_parallel": 2}
PIPELINE = {"megatron": MegatronConfig(pipeline_parallel=2)}
CONTEXT = {"megatron": MegatronConfig(context_parallel=2)}
EXPERT = {"megatron": MegatronConfig(expert_parallel=2)}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = RankGroup(tmp_path_factory.mktemp("ranks"), TARGET)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "qwen2", "qwen3", "qwen3_moe")}


def alone(folder, **changes):
    return EmbeddedTrainer(str(folder), structs.replace(OPTIONS, **changes), temperature=1.0, seed=0)


def ranks(group, folder, number=2, name="megatron", **changes):
    return group.trainer(number, folder, name, **to_builtins(structs.replace(OPTIONS, **changes)))


def batches(made, number=3):
    """Three groups of four: neither trajectories nor tokens divide by the ranks."""
    return [batch(made, step, groups=3) for step in range(number)]


def assert_same_report(got, expected, rel=1e-4):
    assert (got.trained_tokens, got.skipped) == (expected.trained_tokens, expected.skipped)
    assert got.loss == pytest.approx(expected.loss, rel=rel, abs=1e-6)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=rel)
    for name in ("ratio", "entropy", "kl_behaviour", "clip_fraction", "samples"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=rel, abs=1e-5), name


def assert_near(got, expected, atol=2e-4):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("llama", DATA, id="llama-data"),
        pytest.param("qwen2", TENSOR, id="qwen2-tensor"),
        pytest.param("llama", PIPELINE, id="llama-pipeline"),
        pytest.param("qwen3", TENSOR, id="qwen3-tensor"),
        pytest.param("qwen3", PIPELINE, id="qwen3-pipeline"),
        pytest.param("qwen3", CONTEXT, id="qwen3-context"),
        pytest.param("qwen3_moe", DATA, id="experts-data"),
        pytest.param("qwen3_moe", EXPERT, id="experts-shared"),
        pytest.param("qwen3_moe", TENSOR | EXPERT, id="experts-tensor"),
    ],
)
def test_three_steps_on_two_ranks_are_those_of_one_process(kind, layout, folders, group):
    changes = {"loss": "gspo", "minibatches": 3, "kl_coef": 0.1, "entropy_coef": 0.1}
    one, two = alone(folders[kind], **changes), ranks(group, folders[kind], **changes, **layout)
    assert {each.name: each for each in two.parameters()} == {each.name: each for each in one.parameters()}
    assert two.logprobs(TOKENS) == pytest.approx(one.logprobs(TOKENS), abs=1e-5)
    for each in batches(one):
        assert_same_report(two.train_step(each), one.train_step(each))
    assert_near(two.weights(), dict(one.tensors()))


def test_activations_that_are_computed_again_change_nothing(folders, group):
    one, two = alone(folders["qwen3"]), ranks(group, folders["qwen3"], activation_checkpointing=True, **TENSOR)
    for each in batches(one, 2):
        assert_same_report(two.train_step(each), one.train_step(each))


def test_the_supervised_warm_up_and_what_follows_are_those_of_one_process(folders, group):
    rows = [([2, 3 + row % 5, 8, 11][: 3 + row % 2], [0.0, 1.0, 1.0, 2.0][: 3 + row % 2]) for row in range(9)]
    one, two = alone(folders["llama"]), ranks(group, folders["llama"], **PIPELINE)
    assert two.warmup(rows, 3, 1e-2, 30) == pytest.approx(one.warmup(rows, 3, 1e-2, 30, lambda *_: None), rel=1e-4)
    (each,) = batches(one, 1)
    assert_same_report(two.train_step(each), one.train_step(each))
    assert_near(two.weights(), dict(one.tensors()))


def test_a_step_without_a_finite_loss_leaves_the_weights_alone(folders, group):
    two = ranks(group, folders["llama"])
    (each,) = batches(alone(folders["llama"]), 1)
    with pytest.raises(RewardError, match="is nan"):
        two.train_step(batch(alone(folders["llama"]), reward=math.nan))
    before = two.weights()
    each.groups[1].trajectories[1].turns[0].logprobs[0] = math.nan
    assert two.train_step(each).skipped
    assert_near(two.weights(), before, atol=0)
    assert not two.train_step(batches(alone(folders["llama"]), 1)[0]).skipped


# --------------------------------------------------------------------------------------------------------- checkpoints
def test_a_checkpoint_goes_on_with_any_other_layout_and_with_fsdp2(folders, group, tmp_path):
    folder, changes = folders["qwen3"], {"kl_coef": 0.1, "lr_warmup_steps": 4}
    first, second, third = batches(alone(folder))
    two = ranks(group, folder, **changes)
    two.train_step(first)
    two.save(str(tmp_path / "0"))
    before = two.weights()
    expected = [two.train_step(second), two.train_step(third)]
    layouts = [("megatron", TENSOR), ("megatron", PIPELINE), ("fsdp2", DATA), ("megatron", DATA)]
    for number, (name, layout) in enumerate(layouts):
        resumed = ranks(group, folder, name=name, **changes, **layout)
        resumed.load(str(tmp_path / str(number)))
        assert_near(resumed.weights(), before, atol=0)
        resumed.save(str(tmp_path / str(number + 1)))  # which the next of them reads
        for each, report in zip((second, third), expected, strict=True):
            got = resumed.train_step(each)
            assert_same_report(got, report)
            assert got.learning_rate == report.learning_rate
            assert got.metrics["kl_reference"] == pytest.approx(report.metrics["kl_reference"], rel=1e-3)


@pytest.mark.parametrize("layout", [EXPERT, TENSOR | EXPERT], ids=["shared", "tensor"])
def test_a_checkpoint_of_experts_is_read_by_ranks_that_share_them_otherwise(layout, folders, group, tmp_path):
    folder = folders["qwen3_moe"]
    first, second = batches(alone(folder), 2)
    two = ranks(group, folder, **layout)
    two.train_step(first)
    two.save(str(tmp_path / "saved"))
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    assert_near(plain, two.weights(), atol=0)
    expected = two.train_step(second)
    resumed = ranks(group, folder)
    resumed.load(str(tmp_path / "saved"))
    assert_same_report(resumed.train_step(second), expected)


def test_in_bfloat16_what_a_checkpoint_keeps_is_the_float32_weights(folders, group, tmp_path):
    folder, changes = folders["qwen3"], {"precision": "bfloat16"}
    one, two = alone(folder), ranks(group, folder, **changes, **TENSOR)
    first, second, third = batches(one)
    assert_same_report(two.train_step(first), one.train_step(first), rel=0.05)
    two.save(str(tmp_path / "saved"))
    assert {each.dtype for each in two.weights().values()} == {torch.float32}
    expected = [two.train_step(second), two.train_step(third)]
    two.load(str(tmp_path / "saved"))
    for each, report in zip((second, third), expected, strict=True):
        assert_same_report(two.train_step(each), report, rel=1e-6)
    assert_near(two.weights(), dict(one.tensors()), atol=0.1)


def test_a_checkpoint_that_cannot_be_written_or_read_leaves_the_ranks_able_to_go_on(folders, group, tmp_path):
    two = ranks(group, folders["llama"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunFolderError, match="not empty"):
        two.save(str(tmp_path / "full"))
    with pytest.raises(RunFolderError, match=r"holds no trainer\.json"):
        two.load(str(tmp_path))
    alone(folders["llama"]).save(str(tmp_path / "whole"))
    with pytest.raises(RunFolderError, match=r"not in shards.*trainer = 'embedded'"):
        two.load(str(tmp_path / "whole"))
    two.save(str(tmp_path / "saved"))
    two.load(str(tmp_path / "saved"))  # though nothing was trained yet
    other = ranks(group, folders["qwen3"])
    before = other.weights()
    with pytest.raises(RunFolderError, match=r"it has no model/model\.layers\.0\.self_attn\.k_norm\.weight"):
        other.load(str(tmp_path / "saved"))
    assert_near(other.weights(), before, atol=0)
    assert not other.train_step(batches(alone(folders["qwen3"]), 1)[0]).skipped


# ------------------------------------------------------------------------------------------------------------- refusals
def test_a_model_or_layout_that_megatron_cannot_hold_is_refused(folders, group, tmp_path):
    with pytest.raises(ConfigError, match=r"expert_parallel: 2 does not divide the model's num_experts 1; take 1"):
        ranks(group, folders["llama"], **EXPERT)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ranks(group, tmp_path)
    with pytest.raises(ConfigError, match=r"knows llama, qwen2, qwen3, qwen3_moe, not 'mistral'; take trainer = 'fsdp"):
        ranks(group, save_model(tmp_path, "mistral"))


# --------------------------------------------------------------------------------------------------------------- a run
@pytest.fixture
def lab(tmp_path):
    place = Laboratory(tmp_path)
    yield place
    for process in place.processes:
        process.end()
    assert place.weights() == []


def test_a_run_trains_on_two_ranks_that_split_every_matrix(lab):
    path = ("env", f"PYTHONPATH={IN_PATH}:{REPOSITORY}", f"{STAND_IN}=1")
    words = ("runtime=local", "trainer=megatron", "roles.actor_train.workers=2", "roles.environment.workers=1")
    process = lab.start(*words, "train.tensor_parallel=2", "log.checkpoint_every=3", prefix=path)
    assert process.wait() == 0, process.text()
    check_audit(lab.run, steps=3, alpha=1)
    assert summary(lab.run)["outcome"] == "completed"
    assert checkpoints(lab.run) == [3]
