from __future__ import annotations

import random

import pytest

from rollart.errors import ResourceError
from rollart.resource.readers import Prefix, Readers


def two() -> Readers:
    readers = Readers()
    readers.add("a")
    readers.add("b")
    return readers


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_what_waits_is_what_is_still_to_be_read(seed: int) -> None:
    rng = random.Random(seed)
    readers, there, reading = Readers(), set[str](), list[tuple[str, int]]()
    for event in range(400):
        kind = rng.random()
        if not there or kind < 0.03:
            there.add(f"w{event}")
            readers.add(f"w{event}")
        elif kind < 0.06:
            gone = rng.choice(sorted(there))
            there.remove(gone)
            readers.remove(gone)
        elif kind < 0.5 or not reading:
            trajectory, version = f"t{rng.randrange(9)}", rng.randrange(2)
            name, unread = readers.choose(trajectory, rng.randrange(1, 300), version)
            assert name in there
            assert unread >= 1
            readers.keeps(trajectory, Prefix(name, version, rng.randrange(300)))
            reading.append((name, unread))
        elif kind < 0.6:
            assert readers.forget(f"t{rng.randrange(9)}") in {None, *there}
        else:
            readers.finished(*reading.pop(rng.randrange(len(reading))))
        assert len(readers) == len(there)
        readers.check(reading)
    for each in reading:
        readers.finished(*each)
    readers.check([])


def test_a_prompt_goes_to_the_worker_with_least_to_read() -> None:
    readers = two()
    assert [readers.choose(f"t{n}", tokens, 0) for n, tokens in enumerate((30, 10, 10, 20))] == [
        ("a", 30),
        ("b", 10),
        ("b", 10),
        ("b", 20),
    ]
    readers.finished("b", 40)
    assert readers.choose("t5", 5, 0) == ("b", 5)


def test_a_trajectory_comes_back_to_its_prefix_unless_another_has_read_all_of_it_sooner() -> None:
    readers = two()
    readers.keeps("t", Prefix("b", 3, 100))
    assert readers.choose("t", 120, 3) == ("b", 20)
    assert readers.choose("other", 99, 3) == ("a", 99)
    readers.finished("a", 99)
    assert [readers.choose("t", 120, 3) for _ in range(5)] == [("b", 20)] * 4 + [("a", 120)]


def test_a_prefix_of_older_weights_or_of_a_worker_that_is_gone_counts_for_nothing() -> None:
    readers = two()
    readers.keeps("t", Prefix("b", 3, 100))
    assert readers.choose("t", 120, 4) == ("a", 120)
    readers.keeps("t", Prefix("b", 4, 100))
    readers.remove("b")
    assert readers.forget("t") is None
    readers.keeps("t", Prefix("b", 4, 100))
    assert readers.choose("t", 120, 4) == ("a", 120)
    readers.finished("b", 1)


def test_a_worker_may_keep_what_nobody_heard_that_it_has_read() -> None:
    readers = two()
    assert readers.choose("t", 120, 3) == ("a", 120)
    assert readers.choose("t", 120, 3) == ("b", 120)
    assert readers.forget("t") == "b"


def test_a_prompt_that_is_kept_whole_still_has_a_token_to_read() -> None:
    readers = two()
    readers.keeps("t", Prefix("a", 0, 100))
    assert readers.choose("t", 100, 0) == ("a", 1)
    assert readers.forget("t") == "a"
    assert readers.forget("t") is None


def test_two_of_a_name_and_none_at_all_are_refused() -> None:
    readers = two()
    with pytest.raises(ResourceError, match="'a' exists already"):
        readers.add("a")
    with pytest.raises(ResourceError, match="no prefill worker"):
        Readers().choose("t", 1, 0)
