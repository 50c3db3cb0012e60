"""Whole runs whose inference worker generates with vLLM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollart.data.weights_folder import SHARED_MEMORY
from tests.e2e.laboratory import SMALL, Laboratory, batches, check_audit, lines, steps_done, summary

pytestmark = pytest.mark.e2e

PATIENCE_S = 400.0
ENGINE = """
runtime = "local"
engine = "vllm"
engine_options = { block_size = 32, kv_cache_memory_bytes = 67108864 }
"""
ON_VLLM = SMALL.replace('runtime = "inline"', ENGINE)
ON_TWO = """
[pools.H800]
count = 1
device = "cpu"
[pools.H20]
count = 2
device = "cpu"
[roles.actor_train]
device_class = "H800"
[roles.actor_gen]
device_class = "H20"
devices = 2
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """A place for runs; afterwards no weights of theirs in shared memory are left."""
    place = Laboratory(tmp_path)
    try:
        yield place
    finally:
        for process in place.processes:
            process.end()
    assert place.weights() == []


def test_a_run_trains_on_what_vllm_generated_under_weights_that_change(lab: Laboratory) -> None:
    process = lab.start("steps=4", "log.checkpoint_every=4", text=ON_VLLM)
    assert process.wait(PATIENCE_S) == 0, process.text()
    check_audit(lab.run, steps=4, alpha=1)
    assert summary(lab.run)["outcome"] == "completed"
    assert len(batches(lab.run)) == 4
    canaries = [line["canary"] for line in lines(lab.run / "metrics.jsonl") if "canary" in line]
    assert len(canaries) == 4
    assert max(canaries) < 1e-3
    evaluation = lab.launch("eval", str(lab.run), "--episodes", "2")
    assert evaluation.wait(PATIENCE_S) == 0, evaluation.text()
    assert "failed 0" in evaluation.text()


def test_an_option_that_vllm_does_not_know_ends_the_run_with_one_line(lab: Laboratory) -> None:
    process = lab.start("engine_options.gpu_memory_utilisation=0.5", text=ON_VLLM)
    assert process.wait(PATIENCE_S) == 2
    assert "engine_options.gpu_memory_utilisation: not an argument of vLLM's EngineArgs" in process.text()


def test_the_death_of_vllms_own_processes_is_that_of_their_worker(lab: Laboratory) -> None:
    before = set(SHARED_MEMORY.glob("*cpushm*"))
    process = lab.start("steps=1000", text=ON_VLLM + ON_TWO)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step", PATIENCE_S)
    ranks = [each for each in process.worker("inference-0").children() if "Worker_TP" in each.name()]
    assert len(ranks) == 2
    assert set(SHARED_MEMORY.glob("*cpushm*")) <= before, "they have no names while they are used"
    for each in ranks:
        each.kill()
    process.until(lambda: "inference-0.1 runs on H20:" in process.text(), "a new worker", PATIENCE_S)
    done = steps_done(lab.run)
    process.until(lambda: steps_done(lab.run) >= done + 2, "two more steps")
    everybody = process.workers()
    process.send(signal.SIGTERM)
    assert process.wait() == 130, process.text()
    assert "worker inference-0 died: its process was killed by SIGTERM" in process.text()
    assert "Traceback" not in process.text()
    check_audit(lab.run, steps_done(lab.run), alpha=1)
    assert not psutil.wait_procs(everybody, 30.0)[1]
    assert set(SHARED_MEMORY.glob("*cpushm*")) <= before


def test_a_run_whose_prompts_are_read_by_a_vllm_of_its_own(lab: Laboratory) -> None:
    apart = ON_VLLM.replace("steps = 3", "steps = 2") + "[roles.prefill]\nworkers = 1\n"
    process = lab.start(text=apart)
    assert process.wait(PATIENCE_S) == 0, process.text()
    check_audit(lab.run, steps=2, alpha=1)
    found = summary(lab.run)["prefill"]
    assert found["read"] > 0
    assert found["received_tokens"] > 0
    assert found["by_decode_workers"] == {}
    canaries = [line["canary"] for line in lines(lab.run / "metrics.jsonl") if "canary" in line]
    assert max(canaries) < 1e-3
