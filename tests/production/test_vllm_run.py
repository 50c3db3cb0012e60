"""Whole runs whose inference worker generates with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.laboratory import SMALL, Laboratory, batches, check_audit, lines, summary

pytestmark = pytest.mark.e2e

PATIENCE_S = 400.0
ENGINE = """
runtime = "local"
engine = "vllm"
engine_options = { block_size = 32, kv_cache_memory_bytes = 67108864 }
"""
ON_VLLM = SMALL.replace('runtime = "inline"', ENGINE)


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
