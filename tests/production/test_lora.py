"""Adapters, with peft: trained alone, by one process or by ranks, merged in the engine, and whole in a checkpoint."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from msgspec import structs, to_builtins

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.errors import RunFolderError
from rollart.pipeline import evaluate, train
from rollart.sections import LoraConfig, TrainConfig
from tests.data.trainers.batches import BAD, GOOD, batch
from tests.data.trainers.rank_group import RankGroup
from tests.data.trainers.tiny import save_model
from tests.e2e.laboratory import Laboratory, check_audit
from tests.production.mooncake_processes import have_mooncake

LORA = LoraConfig(r=4, alpha=8.0, targets=["q_proj", "v_proj", "o_proj", "down_proj"])
OPTIONS = TrainConfig(
    learning_rate=2e-2, lr_warmup_steps=0, micro_batch_tokens=16, kl_coef=0.01, lora=LORA, collective_timeout_s=30
)
TOKENS = [2, 3, 4, 8, GOOD]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    made = save_model(tmp_path_factory.mktemp(request.param), request.param)
    (made / "tokenizer.json").unlink()
    return made


def trainer(folder, **changes):
    return EmbeddedTrainer(str(folder), structs.replace(OPTIONS, **changes), temperature=1.0, seed=0)


def weights(made):
    return {name: tensor.clone() for name, tensor in made.tensors()}


def base(made):
    model = made._learner.scorer.model
    return {name: weight.clone() for name, weight in model.named_parameters() if "lora" not in name}


def assert_same(left, right):
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_only_the_adapter_is_trained_and_published_and_the_engine_answers_as_the_trainer(folder):
    made = trainer(folder)
    engine = EmbeddedEngine(str(folder), slots=2, max_model_tokens=32, lora=to_builtins(LORA))
    assert engine.parameters() == made.parameters()
    before, good, bad = base(made), made.logprobs(TOKENS)[-1], made.logprobs([2, 3, 4, BAD])[-1]
    for step in range(3):
        report = made.train_step(batch(made, step))
        engine.update(step, list(made.tensors()))
        assert engine.logprobs(TOKENS) == pytest.approx(made.logprobs(TOKENS), abs=1e-4)
    assert report.metrics["kl_reference"] > 0
    assert made.logprobs(TOKENS)[-1] > good + 0.1
    assert made.logprobs([2, 3, 4, BAD])[-1] < bad
    assert_same(base(made), before)


def test_a_checkpoint_holds_the_merged_model_and_goes_on_with_the_same_bits(folder, tmp_path):
    straight = trainer(folder)
    batches = [batch(straight, step) for step in range(3)]
    straight.train_step(batches[0])
    straight.save(str(tmp_path / "saved"))
    merged = EmbeddedEngine(str(tmp_path / "saved"), slots=2, max_model_tokens=32)
    assert merged.logprobs(TOKENS) == pytest.approx(straight.logprobs(TOKENS), abs=1e-4)
    names = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert names == safetensors.torch.load_file(folder / "model.safetensors").keys()
    resumed = trainer(folder)
    resumed.load(str(tmp_path / "saved"))
    for each in batches[1:]:
        expected, got = straight.train_step(each), resumed.train_step(each)
        assert structs.replace(got, seconds=0.0) == structs.replace(expected, seconds=0.0)
    assert_same(weights(resumed), weights(straight))
    with pytest.raises(RunFolderError, match="is of an adapter"):
        trainer(folder, lora=LoraConfig()).load(str(tmp_path / "saved"))


def test_two_ranks_train_the_adapter_of_one_process_and_one_rank_goes_on(folder, tmp_path):
    group = RankGroup(tmp_path)
    try:
        one = trainer(folder, activation_checkpointing=True)
        two = group.trainer(2, folder, **to_builtins(structs.replace(OPTIONS, activation_checkpointing=True)))
        assert two.parameters() == one.parameters()
        assert_same(two.weights(), weights(one))
        batches = [batch(one, step, groups=3) for step in range(3)]
        for each in batches[:2]:
            got, expected = two.train_step(each), one.train_step(each)
            assert (got.loss, got.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-4, abs=1e-6)
        for name, tensor in two.weights().items():
            torch.testing.assert_close(tensor, weights(one)[name], atol=1e-3, rtol=0)
        two.save(str(tmp_path / "saved"))
        merged = EmbeddedEngine(str(tmp_path / "saved"), slots=2, max_model_tokens=32)
        assert merged.logprobs(TOKENS) == pytest.approx(two.logprobs(TOKENS), abs=1e-4)
        alone = group.trainer(1, folder, **to_builtins(OPTIONS))
        alone.load(str(tmp_path / "saved"))
        assert alone.train_step(batches[2]).loss == pytest.approx(one.train_step(batches[2]).loss, rel=1e-3, abs=1e-5)
    finally:
        group.close()


RANKS = ("runtime=local", "trainer=fsdp2")
MOONCAKE = pytest.mark.skipif(not have_mooncake(), reason="no Mooncake here: make test-production")


@pytest.mark.parametrize(
    ("words", "then"),
    [
        ((), ()),
        (("weights.delta=2",), ("weights.delta=0",)),
        ((*RANKS, "roles.actor_train.workers=2"), (*RANKS, "roles.actor_train.workers=1")),
        pytest.param(("weights.store=mooncake",), ("weights.store=mooncake", "weights.delta=2"), marks=MOONCAKE),
        (("roles.prefill={}",), ()),
    ],
)
def test_a_run_sends_adapters_passes_its_canary_and_goes_on_from_its_checkpoint(words, then, tmp_path):
    """Whatever the store, and on another number of ranks than before."""
    lab = Laboratory(tmp_path)
    common = ("train.lora={ r = 2, targets = ['q_proj', 'down_proj'] }", "train.learning_rate=1e-2")
    assert train(lab.config(*common, *words)) == 0
    assert train(lab.config(*common, *then, "steps=4"), resume=lab.run) == 0
    check_audit(lab.run, steps=4, alpha=1)
    assert "they go through files in" not in (lab.run / "run.log").read_text()
    assert evaluate(lab.run, episodes=1) == 0
