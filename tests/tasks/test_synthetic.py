import random
import statistics

import pytest

from rollart.tasks.synthetic import VOCABULARY, Synthetic, SyntheticOptions, _delay


def test_naming_the_asked_word_each_turn_earns_one():
    env = Synthetic(SyntheticOptions(turns_min=5, turns_max=5, words=3))
    observation, info = env.reset(4)
    assert info == {"turns": 5}
    total, ends = 0.0, []
    while not ends or not ends[-1]:
        assert len(observation.split()) == 2 + 3
        observation, reward, terminated, _, _ = env.step(observation.split()[1].rstrip("."))
        total += reward
        ends.append(terminated)
    assert total == pytest.approx(1.0)
    assert len(ends) == 5


def test_another_word_earns_nothing():
    env = Synthetic()
    asked = env.reset(4)[0].split()[1].rstrip(".")
    other = next(word for word in VOCABULARY if word != asked)
    assert env.step(other)[1] == 0.0


def test_the_number_of_turns_follows_the_profile():
    env = Synthetic(SyntheticOptions(turns_mean=3, turns_max=1000))
    turns = [env.reset(seed)[1]["turns"] for seed in range(2000)]
    assert statistics.mean(turns) == pytest.approx(3, rel=0.1)
    assert max(turns) > 8
    bounded = Synthetic(SyntheticOptions(turns_mean=3, turns_min=2, turns_max=4))
    assert {bounded.reset(seed)[1]["turns"] for seed in range(100)} == {2, 3, 4}


def test_rates_draw_failures_and_empty_returns():
    with pytest.raises(RuntimeError, match="simulated failure"):
        Synthetic(SyntheticOptions(failure_rate=1)).reset(0)
    assert Synthetic(SyntheticOptions(none_rate=1)).reset(0) is None
    env = Synthetic(SyntheticOptions(none_rate=0.3))
    assert sum(env.reset(seed) is None for seed in range(1000)) == pytest.approx(300, abs=60)


def test_faults_follow_the_seed_unless_drawn_per_member():
    def pattern(options):
        env = Synthetic(options)
        return [env.reset(seed) is None for seed in range(60)]

    by_seed = SyntheticOptions(none_rate=0.5)
    assert pattern(by_seed) == pattern(by_seed)
    fresh = SyntheticOptions(none_rate=0.5, per_member=True)
    assert pattern(fresh) != pattern(fresh)


@pytest.mark.parametrize(("tail", "sigma"), [("none", 1.0), ("lognormal", 1.0), ("gaussian", 0.3)])
def test_delays_keep_their_mean(tail, sigma):
    rng = random.Random(1)
    delays = [_delay(rng, 2.0, tail, sigma) for _ in range(20000)]
    assert min(delays) >= 0
    assert statistics.mean(delays) == pytest.approx(2.0, rel=0.05)
