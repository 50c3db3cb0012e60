"""Runs on one host do not meet: no port, path or process of theirs is shared, even when their configs are equal."""

from __future__ import annotations

import pytest

from tests.e2e.laboratory import Laboratory, check_audit, summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_two_runs_of_one_config_complete_at_once_in_folders_of_their_own(lab: Laboratory) -> None:
    both = [lab.start("runtime=local") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].text() + both[1].text()
    folders = sorted(path for path in lab.run.parent.iterdir() if not path.is_symlink())
    assert [path.name for path in folders] == [lab.name, f"{lab.name}-2"]
    for folder in folders:
        assert summary(folder)["outcome"] == "completed"
        check_audit(folder, steps=3, alpha=1)
    assert (lab.run.parent / "latest").resolve() in folders
