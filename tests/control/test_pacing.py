"""Admission pacing: more groups in flight while the trainer waits and the engines have room, fewer when it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config import from_dict, limits
from rollart.control.pacing import Pacing
from rollart.errors import ConfigError
from tests.control.test_training_loop import trained


def test_a_trainer_that_waits_gets_more_groups_up_to_the_most() -> None:
    pacing = Pacing(groups_per_batch=16, most=16)
    assert [pacing.batch(waited=0.5, busy=0.2, lost=0.1) for _ in range(10)] == [2, 4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert pacing.held_back == 0


@pytest.mark.parametrize(
    ("waited", "busy", "lost"), [(0.5, 0.95, 0.0), (0.5, 0.1, 0.8), (0.0, 0.1, 0.0)], ids=["queue", "stale", "no wait"]
)
def test_groups_that_cost_more_than_they_give_go(waited: float, busy: float, lost: float) -> None:
    pacing = Pacing(groups_per_batch=16, most=16)
    for _ in range(3):
        pacing.batch(waited=0.5, busy=0.2, lost=0.1)
    assert [pacing.batch(waited, busy, lost) for _ in range(4)] == [4, 2, 0, 0]


def test_a_short_wait_leaves_it_as_it_is() -> None:
    pacing = Pacing(groups_per_batch=16, most=16)
    pacing.batch(waited=0.5, busy=0.2, lost=0.1)
    assert pacing.batch(waited=0.03, busy=0.2, lost=0.1) == 2


@given(st.integers(1, 64), st.lists(st.tuples(*[st.floats(0, 2)] * 3)))
def test_it_stays_within_its_bounds(groups: int, batches: list[tuple[float, float, float]]) -> None:
    pacing = Pacing(groups, groups)
    for waited, busy, lost in batches:
        assert 0 <= pacing.batch(waited, busy, lost) <= groups
        assert pacing.extra + pacing.held_back == groups


def test_a_run_paces_itself_and_trains_nothing_stale_or_twice() -> None:
    run = trained(rollout__extra_groups="auto", steps=8, train_s=0.1)
    assert run.scheduler.live()["extra_groups"] > 0, "the trainer waited, and the engines had room"
    seen = [t.trajectory_id for batch in run.trainer.batches for group in batch.groups for t in group.trajectories]
    assert len(seen) == len(set(seen))
    assert "redundant" not in run.ledger.aborted, "nothing is ended for being slow"


def test_pacing_needs_continuous_admission() -> None:
    config = {"tasks": {"sorting": {}}, "rollout": {"groups_per_batch": 8, "extra_groups": "auto"}}
    derived = limits(from_dict(config))
    assert (derived.needed_slots, derived.slots) == (16, 24)
    with pytest.raises(
        ConfigError, match=r"rollout\.extra_groups: 'auto' paces continuous admission, but schedule 'sync'"
    ):
        from_dict({**config, "schedule": "sync"})
