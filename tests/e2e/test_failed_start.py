"""A start that fails says why in its folder, and is nobody's latest run."""

from __future__ import annotations

import pytest

from rollart.errors import RollartError
from rollart.pipeline import train
from tests.e2e.laboratory import Laboratory, summary

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
