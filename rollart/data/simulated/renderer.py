"""Observations of a `SimulatedEnvironment` as tokens: `protocols.Renderer` without a tokenizer.

The text "P R" becomes P tokens, of which the last is R: the number of tokens that a simulated engine answers with, as
it finds it at the end of a prompt. Engines thereby need no knowledge of tasks, and a request that is asked again of
another engine gets the same answer. What this file leaves out: text; the profile's tokens count the chat's markup.
"""

from __future__ import annotations

from collections.abc import Sequence


class SimulatedRenderer:
    """No token ends an answer: its length does."""

    stop_token_ids: tuple[int, ...] = ()

    def first(self, system_prompt: str, observation: str) -> list[int]:  # noqa: ARG002
        """P tokens, the last of which is R."""
        return _tokens(observation)

    def following(self, observation: str, previous_action: Sequence[int]) -> list[int]:  # noqa: ARG002
        """P tokens, the last of which is R."""
        return _tokens(observation)

    def decode(self, action: Sequence[int]) -> str:  # noqa: ARG002
        """Nothing was said."""
        return ""


def _tokens(observation: str) -> list[int]:
    num_tokens, num_answer_tokens = observation.split()
    tokens = [0] * int(num_tokens)
    tokens[-1] = int(num_answer_tokens)
    return tokens
