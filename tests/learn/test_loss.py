"""Losses against a slow reference in plain Python, and their gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from rollart.learn.loss import LOSSES, PolicyTokens, k3, summed_loss
from rollart.sections import TrainConfig

OPTIONS = TrainConfig(clip_low=0.1, clip_high=0.2, tis_cap=1.1)


def tokens(spread=0.4, seed=0):
    """Three rows of five positions in float64, one row fully masked."""
    rng = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(3, 5, generator=rng, dtype=torch.float64)

    mask_BT = torch.rand(3, 5, generator=rng) < 0.7
    mask_BT[2] = False
    logprobs_BT = draw() - 3
    return PolicyTokens(
        logprobs_BT=logprobs_BT,
        proximal_BT=logprobs_BT + spread * draw(),
        behaviour_BT=logprobs_BT + spread * draw(),
        advantages_BT=draw()[:, :1].expand(3, 5),
        mask_BT=mask_BT,
    )


def options(loss, **changes):
    return structs.replace(OPTIONS, loss=loss, **changes)


def no_entropy(policy):
    return torch.zeros_like(policy.logprobs_BT)


def clip(value, low, high):
    return max(low, min(high, value))


def slow_reference(policy, chosen):
    """The summed loss, one token at a time."""
    total = 0.0
    rows = zip(
        policy.logprobs_BT.tolist(),
        policy.proximal_BT.tolist(),
        policy.behaviour_BT.tolist(),
        policy.advantages_BT.tolist(),
        policy.mask_BT.tolist(),
        strict=True,
    )
    for current, proximal, behaviour, advantages, mask in rows:
        trained = [t for t, bit in enumerate(mask) if bit]
        for t in trained:
            span = trained if chosen.loss == "gspo" else [t]
            ratio = math.exp(sum(current[i] - proximal[i] for i in span) / len(span))
            importance = math.exp(sum(proximal[i] - behaviour[i] for i in span) / len(span))
            weight = min(importance, chosen.tis_cap)
            held = clip(ratio, 1 - chosen.clip_low, 1 + chosen.clip_high)
            a = advantages[t]
            if chosen.loss in ("ppo", "gspo"):
                total += -weight * min(ratio * a, held * a)
            elif chosen.loss == "cispo":
                total += -weight * held * a * current[t]
            else:
                total += -min(math.exp(current[t] - behaviour[t]), chosen.tis_cap) * a * current[t]
    return total


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("seed", range(4))
def test_loss_equals_the_slow_reference(name, seed):
    policy = tokens(seed=seed)
    loss, _ = summed_loss(policy, no_entropy(policy), None, options(name))
    assert float(loss) == pytest.approx(slow_reference(policy, options(name)), rel=1e-9)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_a_differentiable_loss_equals_finite_differences(name, seed):
    policy = tokens(seed=seed)

    def loss(logprobs_BT):
        moved = replace(policy, logprobs_BT=logprobs_BT)
        return summed_loss(moved, no_entropy(moved), None, options(name))[0]

    assert torch.autograd.gradcheck(loss, policy.logprobs_BT.clone().requires_grad_())


def gradient(policy, chosen):
    logprobs_BT = policy.logprobs_BT.clone().requires_grad_()
    moved = replace(policy, logprobs_BT=logprobs_BT)
    summed_loss(moved, no_entropy(moved), None, chosen)[0].backward()
    return logprobs_BT.grad


def test_cispo_gradient_is_that_of_reinforce_with_a_clipped_constant_weight():
    policy = tokens()
    ratio_BT = (policy.logprobs_BT - policy.proximal_BT).exp().clamp(0.9, 1.2)
    weight_BT = (policy.proximal_BT - policy.behaviour_BT).exp().clamp(max=1.1)
    expected_BT = -(ratio_BT * weight_BT * policy.advantages_BT) * policy.mask_BT
    torch.testing.assert_close(gradient(policy, options("cispo")), expected_BT)


def test_reinforce_gradient_is_the_truncated_weight_times_the_advantage():
    policy = tokens()
    weight_BT = (policy.logprobs_BT - policy.behaviour_BT).exp().clamp(max=1.1)
    torch.testing.assert_close(
        gradient(policy, options("reinforce")), -(weight_BT * policy.advantages_BT) * policy.mask_BT
    )


@pytest.mark.parametrize("name", ["ppo", "cispo", "reinforce"])
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    policy = tokens(spread=0.0)
    torch.testing.assert_close(gradient(policy, options(name)), -policy.advantages_BT * policy.mask_BT)


def test_ppo_gives_no_gradient_beyond_the_clip_on_the_side_of_the_advantage():
    logprobs_BT = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    policy = PolicyTokens(
        logprobs_BT=logprobs_BT,
        proximal_BT=logprobs_BT - 1.0,  # ratio e
        behaviour_BT=logprobs_BT - 1.0,
        advantages_BT=torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        mask_BT=torch.tensor([[True, True]]),
    )
    assert gradient(policy, options("ppo")).tolist() == [[0.0, pytest.approx(math.e)]]


@pytest.mark.parametrize("name", list(LOSSES))
def test_entries_outside_the_mask_change_nothing(name):
    policy = tokens()
    junk = torch.full_like(policy.logprobs_BT, 7.0)
    dirty = PolicyTokens(
        *(
            torch.where(policy.mask_BT, value, junk)
            for value in (policy.logprobs_BT, policy.proximal_BT, policy.behaviour_BT, policy.advantages_BT)
        ),
        policy.mask_BT,
    )
    clean_loss, clean_metrics = summed_loss(policy, no_entropy(policy), None, options(name))
    dirty_loss, dirty_metrics = summed_loss(dirty, no_entropy(dirty), None, options(name))
    assert float(dirty_loss) == pytest.approx(float(clean_loss))
    assert dirty_metrics == pytest.approx(clean_metrics)


@pytest.mark.parametrize("name", list(LOSSES))
def test_an_absurd_gap_between_policies_stays_finite(name):
    policy = tokens(spread=500.0)
    loss, metrics = summed_loss(policy, no_entropy(policy), None, options(name))
    assert math.isfinite(float(loss))
    assert all(map(math.isfinite, metrics.values()))
    assert gradient(policy, options(name)).isfinite().all()


def test_kl_to_the_reference_adds_its_k3_estimate():
    policy = tokens()
    reference_BT = policy.logprobs_BT + 0.3
    plain, _ = summed_loss(policy, no_entropy(policy), None, options("ppo"))
    held, metrics = summed_loss(policy, no_entropy(policy), reference_BT, options("ppo", kl_coef=0.5))
    per_token = math.exp(0.3) - 0.3 - 1
    count = int(policy.mask_BT.sum())
    assert metrics["kl_reference"] == pytest.approx(count * per_token)
    assert float(held - plain) == pytest.approx(0.5 * count * per_token)


def test_k3_is_unbiased_on_a_small_distribution_and_never_negative():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimates = k3(q.log(), p.log())
    assert (estimates >= 0).all()
    assert float((p * estimates).sum()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_entropy_bonus_lowers_the_loss_by_its_share():
    policy = tokens()
    entropy_BT = torch.full_like(policy.logprobs_BT, 2.0)
    plain, _ = summed_loss(policy, entropy_BT, None, options("ppo"))
    bonus, metrics = summed_loss(policy, entropy_BT, None, options("ppo", entropy_coef=0.1))
    count = int(policy.mask_BT.sum())
    assert float(plain - bonus) == pytest.approx(0.1 * 2.0 * count)
    assert metrics["entropy"] == pytest.approx(2.0 * count)


def test_metrics_count_clipped_and_truncated_tokens():
    zeros_BT = torch.zeros(1, 4, dtype=torch.float64)
    policy = PolicyTokens(
        logprobs_BT=zeros_BT,
        proximal_BT=torch.tensor([[0.0, -0.5, 0.5, 0.0]], dtype=torch.float64),
        behaviour_BT=torch.tensor([[0.0, -0.5, 0.0, -3.0]], dtype=torch.float64),
        advantages_BT=torch.ones(1, 4, dtype=torch.float64),
        mask_BT=torch.tensor([[True, True, True, False]]),
    )
    _, metrics = summed_loss(policy, zeros_BT, None, options("ppo"))
    assert metrics["ratio"] == pytest.approx(1 + math.exp(0.5) + math.exp(-0.5))
    assert metrics["clip_fraction"] == 1  # the ratio below the clip keeps its gradient, as the advantage is positive
    assert metrics["tis_fraction"] == 1
    assert metrics["kl_behaviour"] == pytest.approx(math.exp(0.5) - 0.5 - 1)
