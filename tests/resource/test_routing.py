from __future__ import annotations

import random

import pytest

from rollart.errors import ResourceError
from rollart.resource.routing import Router


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_loads_are_the_outstanding_tokens(seed: int) -> None:
    rng = random.Random(seed)
    router = Router({"math": "fast", "default": "wide"}, {"fast": ["wide"], "wide": ["fast"]}, slack_tokens=100)
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
    router = two()
    assert router.choose("t1", "x", 101) == "a"
    assert router.choose("t1", "x", 10) == "b"


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
