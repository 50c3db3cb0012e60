"""Which of an engine's requests its time went to: prefill as work, decoding as latency.

One step may read prompts and decode at once, and its time cannot be taken apart by a clock. Decoding is charged what a
step that only decoded took lately, and prompts the rest, shared by tokens; before any such step, both by tokens.

Invariant: what a step charges to prefill and to decoding adds up to its time. What this file leaves out: measuring it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart.data.engines.request import Running

MEMORY = 0.8
"""Weight of earlier steps in the time of a step that only decodes."""


class StageTimes:
    """Charges steps to requests."""

    def __init__(self) -> None:
        self._decode_step_s: float | None = None

    def charge(self, seconds: float, decoding: Sequence[Running], prefilling: Sequence[tuple[Running, int]]) -> None:
        """Add a step's time to its requests; `prefilling` says how many prompt tokens it computed of each."""
        num_tokens = sum(number for _, number in prefilling)
        decode_s = self._decode_part(seconds, len(decoding), num_tokens)
        for running in decoding:
            running.decode_s += decode_s
        for running, number in prefilling:
            running.prefill_s += (seconds - decode_s) * number / num_tokens

    def _decode_part(self, seconds: float, num_decoding: int, num_tokens: int) -> float:
        if not num_decoding:
            return 0.0
        if not num_tokens:
            earlier = seconds if self._decode_step_s is None else self._decode_step_s
            self._decode_step_s = MEMORY * earlier + (1 - MEMORY) * seconds
            return seconds
        if self._decode_step_s is None:
            return seconds * num_decoding / (num_decoding + num_tokens)
        return min(seconds, self._decode_step_s)
