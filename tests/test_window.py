"""What lies between two samples: engine time goes to its true cause, also while there is no engine."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.window import Sample, window

BEFORE = Sample(
    at=100.0,
    generated=5000,
    trajectories=40,
    busy_s=50.0,
    train_s=9.0,
    waits_s={"generate": 1.0, "weights": 1.0, "training": 0.0},
    stages={"generate": 7.0},
)


def later(**changes: Any) -> dict[str, Any]:
    """The ten seconds after `BEFORE`."""
    values = {name: getattr(BEFORE, name) for name in BEFORE.__struct_fields__}
    return window(BEFORE, Sample(**{**values, "at": 110.0, **changes}))


def test_counters_become_rates_and_the_rollouts_wait_is_not_the_trainers() -> None:
    waits = {"generate": 4.0, "weights": 1.0, "training": 5.0}
    seen = later(
        generated=5100, trajectories=60, train_s=13.0, waits_s=waits, stages={"generate": 9.0, "training": 1.0}
    )
    assert (seen["tokens_per_s"], seen["trajectories_per_s"], seen["train_s"]) == (10.0, 2.0, 4.0)
    assert seen["trainer_waits"] == {"generate": 3.0}
    assert seen["stages"] == {"generate": 2.0}


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"busy_s": 56.0, "stages": {"generate": 9.0, "step": 3.0, "reset": 1.0}}, {"step": 3.0, "reset": 1.0}),
        ({"busy_s": 50.0, "no_engine_s": 10.0, "stages": {"generate": 17.0}}, {"no_engine": 10.0}),
        ({"busy_s": 0.0, "no_engine_s": 10.0, "stages": {"generate": 17.0}}, {"no_engine": 10.0}),
        ({"busy_s": 0.0, "no_engine_s": 6.0, "stages": {"step": 2.0}}, {"no_engine": 6.0, "step": 4.0}),
        ({"busy_s": 58.0, "waits_s": {"weights": 2.0, "suspended": 3.0}}, {"weights": 0.5, "suspended": 1.5}),
        ({"busy_s": 60.0, "stages": {"generate": 17.0, "step": 1.0}}, {"step": 0.0}),
        ({"busy_s": 58.0, "stages": {"generate": 17.0}}, {}),
    ],
    ids=["elsewhere", "none is left", "the last one has died", "for a while", "new weights", "busy", "unknown"],
)
def test_engine_time_that_was_not_used_has_a_cause(changes: dict[str, Any], waits: dict[str, float]) -> None:
    seen = later(**changes)["engine_waits"]
    assert seen == pytest.approx(waits)


def test_an_engine_that_was_started_again_and_counts_anew_shows_no_negative_speed() -> None:
    assert later(generated=3)["tokens_per_s"] == 0
