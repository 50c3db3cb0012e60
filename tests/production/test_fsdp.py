"""Trainers of several ranks on FSDP2: equal to the trainer of one process, whole again after a fault, or clearly ended.

All ranks are processes of this machine that talk by gloo. Tolerances: losses and gradient norms to 1e-4 of their size
(sums of float32 in another order), weights to 2e-4 after three steps of 1e-2 (Adam makes a full step of a gradient that
is next to nothing, whatever its sign). Single gradients: to 1e-3 of their size, or 1e-5 of the largest in their tensor.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal

import pytest
import safetensors.torch
import torch
from msgspec import structs, to_builtins
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.errors import ConfigError, RankError, RewardError, RunFolderError, WeightsError, WorkerDied
from rollart.sections import TrainConfig
from rollart.types import Turn
from tests.data.trainers.batches import batch
from tests.data.trainers.rank_group import RankGroup
from tests.data.trainers.tiny import save_model

pytestmark = pytest.mark.timeout(400)  # several processes on a busy machine

torch.set_num_threads(1)  # two would fight for the cores
OPTIONS = TrainConfig(learning_rate=1e-2, lr_warmup_steps=0, micro_batch_tokens=16, collective_timeout_s=30)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trainer_model(request, tmp_path_factory):
    """A folder with a model (Qwen3 with tied embeddings), and files that stand for its tokenizer."""
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


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
        torch.testing.assert_close(got[name], expected[name], atol=atol, rtol=0)


def test_three_steps_on_two_ranks_are_those_of_one_process(trainer_model, group):
    changes = {"loss": "gspo", "minibatches": 3, "kl_coef": 0.1, "entropy_coef": 0.1}
    one, two = alone(trainer_model, **changes), ranks(group, 2, trainer_model, **changes)
    assert two.parameters() == one.parameters()
    for each in batches(one):
        assert_same_report(two.train_step(each), one.train_step(each))
    assert_near(two.weights(), dict(one.tensors()))
    assert two.logprobs([2, 3, 4, 8, 5]) == pytest.approx(one.logprobs([2, 3, 4, 8, 5]), abs=1e-3)


@pytest.mark.parametrize("number", [2, 4])
def test_ranks_that_split_every_matrix_are_one_process(trainer_model, number, group):
    """Four of them also share the batch, two and two."""
    changes = {"kl_coef": 0.1}
    one, several = alone(trainer_model, **changes), ranks(group, number, trainer_model, tensor_parallel=2, **changes)
    assert several.parameters() == one.parameters()
    for each in batches(one):
        assert_same_report(several.train_step(each), one.train_step(each))
    assert_near(several.weights(), dict(one.tensors()))


def first_moments(folder):
    """Of the optimizer, after one step a tenth of every gradient."""
    if not (folder / "shards").is_dir():
        state = safetensors.torch.load_file(folder / "state" / "trainer.safetensors")
        return {name: tensor for name, tensor in state.items() if name.endswith("/exp_avg")}
    reader = FileSystemReader(folder / "shards")
    saved = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(each.size) for name, each in saved.items() if name.endswith("/exp_avg")}
    state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is here, where shards are put together
@pytest.mark.parametrize(("number", "tensor_parallel"), [(2, 1), (2, 2)])
def test_every_gradient_is_that_of_one_process(trainer_model, number, tensor_parallel, group, tmp_path):
    one, two = alone(trainer_model), ranks(group, number, trainer_model, tensor_parallel=tensor_parallel)
    (each,) = batches(one, 1)
    for name, trainer in (("one", one), ("two", two)):
        trainer.train_step(each)
        trainer.save(str(tmp_path / name))
    expected, got = first_moments(tmp_path / "one"), first_moments(tmp_path / "two")
    assert got.keys() == expected.keys()
    for name, moment in expected.items():
        largest = float(moment.abs().max())
        assert largest > 0, name
        torch.testing.assert_close(got[name], moment, rtol=1e-3, atol=1e-5 * largest)


def test_a_model_without_a_plan_is_not_split(group, tmp_path):
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 61}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.tensor_parallel: transformers has no tensor-parallel plan for GPT2"):
        ranks(group, 2, tmp_path, tensor_parallel=2)


@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_activations_that_are_computed_again_change_nothing(trainer_model, group):
    one, two = alone(trainer_model), ranks(group, 2, trainer_model, activation_checkpointing=True)
    again = alone(trainer_model, activation_checkpointing=True)
    for each in batches(one, 2):
        expected = one.train_step(each)
        assert_same_report(two.train_step(each), expected)
        assert_same_report(again.train_step(each), expected)


@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_a_rank_for_which_there_is_nothing_keeps_up_with_the_others(trainer_model, group):
    """Of each mini-batch one trajectory is left."""
    one, two = alone(trainer_model, minibatches=3), ranks(group, 2, trainer_model, minibatches=3)
    (sparse,) = batches(one, 1)
    for each in sparse.groups:
        for trajectory in each.trajectories[:-1]:
            trajectory.turns = [Turn([2, 3], [], [], [])]
    assert_same_report(two.train_step(sparse), one.train_step(sparse))
    assert_near(two.weights(), dict(one.tensors()))


@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_matrices_are_multiplied_in_bfloat16_and_weights_kept_in_float32(trainer_model, group):
    one, two = alone(trainer_model), ranks(group, 2, trainer_model, precision="bfloat16")
    for each in batches(one):
        assert_same_report(two.train_step(each), one.train_step(each), rel=0.05)
    published = two.weights()
    assert {tensor.dtype for tensor in published.values()} == {torch.float32}
    exact = ranks(group, 2, trainer_model)
    exact.train_step(batches(one, 1)[0])
    assert any(not torch.equal(published[name], tensor) for name, tensor in exact.weights().items())
    assert_near(published, dict(one.tensors()), atol=0.05)


@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_the_supervised_warm_up_is_that_of_one_process(trainer_model, group):
    rows = [
        ([2, 3 + row % 5, 8, 11, 12 + row % 5][: 3 + row % 3], [0.0, 1.0, 1.0, 1.0, 2.0][: 3 + row % 3])
        for row in range(9)
    ]
    one, two = alone(trainer_model), ranks(group, 2, trainer_model)
    expected = one.warmup(rows, 4, 1e-2, 30, lambda step, loss: None)
    assert two.warmup(rows, 4, 1e-2, 30) == pytest.approx(expected, rel=1e-4)
    assert two.warmup_progress() == (4, pytest.approx(expected[1], rel=1e-4))
    assert_near(two.weights(), dict(one.tensors()))


# -------------------------------------------------------------------------------------------------------- publications
@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_no_more_than_a_bucket_and_the_tensor_after_it_is_gathered_at_once(trainer_model, group, tmp_path):
    bucket_bytes = 8192
    two = ranks(group, 2, trainer_model)
    sizes = [tensor.nbytes for tensor in two.weights().values()]
    assert max(sizes) <= bucket_bytes
    assert sum(sizes) > 5 * (bucket_bytes + max(sizes))

    async def publish():
        calls = [rank.call("most_held", str(tmp_path / rank.name), bucket_bytes, returns=int) for rank in two.ranks]
        return await asyncio.gather(*calls)

    first, second = group.run(publish())
    assert 0 < first <= bucket_bytes + max(sizes)
    assert second == 0


@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_weights_that_a_store_refuses_or_loses_leave_the_ranks_able_to_publish_them_again(trainer_model, group):
    """Whoever stops writing in the middle still gathers to the end, and what is trained on meanwhile is not rescued."""
    two = ranks(group, 2, trainer_model)
    two.publish(10_001)
    with pytest.raises(WeightsError, match="already published"):
        two.publish(10_001)
    with pytest.raises(WeightsError, match="and there is no other place"):
        two.rescue(10_001)
    two.train_step(batches(alone(trainer_model), 1)[0])
    with pytest.raises(WeightsError, match="the trainer holds other weights by now"):
        two.rescue(10_001)
    assert two.weights().keys() == {info.name for info in two.parameters()}


# --------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_a_checkpoint_of_two_ranks_goes_on_with_any_other_layout(trainer_model, group, tmp_path):
    changes = {"kl_coef": 0.1, "lr_warmup_steps": 4}
    two = ranks(group, 2, trainer_model, **changes)
    first, second, third = batches(alone(trainer_model))
    two.train_step(first)
    two.save(str(tmp_path / "saved"))
    before = two.weights()
    expected = [two.train_step(second), two.train_step(third)]
    for number, tensor in ((3, 1), (2, 2), (4, 2), (1, 1)):
        resumed = ranks(group, number, trainer_model, tensor_parallel=tensor, **changes)
        resumed.load(str(tmp_path / "saved"))
        assert all(torch.equal(before[name], tensor) for name, tensor in resumed.weights().items())
        for each, report in zip((second, third), expected, strict=True):
            got = resumed.train_step(each)
            assert_same_report(got, report)
            assert got.learning_rate == report.learning_rate
            assert got.metrics["kl_reference"] == pytest.approx(report.metrics["kl_reference"], rel=1e-3)
        if (number, tensor) == (2, 2):
            resumed.load(str(tmp_path / "saved"))
            resumed.save(str(tmp_path / "again"))
    again = ranks(group, 1, trainer_model, **changes)
    again.load(str(tmp_path / "again"))
    assert_same_report(again.train_step(second), expected[0])


@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_a_checkpoint_is_a_model_folder_with_its_tokenizer(trainer_model, group, tmp_path):
    two = ranks(group, 2, trainer_model)
    two.save(str(tmp_path / "untrained"))
    two.load(str(tmp_path / "untrained"))
    two.train_step(batches(alone(trainer_model), 1)[0])
    two.save(str(tmp_path / "saved"))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (trainer_model / name).read_bytes()
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    published = two.weights()
    assert plain.keys() == published.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in published.items())
    with pytest.raises(RunFolderError, match=r"is in shards.*trainer = 'fsdp2'"):
        alone(trainer_model).load(str(tmp_path / "saved"))


@pytest.mark.parametrize("trainer_model", ["qwen3"], indirect=True)
def test_a_checkpoint_that_cannot_be_written_or_read_leaves_the_ranks_able_to_go_on(trainer_model, group, tmp_path):
    two = ranks(group, 2, trainer_model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunFolderError, match="not empty"):
        two.save(str(tmp_path / "full"))
    with pytest.raises(RunFolderError, match=r"holds no trainer\.json"):
        two.load(str(tmp_path))
    alone(trainer_model).save(str(tmp_path / "whole"))
    with pytest.raises(RunFolderError, match=r"not in shards.*trainer = 'embedded'"):
        two.load(str(tmp_path / "whole"))
    two.save(str(tmp_path / "saved"))
    shard = next((tmp_path / "saved" / "shards").glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RunFolderError, match="is damaged"):
        two.load(str(tmp_path / "saved"))
    assert not two.train_step(batches(alone(trainer_model), 1)[0]).skipped


# -------------------------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_what_one_process_refuses_all_ranks_refuse(trainer_model, group, tmp_path):
    two = ranks(group, 2, trainer_model)
    with pytest.raises(RewardError, match="is nan"):
        two.train_step(batch(alone(trainer_model), reward=math.nan))
    assert not two.train_step(batches(alone(trainer_model), 1)[0]).skipped
    with pytest.raises(
        ConfigError, match=r"train\.tensor_parallel: 3 does not divide the model's num_attention_heads 4"
    ):
        ranks(group, 3, trainer_model, tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ranks(group, 2, tmp_path)


@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_a_rank_that_hangs_ends_the_step_when_its_time_is_up(trainer_model, group):
    two = ranks(group, 2, trainer_model, collective_timeout_s=2)
    (each,) = batches(alone(trainer_model), 1)
    os.kill(two.ranks[1].pid, signal.SIGSTOP)
    try:
        with pytest.raises(RankError, match="train step on rank 0 of 2: another rank is gone, or was silent"):
            two.train_step(each)
    finally:
        os.kill(two.ranks[1].pid, signal.SIGCONT)


@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_ranks_that_wait_within_a_part_of_all_ranks_wait_no_longer(trainer_model, group):
    four = ranks(group, 4, trainer_model, tensor_parallel=2, collective_timeout_s=2)

    async def wait():
        await asyncio.gather(*(rank.call("wait_for_the_others", 2, returns=None) for rank in four.ranks))

    with pytest.raises(RankError, match="alone: another rank is gone, or was silent"):
        group.run(wait())


@pytest.mark.parametrize("trainer_model", ["llama"], indirect=True)
def test_a_rank_that_dies_ends_the_step_with_its_name(trainer_model, group):
    two = ranks(group, 2, trainer_model)
    (each,) = batches(alone(trainer_model), 1)
    two.train_step(each)
    os.kill(two.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"worker {two.ranks[1].name}.*SIGKILL"):
        two.train_step(each)
