"""One request inside the engine: its tokens, how far its keys and values reach, and when it ends.

Invariant: `computed` tokens of `tokens` (prompt, then generated) have keys and values in the request's slot; a request
that runs always has at least one more token than that.
What other workers generated of it before stands between the prompt and what is generated here.
Left out: scheduling.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from rollart.data.engines.prefixes import Kept
from rollart.data.engines.sampling import check_sampling
from rollart.errors import GenerationError
from rollart.types import FinishReason, GenRequest, GenResult


def check_request(request: GenRequest, max_model_tokens: int, vocabulary: int, tokenizer: Tokenizer | None) -> None:
    """Raise GenerationError when a request can never run."""
    name, prompt = f"request {request.request_id}", request.prompt
    if not prompt:
        raise GenerationError(f"{name}: the prompt is empty")
    if len(prompt) >= max_model_tokens:
        raise GenerationError(
            f"{name}: a prompt of {len(prompt)} tokens leaves no room in max_model_tokens {max_model_tokens}"
        )
    check_vocabulary(prompt, vocabulary)
    check_sampling(request.sampling)
    if request.sampling.stop and tokenizer is None:
        raise GenerationError(f"{name}: stop strings need a tokenizer.json beside the model")


def check_vocabulary(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise GenerationError for a token that the model does not know."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise GenerationError(f"a token id is outside the model's vocabulary of {vocabulary}")


class StopStrings:
    """Finds stop strings in text that arrives token by token; a string may span tokens or begin at the first."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._stream = DecodeStream(skip_special_tokens=False)
        self._overlap = max(map(len, stop)) - 1
        self._tail = ""

    def found(self, token: int) -> bool:
        """Whether the text up to and including `token` holds a stop string not seen before."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[-self._overlap :] if self._overlap else ""
        return any(stop in text for stop in self._stop)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Keys and values that were computed elsewhere, of tokens from `start` on; those before are the first of `base`."""

    base: Kept | None
    start: int
    received_L2HTD: Tensor


class Running:
    """A request from `add` to its result. `hands_over`: it ends here with its next token."""

    __slots__ = (
        *("cached", "computed", "limit", "logprobs", "request", "stop_ids", "stops", "tokens", "versions"),
        *("added_s", "decode_s", "prefill_s", "queue_s", "waited_s"),
        *("arrived", "hands_over", "received"),
    )

    def __init__(self, request: GenRequest, max_model_tokens: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.prompt)
        self.limit = min(len(self.tokens) + sampling.max_tokens, max_model_tokens)
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.stops = StopStrings(tokenizer, sampling.stop) if tokenizer is not None and sampling.stop else None
        self.computed = self.cached = 0
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.added_s = time.perf_counter()
        self.queue_s = self.prefill_s = self.decode_s = self.waited_s = 0.0
        self.arrived: Arrived | None = None
        self.hands_over = False
        self.received = 0

    def go_on(self, so_far: GenResult) -> None:
        """Begin after what was generated elsewhere. Raises GenerationError when nothing may follow it."""
        if len(self.tokens) + len(so_far.tokens) >= self.limit:
            raise GenerationError(f"request {self.request.request_id}: it has its {len(so_far.tokens)} tokens already")
        self.tokens += so_far.tokens
        self.logprobs += so_far.logprobs
        self.versions += so_far.versions
        self.cached, self.received = so_far.cached_tokens, so_far.received_tokens
        self.waited_s, self.prefill_s, self.decode_s = so_far.queue_s, so_far.prefill_s, so_far.decode_s
        if self.stops is not None:
            for token in so_far.tokens:
                self.stops.found(token)

    @property
    def num_pending(self) -> int:
        """Tokens still without keys and values."""
        return len(self.tokens) - self.computed

    def accept(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Append a generated token; the reason to end, if it is one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids or (self.stops is not None and self.stops.found(token)):
            return "stop"
        if len(self.tokens) >= self.limit:
            return "length"
        return "handoff" if self.hands_over else None

    def result(self, reason: FinishReason, error: str = "") -> GenResult:
        """What the caller gets."""
        return GenResult(
            request_id=self.request.request_id,
            tokens=self.tokens[len(self.request.prompt) :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            cached_tokens=self.cached,
            error=error,
            queue_s=self.waited_s + self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            received_tokens=self.received,
        )


def go_on_after(waiting: deque[Running], so_far: GenResult) -> Running:
    """The request that was queued last, which begins after what was generated elsewhere.

    Raises GenerationError when nothing may follow it, and the request is then queued no more.
    """
    running = waiting.pop()
    running.go_on(so_far)
    waiting.append(running)
    return running


def load_tokenizer(path: Any) -> Tokenizer | None:
    """The tokenizer of a `tokenizer.json`, or None when there is no such file."""
    return Tokenizer.from_file(str(path)) if path.is_file() else None
