"""Whole runs on a real Mooncake store: as it should be, and with its processes killed in the middle."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.laboratory import Laboratory, check_audit, steps_done

REASON = "mooncake, or a library that it needs, is not installed; run them with: make test-production"
pytest.importorskip("mooncake.store", reason=REASON, exc_type=ImportError)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]

ON_MOONCAKE = ("runtime=local", "weights.store=mooncake", "train.learning_rate=1e-2")


def kill(lab: Laboratory, word: str) -> None:
    """Those of the run's processes whose command line has this word."""
    victims = [each for each in lab.processes[0].workers() if word in each.cmdline() or each.name() == word]
    assert victims
    for each in victims:
        each.kill()


def test_a_run_trains_through_the_store_and_leaves_nothing(lab: Laboratory) -> None:
    process = lab.start(*ON_MOONCAKE, "steps=4", "weights.delta=2")
    assert process.wait() == 0, process.text()
    assert "files" not in process.text()
    check_audit(lab.run, steps=4, alpha=1)


@pytest.mark.parametrize("word", ["node", "mooncake_master"])
def test_a_run_whose_store_dies_goes_on_with_files_and_says_so_once(word: str, lab: Laboratory) -> None:
    process = lab.start(*ON_MOONCAKE, "steps=12")
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    kill(lab, word)
    assert process.wait() == 0, process.text()
    assert process.text().count("on, they go through files in") == 1
    assert "Traceback" not in process.text()
    check_audit(lab.run, steps=12, alpha=1)


def test_a_run_that_is_killed_takes_its_store_along(lab: Laboratory) -> None:
    process = lab.start(*ON_MOONCAKE, "steps=1000")
    process.until(lambda: steps_done(lab.run) >= 1, "its first step")
    workers = process.workers()
    assert any(each.name() == "mooncake_master" for each in workers)
    psutil.Process(process.pid).kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, 60.0)
    assert not alive
    assert lab.start("steps=1", "runtime=inline").wait() == 0  # the next run clears up after the dead one
