"""Scores against the plain forward pass of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from rollart.data.trainers.scoring import Scorer, load_model
from rollart.errors import ConfigError
from rollart.learn.batching import Sample, collate

LENGTHS = (3, 40, 17, 25)


def micro_batch(seed=0, vocab=61):
    rng = torch.Generator().manual_seed(seed)
    samples = []
    for length in LENGTHS:
        tokens = torch.randint(0, vocab, (length,), generator=rng).tolist()
        mask = (torch.rand(length, generator=rng) < 0.3).tolist()
        mask[0], mask[-1] = False, True
        samples.append(Sample(tokens, mask, [0.0] * length, [1.0] * length))
    return samples, collate(samples)


@torch.no_grad()
def plain_logprobs(model, sample, temperature):
    """One row alone, without padding, through the model's own forward."""
    logits_TV = model(input_ids=torch.tensor([sample.tokens])).logits[0, :-1].double() / temperature
    targets_T = torch.tensor(sample.tokens[1:])
    logprobs_T = logits_TV.log_softmax(-1)
    entropy_T = -(logprobs_T.exp() * logprobs_T).sum(-1)
    mask_T = torch.tensor(sample.mask[1:])
    return logprobs_T.gather(-1, targets_T[:, None])[:, 0] * mask_T, entropy_T * mask_T


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_logits", [1 << 25, 61 * 5])
def test_scores_of_a_padded_batch_equal_the_plain_forward_of_each_row(trainer_model, temperature, max_logits):
    scorer = Scorer(load_model(trainer_model, "cpu"), max_logits)
    assert scorer.sparse
    samples, micro = micro_batch()
    logprobs_BT, entropy_BT = scorer.score(micro, temperature)
    for row, sample in enumerate(samples):
        expected, entropy = plain_logprobs(scorer.model, sample, temperature)
        torch.testing.assert_close(logprobs_BT[row, : sample.num_inputs].double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(entropy_BT[row, : sample.num_inputs].double(), entropy, atol=2e-5, rtol=0)
        assert not logprobs_BT[row, sample.num_inputs :].any()


def gradients(scorer, micro):
    scorer.model.zero_grad()
    logprobs_BT, entropy_BT = scorer.score(micro, 0.8, entropy_gradient=True)
    (logprobs_BT + 0.1 * entropy_BT).sum().backward()
    return [weight.grad.clone() for weight in scorer.model.parameters()]


def test_chunks_of_the_head_give_the_same_gradients(trainer_model):
    model = load_model(trainer_model, "cpu")
    _, micro = micro_batch()
    for whole, chunked in zip(
        gradients(Scorer(model), micro), gradients(Scorer(model, max_logits=61 * 3), micro), strict=True
    ):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_a_model_that_caps_its_logits_is_found_out_and_scored_by_its_full_forward(caplog):
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=1.0,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        scorer = Scorer(Gemma2ForCausalLM(config).eval())
    assert not scorer.sparse
    assert "post-processes its logits" in caplog.text
    samples, micro = micro_batch()
    with torch.no_grad():
        logprobs_BT, _ = scorer.score(micro, 1.0)
    for row, sample in enumerate(samples):
        expected, _ = plain_logprobs(scorer.model, sample, 1.0)
        torch.testing.assert_close(logprobs_BT[row, : sample.num_inputs].double(), expected, atol=2e-5, rtol=0)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(tmp_path, "cpu")


def test_a_device_that_does_not_exist_is_refused(trainer_model):
    with pytest.raises(ConfigError, match="device 'gpu'"):
        load_model(trainer_model, "gpu")
