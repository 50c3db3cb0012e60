"""Choosing tokens: temperature, top-k, top-p and greedy, for all rows at once.

Invariant: the log-probability returned for a token is the one under the distribution it was drawn from (greedy rows:
under temperature 1). Tokens are drawn by inverting the cumulative distribution, one uniform number per row. That number
follows from the seed, the trajectory and the position in it alone, so that what a trajectory says depends neither on
its neighbours in the batch nor on the worker or machine that it runs on.
Left out: penalties, logit biases, grammars.

Shapes: R rows, V vocabulary, N positions of one row, one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rollart.errors import GenerationError
from rollart.types import Sampling

BLOCK = 16
"""Random numbers drawn ahead per row."""


def check_sampling(sampling: Sampling) -> None:
    """Raise GenerationError for values that mean nothing."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise GenerationError(f"temperature {sampling.temperature}: must be finite and at least 0")
    if not 0 < sampling.top_p <= 1:
        raise GenerationError(f"top_p {sampling.top_p}: must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise GenerationError(f"top_k {sampling.top_k}: must be at least 0; 0 switches the filter off")
    if sampling.max_tokens < 1:
        raise GenerationError(f"max_tokens {sampling.max_tokens}: must be at least 1")
    if "" in sampling.stop:
        raise GenerationError("stop: an empty stop string would end every request")


class Sampler:
    """Draws tokens from logits. Call `arrange` whenever the rows change."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self.arrange((), (), ())

    def arrange(self, rows: Sequence[Sampling], trajectory_ids: Sequence[str], positions: Sequence[int]) -> None:
        """Say how each row samples, whose it is, and at which position of its trajectory the next token stands."""
        self._keys_R1 = self._tensor([_key(self._seed, each) for each in trajectory_ids])[:, None]
        self._positions_R1 = self._tensor(list(positions))[:, None]
        self._uniform_RN, self._used = self._positions_R1[:, :0], 0
        greedy = [row.temperature == 0 for row in rows]
        warm = [1.0 if row.temperature == 0 else row.temperature for row in rows]
        filtered = [row.temperature > 0 and (row.top_k > 0 or row.top_p < 1) for row in rows]
        self._greedy_R = self._tensor(greedy) if any(greedy) else None
        self._all_greedy = all(greedy)
        self._temperature_R1 = self._tensor(warm)[:, None] if any(t != 1 for t in warm) else None
        self._filters = None
        if any(filtered):
            top_k = [row.top_k if on and row.top_k else 1 << 30 for row, on in zip(rows, filtered, strict=True)]
            top_p = [row.top_p if on and row.top_p < 1 else math.inf for row, on in zip(rows, filtered, strict=True)]
            self._filters = self._tensor(top_k)[:, None], self._tensor(top_p)[:, None]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device, dtype=None if values else torch.int64)

    def __call__(self, logits_RV: Tensor) -> tuple[list[int], list[float]]:
        """One token and its log-probability per row. A row that is not finite gives a log-probability that is not."""
        logits_RV = logits_RV.float()
        if self._temperature_R1 is not None:
            logits_RV = logits_RV / self._temperature_R1
        if self._filters is not None:
            logits_RV = keep_top(logits_RV, *self._filters)
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        tokens_R = self._pick(logprobs_RV)
        chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
        return tokens_R.tolist(), chosen_R.tolist()

    def _pick(self, logprobs_RV: Tensor) -> Tensor:
        if self._all_greedy:
            return logprobs_RV.argmax(dim=-1)
        drawn_R = self._draw(logprobs_RV)
        return drawn_R if self._greedy_R is None else torch.where(self._greedy_R, logprobs_RV.argmax(dim=-1), drawn_R)

    def _draw(self, logprobs_RV: Tensor) -> Tensor:
        below_RV = logprobs_RV.exp().cumsum(dim=-1)
        total_R1 = below_RV[:, -1:]
        uniform_R1 = self._next_uniform()
        # Strictly below the total, so that the token found always has a probability above zero.
        threshold_R1 = torch.minimum(uniform_R1 * total_R1, total_R1.nextafter(torch.zeros_like(total_R1)))
        found_R = torch.searchsorted(below_RV, threshold_R1, right=True)[:, 0]
        return found_R.clamp_(max=logprobs_RV.shape[1] - 1)

    def _next_uniform(self) -> Tensor:
        if self._used == self._uniform_RN.shape[1]:
            ahead_N = torch.arange(BLOCK, device=self._device)
            self._uniform_RN = uniform(self._keys_R1, self._positions_R1 + ahead_N)
            self._positions_R1, self._used = self._positions_R1 + BLOCK, 0
        self._used += 1
        return self._uniform_RN[:, self._used - 1 : self._used].contiguous()


def uniform(keys_R1: Tensor, positions_RN: Tensor) -> Tensor:
    """Numbers of [0, 1) with 24 bits, by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) over a counter."""
    mixed_RN = keys_R1 + positions_RN * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed_RN = (mixed_RN ^ (mixed_RN >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed_RN >> 40 & 0xFFFFFF) / float(1 << 24)


def seed_of(seed: int, trajectory_id: str) -> int:
    """For engines that draw by seeds of their own: of one trajectory, at least 0, and below 2**62."""
    return _key(seed, trajectory_id) & (1 << 62) - 1


@functools.lru_cache(1 << 14)
def _key(seed: int, trajectory_id: str) -> int:
    """64 bits, signed."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def keep_top(logits_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor) -> Tensor:
    """Minus infinity outside the `top_k` best and, among those, outside the smallest set that holds `top_p`."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(ranks_V >= top_k_R1, -math.inf)
    probs_RV = sorted_RV.softmax(dim=-1)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    dropped_RV = (before_RV >= top_p_R1) & (ranks_V > 0)
    return torch.empty_like(logits_RV).scatter_(1, order_RV, sorted_RV.masked_fill(dropped_RV, -math.inf))
