from __future__ import annotations

import random
from collections import Counter

import pytest

from rollart.errors import ResourceError
from rollart.resource.routing import Fallback, Router


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_loads_are_the_outstanding_tokens(seed: int) -> None:
    rng = random.Random(seed)
    router = Router(
        {"math": "fast", "default": "wide"},
        {"fast": ["wide"], "wide": ["fast"]},
        slack_tokens=100,
        slots=3,
        reserved=rng.choice([["fast"], ["wide"], [], ["fast", "wide"]]),
    )
    flights: list[tuple[str, int]] = []
    classes: dict[str, str] = {}
    for event in range(400):
        kind = rng.random()
        if len(classes) < 2 or kind < 0.02:
            classes[f"w{event}"] = rng.choice(["fast", "wide"])
            router.add(f"w{event}", classes[f"w{event}"])
        elif kind < 0.04:
            gone = rng.choice(sorted(classes))
            del classes[gone]
            router.remove(gone)
            flights = [flight for flight in flights if flight[0] != gone] + [f for f in flights if f[0] == gone]
        elif kind < 0.55 or not flights:
            tag, tokens = rng.choice(["math", "maze"]), rng.randrange(1, 300)
            name = router.choose(f"t{rng.randrange(12)}", tag, tokens)
            assert name in classes
            if router.is_reserved(classes[name]):
                assert all(router.is_reserved(each) for each in classes.values())
            flights.append((name, tokens))
        elif kind < 0.65:
            assert router.forget(f"t{rng.randrange(12)}") in {None, *classes}
        else:
            router.finished(*flights.pop(rng.randrange(len(flights))))
        router.check(flights)
    for flight in flights:
        router.finished(*flight)
    router.check([])


def two() -> Router:
    router = Router(overload=1.5, slack_tokens=100)
    router.add("a")
    router.add("b")
    return router


def test_a_trajectory_stays_on_its_worker() -> None:
    router = two()
    assert router.choose("t1", "x", 50) == "a"
    assert router.choose("t2", "x", 50) == "b"
    router.finished("a", 50)
    router.finished("b", 50)
    assert [router.choose("t2", "x", 10) for _ in range(3)] == ["b", "b", "b"]


def test_an_overloaded_worker_loses_its_trajectory_to_the_least_loaded() -> None:
    router = Router(overload=1.5, slack_tokens=100)
    router.add("a")
    assert [router.choose(name, "x", tokens) for name, tokens in (("long", 101), ("t1", 10))] == ["a", "a"]
    router.finished("a", 10)
    router.add("b")
    assert router.choose("t1", "x", 10) == "b"
    assert router.choose("long", "x", 101) == "a", "nobody is helped when all that lives there moves"


def burst(router: Router, names: list[str], tokens: int) -> dict[str, str]:
    """All ask at one moment, and all answers come before anybody asks again."""
    flights = {name: router.choose(name, "x", tokens) for name in names}
    router.check([(worker, tokens) for worker in flights.values()])
    for worker in flights.values():
        router.finished(worker, tokens)
    return flights


def test_trajectories_that_ask_at_one_moment_stay_where_they_are() -> None:
    router, rng = two(), random.Random(0)
    router.add("c")
    names = [f"t{n}" for n in range(10)]
    homes = burst(router, names, 400)
    assert sorted(Counter(homes.values()).values()) == [3, 3, 4]
    for turn in range(1, 20):
        rng.shuffle(names)
        assert burst(router, names, 400 + 300 * turn) == {name: homes[name] for name in names}


def test_a_new_worker_takes_its_share_of_those_that_ask_at_one_moment_and_no_more() -> None:
    router = two()
    names = [f"t{n}" for n in range(12)]
    before = burst(router, names, 400)
    router.add("c")
    after = burst(router, names, 500)
    moved = [name for name in names if before[name] != after[name]]
    assert {after[name] for name in moved} == {"c"}
    assert 2 <= len(moved) <= 4
    assert burst(router, names, 600) == after


def test_a_worker_that_falls_behind_is_left_as_the_trajectories_of_the_others_end() -> None:
    router = two()
    homes = burst(router, [f"t{n}" for n in range(8)], 400)
    slow = [name for name, worker in homes.items() if worker == "a"]
    quick = [name for name, worker in homes.items() if worker == "b"]
    for name in slow[:3]:
        assert router.choose(name, "x", 400) == "a"
    assert router.choose("new", "x", 400) == "b", "who is new avoids it"
    router.finished("b", 400)
    for name in ("new", *quick[:2]):
        router.forget(name)
    assert router.choose(slow[3], "x", 400) == "a"
    router.finished("a", 400)
    router.forget(quick[2])
    assert router.choose(slow[3], "x", 400) == "b"


def test_trajectories_that_ask_in_turn_do_not_swap_places() -> None:
    router = two()
    homes = burst(router, ["t1", "t2", "t3"], 1000)
    assert homes == {"t1": "a", "t2": "b", "t3": "a"}
    for one, other in (("t1", "t3"), ("t3", "t1"), ("t2", "t1"), ("t1", "t3")) * 3:
        assert burst(router, [one, other], 1000) == {one: homes[one], other: homes[other]}


def test_of_idle_workers_the_one_where_least_lives_takes_a_new_trajectory() -> None:
    router = two()
    for name, tokens, worker in (("t1", 50, "a"), ("t2", 20, "b"), ("t3", 20, "b"), ("t4", 9, "b"), ("t5", 9, "b")):
        assert router.choose(name, "x", tokens) == worker
        router.finished(worker, tokens)
    assert router.choose("t6", "x", 1) == "a"
    assert router.forget("t1") == "a"
    router.finished("a", 1)
    assert router.choose("t7", "x", 1) == "a"


def test_others_go_to_the_least_loaded() -> None:
    router = two()
    assert [router.choose(f"t{n}", "x", tokens) for n, tokens in enumerate((30, 10, 10, 20))] == ["a", "b", "b", "b"]


def test_a_removed_worker_gets_nothing_and_its_trajectories_move() -> None:
    router = two()
    assert router.choose("t1", "x", 10) == "a"
    router.remove("a")
    router.finished("a", 10)
    assert router.choose("t1", "x", 10) == "b"
    router.remove("b")
    with pytest.raises(ResourceError, match="no inference worker for tag 'x'"):
        router.choose("t1", "x", 10)


def test_a_tag_prefers_its_class_and_falls_back_in_order() -> None:
    router = Router({"maze": "compute"}, {"compute": ["bandwidth", "default"]})
    router.add("d")
    assert router.choose("t1", "maze", 1) == "d"
    router.add("b", "bandwidth")
    assert router.choose("t2", "maze", 1) == "b"
    router.add("c", "compute")
    assert router.choose("t3", "maze", 1) == "c"
    assert router.choose("t4", "other", 1) == "d"


def test_two_workers_of_one_name_are_refused() -> None:
    router = two()
    with pytest.raises(ResourceError, match="'a' exists already"):
        router.add("a")


def mixed(slots: int = 2, **fallback: list[str]) -> Router:
    router = Router({"maze": "compute"}, fallback, slots=slots)
    router.add("c", "compute")
    router.add("b", "bandwidth")
    return router


def test_a_class_without_a_free_slot_borrows_an_idle_worker_of_a_compatible_class_alone() -> None:
    router = mixed(compute=["bandwidth"])
    assert [router.choose(f"t{n}", "maze", 10) for n in range(5)] == ["c", "c", "b", "c", "c"]
    assert router.fallbacks == {Fallback("maze", "compute", "bandwidth", "none free"): 1}
    router.finished("b", 10)
    assert router.choose("t2", "maze", 10) == "b"
    for _ in range(4):
        router.finished("c", 10)
    assert router.choose("t6", "maze", 10) == "c"


@pytest.mark.parametrize("router", [mixed(), mixed(slots=0, compute=["bandwidth"])])
def test_without_a_compatible_class_or_a_known_number_of_slots_requests_queue(router: Router) -> None:
    assert [router.choose(f"t{n}", "maze", 10) for n in range(5)] == ["c"] * 5
    assert not router.fallbacks


def test_trajectories_of_a_class_without_workers_are_counted() -> None:
    router = mixed()
    router.remove("c")
    assert router.choose("t1", "maze", 10) == "b"
    assert [str(kind) for kind in router.fallbacks] == ["maze: compute -> bandwidth (none alive)"]


def test_a_tag_without_preference_goes_to_the_least_loaded_of_all() -> None:
    router = mixed()
    assert [router.choose(f"t{n}", "other", 10) for n in range(4)] == ["c", "b", "c", "b"]


def test_a_change_of_affinity_moves_new_trajectories_alone() -> None:
    router = mixed()
    assert router.choose("t1", "maze", 10) == "c"
    router.set_affinity({"maze": "bandwidth"})
    assert router.affinity == {"maze": "bandwidth"}
    assert router.choose("t1", "maze", 10) == "c"
    assert router.choose("t2", "maze", 10) == "b"


def test_a_wish_counts_for_a_new_trajectory_and_a_class_that_has_a_worker() -> None:
    router = mixed()
    assert router.choose("t1", "maze", 10, wish="bandwidth") == "b"
    assert router.knows("t1")
    assert router.choose("t1", "maze", 10, wish="compute") == "b"
    assert router.choose("t2", "maze", 10, wish="gone") == "c"
    router.remove("b")
    assert not router.knows("t1")
    assert not router.fallbacks


@pytest.mark.parametrize("affinity", [{}, {"maze": "compute"}, {"default": "compute"}])
def test_a_reserved_class_serves_only_while_no_other_has_a_worker(affinity: dict[str, str]) -> None:
    router = Router(affinity, {"compute": ["bandwidth"]}, slots=1, reserved=["bandwidth"])
    router.add("b", "bandwidth")
    assert router.choose("t0", "maze", 10) == "b"
    router.add("c", "compute")
    assert [router.choose(f"t{n}", "maze", 10) for n in range(5)] == ["c"] * 5
    router.remove("c")
    assert [router.choose(f"t{n}", "maze", 10) for n in range(5)] == ["b"] * 5
    router.check([("b", 10)] * 6)
