"""Observations of simulated environments as tokens."""

from __future__ import annotations

import pytest

from rollart.data.simulated.renderer import SimulatedRenderer


@pytest.mark.parametrize(("text", "tokens"), [("4 9", [0, 0, 0, 9]), ("1 3000", [3000])])
def test_an_observation_is_as_long_as_it_says_and_ends_with_the_length_of_the_answer(
    text: str, tokens: list[int]
) -> None:
    renderer = SimulatedRenderer()
    assert renderer.first("a system prompt", text) == tokens
    assert renderer.following(text, [0, 0]) == tokens


def test_an_answer_has_no_text_and_no_stop_token() -> None:
    assert SimulatedRenderer().decode([0, 0]) == ""
    assert SimulatedRenderer.stop_token_ids == ()
