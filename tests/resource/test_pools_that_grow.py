"""A pool in a shared store, declared again by a run that sees more nodes, fewer, or other devices."""

import pytest

from rollart.errors import ConfigError
from rollart.resource.pool import Pools
from rollart.types import PoolSpec


def h20(**nodes: int) -> PoolSpec:
    return PoolSpec("H20", "H20", {node: tuple(range(number)) for node, number in nodes.items()})


def test_a_node_that_joins_is_added_and_one_that_is_lost_stays_lost() -> None:
    pools = Pools([h20(one=2, two=2)])
    pools.fail_node("two")
    pools.declare([h20(one=2)])
    pools.declare([h20(one=2, three=1)])
    assert {row.node: (row.free, row.failed) for row in pools.rows()} == {"one": (2, 0), "two": (0, 2), "three": (1, 0)}
    pools.check()


def test_a_node_with_other_devices_is_refused_and_nothing_changes() -> None:
    pools = Pools([h20(one=2)])
    pools.bind("first/w", "actor_gen", "H20")
    with pytest.raises(
        ConfigError, match=r"pools\.H20: this store has a pool of that name that differs \(nodes one 0,1 there, "
    ):
        pools.declare([h20(one=3, two=1)])
    with pytest.raises(ConfigError, match="cost"):
        pools.declare([PoolSpec("H20", "H20", {"one": (0, 1)}, cost=2.0)])
    assert [row.node for row in pools.rows()] == ["one"]
