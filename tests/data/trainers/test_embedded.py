"""The embedded trainer: what a step does to the policy, what it survives, and that resuming is exact."""

from __future__ import annotations

import math
import shutil

import pytest
import safetensors.torch
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rollart.data import roles
from rollart.data.trainers import trainer_factory
from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.data.weights import FileWeightStore
from rollart.errors import ConfigError, RewardError, RunFolderError, TrainError
from rollart.sections import TrainConfig
from rollart.types import Turn
from tests.data.trainers.batches import BAD, GOOD, batch

OPTIONS = TrainConfig(learning_rate=1e-2, lr_warmup_steps=0, micro_batch_tokens=64)


def trainer(folder, **changes):
    return EmbeddedTrainer(str(folder), structs.replace(OPTIONS, **changes), temperature=1.0, seed=0)


def weights(made):
    return {name: tensor.clone() for name, tensor in made.tensors()}


def assert_same(left, right):
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name


def quiet(step, loss):
    """Nobody listens to the warm-up."""


# ------------------------------------------------------------------------------------------------------------ training
@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "ppo"},
        {"loss": "ppo", "minibatches": 2, "kl_coef": 0.01, "entropy_coef": 0.01},
        {"loss": "gspo", "minibatches": 2},
        {"loss": "cispo", "minibatches": 2},
        {"loss": "reinforce", "advantage": "rloo"},
        {"loss": "reinforce", "advantage": "reinforce_pp"},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_steps_make_rewarded_tokens_likelier_and_others_less_likely(trainer_model, changes):
    made = trainer(trainer_model, **changes)
    good, bad = made.logprobs([2, 3, 4, GOOD])[-1], made.logprobs([2, 3, 4, BAD])[-1]
    for step in range(3):
        report = made.train_step(batch(made, step))
    assert made.logprobs([2, 3, 4, 8, GOOD])[-1] > good + 0.1
    assert made.logprobs([2, 3, 4, BAD])[-1] < bad
    assert not report.skipped
    assert report.trained_tokens == 4 * (1 + 2 + 3 + 4)
    assert all(map(math.isfinite, report.metrics.values()))


def test_on_policy_the_ratio_and_the_gap_to_behaviour_are_nothing(trainer_model):
    made = trainer(trainer_model)
    report = made.train_step(batch(made))
    assert report.metrics["ratio"] == pytest.approx(1)
    assert report.metrics["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert report.metrics["kl_behaviour"] == pytest.approx(0, abs=1e-6)
    assert report.metrics["clip_fraction"] == report.metrics["tis_fraction"] == 0
    assert report.metrics["entropy"] == pytest.approx(math.log(61), rel=0.1)


def test_minibatches_after_the_first_see_a_ratio(trainer_model):
    made = trainer(trainer_model, minibatches=4)
    assert made.train_step(batch(made)).metrics["ratio"] != pytest.approx(1, abs=1e-4)


def gradient_step(folder, budget, **changes):
    """The weights after one step with plain, unclipped gradient sizes (Adam hides them: compare the norm too)."""
    made = trainer(folder, micro_batch_tokens=budget, kl_coef=0.1, entropy_coef=0.1, **changes)
    return made.train_step(batch(made)), weights(made)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("budget", [1, 16])
def test_microbatches_accumulate_to_one_big_batch(trainer_model, loss, budget):
    """Rows alone share nothing with others, some rows share their prompt, all together share what there is."""
    whole, whole_weights = gradient_step(trainer_model, 10_000, loss=loss)
    cut, cut_weights = gradient_step(trainer_model, budget, loss=loss)
    assert whole.metrics["computed_fraction"] < cut.metrics["computed_fraction"] <= 1
    assert cut.loss == pytest.approx(whole.loss, abs=1e-6)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name, tensor in whole_weights.items():
        torch.testing.assert_close(cut_weights[name], tensor, atol=2e-4, rtol=0)  # of a step of 1e-2
    shared = set(whole.metrics) - {"padding_fraction", "computed_fraction"}
    for name in shared:
        assert cut.metrics[name] == pytest.approx(whole.metrics[name], abs=1e-5), name


def test_learning_rate_rises_linearly_to_its_value(trainer_model):
    made = trainer(trainer_model, lr_warmup_steps=4)
    rates = [made.train_step(batch(made, step)).learning_rate for step in range(5)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_learning_rate_falls_linearly_to_a_tenth_and_stays(trainer_model):
    made = trainer(trainer_model, lr_warmup_steps=0, lr_decay_steps=4)
    rates = [made.train_step(batch(made, step)).learning_rate for step in range(6)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.001, 0.001])


def test_kl_to_the_reference_starts_at_zero_and_grows(trainer_model):
    made = trainer(trainer_model, kl_coef=0.01)
    values = [made.train_step(batch(made, step)).metrics["kl_reference"] for step in range(3)]
    assert values[0] == pytest.approx(0, abs=1e-6)
    assert 0 < values[1] < values[2]


def test_trajectories_without_generated_tokens_are_counted(trainer_model):
    made = trainer(trainer_model)
    full = batch(made)
    full.groups[0].trajectories[0].turns = [Turn([2, 3], [], [], [])]
    report = made.train_step(full)
    assert (report.metrics["samples"], report.metrics["empty_samples"]) == (15, 1)


# ---------------------------------------------------------------------------------------------------------- non-finite
def poisoned(made, step=1, groups=4, bad_groups=1):
    made_batch = batch(made, step, groups)
    for group in made_batch.groups[:bad_groups]:
        group.trajectories[0].turns[0].logprobs = [math.nan]
    return made_batch


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(trainer_model):
    made = trainer(trainer_model)
    before = weights(made)
    report = made.train_step(poisoned(made))
    assert report.skipped
    assert math.isnan(report.loss)
    assert_same(weights(made), before)
    assert not made.train_step(batch(made, 2)).skipped


def test_only_the_minibatch_that_is_not_finite_is_left_out(trainer_model):
    made = trainer(trainer_model, minibatches=2)
    before = weights(made)
    report = made.train_step(poisoned(made))
    assert not report.skipped
    assert report.metrics["nonfinite_minibatches"] == 1
    assert math.isfinite(report.loss)
    assert report.trained_tokens == 2 * (1 + 2 + 3 + 4)
    after = weights(made)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_several_steps_in_a_row_that_are_not_finite_end_the_run(trainer_model):
    made = trainer(trainer_model, max_nonfinite=2)
    made.train_step(poisoned(made))
    made.train_step(batch(made))
    made.train_step(poisoned(made))
    with pytest.raises(TrainError, match=r"2 train steps in a row .*learning_rate"):
        made.train_step(poisoned(made))


def test_batches_without_any_generated_token_end_the_run(trainer_model):
    made = trainer(trainer_model, max_nonfinite=2)
    empty = batch(made)
    for group in empty.groups:
        for trajectory in group.trajectories:
            trajectory.turns = [Turn([2, 3], [], [], [])]
    report = made.train_step(empty)
    assert (report.skipped, report.trained_tokens) == (True, 0)
    with pytest.raises(TrainError, match=r"no trained token.*token limits"):
        made.train_step(empty)


def test_a_reward_that_is_not_finite_is_refused(trainer_model):
    made = trainer(trainer_model)
    with pytest.raises(RewardError, match="is nan"):
        made.train_step(batch(made, reward=math.nan))


# ------------------------------------------------------------------------------------------------------------- weights
def test_logprobs_equal_the_plain_forward(trainer_model):
    made, plain = trainer(trainer_model), AutoModelForCausalLM.from_pretrained(trainer_model)
    tokens = [3, 1, 4, 1, 5, 9]
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    assert made.logprobs(tokens) == pytest.approx(
        [float(expected[index, token]) for index, token in enumerate(tokens[1:])], abs=1e-5
    )
    assert made.logprobs([3]) == []


def test_logprobs_of_tokens_outside_the_vocabulary_are_refused(trainer_model):
    with pytest.raises(TrainError, match="log-probabilities of 2 tokens"):
        trainer(trainer_model).logprobs([1, 10_000])


def test_tensors_are_those_that_hugging_face_saves(trainer_model, tmp_path):
    made = trainer(trainer_model)
    made.save(str(tmp_path / "saved"))
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    ours = weights(made)
    assert sorted(ours) == sorted(saved)
    assert_same(ours, {name: saved[name] for name in ours})
    described = {info.name: (info.shape, info.dtype) for info in made.parameters()}
    assert described == {name: (tuple(tensor.shape), "float32") for name, tensor in ours.items()}


# ------------------------------------------------------------------------------------------------------- save and load
def test_a_resumed_trainer_goes_on_with_the_same_bits(trainer_model, tmp_path):
    changes = {"minibatches": 2, "kl_coef": 0.1, "lr_warmup_steps": 4}
    straight = trainer(trainer_model, **changes)
    batches = [batch(straight, step) for step in range(4)]
    for each in batches[:2]:
        straight.train_step(each)
    straight.save(str(tmp_path / "saved"))
    resumed = trainer(trainer_model, **changes)
    resumed.load(str(tmp_path / "saved"))
    assert_same(weights(resumed), weights(straight))
    for each in batches[2:]:
        expected, got = straight.train_step(each), resumed.train_step(each)
        assert structs.replace(got, seconds=0.0) == structs.replace(expected, seconds=0.0)
    assert_same(weights(resumed), weights(straight))


def test_a_checkpoint_taken_before_the_first_step_loads(trainer_model, tmp_path):
    made = trainer(trainer_model)
    made.save(str(tmp_path / "saved"))
    made.load(str(tmp_path / "saved"))
    assert not made.train_step(batch(made)).skipped


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer(trainer_model, tmp_path):
    made = trainer(trainer_model)
    made.train_step(batch(made))
    made.save(str(tmp_path / "saved"))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (trainer_model / name).read_bytes()
    again = trainer(tmp_path / "saved")
    assert_same(weights(again), weights(made))
    again.save(str(tmp_path / "copy"))
    trainer(trainer_model).load(str(tmp_path / "copy"))


@pytest.mark.parametrize("damage", ["no_state", "cut", "missing", "empty"])
def test_a_half_written_checkpoint_is_refused_and_changes_nothing(trainer_model, tmp_path, damage):
    made = trainer(trainer_model)
    made.train_step(batch(made))
    folder = tmp_path / "saved"
    made.save(str(folder))
    if damage == "no_state":
        (folder / "trainer.json").unlink()
    elif damage == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif damage == "missing":
        (folder / "state" / "trainer.safetensors").unlink()
    else:
        shutil.rmtree(folder)
    fresh = trainer(trainer_model)
    before = weights(fresh)
    with pytest.raises(RunFolderError, match=r"half-written|damaged"):
        fresh.load(str(folder))
    assert_same(weights(fresh), before)


def test_a_checkpoint_never_overwrites_another(trainer_model, tmp_path):
    made = trainer(trainer_model)
    made.save(str(tmp_path / "saved"))
    with pytest.raises(RunFolderError, match="not empty"):
        made.save(str(tmp_path / "saved"))


def test_a_checkpoint_without_reference_cannot_resume_with_kl(trainer_model, tmp_path):
    made = trainer(trainer_model)
    made.train_step(batch(made))
    made.save(str(tmp_path / "saved"))
    other = trainer(trainer_model, kl_coef=0.1)
    before = weights(other)
    with pytest.raises(RunFolderError, match="kl_coef = 0"):
        other.load(str(tmp_path / "saved"))
    assert_same(weights(other), before)


def test_a_checkpoint_of_another_model_is_refused(trainer_model, tmp_path):
    made = trainer(trainer_model)
    config = LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    trainer(tmp_path / "other").save(str(tmp_path / "saved"))
    with pytest.raises(RunFolderError, match="of another model"):
        made.load(str(tmp_path / "saved"))


# ------------------------------------------------------------------------------------------------------------- warm-up
def sequences():
    return [([2, 3 + row % 5, 8, 11, 12 + row % 5], [0.0, 0.0, 1.0, 1.0, 2.0]) for row in range(20)]


def test_warmup_lowers_the_loss_and_is_deterministic(trainer_model):
    made, twin = trainer(trainer_model), trainer(trainer_model)
    heard = []
    first, last = made.warmup(
        sequences(),
        steps=30,
        learning_rate=1e-2,
        batch_tokens=40,
        progress=lambda step, loss: heard.append((step, loss)),
    )
    assert first == pytest.approx(math.log(61), rel=0.2)
    assert last < 0.5 * first
    assert made.logprobs([2, 4, 8])[-1] > math.log(0.5)
    assert [step for step, _ in heard] == list(range(1, 31))
    assert (heard[0][1], heard[-1][1]) == (first, last)
    assert twin.warmup(sequences(), 30, 1e-2, 40, quiet) == (first, last)


def test_warmup_leaves_no_optimizer_state_and_moves_the_reference(trainer_model):
    made = trainer(trainer_model, kl_coef=0.1)
    made.warmup(sequences(), 3, 1e-2, 1000, quiet)
    assert made.train_step(batch(made)).metrics["kl_reference"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "bad", [[], [([1, 2], [1.0])], [([1, 2], [0.0, math.nan])], [([1, 2], [0.0, -1.0])], [([1, 2], [1.0, 0.0])]]
)
def test_warmup_refuses_sequences_that_it_cannot_use(trainer_model, bad):
    with pytest.raises(TrainError, match="warm-up"):
        trainer(trainer_model).warmup(bad, 1, 1e-3, 100, quiet)


# ------------------------------------------------------------------------------------------------------------ registry
def test_the_trainer_is_found_by_name_and_others_are_refused():
    assert trainer_factory("embedded") is EmbeddedTrainer
    with pytest.raises(ConfigError, match="did you mean 'embedded'"):
        trainer_factory("embeded")


def test_a_worker_made_from_plain_values_trains_and_publishes_the_model(trainer_model, tmp_path):
    weights = {"folder": str(tmp_path), "bucket_bytes": 4096, "keep": 2}
    worker = roles.training(str(trainer_model), "embedded", {"learning_rate": 0.01}, "cpu", 1.0, 0, weights)
    made = trainer(trainer_model)
    report = worker.train_step(batch(made))
    manifest = worker.publish(1)
    assert not report.skipped
    assert list(manifest.parameters) == worker.parameters() == made.parameters()
    published = dict(FileWeightStore(tmp_path, 4096, 2).fetch(1))
    assert not all(torch.equal(published[name], tensor) for name, tensor in made.tensors())
