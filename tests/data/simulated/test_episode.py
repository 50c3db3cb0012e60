"""Episodes: the same for the same seed and key, tied within a group where the profile says so, and nowhere else."""

from __future__ import annotations

from statistics import correlation, fmean, stdev

import pytest

from rollart.data.simulated.episode import Episode, draw_episode, has_equal_rewards
from rollart.data.simulated.profile import Spread

from .profiles import LONG, profile

WILD = profile(
    turns=Spread(10.0, "geometric"),
    prompt_tokens=LONG,
    observation_tokens=LONG,
    response_tokens=LONG,
    reset_s=LONG,
    step_s=LONG,
    reset_failure_rate=0.3,
    reset_failure_s=Spread(300.0),
    step_failure_rate=0.05,
)


def lengths(episode: Episode) -> tuple[list[int], list[int]]:
    return episode.prompts, episode.responses


def test_an_episode_has_one_entry_per_turn() -> None:
    episode = draw_episode(profile(), 1, "g0-m0-a0")
    assert episode.prompts == [11, 7, 7, 7]
    assert episode.responses == [3, 3, 3, 3]
    assert episode.steps_s == [2.0, 2.0, 2.0, 2.0]
    assert (episode.reset_s, episode.reset_fails, episode.failing_step) == (5.0, False, -1)
    assert 0 <= episode.reward < 1


def test_seed_and_key_decide_alone() -> None:
    first = draw_episode(WILD, 1, "g0-m0-a0")
    assert draw_episode(WILD, 1, "g0-m0-a0") == first
    assert draw_episode(WILD, 2, "g0-m0-a0") != first
    assert draw_episode(WILD, 1, "g0-m1-a0") != first


def test_nothing_is_empty_and_every_episode_has_a_turn() -> None:
    nothing = Spread(0.0)
    tiny = profile(turns=nothing, prompt_tokens=nothing, response_tokens=nothing)
    assert lengths(draw_episode(tiny, 1, "a")) == ([1], [1])


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s": Spread(10.0, "gaussian", 5.0)},
        {"step_s": Spread(10.0)},
        {"reset_s": Spread(1.0, "uniform", 1.0)},
        {"reset_failure_rate": 0.9},
        {"step_failure_rate": 0.9},
    ],
)
def test_another_latency_leaves_turns_and_tokens_as_they_were(changes: dict[str, object]) -> None:
    plain, changed = profile(turns=LONG, response_tokens=LONG), profile(turns=LONG, response_tokens=LONG, **changes)
    for number in range(20):
        assert lengths(draw_episode(plain, 1, f"m{number}")) == lengths(draw_episode(changed, 1, f"m{number}"))


def test_failures_come_at_their_rates_and_take_their_own_time() -> None:
    episodes = [draw_episode(WILD, 1, f"m{number}") for number in range(4000)]
    failed = [each for each in episodes if each.reset_fails]
    assert len(failed) / len(episodes) == pytest.approx(0.3, abs=0.03)
    assert {each.reset_s for each in failed} == {300.0}
    steps = sum(len(each.steps_s) if each.failing_step < 0 else each.failing_step + 1 for each in episodes)
    assert sum(each.failing_step >= 0 for each in episodes) / steps == pytest.approx(0.05, abs=0.005)
    assert all(each.failing_step < len(each.steps_s) for each in episodes)


def test_a_group_shares_its_difficulty_and_members_differ_besides() -> None:
    shared = profile(turns=Spread(50.0, "lognormal", 0.1), difficulty_sigma=0.6)
    groups = [[len(draw_episode(shared, seed, f"m{n}").responses) for n in range(4)] for seed in range(300)]
    assert fmean(turns for group in groups for turns in group) == pytest.approx(50, rel=0.1)
    within = fmean(stdev(group) for group in groups)
    between = stdev(fmean(group) for group in groups)
    assert between > 4 * within > 0


def test_members_of_a_group_have_turns_as_alike_as_the_profile_says() -> None:
    for shared in (0.0, 0.5, 1.0):
        turns = Spread(5.5, "recorded", values=tuple(range(1, 11)))
        like = profile(turns=turns, turns_shared=shared)
        groups = [[len(draw_episode(like, seed, f"m{n}").responses) for n in range(2)] for seed in range(1500)]
        members = [turns for group in groups for turns in group]
        assert [members.count(turns) / 3000 for turns in range(1, 11)] == pytest.approx([0.1] * 10, abs=0.03)
        assert correlation(*zip(*groups, strict=True)) == pytest.approx(shared, abs=0.1)


def test_difficulty_keeps_turns_within_their_bounds() -> None:
    bounded = profile(turns=Spread(40.0, "uniform", 10.0, 30.0, 50.0), difficulty_sigma=1.0)
    turns = [len(draw_episode(bounded, seed, "m0").responses) for seed in range(200)]
    assert (min(turns), max(turns)) == (30, 50)


def test_members_of_a_group_get_equal_rewards_as_often_as_the_profile_says() -> None:
    some = profile(equal_rewards=0.25)
    rewards = [{draw_episode(some, seed, f"m{n}").reward for n in range(3)} for seed in range(2000)]
    equal = [len(group) == 1 for group in rewards]
    assert fmean(equal) == pytest.approx(0.25, abs=0.03)
    assert equal == [has_equal_rewards(some, seed) for seed in range(2000)]
