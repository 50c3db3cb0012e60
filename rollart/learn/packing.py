"""Rows of tokens laid end to end as one, in which what several of them begin with is there only once.

In a causal model a token's state follows from the tokens up to it, so rows that begin alike have equal states there:
members of a group share their prompt, groups of one task its system prompt. Everything in the model but attention
works token by token, so that each such state need be computed only once, and padding not at all. Attention alone still
sees rows: it gathers the keys and values of every row, and the queries of the tokens that this row was first to have.

Invariant: up to the token at `place_BT[b, t]`, its row equals row b up to position t; no token is there twice.
What this file leaves out: the attention (`data/trainers/attention.py`), and when packing is worth while (`batching`).

Shape suffixes: N packed tokens, B rows of T positions; in a segment R rows, with C queries each that see W keys.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str
LONGEST_MASKED = 512
"""A row with more new tokens than this attends as a whole, so that masks stay small against everything else."""
TYPE_CODES = {torch.long: "q", torch.bool: "b", torch.float32: "f"}


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows that attend in one call. Indices are those of packed tokens; what comes of padding is never looked at.

    `mask_R1CW`: 0 where a query sees a key, else minus infinity. None: C = W, and each sees those up to its own place.
    """

    queries_RC: Tensor
    keys_RW: Tensor
    mask_R1CW: Tensor | None


@dataclass(frozen=True, eq=False)
class Packed:
    """The packed row. `collect_N`: a token's place among the queries of all segments, one after the other."""

    tokens_N: Tensor
    positions_N: Tensor
    place_BT: Tensor
    segments: tuple[Segment, ...]
    collect_N: Tensor


def pack(rows: Sequence[list[int]], device: Device = "cpu") -> Packed:
    """Lay out rows of token ids, at least one of them and none empty, in any order."""
    # In the order of their tokens, what a row shares with any row before it, it shares with the one just before it.
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    tokens_BT = padded([rows[index] for index in order], torch.long)
    lengths_B1 = torch.tensor([[len(rows[index])] for index in order])
    times_T = torch.arange(tokens_BT.shape[1])
    starts_B1 = _num_shared(tokens_BT, lengths_B1)
    new_BT = (times_T >= starts_B1) & (times_T < lengths_B1)
    owner_BT = torch.where(new_BT, torch.arange(len(rows))[:, None], 0).cummax(0).values
    places_BT = (new_BT.flatten().cumsum(0).view_as(new_BT) - 1).gather(0, owner_BT)
    segments, collect_BT = _segments(places_BT, starts_B1[:, 0], lengths_B1[:, 0], device)
    return Packed(
        tokens_N=tokens_BT[new_BT].to(device),
        positions_N=times_T.expand_as(new_BT)[new_BT].to(device),
        place_BT=torch.empty_like(places_BT).index_copy_(0, torch.tensor(order), places_BT).to(device),
        segments=tuple(segments),
        collect_N=collect_BT[new_BT].to(device),
    )


def _num_shared(tokens_BT: Tensor, lengths_B1: Tensor) -> Tensor:
    """What each row begins with like the one before it, [B, 1]."""
    alike_BT = torch.zeros_like(tokens_BT)
    alike_BT[1:] = (tokens_BT[1:] == tokens_BT[:-1]).cumprod(1)
    return alike_BT.sum(1, keepdim=True).minimum(lengths_B1).minimum(lengths_B1.roll(1, 0))


def _segments(places_BT: Tensor, starts_B: Tensor, lengths_B: Tensor, device: Device) -> tuple[list[Segment], Tensor]:
    """Rows that attend as a whole, and rows of which only the new tokens do; and for each place that of its query.

    The causal kernel leaves out half of the work, so that asking for less pays where most queries are left out.
    """
    new_B = lengths_B - starts_B
    whole_B = (2 * new_B >= lengths_B) | (new_B > LONGEST_MASKED)
    segments: list[Segment] = []
    collect_BT = torch.zeros_like(places_BT)
    num_queries = 0
    for chosen_B, firsts_B in ((whole_B, torch.zeros_like(starts_B)), (~whole_B, starts_B)):
        rows_R = (chosen_B & (new_B > 0)).nonzero()[:, 0]
        if not len(rows_R):
            continue
        firsts_R = firsts_B[rows_R]
        segments.append(_segment(places_BT[rows_R], firsts_R, lengths_B[rows_R], device))
        longest = segments[-1].queries_RC.shape[1]
        begins_R = num_queries + longest * torch.arange(len(rows_R)) - firsts_R
        collect_BT[rows_R] = begins_R[:, None] + torch.arange(places_BT.shape[1])
        num_queries += longest * len(rows_R)
    return segments, collect_BT


def _segment(places_RT: Tensor, firsts_R: Tensor, lengths_R: Tensor, device: Device) -> Segment:
    """The rows' queries from their first on, the keys of all their tokens."""
    keys_RW = places_RT[:, : int(lengths_R.max())]
    if not firsts_R.any():
        return Segment(keys_RW.to(device), keys_RW.to(device), None)
    own_RC = firsts_R[:, None] + torch.arange(int((lengths_R - firsts_R).max()))
    hidden_RCW = torch.arange(keys_RW.shape[1]) > own_RC[:, :, None]
    mask_RCW = torch.zeros(hidden_RCW.shape).masked_fill_(hidden_RCW, -math.inf)
    queries_RC = keys_RW.gather(1, own_RC.clamp(max=keys_RW.shape[1] - 1))
    return Segment(queries_RC.to(device), keys_RW.to(device), mask_RCW[:, None].to(device))


def num_distinct(rows: Sequence[list[int]]) -> int:
    """Tokens that the packed row would have."""
    ordered = sorted(rows)
    shared = sum(num_alike(*pair) for pair in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - shared


def num_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: Device = "cpu") -> Tensor:
    """Rows as one tensor, with zeros on the right. Through an array, which reads lists much faster than a tensor."""
    longest = max(map(len, rows))
    values: array[Any] = array(TYPE_CODES[dtype])
    for row in rows:
        values.extend(row)
        values.frombytes(bytes(values.itemsize * (longest - len(row))))
    return torch.frombuffer(values, dtype=dtype).view(len(rows), longest).to(device)
