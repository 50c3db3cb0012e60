"""Distributions from samples: their mean is kept, their spread is found, and what has none is constant."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.data.simulated.fit import fitted, rounded, shared_part
from rollart.data.simulated.profile import Spread


def test_a_lognormal_sample_is_found_again() -> None:
    spread = fitted(Spread(12.0, "lognormal", 0.7).draws(random.Random("sample"), 20_000))
    assert spread.tail == "lognormal"
    assert spread.mean == pytest.approx(12.0, rel=0.03)
    assert spread.sigma == pytest.approx(0.7, rel=0.05)
    assert spread.high is None


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0, 3.0], [3.0, 3.001]])
def test_what_does_not_spread_is_constant(values: list[float]) -> None:
    assert fitted(values) == Spread(rounded(fmean(values)))


def test_of_nothing_comes_nothing() -> None:
    assert fitted([]) == fitted([0.0, 0.0]) == Spread(0.0)


LENGTHS = st.lists(st.integers(1, 200), min_size=2, max_size=300).filter(lambda values: len(set(values)) > 1)


@given(LENGTHS)
def test_a_bounded_fit_draws_what_the_sample_had_in_the_mean_and_nothing_beyond_it(values: list[int]) -> None:
    spread = fitted(values, bounded=True)
    assert len(spread.values) == min(len(values), 64)
    drawn = [spread.at((n + 0.5) / len(spread.values)) for n in range(len(spread.values))]
    assert min(values) <= min(drawn) <= max(drawn) <= max(values)
    assert fmean(drawn) == pytest.approx(fmean(values), rel=0.001)


def test_turns_up_to_a_limit_keep_the_heap_at_the_limit() -> None:
    rng = random.Random("turns")
    values = [min(6, int(Spread(3.0, "geometric").draw(rng))) for _ in range(4000)]
    drawn = [round(value) for value in fitted(values, bounded=True).draws(rng, 4000)]
    for turns in range(1, 7):
        assert drawn.count(turns) / 4000 == pytest.approx(values.count(turns) / 4000, abs=0.03)


def test_what_groups_share_is_told_from_what_members_do_not() -> None:
    rng = random.Random("groups")
    for shared_sigma, own_sigma in ((0.5, 0.5), (0.0, 0.5), (0.5, 0.1)):
        groups = {
            str(group): [math.exp(base + rng.gauss(0, own_sigma)) for _ in range(4)]
            for group, base in enumerate(rng.gauss(0, shared_sigma) for _ in range(2000))
        }
        expected = shared_sigma**2 / (shared_sigma**2 + own_sigma**2)
        assert shared_part(groups) == pytest.approx(expected, abs=0.05)


def test_groups_of_one_tell_nothing_of_what_is_shared() -> None:
    assert shared_part({"a": [1.0], "b": [2.0], "c": [1.0, 2.0]}) == 0.0
    assert shared_part({"a": [3.0, 3.0], "b": [3.0, 3.0]}) == 0.0
    assert shared_part({"a": [3.0, 3.0], "b": [5.0, 5.0]}) == 1.0
