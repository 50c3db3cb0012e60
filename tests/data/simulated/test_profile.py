"""The workload model: what a profile file may say, how it is refused, and what the shipped one stands on."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.data.simulated.profile import (
    LINKS,
    Efficiency,
    Link,
    Profile,
    Spread,
    TaskProfile,
    load_profile,
    parse_profile,
    to_toml,
)
from rollart.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SMALL = """
[efficiency]
prefill = 0.5
decode = 0.5
train = 0.5
step_overhead_s = 0
tp_efficiency = 1
memory = 0.9
chunk_tokens = 512
slots_max = 8
train_overhead_s = 0

[links]
push = { latency_s = 1, bytes_per_s = 1e9 }
pull = { latency_s = 0, bytes_per_s = 1e9 }
load = { latency_s = 0, bytes_per_s = 1e9 }
kv = { latency_s = 0, bytes_per_s = 1e9 }

[tasks.maze]
turns = { mean = 4, tail = "geometric", high = 9 }
prompt_tokens = { mean = 100 }
response_tokens = { mean = 10, tail = "lognormal", sigma = 0.5 }
"""
WEIGHTS = [(15.26 * 2**30, 6.9, 5.5), (27.51 * 2**30, 14.4, 5.8), (61.02 * 2**30, 29.6, 9.4)]
"""Bytes, and seconds over TCP and over RDMA (paper, section 7; its sizes are GiB: those of the models in bf16)."""


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_profile(text, "mine.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------------- spreads
@pytest.mark.parametrize(
    ("spread", "mean", "deviation"),
    [
        (Spread(7.0), 7.0, 0.0),
        (Spread(10.0, "lognormal", 0.8), 10.0, 10.0 * math.sqrt(math.exp(0.64) - 1)),
        (Spread(10.0, "gaussian", 2.0), 10.0, 2.0),
        (Spread(10.0, "uniform", 6.0), 10.0, 6.0 / math.sqrt(3)),
        (Spread(4.0, "geometric"), 4.0, math.sqrt(12.0)),
        (Spread(1.0, "geometric"), 1.0, 0.0),
        (Spread(4.0, "recorded", values=(1.0, 2.0, 3.0, 10.0)), 4.0, math.sqrt(12.5)),
    ],
)
def test_draws_have_the_mean_and_the_deviation_of_their_tail(spread: Spread, mean: float, deviation: float) -> None:
    values = spread.draws(random.Random("tail"), 40_000)
    assert fmean(values) == pytest.approx(mean, rel=0.02)
    assert stdev(values) == pytest.approx(deviation, rel=0.05)


SPREADS = st.builds(
    Spread,
    mean=st.floats(1, 1e4),
    tail=st.sampled_from(["constant", "lognormal", "gaussian", "uniform", "geometric"]),
    sigma=st.floats(0, 3),
    low=st.floats(0, 50),
    high=st.none() | st.floats(50, 1e4),
)


@given(SPREADS, st.floats(0, 1), st.floats(0, 1))
def test_values_keep_within_their_bounds_and_grow_with_the_random_number(
    spread: Spread, one: float, other: float
) -> None:
    first, second = spread.at(min(one, other)), spread.at(max(one, other))
    assert spread.low <= first <= second <= (math.inf if spread.high is None else spread.high)


@given(SPREADS)
def test_a_draw_takes_one_random_number_whatever_the_tail(spread: Spread) -> None:
    drawn, plain = random.Random("same"), random.Random("same")
    one, several = spread.draw(drawn), spread.draws(drawn, 3)
    assert [one, *several] == [spread.at(plain.random()) for _ in range(4)]
    assert drawn.random() == plain.random()


def test_a_link_takes_its_latency_and_its_bytes() -> None:
    assert Link(latency_s=2.0, bytes_per_s=10.0).seconds(30) == 5.0


# ---------------------------------------------------------------------------------------------------------------- files
def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    profile = load_profile(str(path))
    assert profile.tasks["maze"].turns == Spread(4.0, "geometric", high=9.0)
    assert profile.tasks["maze"].reward_s == Spread(0.0)
    assert (profile.engine, profile.train_s_per_token) == ("roofline", None)
    assert profile.links["push"].seconds(1e9) == 2.0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("prefill = 0.5", "prefil = 0.5", "efficiency.prefil: unknown key; did you mean 'prefill'?"),
        ("prefill = 0.5", "", "efficiency.prefill: missing; docs/simulate.md lists what a profile holds"),
        ("prefill = 0.5", "prefill = 1.5", "efficiency.prefill: 1.5 is out of range; expected a number above 0"),
        ("chunk_tokens = 512", "chunk_tokens = 0.5", "efficiency.chunk_tokens: expected a whole number of at least 1"),
        ("turns = { mean = 4,", "turns = { mean = 'four',", "tasks.maze.turns.mean: expected a number of at least 0"),
        ("turns = { mean = 4,", "turns = {", "tasks.maze.turns.mean: missing"),
        ("turns = ", "turn = ", "tasks.maze.turn: unknown table; did you mean 'turns'?"),
        ("prompt_tokens = { mean = 100 }", "prompt_tokens = 100", "tasks.maze.prompt_tokens: expected a table"),
        ("prompt_tokens = { mean = 100 }", "", "tasks.maze.prompt_tokens: missing"),
        ('tail = "geometric"', "tail = 'pareto'", "tasks.maze.turns.tail: 'pareto' is not a choice"),
        ("mean = 4, ", "mean = 0.5, ", "tasks.maze.turns.mean: 0.5 is below 1, where a geometric tail begins"),
        ("high = 9", "high = 1, low = 2", "tasks.maze.turns.high: 1 is below low, 2"),
        ("{ mean = 100 }", "{ mean = 100, sigma = 1 }", "tasks.maze.prompt_tokens.sigma: means nothing with tail"),
        (
            "{ mean = 100 }",
            "{ mean = 100, values = [1] }",
            "tasks.maze.prompt_tokens.values: go with tail = 'recorded'",
        ),
        ("{ mean = 100 }", "{ mean = 100, tail = 'recorded' }", "tasks.maze.prompt_tokens.values: go with tail"),
        (
            "{ mean = 100 }",
            "{ mean = 1, tail = 'recorded', values = [2, 1] }",
            "tasks.maze.prompt_tokens.values: not in order",
        ),
        ("[tasks.maze]", "[tasks.maze]\nreset_failure_rate = 2", "tasks.maze.reset_failure_rate: 2 is out of range"),
        ("pull = ", "poll = ", "links.poll: not a link; did you mean 'pull'?"),
        ("pull = { latency_s = 0, bytes_per_s = 1e9 }", "", "links.pull: missing; add a table [links.pull]"),
        ("load = { latency_s = 0, ", "load = {", "links.load.latency_s: missing"),
        ("[efficiency]", "train_s_per_token = 0\n[efficiency]", "train_s_per_token: 0 is out of range"),
        ("[efficiency]", "engine = 'vllm'\n[efficiency]", "engine: 'vllm' is not a choice"),
        ("[efficiency]", "[efficiency", "not valid TOML: "),
    ],
)
def test_a_mistake_is_one_line_with_the_file_and_the_key(old: str, new: str, reason: str) -> None:
    assert old in SMALL
    assert complaint(SMALL.replace(old, new, 1)).startswith(f"mine.toml: {reason}")


def test_a_profile_without_tasks_says_how_to_add_one() -> None:
    text = SMALL.partition("[tasks.maze]")[0]
    assert complaint(text) == "mine.toml: tasks: missing; docs/simulate.md lists what a profile holds"
    assert complaint(f"{text}\n[tasks]\n") == "mine.toml: tasks: no task; add a table such as [tasks.maths]"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^simulate.profile: papr: No such file .* shipped profile: 'paper'$"):
        load_profile("papr")
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine.toml: not UTF-8 text"):
        load_profile(str(path))


NAMES = st.sampled_from(["maze", "two words", "my.module:Env", "mean", "\u03a9"])
SHARES = st.floats(0.01, 1)
TASKS = st.builds(
    TaskProfile,
    turns=st.builds(Spread, mean=st.floats(1, 50), tail=st.just("lognormal"), sigma=st.floats(0, 2)),
    prompt_tokens=st.builds(Spread, mean=st.floats(0, 1e5), high=st.none() | st.floats(0, 1e6)),
    response_tokens=st.builds(
        lambda values: Spread(1.0, "recorded", values=tuple(sorted(values))), st.lists(st.floats(1, 1e5), min_size=1)
    ),
    reset_failure_rate=st.floats(0, 1),
    reasons=st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]))),
)
LINK = st.builds(Link, latency_s=st.floats(0, 9), bytes_per_s=st.floats(1e-3, 1e15))
PROFILES = st.builds(
    Profile,
    engine=st.sampled_from(["roofline", "emulated"]),
    train_s_per_token=st.none() | st.floats(1e-9, 1),
    efficiency=st.builds(
        Efficiency,
        prefill=SHARES,
        decode=SHARES,
        train=SHARES,
        step_overhead_s=st.floats(0, 1),
        tp_efficiency=SHARES,
        memory=SHARES,
        chunk_tokens=st.integers(1, 10**6),
        slots_max=st.integers(1, 10**6),
        train_overhead_s=st.floats(0, 1),
    ),
    links=st.fixed_dictionaries(dict.fromkeys(LINKS, LINK)),
    tasks=st.dictionaries(NAMES, TASKS, min_size=1),
)


@given(PROFILES)
def test_what_is_written_reads_back_equal(profile: Profile) -> None:
    assert parse_profile(to_toml(profile)) == profile


def test_defaults_are_not_written() -> None:
    text = to_toml(parse_profile(SMALL))
    assert "[tasks.maze]" in text
    assert 'turns = { mean = 4.0, tail = "geometric", high = 9.0 }' in text
    assert "reset_s" not in text
    assert "reasons" not in text


# ------------------------------------------------------------------------------------------------- the shipped profile
def tables(profile: Profile) -> list[tuple[str, Efficiency | Link | TaskProfile]]:
    """Every table of numbers, with what it is called."""
    return [
        ("efficiency", profile.efficiency),
        *((f"links.{name}", link) for name, link in profile.links.items()),
        *((f"tasks.{name}", task) for name, task in profile.tasks.items()),
    ]


@pytest.mark.parametrize(("name", "table"), tables(load_profile("paper")))
def test_every_number_of_the_shipped_profile_has_a_reason(name: str, table: Efficiency | Link | TaskProfile) -> None:
    text = to_toml(load_profile("paper"))
    block = re.search(rf"^\[{re.escape(name)}\]\n((?:.+\n)+)", text, re.MULTILINE)
    assert block is not None
    keys = [line.partition(" = ")[0] for line in block[1].splitlines()]
    assert sorted(table.reasons) == sorted(keys)


def least_squares(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Latency and rate of latency + bytes / rate."""
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)
    return y_mean - slope * x_mean, 1 / slope


def test_the_shipped_links_are_the_least_squares_of_the_papers_transfers() -> None:
    links = load_profile("paper").links
    for name, column in (("push", 1), ("pull", 2)):
        latency_s, bytes_per_s = least_squares([(row[0], row[column]) for row in WEIGHTS])
        assert links[name].latency_s == pytest.approx(latency_s, rel=0.01)
        assert links[name].bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


def test_the_shipped_resets_have_the_papers_tail_and_failures() -> None:
    task = load_profile("paper").tasks["swe_bench"]
    rng = random.Random("resets")
    longest = fmean(task.reset_s.at(rng.random() ** (1 / 128)) for _ in range(20_000))  # of 128, by its distribution
    of_the_last = 0.146 * 365.7  # the trajectory that ends last has a long reset, if not the longest
    assert of_the_last < longest < 2 * of_the_last
    assert task.reset_s.at(1 - 1e-4) > 200
    assert 1 - (1 - task.reset_failure_rate) ** 128 == pytest.approx(0.1, rel=0.02)
    rollout_s = 513.3 - (0.231 + 0.085) * 365.7
    assert task.reset_failure_s.mean + task.reset_s.mean == pytest.approx(0.78 * rollout_s, rel=0.03)


@pytest.mark.parametrize(
    ("name", "fewest", "most"),
    [("swe_bench", 30, 50), ("webshop", 5, 30), ("frozenlake", 20, 100), ("gem_math", 1, 4), ("gem_game", 1, 1)],
)
def test_the_shipped_tasks_have_the_papers_turns_and_fit_into_the_context(name: str, fewest: int, most: int) -> None:
    task = load_profile("paper").tasks[name]
    assert (task.turns.at(0.0), task.turns.at(1.0)) == (fewest, most)
    turns = task.turns.mean
    mean = task.prompt_tokens.mean + turns * task.response_tokens.mean + (turns - 1) * task.observation_tokens.mean
    assert mean < 32_000


@pytest.mark.parametrize(
    ("task", "key", "mean", "most"),
    [
        ("frozenlake", "step_s", 0.02, 1.4),
        ("gem_math", "reward_overhead_s", 0.01, 2.1),
        ("swe_bench", "reward_overhead_s", 0.01, 2.1),
    ],
)
def test_the_shipped_call_overheads_have_the_papers_mean_and_maximum(
    task: str, key: str, mean: float, most: float
) -> None:
    spread: Spread = getattr(load_profile("paper").tasks[task], key)
    assert fmean(spread.at((n + 0.5) / 100_000) for n in range(100_000)) == pytest.approx(mean, rel=0.05)
    assert spread.at(1 - 1 / 30_000) == pytest.approx(most, rel=0.1)
    assert spread.high == most


def test_profiles_in_documents_are_valid() -> None:
    found = re.findall(r"```toml profile\n(.*?)```", (ROOT / "docs" / "simulate.md").read_text(), re.DOTALL)
    assert found
    for text in found:
        parse_profile(text)
