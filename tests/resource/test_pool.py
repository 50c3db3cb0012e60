"""Pools by random events, and what an error says."""

from __future__ import annotations

import random

import msgspec
import pytest

from rollart.errors import ConfigError, ResourceError
from rollart.resource.pool import Pools
from rollart.types import PoolSpec

H800 = PoolSpec("train", "H800", {"a": (0, 1, 2, 3), "b": (0, 1)}, cost=2.85, compatible=("H20",))
H20 = PoolSpec("wide", "H20", {"c": tuple(range(8))})
CPU = PoolSpec("cpu", "CPU", {"a": (0, 1), "c": (0,)}, share=3)
SPECS = (H800, H20, CPU)


def through_a_store(pools: Pools) -> Pools:
    return Pools.of(msgspec.msgpack.decode(msgspec.msgpack.encode(pools.state())))


@pytest.mark.parametrize("seed", range(6))
def test_random_events_never_bind_a_device_twice_nor_lose_one(seed: int) -> None:
    rng = random.Random(seed)
    pools, held, refused = Pools(SPECS), set[str](), 0
    for event in range(1500):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                name = f"run{rng.randrange(3)}/w{event}"
                try:
                    binding = pools.bind(name, "r", rng.choice(["H800", "H20", "CPU"]), rng.randint(1, 3))
                    held.add(name)
                    assert len(binding.devices) >= 1
                except ResourceError:
                    refused += 1
            case 4 | 5 if held:
                name = rng.choice(sorted(held))
                held.discard(name)
                pools.release(name)
            case 6:
                spec = rng.choice(SPECS)
                node = rng.choice(sorted(spec.nodes))
                lost = pools.fail(spec.name, node, [rng.choice(spec.nodes[node])])
                held -= {each.binding_id for each in lost}
            case 7:
                spec = rng.choice(SPECS)
                pools.repair(spec.name, rng.choice(sorted(spec.nodes)))
            case 8 if rng.random() < 0.1:
                held -= {each.binding_id for each in pools.fail_node("a")}
            case 9 if rng.random() < 0.1:
                held -= {each.binding_id for each in pools.release_run("run1")}
            case _:
                pools = through_a_store(pools)
        pools.check()
        assert {holder for row in pools.rows() for holder in row.holders} == held
    assert refused, "the pools were never full"
    for name in held:
        pools.release(name)
    for spec in SPECS:
        for node in spec.nodes:
            pools.repair(spec.name, node)
    assert all(row.free == row.total and not row.failed for row in pools.rows())


def test_the_class_that_is_asked_for_comes_first_and_a_compatible_one_when_it_is_full() -> None:
    pools = Pools(SPECS)
    first = [pools.bind(f"r/{n}", "g", "H800", 2) for n in range(3)]
    assert [(each.device_class, each.node) for each in first] == [("H800", "a"), ("H800", "b"), ("H800", "a")]
    assert not any(each.fell_back for each in first)
    fallen = pools.bind("r/3", "g", "H800", 2)
    assert (fallen.device_class, fallen.asked_class, fallen.fell_back) == ("H20", "H800", True)


def test_devices_of_one_binding_lie_on_one_node() -> None:
    pools = Pools([H800])
    with pytest.raises(ResourceError, match="no node has 5 devices of class 'H800' free"):
        pools.bind("r/w", "g", "H800", 5)
    assert pools.bind("r/w", "g", "H800", 4).node == "a"


def test_workers_spread_over_the_nodes_and_cores_of_a_shared_pool() -> None:
    pools = Pools([CPU])
    taken = [pools.bind(f"r/{n}", "environment", "CPU") for n in range(9)]
    assert sorted((each.node, *each.devices) for each in taken) == sorted([("a", 0), ("a", 1), ("c", 0)] * 3)
    with pytest.raises(ResourceError, match="names no class in `compatible` to fall back to"):
        pools.bind("r/10", "environment", "CPU")


def test_a_refusal_says_what_there_is_who_holds_it_and_where_it_looked_besides() -> None:
    pools = Pools([H800, H20])
    for n in range(6):
        pools.bind(f"other/w{n}", "g", "H800")
    pools.bind("other/wide", "g", "H20", 8)
    with pytest.raises(ResourceError) as caught:
        pools.bind("r/w", "g", "H800")
    assert str(caught.value) == (
        "no node has 1 device of class 'H800' free (a: 4 in all, 0 free, 0 failed; b: 2 in all, 0 free, 0 failed), nor "
        "of the compatible H20; held by other (6 workers)"
    )


def test_a_refusal_of_a_large_cluster_is_short() -> None:
    pools = Pools([PoolSpec("big", "H800", {f"n{number}": tuple(range(8)) for number in range(40)})])
    for run in range(7):
        pools.bind(f"run-{run}/w", "g", "H800", 8)
    with pytest.raises(ResourceError) as caught:
        pools.bind("r/w", "g", "H800", 9)
    assert str(caught.value) == (
        "no node has 9 devices of class 'H800' free (each of 7 nodes, n0 to n6: 8 in all, 0 free, 0 failed; each of 33 "
        "nodes, n7 to n39: 8 in all, 8 free, 0 failed), and its pool names no class in `compatible` to fall back to; "
        "held by run-0 (1 worker), run-1 (1 worker), run-2 (1 worker), run-3 (1 worker), run-4 (1 worker) and 2 more"
    )


def test_an_unknown_class_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="device class 'H80': no pool has it; did you mean 'H800'"):
        Pools(SPECS).bind("r/w", "g", "H80")


def test_a_pool_that_differs_from_the_one_in_use_is_refused() -> None:
    pools = Pools(SPECS)
    pools.declare([H800])
    pools.bind("first/w", "g", "H800")
    with pytest.raises(ConfigError, match=r"pools.train: .* differs \(cost 2.85 there, 3.0 here\), and first holds"):
        pools.declare([msgspec.structs.replace(H800, cost=3.0)])


def test_a_pool_that_nobody_holds_is_what_the_last_run_says() -> None:
    pools = Pools([PoolSpec("p", "X", {"n": (0, 1), "gone": (0,)})])
    pools.fail("p", "n", [0, 1])
    pools.bind("r/w", "g", "X")
    pools.release_run("r")
    pools.declare([PoolSpec("p", "X", {"n": (0,)}, cost=3.0)])
    assert [(row.node, row.total, row.free, row.failed, row.cost) for row in pools.rows()] == [("n", 1, 0, 1, 3.0)]
    pools.check()


def test_what_failed_is_not_bound_again_until_it_is_repaired() -> None:
    pools = Pools([PoolSpec("p", "X", {"n": (0, 1)})])
    pools.bind("r/w", "g", "X", 2)
    assert [each.worker for each in pools.fail("p", "n", [1])] == ["w"]
    assert pools.bind("r/v", "g", "X").devices == (0,)
    with pytest.raises(ResourceError, match="n: 2 in all, 0 free, 1 failed"):
        pools.bind("r/u", "g", "X")
    pools.repair("p", "n")
    assert pools.bind("r/u", "g", "X").devices == (1,)


def test_a_binding_is_taken_back_only_where_its_devices_are_free() -> None:
    binding = Pools([H20]).bind("r/w", "g", "H20", 3)
    pools = Pools([H20])
    pools.adopt(binding)
    pools.check()
    with pytest.raises(ResourceError, match="held by another"):
        pools.adopt(msgspec.structs.replace(binding, binding_id="r/v"))
    with pytest.raises(ResourceError, match="the store has no H20:0,1,2 of pool wide on c"):
        Pools([H800]).adopt(binding)


def test_a_state_that_is_damaged_is_said_to_be() -> None:
    with pytest.raises(ResourceError, match="the stored resource view is damaged"):
        Pools.of({"pools": 3})
