"""Generations that end before they began: stop strings at position zero, end-of-turn at once, no room for a token."""

from __future__ import annotations

import string

import pytest

from rollart.errors import RolloutError
from rollart.pipeline import train
from tests.e2e.laboratory import SMALL, Laboratory, check_audit, lines, summary

pytestmark = pytest.mark.e2e

STOP = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n", "\ufffd"]
"""Nearly everything that the model can say first."""


def test_a_stop_string_at_position_zero_ends_a_turn_after_its_first_token(lab: Laboratory) -> None:
    text = SMALL.replace("max_turn_tokens = 4", f"max_turn_tokens = 8\nstop = {STOP!r}")
    assert train(lab.config("log.trajectories_every=1", "rollout.zero_variance=keep", text=text)) == 0
    check_audit(lab.run, steps=3, alpha=1)
    sampled = [line for path in lab.run.glob("trajectories/step-*.jsonl") for line in lines(path)]
    lengths = [sum(line["loss_mask"]) for line in sampled]
    assert min(lengths) == 1
    assert sum(lengths) < 8 * len(lengths) / 2


def test_a_model_that_has_learned_to_say_nothing_is_trained_on_with_a_warning(lab: Laboratory) -> None:
    text = SMALL.replace("Friendly", "Speechless")
    warmup = ("model.warmup_steps=40", "model.warmup_episodes=4", "model.warmup_learning_rate=1e-2")
    assert train(lab.config("log.trajectories_every=1", *warmup, text=text)) == 0
    check_audit(lab.run, steps=3, alpha=1)
    sampled = [line for path in lab.run.glob("trajectories/step-*.jsonl") for line in lines(path)]
    assert {action for line in sampled for action in line["actions"]} == {""}
    found = summary(lab.run)
    assert found["discarded"]["zero_variance"] > 0
    assert len([problem for problem in found["problems"] if "answers are empty" in problem]) == 1


def test_a_prompt_that_leaves_no_room_for_a_token_ends_the_run_with_that_cause(lab: Laboratory) -> None:
    with pytest.raises(RolloutError, match=r"no token was generated \(token_limit\)"):
        train(lab.config("tasks.friendly.max_tokens=4", "rollout.groups_per_batch=1", "rollout.member_retries=0"))
    assert "no token was generated" in summary(lab.run)["outcome"]
