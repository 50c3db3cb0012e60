import random
import threading

import pytest

from rollart.errors import ConfigError, EnvError
from rollart.tasks.frozenlake import WORDS, FrozenLake
from rollart.tasks.sorting import Sorting
from rollart.tasks.warmup import episodes, left_out
from rollart.types import HELD_OUT, TaskSpec

LAKE = TaskSpec(name="lake", system_prompt="Walk.", max_turns=5)
SORT = TaskSpec(name="sort", weight=3.0, max_turns=1)


class Seeds(FrozenLake):
    """A lake that notes its seeds."""

    seen: list[int]

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def reset(self, seed=None):
        self.seen.append(seed)
        return super().reset(seed)


class Mute:
    """Has no `sample_action`."""

    def reset(self, seed=None):
        return "x", {}

    def step(self, action):
        return "x", 0.0, True, False, {}


@pytest.fixture
def renderer(renderers):
    return renderers["chatml"]


def test_an_episode_is_what_a_rollout_would_hold(renderer):
    (sequence,) = episodes({"lake": (LAKE, FrozenLake)}, renderer, 1, seed=4, observation_weight=0.25)
    text = renderer._tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    head, *turns = text.split("<|im_start|>assistant\n")
    env = FrozenLake()
    observation, _ = env.reset(_seed_of(4))
    assert head == f"<|im_start|>system\nWalk.<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n"
    for turn in turns[:-1]:
        action, _, rest = turn.partition("<|im_end|>")
        assert action in WORDS
        observation = env.step(action)[0]
        assert rest == f"\n<|im_start|>user\n{observation}<|im_end|>\n"
    assert turns[-1].removesuffix("<|im_end|>") in WORDS


def test_weights_mark_actions_and_later_observations(renderer):
    tasks = {"lake": (LAKE, FrozenLake)}
    sequence = next(s for s in episodes(tasks, renderer, 50, 1, 0.25) if s.weights.count(0.25) > 100)
    tokens, weights = sequence.tokens, sequence.weights
    assert len(tokens) == len(weights)
    start = weights.index(1.0)
    assert set(weights[:start]) == {0.0}
    assert set(weights[start:]) == {1.0, 0.25}
    actions = renderer._tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w == 1.0], False)
    assert set(actions.removesuffix("<|im_end|>").split("<|im_end|>")) <= set(WORDS)
    assert weights[-1] == 1.0


def test_tasks_are_played_by_their_weight_and_with_training_seeds_only(renderer):
    seen = []
    tasks = {"lake": (LAKE, lambda: Seeds(seen)), "sort": (SORT, Sorting)}
    sequences = list(episodes(tasks, renderer, 200, seed=0))
    assert len(sequences) == 200
    assert len(seen) == pytest.approx(50, abs=20)
    assert all(0 <= seed < HELD_OUT for seed in seen)


def test_the_same_seed_plays_the_same_episodes(renderer):
    tasks = {"lake": (LAKE, FrozenLake), "sort": (SORT, Sorting)}
    first, again, other = (list(episodes(tasks, renderer, 8, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_limits_cut_an_episode(renderer):
    short = TaskSpec(name="lake", max_turns=2, max_tokens=1000)
    for sequence in episodes({"lake": (short, FrozenLake)}, renderer, 5, seed=0):
        text = renderer._tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        assert text.count("<|im_start|>assistant") <= 2
    narrow = TaskSpec(name="lake", max_turns=50, max_tokens=90)
    lengths = {len(sequence.tokens) for sequence in episodes({"lake": (narrow, FrozenLake)}, renderer, 20, seed=0)}
    assert max(lengths) == 90


def test_tasks_without_random_actions_are_named_and_left_out(renderer):
    tasks = {"mute": (TaskSpec(name="mute", weight=99), Mute), "sort": (SORT, Sorting)}
    assert left_out(tasks) == ["mute"]
    assert len(list(episodes(tasks, renderer, 3, seed=0))) == 3
    with pytest.raises(ConfigError, match="no task of the mixture has a sample_action"):
        episodes({"mute": tasks["mute"]}, renderer, 3, seed=0)


def test_a_failing_and_a_hanging_environment_cost_an_episode_each(renderer):
    gate, faults = threading.Event(), iter(["raise", "hang", "none"])

    class Faulty(Sorting):
        def step(self, action):
            fault = next(faults, "")
            if fault == "raise":
                raise KeyError("x")
            if fault == "hang":
                gate.wait()
            return super().step(action) if fault != "none" else None

    spec = TaskSpec(name="sort", step_timeout_s=0.2)
    assert len(list(episodes({"sort": (spec, Faulty)}, renderer, 6, seed=0))) == 6
    gate.set()


def test_an_environment_that_always_fails_ends_the_warm_up_with_its_cause(renderer):
    class Broken(Sorting):
        def reset(self, seed=None):
            raise KeyError("no data")

    with pytest.raises(EnvError, match=r"warm-up: 4 episodes failed; the last one: reset of task 'sort': KeyError"):
        list(episodes({"sort": (SORT, Broken)}, renderer, 4, seed=0))


def _seed_of(seed):
    """The first episode's seed: one draw of the mixture comes before it."""
    rng = random.Random(seed)
    rng.choices([0])
    return rng.randrange(HELD_OUT)


def test_an_action_is_cut_at_the_limit_of_a_turn_as_in_a_rollout(renderer):
    word = TaskSpec(name="lake", max_turns=3, max_turn_tokens=1)
    for sequence in episodes({"lake": (word, FrozenLake)}, renderer, 5, seed=0):
        trained = [t for t, w in zip(sequence.tokens, sequence.weights, strict=True) if w == 1.0]
        assert set(trained) <= {renderer.encode(word)[0] for word in WORDS}
        text = renderer._tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1, "every turn but the last is closed"
