"""The simulator: the same result each time, nothing lost, nothing slower by better devices, faults that end well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rollart.config import Config, parse
from rollart.data.simulated.profile import Profile, Spread, TaskProfile, load_profile
from rollart.data.simulated.timeline import Timeline
from rollart.errors import ConfigError, RollartError, RunFolderError, WorkerDied
from rollart.schedule import SCHEDULES
from rollart.simulation import Simulation, to_json
from rollart.simulator import Run, run, simulate
from rollart.virtual_time import run_virtual

CONFIG = """
steps = 3
schedule = "rollart"

[simulate]
warmup_steps = 0

[tasks.webshop]
[tasks.gem_math]

[pools.H800]
count = 12
cost = 2.85
compatible = ["H20"]

[pools.H20]
count = 8
compatible = ["H800"]

[roles.actor_train]
device_class = "H800"
workers = 1
devices = 8

[roles.actor_gen]
workers = { H800 = 4, H20 = 8 }

[rollout]
groups_per_batch = 6
group_size = 4
max_model_tokens = 32768
engine_slots = 256
zero_variance = "keep"
"""
ONE_POOL = ("pools.H800.count=12", "pools.H20.count=1", "roles.actor_gen.workers={H800=4}")
STEADY = TaskProfile(
    turns=Spread(6),
    prompt_tokens=Spread(500),
    observation_tokens=Spread(100),
    response_tokens=Spread(200),
)
"""Every trajectory is like every other, and its environment takes no time."""


def made(*overrides: str) -> Config:
    return parse(CONFIG, overrides)


def result(*overrides: str, profile: Profile | None = None) -> Simulation:
    return simulate(made(*overrides), profile=profile)


def paper(**efficiency: float) -> Profile:
    profile = load_profile("paper")
    return replace(profile, efficiency=replace(profile.efficiency, **efficiency))


def all_like(task: TaskProfile) -> Profile:
    profile = load_profile("paper")
    return replace(profile, tasks=dict.fromkeys(profile.tasks, task))


def complaint(*overrides: str, profile: Profile | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        simulate(made(*overrides), profile=profile)
    text = str(caught.value)
    assert "\n" not in text
    return text


def command(tmp_path: Path, *words: str, hash_seed: str = "0") -> subprocess.Popen[str]:
    (tmp_path / "small.toml").write_text(CONFIG)
    return subprocess.Popen(
        [sys.executable, "-m", "rollart", "simulate", str(tmp_path / "small.toml"), *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# -------------------------------------------------------------------------------------------------- the same each time
def test_two_processes_with_other_hashes_give_the_same_json_byte_for_byte(tmp_path: Path) -> None:
    words = ("affinity=auto", "steps=2", 'simulate.faults=[{at_s=30,worker="inference-1"},{at_s=50,node="H20-0"}]')
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    processes = [
        command(tmp_path, *words, "--json", str(file), hash_seed=seed)
        for file, seed in zip(files, ("1", "2"), strict=True)
    ]
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "H20-0" in files[0].read_text()


def test_another_seed_gives_another_result() -> None:
    assert to_json(result("steps=1")) != to_json(result("steps=1", "seed=7"))


# ----------------------------------------------------------------------------------------------------- nothing is lost
@pytest.mark.parametrize(
    "overrides",
    [
        *([f"schedule={name}"] for name in SCHEDULES),
        ["rollout.extra_groups=2", "rollout.extra_members=1"],
        ["rollout.extra_groups=2", "rollout.on_target=keep", "alpha=2"],
        ["weights.asynchronous=false"],
        ["simulate.prefill=H800"],
        ['simulate.faults=[{at_s=40,worker="inference-0"},{at_s=60,pool="H20"}]'],
        ["simulate.prefill=H800", 'simulate.faults=[{at_s=40,node="H800-1"},{at_s=60,worker="inference-5"}]'],
    ],
    ids=" ".join,
)
def test_every_generated_token_was_trained_on_or_is_wasted(overrides: list[str]) -> None:
    found = result(*overrides)
    trained = found.generated_per_step * found.steps
    assert found.generated_tokens == trained + sum(found.wasted_tokens.values()) + found.unfinished_tokens
    assert found.bound is not None
    assert all(found.bound.step_s <= step_s * 1.0001 for step_s in found.step_times[1:])


def test_what_still_waits_when_the_last_step_ends_is_unfinished_and_not_lost() -> None:
    found = result("alpha=8", "rollout.zero_variance=keep")
    assert (found.wasted_tokens, found.aborted, found.discarded, found.wasted_share) == ({}, {}, {}, 0)
    assert found.unfinished_trajectories > 0
    assert found.unfinished_tokens > 0
    alternating = result("schedule=sync", "rollout.zero_variance=keep")
    assert (alternating.unfinished_trajectories, alternating.unfinished_tokens) == (0, 0)


def test_waste_before_the_first_measured_step_does_not_count() -> None:
    words = ("rollout.extra_groups=3", "alpha=0.5")
    whole, late = result(*words), result(*words, "simulate.warmup_steps=2")
    assert whole.step_times[2:] == late.step_times
    assert 0 < sum(late.wasted_tokens.values()) < sum(whole.wasted_tokens.values())


# --------------------------------------------------------------------------------------------------------- monotonicity
@pytest.mark.parametrize("schedule", ["sync", "sync_plus"])
def test_more_bandwidth_or_arithmetic_is_never_slower(schedule: str) -> None:
    words = (f"schedule={schedule}", "steps=2", *ONE_POOL)
    usual = result(*words, profile=paper()).step_s
    for better in ({"decode": 1.0}, {"prefill": 1.0}, {"train": 0.3}, {"prefill": 1.0, "decode": 1.0, "train": 0.3}):
        assert result(*words, profile=paper(**better)).step_s <= usual * 1.01, better


def test_stepping_together_or_apart_has_the_same_lower_bound() -> None:
    words = ("rollout.zero_variance=keep", "tasks.webshop.max_turns=6")
    together, apart = (result(f"schedule={name}", *words).bound for name in ("sync", "sync_plus"))
    assert together is not None
    assert apart is not None
    assert together.parts["longest trajectory"] == pytest.approx(apart.parts["longest trajectory"], rel=1e-9)


def test_environments_without_latency_make_lockstep_and_stepping_apart_equal() -> None:
    words = (*ONE_POOL, "roles.actor_gen.workers={H800=1}", "rollout.groups_per_batch=4")
    together = result("schedule=sync", *words, profile=all_like(STEADY))
    apart = result("schedule=sync_plus", *words, profile=all_like(STEADY))
    assert together.step_times == apart.step_times
    slow = all_like(replace(STEADY, step_s=Spread(10, "gaussian", 5)))
    assert (
        result("schedule=sync", *words, profile=slow).step_s
        > 1.05 * result("schedule=sync_plus", *words, profile=slow).step_s
    )


def test_affinity_changes_nothing_where_all_engines_are_alike() -> None:
    plain = to_json(result(*ONE_POOL))
    assert to_json(result(*ONE_POOL, "affinity={webshop='H800',gem_math='H800'}")) == plain
    assert to_json(result(*ONE_POOL, "affinity=auto")) == plain


def test_weights_that_travel_in_the_background_are_never_slower() -> None:
    for schedule in ("rollart", "one_off", "sync_plus"):
        words = (f"schedule={schedule}", "steps=4", "simulate.warmup_steps=1")
        on, off = (result(*words, f"weights.asynchronous={each}") for each in ("true", "false"))
        assert on.step_s <= off.step_s * 1.01, schedule


# ------------------------------------------------------------------------------------- invariants at the scale of a job
BIG = (
    "steps=3",
    "pools.H800.count=2000",
    "pools.H20.count=1000",
    "roles.actor_train.workers=125",
    "roles.actor_train.devices=4",
    "rollout.groups_per_batch=8",
    "rollout.group_size=2",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_age_and_load_are_right_on_3000_devices(schedule: str) -> None:
    alone = schedule == "rollart"
    engines = "{H800=1500,H20=1000}" if alone else "{H800=375,H20=250}"
    words = (f"roles.actor_gen.workers={engines}", f"roles.actor_gen.devices={1 if alone else 4}")
    config = made(*BIG, *words, f"schedule={schedule}")
    steps: list[int] = []

    def look(step: int, seconds: float) -> None:
        steps.append(step)
        simulation.scheduler.book.check()

    simulation = Run(config, load_profile("paper"), on_step=look)
    found = run_virtual(simulation.to_the_end())
    assert steps == [1, 2, 3]
    assert max(map(int, found.age_histogram)) <= config.effective_alpha
    simulation.scheduler.book.check()
    assert simulation.scheduler.book.num_live == simulation.proxy.num_in_flight == 0
    simulation.router.check([])
    assert len(found.resources) > (2600 if alone else 750)


# --------------------------------------------------------------------------------------------------------------- faults
def test_a_dead_pool_is_replaced_by_a_compatible_one_and_the_run_says_so() -> None:
    spare = ("pools.H800.count=16", "affinity={webshop='H800',gem_math='H20'}")
    found = result(*spare, 'simulate.faults=[{at_s=20,pool="H20"}]')
    said = "\n".join(found.events)
    assert len(found.step_times) == 3
    assert "20.0 s: fault: 1 nodes go: H20-0" in said
    assert "runs on H800" in said
    assert "going on without" in said
    assert set(found.resources.values()) == {"H800", "CPU"}


def test_a_dead_worker_is_started_again_where_it_was() -> None:
    found = result('simulate.faults=[{at_s=20,worker="inference-1"},{at_s=20,worker="inference-1"}]')
    assert "inference-1.1" in found.resources
    assert "inference-1" not in found.resources
    said = "\n".join(found.events)
    assert "worker inference-1 died: simulated fault" in said
    assert "fault: worker inference-1 is not there" in said


def test_a_dead_environment_worker_costs_its_trajectories_a_new_try() -> None:
    found = result('simulate.faults=[{at_s=20,worker="environment-0"}]')
    assert found.discarded["env_error"] > 0
    assert len(found.step_times) == 3


def test_a_dead_trainer_ends_the_run_with_a_clear_error() -> None:
    with pytest.raises(WorkerDied, match="worker 'training-0' died: simulated fault"):
        result('simulate.faults=[{at_s=20,worker="training-0"}]')


def test_the_loss_of_the_only_pool_ends_the_run_with_a_clear_error() -> None:
    with pytest.raises(RollartError, match=r"died: node H800-\d is gone"):
        result(*ONE_POOL, 'simulate.faults=[{at_s=20,pool="H800"}]')


def test_a_fault_that_comes_too_late_is_told_of() -> None:
    found = result("steps=1", 'simulate.faults=[{at_s=1e9,pool="H20"}]')
    assert any("fault of 1e+09 s: the run ended before" in line for line in found.events)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ('{at_s=1,pool="H2O"}', r"simulate.faults\[0\].pool: there is no pool 'H2O'; did you mean 'H20'"),
        ('{at_s=1,node="H20-9"}', r"simulate.faults\[0\].node: there is no node 'H20-9'"),
        ('{at_s=1,worker="inferenc-1"}', r"simulate.faults\[0\].worker: there is no worker 'inferenc-1'"),
        ("{at_s=1}", r"simulate.faults\[0\]: name one of pool, node and worker"),
        ('{at_s=1,pool="H20",node="H20-0"}', r"simulate.faults\[0\]: name one of pool, node and worker"),
    ],
)
def test_a_fault_of_what_is_not_there_is_a_mistake(fault: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        result(f"simulate.faults=[{fault}]")


# --------------------------------------------------------------------------------------------------- prefill elsewhere
@pytest.mark.parametrize(
    "affinity", ["affinity={}", "affinity=auto", "affinity={gem_math='H20'}", "affinity={default='H20'}"]
)
def test_devices_that_only_prefill_decode_nothing_whatever_the_affinity(affinity: str) -> None:
    timeline = Timeline()
    found = simulate(made("simulate.prefill=H800", affinity), timeline)
    events = timeline.to_chrome()["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    done: dict[str, set[str]] = {"H800": set(), "H20": set()}
    for each in events:
        if each["ph"] == "X" and (engine := tracks[each["tid"]]).startswith("inference"):
            done[found.resources[engine]].add(each["name"])
    assert done == {"H800": {"prefill"}, "H20": {"decode"}}


def test_devices_that_only_prefill_do_everything_once_no_others_are_left() -> None:
    found = result("simulate.prefill=H800", 'simulate.faults=[{at_s=20,pool="H20"}]', "pools.H20.compatible=[]")
    assert len(found.step_times) == 3
    assert "H20" not in found.resources.values()
    assert found.utilisation["actor_gen H800"] > 0


def test_training_that_a_run_measured_needs_no_figures_of_its_device() -> None:
    on_cpu = ("roles.actor_train.device_class=CPU", "roles.actor_train.devices=1")
    found = result(*on_cpu, profile=replace(load_profile("paper"), train_s_per_token=1e-4))
    assert found.breakdown["training"] > 0
    assert "device class 'CPU' has no figures" in complaint(*on_cpu)


def test_the_table_of_a_real_run_says_the_same() -> None:
    named = result("roles.actor_gen.workers={H20=8,H800=4}", "simulate.prefill=H800")
    assert result("roles.actor_gen.workers={H20=8}", "roles.prefill.workers={H800=4}") == named


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["simulate.prefill=H800"], "simulate.prefill: the table roles.prefill says who reads; keep one of them"),
        (["roles.prefill.device_class=H20"], "roles.prefill: it is on H20, actor_gen on H20; a simulated run reads on"),
        (["roles.prefill.devices=2"], "roles.prefill.devices: in a simulated run as many as roles.actor_gen.devices"),
    ],
)
def test_what_only_a_real_run_can_do_is_told(words: list[str], reason: str) -> None:
    assert reason in complaint("roles.actor_gen.workers={H20=4}", "roles.prefill.workers=1", *words)


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("simulate.model=Qwen3-8", "did you mean 'Qwen3-8B'"),
        ("simulate.profile=papr", "papr"),
        ("simulate.tasks={webshop='webshp'}", "the profile has no task 'webshp'; did you mean 'webshop'"),
        ("simulate.tasks={websho='webshop'}", "no task has this name; did you mean 'webshop'"),
        ("simulate.warmup_steps=3", "3 of 3 steps leave none to measure"),
        ("simulate.prefill=H2O", "simulate.prefill: no worker of actor_gen is on class 'H2O'"),
        ("pools.H20.count=0", "pools.H20.count: a simulated pool says how many devices it has"),
        ("pools.H800.count=1", "ask for fewer workers or devices"),
        ("simulate.prefill=H20", "all workers of actor_gen are on 'H20', and none decodes"),
        ("affinity={webshop='H800'}", "affinity.webshop: class 'H800' only prefills (simulate.prefill)"),
        ("pools.H20.device_class=B900", "B900"),
        ("simulate.model=Qwen3-32B", "take at least 2 devices for an engine"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(word: str, reason: str) -> None:
    engines = {"pools.H20.device_class=B900": "{H800=4,B900=8}", "simulate.prefill=H20": "{H20=8}"}
    words = [f"roles.actor_gen.workers={engines[word]}"] if word in engines else []
    words += ["simulate.prefill=H800"] if "only prefills" in reason else []
    assert reason in complaint(word, *words)


def test_a_task_that_the_profile_does_not_know_is_a_mistake() -> None:
    profile = load_profile("paper")
    few = replace(profile, tasks={"webshop": profile.tasks["webshop"]})
    assert "tasks.gem_math: the profile has no task 'gem_math'" in complaint(profile=few)


# ---------------------------------------------------------------------------------------------------------------- files
def test_the_files_hold_what_was_found_and_what_each_device_did(tmp_path: Path) -> None:
    trace, written = tmp_path / "trace.json", tmp_path / "result.json"
    config = made("steps=1")
    text = run(config, trace, written)
    found = msgspec.json.decode(written.read_bytes(), type=Simulation)
    assert found == simulate(config)
    assert f"{found.steps} steps measured" in text
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    busy = {tracks[each["tid"]] for each in events if each["ph"] == "X"}
    classes = {found.resources[name] for name in busy if name in found.resources}
    assert classes == {"H800", "H20"}
    assert "trainer" in busy


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none" / "a.json", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(RunFolderError, match=reason):
            run(made("steps=1"), None, path)


def test_a_full_disk_is_told_of_and_the_report_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFolderError, match=r"/dev/full: .*No space left"):
        run(made("steps=1"), None, Path("/dev/full"))
    assert "lower bound" in capsys.readouterr().err


def test_an_interrupt_ends_it_in_the_middle(tmp_path: Path) -> None:
    process = command(tmp_path, "steps=100000")
    assert process.stderr is not None
    while "step 2/" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "rollart: interrupted"
    assert "Traceback" not in said


# -------------------------------------------------------------------------------------------------------- odd clusters
@pytest.mark.parametrize(
    "overrides",
    [
        ["alpha=0.5"],
        ["rollout.group_size=1", "train.advantage=reinforce_pp"],
        ["rollout.groups_per_batch=1"],
        ["rollout.max_model_tokens=131072", "tasks.gem_math.max_tokens=131072"],
        ["rollout.max_model_tokens=2000"],
        ["tasks.webshop.max_turns=1", "tasks.gem_math.max_turn_tokens=10"],
        ["pools.H800.nodes={west='0-7',east='0-3'}", "pools.H800.count=0"],
        ["pools.H800.ids='0-11'", "pools.H800.count=0"],
        ["rollout.engine_slots=1"],
    ],
    ids=" ".join,
)
def test_odd_runs_end_well(overrides: list[str]) -> None:
    found = result("steps=2", *overrides)
    assert len(found.step_times) == 2
    trained = found.generated_per_step * found.steps
    assert found.generated_tokens == trained + sum(found.wasted_tokens.values()) + found.unfinished_tokens


def test_two_pools_of_one_class_stand_on_nodes_of_their_own() -> None:
    text = CONFIG.replace("[pools.H20]\ncount = 8", "[pools.\"o'h-1\"]\ndevice_class = 'H800'\ncount = 8\ncost = 3")
    text = text.replace("H800 = 4, H20 = 8", "H800 = 12")
    text = text.replace('compatible = ["H20"]', "").replace('compatible = ["H800"]', "")
    faults = 'simulate.faults=[{at_s=20,pool="o\'h-1"}]'
    found = simulate(parse(text, ["steps=2", faults]))
    assert any("fault: 1 nodes go: o'h-1-0" in line for line in found.events)
    assert len(found.step_times) == 2
    assert found.cost_per_hour == 12 * 2.85 + 8 * 3
