"""The three decorators of the programming model: they attach a typed declaration and change nothing else (section 3).

    @register(mode="execute_all" | "execute_first" | "split")      how a collective call spreads over the workers
    @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})      which class a call goes to, by `tag_name`
    @register_serverless(attribute="reward_proxy", serverless_url="...")   a function that runs elsewhere

A decorated method stays an ordinary function that can be called and tested alone. Decorators may be combined; what does
not fit together is a ConfigError at once, when the class is defined. What this file leaves out: what obeys the
declaration (`data/cluster.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from msgspec import Struct, field
from msgspec.structs import replace

from rollart.checks import nearest, not_a_choice
from rollart.errors import ConfigError

Mode = Literal["execute_all", "execute_first", "split"]
Reduce = Literal["concat", "list", "sum", "mean", "min", "max"]

DEFAULT_TAG = "default"
TAG_NAME = "tag_name"
ATTRIBUTE = "__rollart__"

W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class Declaration(Struct, frozen=True):
    """What the decorators say of one method. `mode` is None where only a class or a URL is declared.

    `split`: names of the parameters that are scattered; empty: the first one. `reduce`: how results are put together.
    `affinity`: tag -> device class. `attribute` and `url`: of a serverless function.
    """

    mode: Mode | None = None
    split: tuple[str, ...] = ()
    reduce: Reduce = "concat"
    affinity: dict[str, str] = field(default_factory=dict)
    attribute: str = ""
    url: str = ""


class Registered(Protocol[W_contra, P, R_co, Out_co]):
    """A declared method, as the type checker sees it: a function of a worker whose collective call gives `Out`."""

    def __call__(self, worker: W_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: object) -> Registered[W_contra, P, R_co, Out_co]: ...

    @overload
    def __get__(self, instance: object, owner: object) -> Callable[P, R_co]: ...

    @property
    def collective(self) -> Out_co:
        """Never there: it carries the type of a collective call's result."""
        ...


class _ToAll(Protocol):
    """`execute_all`: one result per worker, in the order of the workers."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[W, P], Awaitable[R]], /
    ) -> Registered[W, P, Awaitable[R], list[R]]: ...

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], R], /) -> Registered[W, P, R, list[R]]: ...


class _ToOne(Protocol):
    """One result: of the one worker, or put together from all."""

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], Awaitable[R]], /) -> Registered[W, P, Awaitable[R], R]: ...

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], R], /) -> Registered[W, P, R, R]: ...


class _Either(Protocol):
    """Over a method that is registered already, or a plain one."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, method: Registered[W, P, R, Out], /
    ) -> Registered[W, P, R, Out]: ...

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], Awaitable[R]], /) -> Registered[W, P, Awaitable[R], R]: ...

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], R], /) -> Registered[W, P, R, R]: ...


@overload
def register(mode: Literal["execute_all"] = ...) -> _ToAll: ...


@overload
def register(mode: Literal["execute_first"]) -> _ToOne: ...


@overload
def register(mode: Literal["split"], *, split: str | tuple[str, ...] = ..., reduce: Reduce = ...) -> _ToOne: ...


def register(mode: Mode = "execute_all", *, split: str | tuple[str, ...] = (), reduce: Reduce = "concat") -> Any:
    """Declare how a collective call of a method spreads.

    execute_all: every worker gets the inputs; a list of their results, in the order of the workers.
    execute_first: the first worker alone; its result.
    split: the parameters named in `split` (default: the first one) are lists, cut into one stretch per worker, as equal
    as can be; the others go to all. The results are put together by `reduce`: "concat" (lists, in order), "list" (one
    entry per worker that had a share), "sum", "min", "max", or "mean" weighted by the length of each stretch.

    Raises ConfigError for a mode, parameter or reduction that does not exist.
    """
    names = (split,) if isinstance(split, str) else tuple(split)
    if mode not in get_args(Mode):
        raise ConfigError(f"@register: mode {not_a_choice(mode, get_args(Mode))}")
    if reduce not in get_args(Reduce):
        raise ConfigError(f"@register: reduce {not_a_choice(reduce, get_args(Reduce))}")
    if mode != "split" and names:
        raise ConfigError(f"@register: mode {mode!r} splits nothing; take mode='split' or leave split out")

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        known = _parameters(method)
        chosen = names or (tuple(known[:1]) if mode == "split" else ())
        if mode == "split" and not known:
            raise ConfigError(f"@register on {method.__qualname__}: mode 'split' needs a parameter to split")
        for name in chosen:
            if name not in known:
                raise ConfigError(f"@register on {method.__qualname__}: no parameter {name!r}{nearest(name, known)}")
        return _attach(method, "register", mode=mode, split=chosen, reduce=reduce)

    return declare


def hw_mapping(hw_affinity: Mapping[str, str]) -> _Either:
    """Declare which device class a call goes to: {task tag: class}; the tag "default" serves all others.

    The method needs a parameter `tag_name: str = "default"`; a call passes the task there. Raises ConfigError.
    """
    if not isinstance(hw_affinity, Mapping) or not hw_affinity:
        raise ConfigError('@hw_mapping: hw_affinity is a table such as {"FrozenLake": "H800", "default": "H20"}')
    for tag, name in hw_affinity.items():
        if not isinstance(tag, str) or not isinstance(name, str) or not tag or not name:
            raise ConfigError(f"@hw_mapping: {tag!r}: {name!r} is not a task tag with a device class, both text")

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        if TAG_NAME not in _parameters(method):
            raise ConfigError(
                f"@hw_mapping on {method.__qualname__}: it needs a parameter {TAG_NAME!r}, by which a call names its "
                f'task: def {method.__name__}(self, ..., {TAG_NAME}: str = "{DEFAULT_TAG}")'
            )
        return _attach(method, "hw_mapping", affinity=dict(hw_affinity))

    return declare  # type: ignore[return-value]


def register_serverless(attribute: str, serverless_url: str) -> _Either:
    """Declare that `self.<attribute>(...)` runs at a URL (scheme://...) as a pure function. Raises ConfigError."""
    if not isinstance(attribute, str) or not attribute.isidentifier() or attribute.startswith("__"):
        raise ConfigError(f"@register_serverless: attribute {attribute!r} cannot be the name of an attribute")
    scheme, separator, rest = str(serverless_url).partition("://")
    if not separator or not scheme or not rest:
        raise ConfigError(
            f"@register_serverless: serverless_url {serverless_url!r} is no URL; write it as local://module:function "
            "or https://host/path"
        )

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        return _attach(method, "register_serverless", attribute=attribute, url=serverless_url)

    return declare  # type: ignore[return-value]


def declaration_of(method: object) -> Declaration | None:
    """What the decorators said of a function, or None."""
    found = getattr(method, ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


def declared_methods(kind: type) -> dict[str, Declaration]:
    """All declared methods of a class, its bases' included."""
    methods = inspect.getmembers(kind, lambda member: declaration_of(member) is not None)
    return {name: declared for name, method in methods if (declared := declaration_of(method)) is not None}


def _parameters(method: Callable[..., Any]) -> list[str]:
    """Names of what a caller may pass, without `self`."""
    if isinstance(method, staticmethod | classmethod | property) or not callable(method):
        raise ConfigError(f"{method!r} is no method of a worker: decorators go on plain and async methods")
    takes = inspect.signature(method).parameters.values()
    star = next((each for each in takes if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)), None)
    if star is not None:
        raise ConfigError(f"{method.__qualname__}: parameter {star} cannot be sent to a worker; name each parameter")
    return [each.name for each in takes][1:]


def _attach(method: Callable[..., Any], by: str, **said: Any) -> Callable[..., Any]:
    _parameters(method)
    known = declaration_of(method) or Declaration()
    for name in said:
        if getattr(known, name) and name in ("mode", "affinity", "url"):
            raise ConfigError(f"@{by} on {method.__qualname__}: it has that decorator already")
    setattr(method, ATTRIBUTE, replace(known, **said))
    return method
