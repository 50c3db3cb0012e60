"""The result of a simulation: what is printed of it, and that nothing is lost in JSON."""

from __future__ import annotations

from typing import get_args

import msgspec

from rollart.bound import Bound
from rollart.simulation import Simulation, report, table, to_json
from rollart.types import StopReason
from tests.planning import simulation

FULL = simulation(
    step_s=100.0,
    step_times=[90.0, 110.0],
    breakdown={"training": 20.0, "generate": 70.0, "reset": 0.001},
    waits_s={"generate": 140.0, "training": 12.0},
    utilisation={"actor_gen H800": 0.914, "actor_train H800": 0.002},
    age_histogram={"10": 1, "2": 2, "0": 1},
    aborted={"stale": 3},
    discarded={"env_error": 0},
    wasted_tokens={"stale": 250},
    recomputed_tokens=1234567,
    preemptions=2,
    unfinished_trajectories=7,
    unfinished_tokens=4321,
    generated_tokens=5321,
    bound=Bound(62.0, {"training": 20.0, "rollout": 62.0}, "rollout: H20 arithmetic 80%"),
    share_of_possible=0.62,
    events=["12.0 s: 4 nodes go"],
)


def test_everything_is_told() -> None:
    text = report(FULL)
    for line in (
        "schedule     rollart, alpha 1; 2 steps measured",
        "step time    100 s (from 90 to 110)",
        "throughput   100,000 tokens/s: 1,000,000 per step, 250,000 of them generated",
        "cost         128 an hour, 0.5 per million trained tokens",
        "lower bound  62 s, by rollout: H20 arithmetic 80% (training 20 s, rollout 62 s)",
        "possible     62% of a speed that no schedule could exceed",
        "waiting for generation    70.00    70%",
        "training                  20.00    20%",
        "actor_gen H800     91%",
        "actor_train H800  0.2%",
        "trainer: generate   140.00    70%",
        "rollout: training    12.00     6%",
        "trajectories aborted: stale                            3\n",
        "tokens generated for nobody: stale                   250\n",
        "tokens prefilled again                         1,234,567\n",
        "requests set back                                      2\n",
        "unfinished at the end, not lost: trajectories          7\n",
        "unfinished at the end, not lost: tokens            4,321\n",
        "\n  stale: older than alpha allows, before it was trained on\n",
        "\n  requests set back: they gave up their KV to others, for lack of room\n",
        "\n  unfinished at the end, not lost: running, or whole and waiting for a batch, when the last step ended\n",
        "12.0 s: 4 nodes go",
    ):
        assert line in text, text


def test_every_cause_of_lost_work_has_its_words() -> None:
    causes = [*get_args(StopReason), "zero_variance", "group_dropped", "cut short"]
    text = report(simulation(aborted=dict.fromkeys(causes, 1), wasted_tokens=dict.fromkeys(causes, 1)))
    for cause in causes:
        assert text.count(f"\n  {cause}: ") == 1


def test_ages_stand_in_order_of_their_numbers() -> None:
    lines = report(FULL).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("AGE"))
    assert [line.split() for line in lines[begin + 1 : begin + 4]] == [
        ["0", "1", "25%"],
        ["2", "2", "50%"],
        ["10", "1", "25%"],
    ]


def test_what_is_nothing_is_left_out() -> None:
    text = report(FULL)
    assert "env_error" not in text
    assert "resets" not in text
    small = report(simulation(trajectories={}))
    for title in ("WHERE", "DEVICES", "WAITS", "AGE", "LOST", "TASK", "lower bound"):
        assert title not in small


def test_json_keeps_every_field() -> None:
    assert msgspec.json.decode(to_json(FULL), type=Simulation) == FULL


def test_the_share_of_waste_is_of_all_tokens_whose_fate_is_known() -> None:
    assert FULL.wasted_share == 0.25
    assert simulation(generated_tokens=0).wasted_share == 0


def test_a_table_aligns_its_columns() -> None:
    assert table([("A", "BB"), ("long", "1")]) == "A     BB\nlong   1"
