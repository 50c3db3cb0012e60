"""A start that fails says why in its folder, and is nobody's latest run."""

from __future__ import annotations

import pytest

from rollart.errors import RollartError, RunFolderError
from rollart.pipeline import train
from tests.e2e.laboratory import Laboratory, batches, summary

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize("config", ["", "{}"], ids=["no model", "a model that no worker can load"])
def test_a_start_that_fails_leaves_its_reason_and_the_latest_run_as_it_was(config: str, lab: Laboratory) -> None:
    model = lab.folder / "model"
    if config:
        model.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (model / name).write_text(config)
    (lab.run.parent / "before").mkdir(parents=True)
    latest = lab.run.parent / "latest"
    latest.symlink_to("before")
    with pytest.raises(RollartError) as caught:
        train(lab.config(f"model.name={model}"))
    outcome = f"{type(caught.value).__name__}: {caught.value}"
    assert summary(lab.run) == {"outcome": outcome, "steps": 0, "problems": []}
    assert outcome.splitlines()[0] in (lab.run / "run.log").read_text()
    assert latest.readlink().name == "before"


def test_a_resume_that_fails_as_its_trainer_loads_leaves_the_run_as_it_was(lab: Laboratory) -> None:
    assert train(lab.config("log.checkpoint_every=1", "steps=2")) == 0
    state = lab.run / "checkpoints" / "step-000001" / "trainer" / "state" / "trainer.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    names = ("config.toml", "metrics.jsonl", "batches.jsonl", "summary.json")
    before = {name: (lab.run / name).read_bytes() for name in names}
    with pytest.raises(RunFolderError, match="damaged"):
        train(lab.config("log.checkpoint_every=1", "steps=3", "train.learning_rate=1e-5"), lab.run, 1)
    assert {name: (lab.run / name).read_bytes() for name in names} == before
    assert len(list((lab.run / "checkpoints").iterdir())) == 2
    state.write_bytes(whole)
    assert train(lab.config("log.checkpoint_every=1", "steps=3", "train.learning_rate=1e-5"), lab.run, 1) == 0
    assert len(batches(lab.run)) == 3
