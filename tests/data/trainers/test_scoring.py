"""Scores against the plain forward pass of transformers."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollart.data.trainers.scoring import Scorer, load_model
from rollart.errors import ConfigError
from rollart.learn.batching import Sample, collate
from rollart.learn.packing import pack

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


# ------------------------------------------------------------------------------------------------ rows that begin alike
DRAW = random.Random(0)


def draw(count):
    return [DRAW.randrange(61) for _ in range(count)]


def answered(prompt, *turns):
    """A sample of a prompt, then (answer, observation) pairs; answers are trained."""
    tokens, mask = list(prompt), [False] * len(prompt)
    for answer, observation in turns:
        tokens += [*answer, *observation]
        mask += [*[True] * len(answer), *[False] * len(observation)]
    end = len(mask) - mask[::-1].index(True)
    return Sample(tokens[:end], mask[:end], [0.0] * end, [1.0] * end)


def one_turn(prompt, *lengths):
    return [answered(prompt, (draw(length), [])) for length in lengths]


def many_turns(prompt, num_turns):
    return answered(prompt, *[(draw(2), draw(9)) for _ in range(num_turns)])


PROMPT, SYSTEM = draw(20), draw(12)
TWINS = one_turn(PROMPT, 5)
GROUPS = {
    "equal prompts": one_turn(PROMPT, 4, 4, 4, 4),
    "different lengths": one_turn(PROMPT, 1, 9, 3, 30),
    "one system prompt": [made for _ in range(3) for made in one_turn([*SYSTEM, *draw(8)], 3, 4)],
    "several turns": [many_turns(PROMPT, turns) for turns in (3, 4, 1)],
    "nothing in common": [made for size in (5, 20, 11) for made in one_turn(draw(size), 6)],
    "a single member": one_turn(PROMPT, 7),
    "equal members": [*TWINS, *TWINS, *one_turn(PROMPT, 2)],
    "one begins with another": [*TWINS, answered(TWINS[0].tokens, (draw(3), []))],
}


def gradients(scorer, micro):
    scorer.model.zero_grad()
    logprobs_BT, entropy_BT = scorer.score(micro, 0.8, entropy_gradient=True)
    (logprobs_BT + 0.1 * entropy_BT).sum().backward()
    return [weight.grad.clone() for weight in scorer.model.parameters()]


@pytest.mark.parametrize("samples", GROUPS.values(), ids=GROUPS)
def test_packed_rows_give_the_plain_scores_and_gradients(trainer_model, samples):
    scorer = Scorer(load_model(trainer_model, "cpu"))
    assert scorer.packs
    plain = collate(samples)
    packed = dataclasses.replace(plain, packed=pack([made.tokens[:-1] for made in samples]))
    with torch.no_grad():
        for ours_BT, theirs_BT in zip(scorer.score(packed, 0.8), scorer.score(plain, 0.8), strict=True):
            torch.testing.assert_close(ours_BT, theirs_BT, atol=2e-5, rtol=0)
    largest = max(float(gradient.abs().max()) for gradient in gradients(scorer, plain))
    for ours, theirs in zip(gradients(scorer, packed), gradients(scorer, plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * largest, rtol=1e-4)


def test_packed_rows_give_the_scores_of_each_row_alone(trainer_model):
    scorer = Scorer(load_model(trainer_model, "cpu"))
    samples = GROUPS["different lengths"]
    micro = scorer.collate(samples)
    assert micro.packed is not None
    with torch.no_grad():
        logprobs_BT, entropy_BT = scorer.score(micro, 0.6)
    for row, sample in enumerate(samples):
        expected, entropy = plain_logprobs(scorer.model, sample, 0.6)
        torch.testing.assert_close(logprobs_BT[row, : sample.num_inputs].double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(entropy_BT[row, : sample.num_inputs].double(), entropy, atol=2e-5, rtol=0)


SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MISTRAL = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("build", "packs"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**MISTRAL, sliding_window=None)), True),
        (lambda: MistralForCausalLM(MistralConfig(**MISTRAL, sliding_window=16)), False),
        (lambda: Qwen2ForCausalLM(Qwen2Config(**MISTRAL, use_sliding_window=True, max_window_layers=1)), False),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)), False),
        (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), True),
    ],
    ids=["full window", "sliding window", "a wide window in one layer", "alibi", "learned positions"],
)
def test_a_model_is_scored_right_whether_or_not_it_takes_packed_rows(build, packs):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        scorer = Scorer(build().eval())
    assert scorer.packs == packs
    samples = GROUPS["different lengths"]
    micro = scorer.collate(samples)
    assert (micro.packed is not None) == packs
    with torch.no_grad():
        logprobs_BT, _ = scorer.score(micro, 1.0)
    for row, sample in enumerate(samples):
        expected, _ = plain_logprobs(scorer.model, sample, 1.0)
        torch.testing.assert_close(logprobs_BT[row, : sample.num_inputs].double(), expected, atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------------ the head
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
    assert not scorer.packs
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
