"""The three decorators: what they attach, and what they refuse when a class is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rollart.distributed as rdist
from rollart.declarations import Declaration, declaration_of, declared_methods
from rollart.errors import ConfigError


class Judge(rdist.Worker):
    role = "judge"

    @rdist.register(mode="execute_all")
    def load(self, path: str) -> int:
        return len(path)

    @rdist.register(mode="split", split="texts", reduce="mean")
    def score(self, rubric: str, texts: list[str]) -> float:
        return float(len(texts))

    @rdist.hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    async def generate(self, prompt: list[int], tag_name: str = "default") -> list[int]:
        return prompt

    @rdist.register_serverless(attribute="reward_proxy", serverless_url="local://tests.test_declarations:remote")
    def compute_rewards(self, trajectory: str) -> float:
        return float(self.reward_proxy(trajectory))  # type: ignore[attr-defined]

    def helper(self) -> None: ...


def remote(trajectory: str) -> float:
    return len(trajectory) / 2


class Louder(Judge):
    @rdist.register(mode="execute_first")
    @rdist.hw_mapping({"default": "H20"})
    def generate(self, prompt: list[int], tag_name: str = "default") -> list[int]:  # type: ignore[override]
        return prompt * 2


def test_decorators_attach_a_declaration_and_leave_the_function_as_it_was() -> None:
    assert declared_methods(Judge) == {
        "load": Declaration(mode="execute_all"),
        "score": Declaration(mode="split", split=("texts",), reduce="mean"),
        "generate": Declaration(affinity={"FrozenLake": "H800", "default": "H20"}),
        "compute_rewards": Declaration(attribute="reward_proxy", url="local://tests.test_declarations:remote"),
    }
    assert Judge().load("abc") == 3
    assert Judge().score("r", ["a", "b"]) == 2.0
    assert declaration_of(Judge.helper) is None


def test_a_subclass_inherits_declarations_and_may_replace_them() -> None:
    assert declared_methods(Louder)["load"] == Declaration(mode="execute_all")
    assert declared_methods(Louder)["generate"] == Declaration(mode="execute_first", affinity={"default": "H20"})


def test_the_first_parameter_is_split_unless_another_is_named() -> None:
    @rdist.register(mode="split")
    def method(self: Judge, first: list[int], second: list[int]) -> list[int]:
        return first

    found = declaration_of(method)
    assert found is not None
    assert found.split == ("first",)


def define(decorator: Callable[[], Any], method: Callable[..., Any] | None = None) -> Callable[[], Any]:
    def plain(self: Any, texts: list[str]) -> list[str]:
        return texts

    return lambda: decorator()(method or plain)


def many(self: Any, *texts: str) -> None: ...


def keyed(self: Any, **texts: str) -> None: ...


def nothing(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("definition", "line"),
    [
        (define(lambda: rdist.register(mode="all")), "@register: mode 'all' is not a choice"),  # type: ignore[call-overload]
        (define(lambda: rdist.register("split", reduce="product")), "@register: reduce 'product' is not a choice"),  # type: ignore[call-overload]
        (define(lambda: rdist.register("split", split="text")), "no parameter 'text'; did you mean 'texts'?"),
        (define(lambda: rdist.register("execute_all", split="texts")), "mode 'execute_all' splits nothing"),  # type: ignore[call-overload]
        (define(lambda: rdist.register("split"), nothing), "mode 'split' needs a parameter to split"),
        (define(lambda: rdist.register(), many), "parameter *texts: 'str' cannot be sent to a worker"),
        (define(lambda: rdist.register(), keyed), "parameter **texts: 'str' cannot be sent to a worker"),
        (define(lambda: rdist.register(), staticmethod(nothing)), "decorators go on plain and async methods"),
        (define(lambda: rdist.hw_mapping({"default": "H20"})), "it needs a parameter 'tag_name'"),
        (define(lambda: rdist.hw_mapping({})), "hw_affinity is a table such as"),
        (define(lambda: rdist.hw_mapping({"a": 3})), "'a': 3 is not a task tag with a device class"),  # type: ignore[dict-item]
        (define(lambda: rdist.register_serverless("a b", "fc://x")), "attribute 'a b' cannot be the name"),
        (define(lambda: rdist.register_serverless("proxy", "x")), "serverless_url 'x' is no URL"),
        (
            define(lambda: lambda method: rdist.register()(rdist.register()(method))),
            "@register on define.<locals>.plain: it has that decorator already",
        ),
    ],
)  # fmt: skip
def test_a_wrong_decorator_is_refused_when_the_class_is_defined(definition: Callable[[], Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        definition()
    assert line in str(caught.value)
