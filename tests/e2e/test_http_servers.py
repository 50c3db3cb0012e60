"""Runs on inference servers that others own: what an evaluation evaluates, and servers that go away and come back."""

from __future__ import annotations

import pytest

from rollart.cli import main
from rollart.data.model import resolve
from rollart.pipeline import train
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import Laboratory
from tests.e2e.servers import places, words

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_an_evaluation_lets_the_server_load_the_checkpoint_also_one_that_was_left_in_the_middle_of_an_update(
    lab: Laboratory,
) -> None:
    with places(resolve("tiny")) as [place]:
        assert train(lab.config("steps=2", *words([place]))) == 0
        trained = place.server.engine.logprobs([5, 6, 7, 8])
        place.kill()
        server = place.start(paused=True)
        assert server.engine.logprobs([5, 6, 7, 8]) != pytest.approx(trained, abs=1e-4)
        assert main(["eval", str(lab.run), "--episodes", "1"]) == 0
        assert server.engine.logprobs([5, 6, 7, 8]) == pytest.approx(trained, abs=1e-5)
        assert not server.paused
    [*_, step] = checkpoints(lab.run)
    assert step == 2
