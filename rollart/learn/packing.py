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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Device = torch.device | str
LONGEST_MASKED = 512
"""A row with more new tokens than this attends as a whole, so that masks stay small against everything else."""


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


@dataclass(frozen=True)
class _Row:
    """Where the tokens of one row are. Those before `start` belong to a row before it."""

    places: list[int]
    start: int

    @property
    def new(self) -> list[int]:
        return self.places[self.start :]

    @property
    def attends_whole(self) -> bool:
        """The causal kernel skips half of the work, so that it pays unless half of the queries can be left out."""
        return 2 * len(self.new) >= len(self.places) or len(self.new) > LONGEST_MASKED


def pack(rows: Sequence[list[int]], device: Device = "cpu") -> Packed:
    """Lay out rows of token ids, at least one of them and none empty, in any order."""
    tokens: list[int] = []
    positions: list[int] = []
    laid: dict[int, _Row] = {}
    before: list[int] = []
    places: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: rows[index]):
        row = rows[index]
        start = num_alike(before, row)
        places = [*places[:start], *range(len(tokens), len(tokens) + len(row) - start)]
        tokens += row[start:]
        positions += range(start, len(row))
        laid[index], before = _Row(places, start), row
    segments, collect = _segments(list(laid.values()), len(tokens), device)
    return Packed(
        tokens_N=torch.tensor(tokens, device=device),
        positions_N=torch.tensor(positions, device=device),
        place_BT=padded([laid[index].places for index in range(len(rows))], torch.long, device),
        segments=segments,
        collect_N=torch.tensor(collect, device=device),
    )


def _segments(rows: list[_Row], num_tokens: int, device: Device) -> tuple[tuple[Segment, ...], list[int]]:
    segments: list[Segment] = []
    collect = [0] * num_tokens
    first = 0
    for whole in (True, False):
        group = [row for row in rows if row.new and row.attends_whole == whole]
        if not group:
            continue
        queries = [row.places if whole else row.new for row in group]
        longest = max(map(len, queries))
        for row, asked in zip(group, queries, strict=True):
            end = first + len(asked)
            collect[row.new[0] : row.new[-1] + 1] = range(end - len(row.new), end)
            first += longest
        queries_RC = padded(queries, torch.long, device)
        keys_RW = queries_RC if whole else padded([row.places for row in group], torch.long, device)
        mask_R1CW = None if whole else _mask([row.start for row in group], longest, keys_RW)
        segments.append(Segment(queries_RC, keys_RW, mask_R1CW))
    return tuple(segments), collect


def _mask(starts: list[int], num_queries: int, keys_RW: Tensor) -> Tensor:
    places_W = torch.arange(keys_RW.shape[1], device=keys_RW.device)
    starts_R1 = torch.tensor(starts, device=keys_RW.device)[:, None]
    own_RC = starts_R1 + torch.arange(num_queries, device=keys_RW.device)
    hidden_RCW = places_W > own_RC[:, :, None]
    return torch.zeros(hidden_RCW.shape, device=keys_RW.device).masked_fill_(hidden_RCW, -math.inf)[:, None]


def num_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: Device) -> Tensor:
    """Rows as one tensor, with zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype, device=device)
