"""The packed row: nothing is there twice, and every token attends to its own row up to itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.learn.packing import LONGEST_MASKED, num_alike, num_distinct, pack

# Few kinds of tokens, so that rows often begin alike.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def seen(packed):
    """For each packed token the tokens that its query sees."""
    by_query = []
    for segment in packed.segments:
        num_keys = segment.keys_RW.shape[1]
        for row, queries in enumerate(segment.queries_RC.tolist()):
            for column, query in enumerate(queries):
                if segment.mask_R1CW is None:
                    visible_W = torch.arange(num_keys) <= column
                else:
                    visible_W = segment.mask_R1CW[row, 0, column] == 0
                by_query.append((query, segment.keys_RW[row][visible_W].tolist()))
    return [by_query[place] for place in packed.collect_N.tolist()]


def assert_exact(rows):
    packed = pack(rows)
    attention = seen(packed)
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert len(packed.tokens_N) == len(packed.positions_N) == len(prefixes) == num_distinct(rows)
    for row, places in zip(rows, packed.place_BT.tolist(), strict=True):
        own = places[: len(row)]
        assert packed.tokens_N[own].tolist() == row
        assert packed.positions_N[own].tolist() == list(range(len(row)))
        for position, place in enumerate(own):
            query, keys = attention[place]
            assert query == place
            assert keys == own[: position + 1]
    for segment in packed.segments:
        assert segment.mask_R1CW is None or bool((segment.mask_R1CW == 0).any(-1).all())
    return packed


@given(rows=ROWS)
def test_every_token_is_there_once_and_sees_its_row_up_to_itself(rows):
    assert_exact(rows)


def test_members_of_a_group_share_their_prompt_and_only_their_answers_attend_again():
    prompt = list(range(20))
    packed = assert_exact([[*prompt, 30 + member, 40] for member in range(4)])
    assert len(packed.tokens_N) == 20 + 4 * 2
    whole, tails = packed.segments
    assert whole.queries_RC.shape == (1, 22)
    assert tails.queries_RC.shape == (3, 2)
    assert tails.keys_RW.shape == (3, 22)


def test_rows_that_share_little_take_the_causal_kernel_whole():
    packed = assert_exact([[1, 2, member, 4, 5, 6] for member in range(3)])
    (whole,) = packed.segments
    assert whole.mask_R1CW is None
    assert len(packed.tokens_N) == 2 + 3 * 4


def test_rows_without_anything_in_common_lie_end_to_end():
    packed = assert_exact([[1, 2, 3], [4, 5]])
    assert packed.tokens_N.tolist() == [1, 2, 3, 4, 5]


def test_a_row_that_another_begins_with_needs_nothing_of_its_own():
    packed = assert_exact([[1, 2, 3, 4], [1, 2], [1, 2, 3, 4]])
    assert len(packed.tokens_N) == 4


@pytest.mark.parametrize(("num_new", "num_segments"), [(LONGEST_MASKED, 2), (LONGEST_MASKED + 1, 1)])
def test_a_mask_is_never_made_for_very_many_new_tokens(num_new, num_segments):
    begin = [1] * (2 * num_new)
    packed = pack([[*begin, *[2] * num_new], [*begin, *[3] * num_new]])
    assert len(packed.segments) == num_segments
    assert len(packed.tokens_N) == 4 * num_new


@given(rows=st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=2, max_size=2))
def test_num_alike_counts_the_common_beginning(rows):
    first, second = rows
    count = num_alike(first, second)
    assert first[:count] == second[:count]
    assert count == min(len(first), len(second)) or first[count] != second[count]
