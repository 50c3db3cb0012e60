"""A recorded run as a workload: what was drawn is found again, and what is missing or thin is said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from rollart.config import parse
from rollart.data.simulated.episode import draw_episode
from rollart.data.simulated.profile import Spread, TaskProfile, load_profile, parse_profile, to_toml
from rollart.errors import ConfigError
from rollart.metrics import Metrics
from rollart.profiling import recorded
from rollart.run_folder import RunFolder
from rollart.types import Group, GroupSpec, Trajectory, Turn

MAZE = TaskProfile(
    turns=Spread(6.0, "lognormal", 0.4),
    prompt_tokens=Spread(100.0),
    observation_tokens=Spread(40.0, "uniform", 20.0),
    response_tokens=Spread(30.0, "lognormal", 0.6),
    reset_s=Spread(5.0, "lognormal", 0.5),
    step_s=Spread(0.2, "lognormal", 1.0),
    difficulty_sigma=0.4,
)
CONFIG = "[tasks.maze]\n[tasks.maths]\n"


def played(task: str, group: int, member: int, profile: TaskProfile = MAZE, **changes: Any) -> Trajectory:
    """A trajectory as the control plane leaves it."""
    episode = draw_episode(profile, group, f"{task}-{group}-{member}")
    turns = [
        Turn([1] * prompt, [2] * response, [-1.0] * response, [0] * response, step_s=step_s)
        for prompt, response, step_s in zip(episode.prompts, episode.responses, episode.steps_s, strict=True)
    ]
    seconds = {"reset": episode.reset_s, "generate": 1.0, "step": sum(episode.steps_s), "score": 1e-5}
    values = {"turns": turns, "seconds": seconds, "reward": episode.reward, "stop_reason": "done", **changes}
    return Trajectory(f"{task}-{group}-{member}", f"g{group}", task, group, **values)


def failed(task: str, **changes: Any) -> Trajectory:
    return Trajectory("lost", "g0", task, 0, stop_reason="env_error", **changes)


def write_step(
    folder: RunFolder, step: int, groups: Sequence[Sequence[Trajectory]], lost: Iterable[Trajectory] = (), **more: float
) -> None:
    """One step of a run: `groups` are trained on and sampled whole, `lost` are not."""
    metrics = Metrics()
    kept = [trajectory for group in groups for trajectory in group]
    for trajectory in (*kept, *lost):
        metrics.trajectory(trajectory, kept=trajectory in kept)
    trained = {"train/seconds": 2.0, "train/tokens": 1000, "wait/weights": 1.0 + 0.5 * step}
    folder.write_metrics(step, {**metrics.flush(), **trained, **more})
    specs = (GroupSpec(group[0].seed, group[0].task, group[0].seed) for group in groups)
    folder.write_batch(step, [Group(spec, list(group)) for spec, group in zip(specs, groups, strict=True)], step)
    folder.write_trajectories(step, kept)


def run(tmp_path: Path, text: str = CONFIG) -> RunFolder:
    return RunFolder.create(parse(text, [f"log.folder={tmp_path}", "log.tensorboard=false"]), ["x.toml"])


def many(task: str, count: int, profile: TaskProfile = MAZE, start: int = 0) -> list[list[Trajectory]]:
    return [[played(task, group, member, profile) for member in range(4)] for group in range(start, start + count)]


def test_what_a_run_drew_is_found_again(tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        for step in range(1, 7):
            write_step(folder, step, [*many("maze", 60, start=60 * step), *many("maths", 8, start=1000 + 8 * step)])
        found = recorded(folder.path)
    assert found.warnings == []
    maze = found.profile.tasks["maze"]
    assert set(found.profile.tasks) == {"maze", "maths"}
    for key in ("turns", "observation_tokens", "response_tokens", "reset_s", "step_s"):
        assert getattr(maze, key).mean == pytest.approx(getattr(MAZE, key).mean, rel=0.12), key
        assert getattr(maze, key).tail == ("lognormal" if key.endswith("_s") else "recorded")
    assert maze.prompt_tokens == Spread(100.0)
    assert stdev(map(math.log, maze.response_tokens.values)) == pytest.approx(0.6, rel=0.1)
    assert maze.step_s.sigma == pytest.approx(1.0, rel=0.15)
    assert maze.turns_shared == pytest.approx(0.5, abs=0.12)
    assert stdev(map(math.log, maze.turns.values)) == pytest.approx(0.4 * math.sqrt(2), rel=0.2)
    assert (maze.reset_failure_rate, maze.step_failure_rate, maze.equal_rewards) == (0.0, 0.0, 0.0)
    assert (maze.reward_s, maze.reward_overhead_s) == (Spread(0.0), Spread(0.0))
    assert maze.reasons["turns"] == "1440 sampled trajectories of 360 groups"
    assert "1440 sampled trajectories" in maze.reasons["step_s"]


def test_a_profile_of_a_run_reads_back_equal(tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        write_step(folder, 1, [*many("maze", 8), *many("maths", 8)])
        profile = recorded(folder.path).profile
    assert parse_profile(to_toml(profile)) == profile


def test_training_and_weights_take_what_they_took(tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        write_step(folder, 1, [*many("maze", 8), *many("maths", 8)], **{"train/seconds": 50.0})
        for step in range(2, 7):
            write_step(folder, step, [], **{"train/seconds": 3.0, "train/tokens": 1500})
        folder.write_metrics(6, {"eval/maze/success": 0.5})
        profile = recorded(folder.path).profile
    assert profile.train_s_per_token == 0.002
    assert profile.reasons["train_s_per_token"] == "5 train steps, 7,500 generated tokens in 15 s"
    assert sum(profile.links[name].seconds(16e9) for name in ("push", "pull", "load")) == pytest.approx(0.5, rel=1e-3)
    assert profile.efficiency == load_profile("paper").efficiency


@pytest.mark.parametrize(("engine", "pace"), [("embedded", "roofline"), ("emulated", "emulated")])
def test_the_engine_says_the_pace(engine: str, pace: str, tmp_path: Path) -> None:
    with run(tmp_path, f"engine = '{engine}'\n{CONFIG}") as folder:
        write_step(folder, 1, many("maze", 8))
        assert recorded(folder.path).profile.engine == pace


def test_failures_are_counted_over_all_trajectories(tmp_path: Path) -> None:
    groups = many("maze", 10)
    groups[0][0].failed_resets_s = [30.0]
    groups[0][0].seconds["reset"] = 1000.0
    broken = played("maze", 1, 0, stop_reason="env_error")
    lost = [failed("maze", failed_resets_s=[20.0, 40.0, 30.0]), broken, failed("maths", failed_resets_s=[1.0])]
    with run(tmp_path) as folder:
        write_step(folder, 1, groups, lost)
        maze = recorded(folder.path).profile.tasks["maze"]
    steps = sum(len(trajectory.turns) for group in [*groups, [broken]] for trajectory in group)
    assert maze.reset_failure_rate == pytest.approx(4 / (42 + 4), rel=1e-3)
    assert maze.reset_failure_s == Spread(30.0)
    assert maze.step_failure_rate == pytest.approx(1 / steps, rel=1e-3)
    assert maze.reset_s.mean < 20, "a reset that was tried again tells nothing of those that work"
    assert maze.reasons["reset_failure_rate"] == "4 of 46 resets of all trajectories"


def test_groups_of_equal_rewards_are_counted_whether_replaced_or_kept(tmp_path: Path) -> None:
    groups = many("maze", 5)
    for trajectory in groups[0]:
        trajectory.reward = 0.5
    with run(tmp_path) as folder:
        write_step(folder, 1, groups, **{"groups/zero_variance/maze": 3})
        maze = recorded(folder.path).profile.tasks["maze"]
    assert (maze.equal_rewards, maze.reasons["equal_rewards"]) == (0.5, "8 complete groups")


@pytest.mark.parametrize(
    ("scope", "rewards", "device", "overhead"),
    [
        ("trajectory", {"maze": {"results": 40, "busy_s": 60.0}}, 1.5, 0.5),
        ("group", {"maze": {"results": 10, "busy_s": 60.0}}, 6.0, 0.0),
        ("trajectory", {}, 0.0, 2.0),
    ],
)
def test_reward_calls_are_work_and_what_comes_on_top(
    scope: str, rewards: dict[str, Any], device: float, overhead: float, tmp_path: Path
) -> None:
    groups = many("maze", 10)
    for group in groups:
        for trajectory in group:
            trajectory.seconds["score"] = 2.0
    with run(tmp_path, f"[tasks.maze]\nreward_scope = '{scope}'\n") as folder:
        write_step(folder, 1, groups)
        folder.write_summary({"rewards": rewards, "steps": 1})
        maze = recorded(folder.path).profile.tasks["maze"]
    assert (maze.reward_s, maze.reward_overhead_s) == (Spread(device), Spread(overhead))


def test_few_samples_are_warned_of_in_one_line_that_says_how_to_get_more(tmp_path: Path) -> None:
    with run(tmp_path, CONFIG + "[tasks.chess]\n") as folder:
        write_step(folder, 1, [*many("maze", 8), *many("maths", 2)])
        found = recorded(folder.path)
    assert set(found.profile.tasks) == {"maze", "maths"}
    missing, few = found.warnings
    assert missing.startswith("no sampled trajectory of chess: left out; log.trajectories_every = 1")
    assert few.startswith("few sampled trajectories (maths 8), so that")
    assert "log.trajectories_every = 1 and log.trajectories = 64 keep more" in few


def test_samples_that_lack_what_was_aborted_are_warned_of(tmp_path: Path) -> None:
    groups = many("maze", 10)
    stale = [played("maze", 20, member, stop_reason="stale") for member in range(4)]
    with run(tmp_path, "[tasks.maze]\n") as folder:
        write_step(folder, 1, groups, stale[:2])
        assert recorded(folder.path).warnings == []
        write_step(folder, 2, [], stale[2:])
        (warning,) = recorded(folder.path).warnings
    assert warning.startswith("9% of the trajectories were aborted, long ones first")
    assert "schedule = 'sync_plus'" in warning


def test_too_few_groups_tell_nothing_of_what_members_share(tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        write_step(folder, 1, many("maze", 7))
        maze = recorded(folder.path).profile.tasks["maze"]
    assert maze.turns_shared == 0.0
    assert maze.turns.values


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        write_step(folder, 1, many("maze", 8))
        whole = recorded(folder.path)
        for name in ("metrics.jsonl", "batches.jsonl"):
            with (folder.path / name).open("a") as file:
                file.write('{"step": 2, "tra')
        assert recorded(folder.path) == whole


def complaint(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        recorded(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_run_or_holds_nothing_yet_is_a_config_error(tmp_path: Path) -> None:
    assert complaint(tmp_path / "nowhere").endswith("is not a run folder: it has no config.toml")
    with run(tmp_path) as folder:
        assert "no step of this run is done yet" in complaint(folder.path)
        folder.write_metrics(0, {"eval/maze/success": 0.5})
        assert "no step of this run is done yet" in complaint(folder.path)
        folder.write_metrics(1, {"train/seconds": 1.0, "train/tokens": 10})
        folder.write_batch(1, [], 0)
        assert complaint(folder.path).endswith(
            "keeps no sampled trajectory yet; log.trajectories_every = 1 samples every step"
        )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("metrics.jsonl", "nonsense\n", "metrics.jsonl, line 1: "),
        ("batches.jsonl", '{"groups": 3}\n', "batches.jsonl, line 1: "),
        ("summary.json", "[]", "summary.json: "),
        ("trajectories/step-000002.jsonl", '{"task": "maze"}\n', "step-000002.jsonl, line 1: "),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, reason: str, tmp_path: Path) -> None:
    with run(tmp_path) as folder:
        write_step(folder, 1, many("maze", 8))
        (folder.path / name).write_text(content)
        assert reason in complaint(folder.path)


def test_what_a_profile_needs_of_a_trajectory_is_written(tmp_path: Path) -> None:
    trajectory = played("maze", 1, 0, failed_resets_s=[30.0])
    with run(tmp_path) as folder:
        folder.write_trajectories(1, [trajectory])
        line = json.loads((folder.path / "trajectories" / "step-000001.jsonl").read_text())
    assert line["failed_resets_s"] == [30.0]
    assert line["turn_step_s"] == [turn.step_s for turn in trajectory.turns]
    assert line["turn_observation_tokens"] == [len(turn.observation) for turn in trajectory.turns]
    assert line["turn_response_tokens"] == [len(turn.action) for turn in trajectory.turns]
