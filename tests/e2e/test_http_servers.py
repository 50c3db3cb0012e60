"""Runs on inference servers that others own: what an evaluation evaluates, and servers that go away and come back."""

from __future__ import annotations

import signal

import pytest

from rollart.cli import main
from rollart.data.model import resolve
from rollart.pipeline import train
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import Laboratory, check_audit, steps_done, summary
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


def test_a_server_that_dies_is_done_without_until_it_is_there_again_and_then_has_the_weights_of_now(
    lab: Laboratory,
) -> None:
    with places(resolve("tiny"), 2) as [steady, dying]:
        process = lab.start("runtime=local", "steps=1000", *words([steady, dying]))
        process.until(lambda: steps_done(lab.run) >= 2, "its second step")
        dying.kill()
        done = steps_done(lab.run)
        process.until(lambda: steps_done(lab.run) >= done + 3, "three more steps")
        assert f"worker inference-1 died: http://{dying.address}/" in process.text()
        server = dying.start()
        process.until(lambda: "inference-1.1 runs on" in process.text(), "its new worker")
        version = server.weights
        process.until(lambda: server.weights not in ("default", version), "new weights")
        process.send(signal.SIGTERM)
        assert process.wait() == 130, process.text()
        check_audit(lab.run, steps_done(lab.run), alpha=1)
        assert summary(lab.run)["resources"]["restarts"] == {"inference-1": 1}
        assert [each.paused for each in (steady.server, server)] == [False, False]


def test_the_only_server_is_waited_for_and_gets_the_weights_of_now_also_when_it_was_gone_for_no_time(
    lab: Laboratory,
) -> None:
    with places(resolve("tiny")) as [place]:
        process = lab.start("runtime=local", "steps=1000", *words([place]))
        process.until(lambda: steps_done(lab.run) >= 2, "its second step")
        place.renew()
        process.until(lambda: "inference-0.1 runs on" in process.text(), "its new worker")
        assert "generated with weights 'default', not 'rollart-" in process.text()
        done = steps_done(lab.run)
        process.until(lambda: steps_done(lab.run) >= done + 2, "two more steps")
        process.send(signal.SIGTERM)
        assert process.wait() == 130, process.text()
        check_audit(lab.run, steps_done(lab.run), alpha=1)


def test_a_run_whose_last_server_does_not_come_back_ends_with_a_checkpoint(lab: Laboratory) -> None:
    with places(resolve("tiny")) as [place]:
        process = lab.start("runtime=local", "steps=1000", "engine_options.away_s=2.0", *words([place]))
        process.until(lambda: steps_done(lab.run) >= 2, "its second step")
        place.kill()
        assert process.wait() == 1, process.text()
        (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
        assert "nothing takes its place" in error
        assert "/health cannot be reached" in error
        assert checkpoints(lab.run)[-1] >= 2
