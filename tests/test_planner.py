"""The planner: what it finds, what it leaves out, and that it says only what the simulations showed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from rollart.config import Config, parse
from rollart.errors import ConfigError, RolloutError
from rollart.plan_choice import changes, configured, given
from rollart.plan_command import Allowance
from rollart.plan_report import Plan, report, to_config, to_json, why
from rollart.planner import plan
from rollart.simulation import Simulation
from tests.e2e.laboratory import as_in_a_terminal
from tests.planning import Counting, deadly, formula, made, picky, simulation

ROOT = Path(__file__).parents[1]


def cost(config: Config) -> float:
    return sum(pool.count * pool.cost for pool in config.pools.values())


def test_the_best_plan_is_better_at_no_more_cost_and_says_so() -> None:
    found = plan(made(), formula, trials=60)
    assert found.best is not None
    assert found.best is found.plans[0]
    assert found.best.gain == found.best.simulation.throughput / found.given.simulation.throughput > 1.2
    assert found.budget == cost(made()) == 128
    assert all(cost(each.config) <= 128 for each in found.plans)
    assert [each.gain for each in found.plans] == sorted((each.gain for each in found.plans), reverse=True)
    assert found.given.config == made()


def test_many_processes_find_the_same_plans_as_one() -> None:
    alone, together = (plan(made(), formula, trials=30, jobs=jobs) for jobs in (1, 2))
    assert msgspec.json.encode(alone) == msgspec.json.encode(together)


def test_a_simulation_whose_process_is_killed_costs_no_other() -> None:
    refused, killed = plan(made(), picky, trials=30), plan(made(), deadly, trials=30, jobs=2)
    assert msgspec.json.encode(refused.plans) == msgspec.json.encode(killed.plans)
    killed_one = "the process that simulated it was killed (no memory left? --jobs 1 needs least)"
    assert killed.impossible == {killed_one: refused.impossible["it does not fit"]}


def test_no_more_simulations_are_run_than_asked_for_and_the_last_are_as_long_as_the_config_says() -> None:
    counting = Counting()
    found = plan(made(), counting, trials=40, top=3)
    assert len(counting.configs) <= 40
    assert len(found.plans) == 3
    assert [config.steps for config in counting.configs[:2]] == [3, 3]
    assert counting.configs[-1].steps == 6
    assert {config.seed for config in counting.configs} == {0}


def test_each_plan_is_simulated_once_per_length() -> None:
    counting = Counting()
    plan(made(), counting, trials=60)
    assert len({msgspec.json.encode(config) for config in counting.configs}) == len(counting.configs)


def test_what_cannot_be_simulated_is_counted_by_its_reason() -> None:
    found = plan(made("roles.actor_gen.devices=4", "roles.actor_gen.workers={ H800 = 4, H20 = 8 }"), formula, trials=40)
    assert found.impossible["the model does not fit: eight devices"] >= 1
    assert "the model does not fit: eight devices" in report(found)
    assert all(each.choice.tensor_parallel < 8 for each in found.plans)


def stuck(config: Config) -> Simulation:
    raise RolloutError("nothing runs")


def test_a_config_that_cannot_be_simulated_itself_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be simulated as it is: nothing runs"):
        plan(made(), stuck)


def test_alpha_stays_unless_more_is_allowed_and_is_then_marked() -> None:
    found = plan(made(), formula, trials=60)
    assert all(each.choice.bound <= 1 and not each.differs for each in found.plans)
    stale = plan(made(), formula, Allowance(devices={"H800": 32, "H20": 32}, max_alpha=4.0), trials=60)
    assert stale.best is not None
    assert stale.best.differs
    assert stale.best.choice.alpha is not None
    assert 1 < stale.best.choice.alpha <= 4
    assert "changes what is learned" in report(stale)
    assert "changes what is learned" in to_config(stale.best, stale.given, "paper.toml")


def test_an_interrupt_ends_the_search_with_what_was_found() -> None:
    found = plan(made(), Counting(interrupted_at=12), trials=60)
    assert found.interrupted
    assert found.plans
    assert "interrupted" in report(found)
    with pytest.raises(KeyboardInterrupt):
        plan(made(), Counting(interrupted_at=1), trials=60)


def test_a_smaller_budget_is_kept_also_where_the_config_costs_more() -> None:
    found = plan(made(), formula, Allowance(budget=64.0), trials=40)
    assert found.plans
    assert all(cost(each.config) <= 64 for each in found.plans)


def test_the_objective_may_be_the_cost_of_tokens() -> None:
    found = plan(made(), formula, objective="cost", trials=60)
    assert found.best is not None
    before, after = (each.simulation.cost_per_million_tokens for each in (found.given, found.best))
    assert found.best.gain == pytest.approx(before / after)
    assert after < before


def test_the_best_plan_is_written_as_a_config_that_reads_back() -> None:
    found = plan(made(), formula, trials=40)
    assert found.best is not None
    text = to_config(found.best, found.given, "paper.toml")
    assert parse(text) == found.best.config
    assert text.startswith("# Found by `rollart plan` from paper.toml:")
    assert f"{found.best.gain:.2f}x the trained tokens per second" in text


def test_all_figures_are_in_the_json() -> None:
    found = plan(made(), formula, trials=20)
    data = msgspec.json.decode(to_json(found))
    assert data["trials"] == found.trials
    assert [each["gain"] for each in data["plans"]] == [each.gain for each in found.plans]
    assert data["plans"][0]["simulation"]["throughput"] == found.plans[0].simulation.throughput
    assert data["given"]["gain"] == 1


def test_every_simulation_is_one_line() -> None:
    lines: list[str] = []
    found = plan(made(), formula, trials=20, say=lines.append)
    done = [line for line in lines if line.startswith("[")]
    assert len(done) == found.trials
    assert "1.000x" in done[0]
    assert "the config as it is" in done[0]


@pytest.fixture
def searching() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A search in a process group of its own, some simulations after its start, and its children."""
    command = [sys.executable, "-m", "tests.planning"]
    own = {"start_new_session": True, "preexec_fn": as_in_a_terminal}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **own) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        yield process, psutil.Process(process.pid).children(recursive=True)
        process.kill()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_to_the_search_or_all_its_processes_prints_the_best_so_far_and_leaves_no_process(
    send: Callable[[int, int], None],
    number: signal.Signals,
    searching: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, children = searching
    send(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert "simulations, interrupted: this is the best so far" in output
    assert process.returncode == 0
    assert len(children) >= 2
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.e2e
def test_a_search_that_is_ended_by_sigterm_tells_its_progress_and_writes_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    words = ["configs/paper.toml", "steps=3", "rollout.groups_per_batch=4", "--jobs", "1", "--json", str(out)]
    command = [sys.executable, "-m", "rollart", "plan", *words, "--out", str(tmp_path / "best.toml")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = [process.stderr.readline() for _ in range(5)]
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert re.fullmatch(r"rollart: \d+m\d\ds \[1/100\] 1.000x, [\d,]+ tokens/s: the config as it is\n", told[1])
    assert "simulations, interrupted: this is the best so far" in output
    assert msgspec.json.decode(out.read_bytes())["interrupted"]
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_no_process_outlives_a_search_that_was_killed(
    searching: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, children = searching
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=30)[1]


# ----------------------------------------------------------------------------------------------------------- reasons
def a_plan(result: Simulation, *overrides: str) -> Plan:
    config = made(*overrides)
    return Plan(given(config), config, result, 1.0)


def test_the_reason_names_what_took_the_time_and_what_became_of_it() -> None:
    before = simulation(
        step_s=100.0,
        breakdown={"training": 20.0, "generate": 70.0, "score": 1.0},
        utilisation={"actor_gen H800": 0.9, "actor_gen H20": 0.3},
    )
    after = simulation(
        step_s=80.0,
        breakdown={"training": 40.0, "generate": 35.0, "score": 1.0},
        utilisation={"actor_gen H800": 0.9, "actor_gen H20": 0.6, "actor_gen L20": 0.1},
    )
    assert why(a_plan(before), a_plan(after)) == (
        "Before, a step of 100.0 s was 70% waiting for generation and 20% training; "
        "actor_gen H800 worked 90% of the time, actor_gen H20 30%. "
        "Now waiting for generation takes 35.0 s instead of 70.0 s and training takes 40.0 s instead of 20.0 s. "
        "Actor_gen H20 works 60% instead of 30% and actor_gen L20, which is new, works 10%."
    )


def test_the_reason_says_when_other_trajectories_are_trained_on() -> None:
    before, after = simulation(), simulation(tokens_per_step=900_000.0, wasted_tokens={"redundant": 500})
    said = why(a_plan(before), a_plan(after, "rollout.extra_members=2"))
    assert "50% are for nobody, where it was 0%" in said
    assert "A batch has 10% fewer tokens: who starts more takes the first to finish, which are the short ones." in said
    assert "the short ones" not in why(a_plan(before), a_plan(after))


def test_changes_are_told_one_by_one() -> None:
    before, after = (
        given(made()),
        given(
            made(
                "affinity=auto",
                "alpha=2",
                "pools.H20.count=40",
                "rollout.extra_groups=2",
                "rollout.free_slots=train_start",
            )
        ),
    )
    assert changes(before, after) == [
        "devices: 32 H800 + 32 H20 -> 32 H800 + 40 H20",
        "alpha: 1 -> 2",
        "affinity: none -> by measurement",
        "extra groups: 0 -> 2",
        "slots freed at: its end -> the start of training",
    ]
    assert changes(before, before) == []


def test_a_choice_makes_a_config_that_makes_the_choice() -> None:
    config = made()
    for override in (
        "affinity=auto",
        "alpha=2",
        "schedule=areal",
        'simulate.prefill="H20"',
        "rollout.on_target=keep",
        "rollout.free_slots=train_start",
    ):
        choice = given(made(override))
        assert given(configured(config, given(config), choice)) == choice
    assert configured(config, given(config), given(config)) is config
