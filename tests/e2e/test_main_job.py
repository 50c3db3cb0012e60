"""The main job, with a process for every worker: it learns, gives its account, and can be evaluated and continued."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psutil
import pytest

from rollart.cli import main
from rollart.data.simulated.profile import load_profile
from rollart.report import warnings
from rollart.run_folder import checkpoints, resolved_config
from tests.e2e.laboratory import Laboratory, batches, check_audit, lines, summary

pytestmark = pytest.mark.e2e

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", re.MULTILINE)


def documented() -> dict[str, str]:
    """Key of summary.json -> what docs/run-folder.md says of it."""
    _, _, table = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text().partition("## `summary.json`")
    return {key: said for keys, said in ROW.findall(table) for key in re.findall(r"\w+", keys)}


def test_the_reward_rises(trained: Path) -> None:
    rewards = [line["reward/shouting"] for line in lines(trained / "metrics.jsonl") if "reward/shouting" in line]
    assert len(rewards) == 14
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.3
    task = summary(trained)["tasks"]["shouting"]
    assert task["reward_last"] > task["reward_first"] + 0.3
    assert task["success_last"] >= task["success_first"]


def test_the_summary_accounts_for_the_run(trained: Path) -> None:
    found = summary(trained)
    assert found["outcome"] == "completed"
    assert found["problems"] == warnings(resolved_config(trained))
    assert "model 'tiny' has never seen text" in found["problems"][0]
    assert found["steps"] == 14
    assert found["trajectories"] == sum(found["age_histogram"].values()) == 14 * 4 * 6
    assert found["tokens"] > found["trajectories"]
    assert 0 < found["overlap"] <= 1
    assert 100 << 20 < found["peak_rss_bytes"] < 3 << 30
    assert found["wall_s"] > 0
    assert found["cpu_s"] > 0
    assert all(seconds >= 0 for seconds in found["waits_s"].values())
    assert (found["alpha"], found["schedule"]) == (1, "rollart")


def test_every_key_of_the_summary_is_documented_and_no_other(trained: Path) -> None:
    found, said = summary(trained), documented()
    assert set(said) - set(found) == {"prefill"}  # written where prompts are read apart
    assert set(found) <= set(said)
    for key in ("groups", "resources"):
        assert [each for each in found[key] if f"`{each}`" not in said[key]] == []
    assert [each for each in found["tasks"]["shouting"] if f"`{each}`" not in said["tasks"]] == []


def test_nothing_is_older_than_alpha_or_trained_twice(trained: Path) -> None:
    check_audit(trained, steps=14, alpha=1)
    ages = {age for batch in batches(trained) for group in batch["groups"] for age in group["ages"]}
    assert ages == {int(age) for age in summary(trained)["age_histogram"]}


def test_the_run_folder_holds_what_it_says_and_no_process_or_weights_are_left(
    trained: Path, first_lab: Laboratory
) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.toml", "metrics.jsonl", "batches.jsonl", "summary.json", "run.log"} <= names
    assert list((trained / "tensorboard").iterdir())
    assert {"step-000007.txt", "step-000014.jsonl"} <= {path.name for path in (trained / "trajectories").iterdir()}
    assert checkpoints(trained) == [10, 14]
    assert (trained.parent / "latest").resolve() == trained.resolve()
    assert psutil.Process().children(recursive=True) == []
    assert first_lab.weights() == []


def test_a_run_can_be_evaluated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--episodes", "3"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert "checkpoint of step 14" in heading
    assert line.startswith("shouting: success ")
    assert "episodes 3  failed 0" in line


def test_a_run_can_be_profiled(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert main(["profile", str(trained), "--out", str(out)]) == 0
    profile = load_profile(str(out))
    task = profile.tasks["shouting"]
    assert min(task.turns.mean, task.prompt_tokens.mean, task.response_tokens.mean) >= 1
    assert min(task.reset_s.mean, task.step_s.mean, profile.train_s_per_token or 0.0) > 0


def test_resuming_a_completed_run_says_what_to_do(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(trained)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollart: error: steps: ")
    assert "has done 14 of 14 steps; ask for more, such as steps=28" in error


def test_a_resumed_run_refuses_what_its_open_groups_depend_on(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(trained), "steps=20", "rollout.group_size=4"]) == 2
    assert "rollout.group_size: 4 differs from the 6 of the run to resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(trained), "steps=20", "model.name=other"]) == 2
    assert "model.name: other differs from the tiny of the run to resume" in capsys.readouterr().err
    assert summary(trained)["steps"] == 14


def test_a_completed_run_goes_on_to_more_steps(trained: Path, lab: Laboratory) -> None:
    run = Path(shutil.copytree(trained, lab.run))
    assert main(["train", "--resume", str(run), "steps=16", "runtime=inline"]) == 0
    check_audit(run, steps=16, alpha=1)
    found = summary(run)
    assert found["steps"] == 16
    assert found["trajectories"] == sum(found["age_histogram"].values()) == 16 * 4 * 6
    assert found["waits_s"]["generate"] >= summary(trained)["waits_s"]["generate"]
    assert resolved_config(run).steps == 16
    commands = [line for line in (run / "config.toml").read_text().splitlines() if line.startswith("# ")]
    assert len(commands) == 4
