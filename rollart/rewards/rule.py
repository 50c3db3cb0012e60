"""Rules: pure functions of one finished trajectory's text."""

from __future__ import annotations

import re

from rollart.types import RewardRequest

_QUESTION = re.compile(r"Sort: (-?\d+(?: -?\d+)*)")


def sorting(request: RewardRequest) -> float:
    """Share of right positions, counted over the longer of answer and expectation; 1.0 only for the exact answer."""
    question = _QUESTION.search(request.prompts[0])
    if question is None:
        raise ValueError(f"no 'Sort: ...' in the prompt {request.prompts[0]!r}")
    expected = sorted(map(int, question[1].split()))
    given = request.responses[0].split()
    right = sum(word == str(number) for word, number in zip(given, expected, strict=False))
    return right / max(len(given), len(expected))
