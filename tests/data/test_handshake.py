"""Two ends of a wire find out that they are of different states of rollart before they send each other anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from rollart import __version__
from rollart.data.handshake import check_greeting, greeting, shapes
from rollart.data.ray_actor import Actor
from rollart.data.runtime import LocalRuntime
from rollart.errors import ResourceError
from tests.data.runtime_contract import TARGET

HERE: dict[str, str] = msgspec.msgpack.decode(greeting())
OTHERS = [{**HERE, "rollart": "9.9.9"}, {**HERE, "wire": "0badc0de"}, {"salut": "monde"}]


def encoded(other: dict[str, str]) -> bytes:
    return msgspec.msgpack.encode(other)


def test_an_actor_greets_with_what_this_process_is_before_it_is_told_anything() -> None:
    theirs = asyncio.run(Actor().hello())
    assert msgspec.msgpack.decode(theirs) == HERE
    assert HERE["rollart"] == __version__
    check_greeting(theirs, "node n")


@pytest.mark.parametrize("other", OTHERS)
def test_another_rollart_is_told_with_who_has_it_both_versions_and_the_way_out(other: dict[str, str]) -> None:
    with pytest.raises(ResourceError) as caught:
        check_greeting(encoded(other), "node n")
    assert str(caught.value).startswith("node n has rollart ")
    assert f"but here is rollart {__version__} (wire format {HERE['wire']})" in str(caught.value)
    assert "install the same rollart on all machines" in str(caught.value)
    assert all(value in str(caught.value) for key, value in other.items() if key != "salut")


def module(source: str) -> ModuleType:
    made = ModuleType("messages")
    exec(f"from __future__ import annotations\nfrom msgspec import Struct\n{source}", vars(made))
    return made


SOURCE = """
class Call(Struct):
    number: int

class Handle:
    async def step(self, action: str) -> Call: ...
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("number: int", "number: float"),
        ("number: int", "number: int\n    more: str = ''"),
        ("action: str", "action: str, limit: int"),
        ("-> Call", "-> None"),
        ("step", "steps"),
    ],
)
def test_the_wire_format_changes_with_what_travels(old: str, new: str) -> None:
    assert shapes((module(SOURCE),)) != shapes((module(SOURCE.replace(old, new)),))


def test_the_wire_format_does_not_change_with_texts_and_bodies() -> None:
    same = SOURCE.replace("...", "return Call(7)").replace("class Call(Struct):", "class Call(Struct):\n    'A call.'")
    assert shapes((module(SOURCE),)) == shapes((module(same),))


@pytest.mark.parametrize("other", OTHERS)
def test_a_local_worker_refuses_a_driver_under_which_rollart_was_changed(other: dict[str, str], tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        runtime._greeting = encoded(other)
        with pytest.raises(
            ResourceError, match=r"the driver has rollart .* start again where it was changed under a run"
        ):
            await runtime.spawn("w", TARGET, {"factor": 3})
        await runtime.shutdown()

    asyncio.run(scenario())


def test_equal_processes_agree(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = LocalRuntime(tmp_path)
        assert runtime._greeting == greeting()
        worker = await runtime.spawn("w", TARGET, {"factor": 3})
        assert await worker.call("times", 2, returns=int) == 6
        await runtime.shutdown()

    asyncio.run(scenario())
