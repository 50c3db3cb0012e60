"""Which plans there are: always within what is allowed, always possible by numbers, always in the same order."""

from __future__ import annotations

from itertools import islice

import pytest

from rollart.config import Config
from rollart.errors import ConfigError
from rollart.plan_choice import Choice, given
from rollart.plan_command import Allowance
from rollart.plan_space import Space
from tests.planning import made


def space(config: Config | None = None, **allowed: object) -> Space:
    found = Space(config or made(), Allowance(**allowed))  # type: ignore[arg-type]
    found.tags = ["pages", "proofs"]
    return found


def around(where: Space, number: int = 300) -> list[Choice]:
    """The grid, and neighbours of neighbours."""
    found = dict.fromkeys(where.grid())
    for choice in list(islice(found, 40)):
        found |= dict.fromkeys(where.neighbours(choice))
    return list(islice(found, number))


def check(choice: Choice, where: Space) -> None:
    devices, engines = dict(choice.devices), dict(choice.engines)
    assert where.cost(devices) <= where.budget * 1.000001
    assert sum(engines.values()) > 0
    for name in {*devices, choice.trainer.device_class}:
        training = choice.trainer.total if name == choice.trainer.device_class else 0
        assert training + engines.get(name, 0) * choice.tensor_parallel <= devices.get(name, 0)
    assert choice.bound <= where.max_alpha
    assert choice.prefill == "" or choice.prefill in engines


def test_every_choice_fits_the_budget_and_its_devices() -> None:
    where = space(max_alpha=4.0)
    choices = around(where)
    assert len(choices) > 200
    for choice in choices:
        check(choice, where)


def test_the_grid_begins_with_the_config_and_holds_every_kind_of_change() -> None:
    grid = space().grid()
    assert grid[0] == given(made())
    assert len(set(grid)) == len(grid)
    varied = ("devices", "trainer", "tensor_parallel", "affinity", "prefill", "extra_groups", "extra_members")
    for name in (*varied, "free_slots"):
        assert len({getattr(choice, name) for choice in grid}) > 1, name
    assert {choice.affinity for choice in grid} >= {
        "auto",
        (("pages", "H800"), ("proofs", "H20")),
        (("pages", "H20"), ("proofs", "H800")),
    }


def test_the_order_of_choices_is_always_the_same() -> None:
    assert around(space()) == around(space())


def test_devices_that_are_given_are_all_taken() -> None:
    where = space(devices={"H800": 16, "H20": 8})
    choices = around(where)
    assert len(choices) > 20
    for choice in choices:
        assert dict(choice.devices) == {"H800": 16, "H20": 8}
        check(choice, where)


def test_a_class_without_devices_is_gone_from_the_plan() -> None:
    alone = [choice for choice in around(space()) if len(choice.devices) == 1]
    assert alone
    for choice in alone:
        assert choice.affinity == ()
        assert choice.prefill == ""


def test_another_budget_keeps_the_proportions_to_begin_with() -> None:
    start = space(budget=64.0).start()
    assert start is not None
    assert dict(start.devices) == {"H800": 16, "H20": 16}
    assert start.trainer.total == 8


def test_two_changes_of_one_parent_come_together() -> None:
    where = space()
    parent = where.given
    one = next(each for each in where.neighbours(parent) if each.affinity == "auto")
    other = next(each for each in where.neighbours(parent) if each.trainer.total < parent.trainer.total)
    both = where.merged(parent, one, other)
    assert both is not None
    assert (both.affinity, both.trainer, both.devices) == ("auto", other.trainer, parent.devices)
    assert sum(dict(both.engines).values()) > sum(dict(parent.engines).values())


def test_kinds_of_change_are_told_apart_and_a_split_is_one_with_the_mix() -> None:
    where = space()
    choices = where.neighbours(where.given)
    assert {
        kind for choice in choices if len(choice.kinds(where.given)) == 1 for kind in choice.kinds(where.given)
    } == {
        "devices",
        "tensor_parallel",
        "affinity",
        "prefill",
        "extra_groups",
        "extra_members",
        "free_slots",
        "engine_slots",
        "alpha",
    }
    assert where.given.kinds(where.given) == set()


def test_training_that_is_always_busy_gets_more_devices_and_one_that_waits_fewer() -> None:
    where = space()
    more, fewer = (where.balanced(where.given, busy) for busy in (0.9, 0.2))
    assert more is not None
    assert fewer is not None
    assert more.trainer.total > where.given.trainer.total > fewer.trainer.total
    assert dict(more.engines)["H800"] < dict(where.given.engines)["H800"] < dict(fewer.engines)["H800"]


def test_other_schedules_come_only_when_asked_for() -> None:
    assert {choice.schedule for choice in around(space())} == {"rollart"}
    choices = around(space(schedules=("areal", "one_off", "sync_plus")))
    assert {choice.schedule for choice in choices} == {"rollart", "areal", "one_off", "sync_plus"}
    assert all((choice.alpha is None) == (choice.schedule in ("one_off", "sync_plus")) for choice in choices)


def test_slots_are_free_when_training_starts_only_where_admission_is_continuous() -> None:
    where = space(made("rollout.free_slots=train_start"), schedules=("areal", "one_off", "sync_plus"))
    found = {(choice.schedule, choice.free_slots) for choice in around(where)}
    assert found == {
        ("rollart", "train_start"),
        ("rollart", "train_end"),
        ("areal", "train_start"),
        ("areal", "train_end"),
        ("one_off", "train_end"),
        ("sync_plus", "train_end"),
    }


def test_a_config_that_alternates_has_no_alpha_to_raise() -> None:
    choices = around(space(made("schedule=sync_plus"), schedules=("rollart", "one_off")))
    assert {choice.schedule for choice in choices} == {"sync_plus"}


def test_devices_of_other_roles_are_left_to_them() -> None:
    where = space(
        made('roles.reward={ device_class = "H800", workers = 4 }', "roles.actor_gen.workers={ H800=12, H20=32 }")
    )
    for choice in around(where):
        there = dict(choice.devices).get("H800", 0)
        assert there >= 4 + choice.trainer.total * (choice.trainer.device_class == "H800")
        assert dict(choice.engines).get("H800", 0) * choice.tensor_parallel <= there - 4


def test_pools_that_are_shared_in_turn_serve_both_roles_with_all_devices() -> None:
    config = made(
        "schedule=sync_plus",
        "pools.H800.share=2",
        "roles.actor_train.workers=4",
        "roles.actor_gen.workers={ H800 = 32, H20 = 32 }",
    )
    start = space(config).start()
    assert start is not None
    assert dict(start.engines) == {"H800": 32, "H20": 32}
    assert start.trainer.total == 32


@pytest.mark.parametrize(
    ("overrides", "allowed", "message"),
    [
        (("pools.H800.count=0",), {}, "pools.H800.count: a plan varies the number"),
        (('pools.other={ device_class = "H800", count = 8 }',), {}, "pool 'H800' has class 'H800' too"),
        ((), {"devices": {"H80": 8}}, "--devices: no pool of accelerators has class 'H80'; did you mean 'H800'"),
        ((), {"devices": {"H800": 8}, "budget": 3.0}, "keep one"),
        (("alpha=2",), {"max_alpha": 1.0}, "--max-alpha: 1 is below the config's own alpha 2"),
    ],
)
def test_what_cannot_be_planned_is_said(overrides: tuple[str, ...], allowed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space(made(*overrides), **allowed)


def test_the_order_in_which_an_affinity_is_written_means_nothing() -> None:
    one, other = 'affinity={ pages = "H800", proofs = "H20" }', 'affinity={ proofs = "H20", pages = "H800" }'
    assert given(made(one)) == given(made(other))
    grid = space(made(other)).grid()
    assert sum(choice.affinity == given(made(one)).affinity for choice in grid if choice.devices == grid[0].devices) > 1
