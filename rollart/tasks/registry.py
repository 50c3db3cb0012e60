"""Which tasks exist, and what a config makes of them.

`TaskConfig.env` is looked up as a built-in name, then as an entry point of group `rollart.tasks`, then as
`module:Class`. Everything a user can get wrong about a task is found here, as one `ConfigError` naming the key, before
any worker starts. What this file leaves out: running environments (`data/environment.py`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from rollart.config import Config, nearest, serverless_of
from rollart.errors import ConfigError, to_install
from rollart.imports import check_arguments, load_object
from rollart.protocols import Env
from rollart.sections import TaskConfig
from rollart.tasks import adapters, arithmetic, frozenlake, reasoning, sorting, synthetic
from rollart.tasks.classes import definition_of_class
from rollart.tasks.definition import TaskDefinition
from rollart.types import TaskSpec

OF_MODULES = ("local", "thread", "ray")
"""Schemes of rewards whose URL names an object of a Python module."""
GROUP = "rollart.tasks"
BUILT_IN: dict[str, TaskDefinition] = {
    task.name: task
    for task in (
        frozenlake.TASK,
        sorting.TASK,
        arithmetic.TASK,
        reasoning.TASK,
        synthetic.TASK,
        adapters.GYMNASIUM,
        adapters.GEM,
    )
}


class OptionInfo(Struct, frozen=True):
    """One option as text; `default` is empty where a value must be given."""

    name: str
    type: str
    default: str
    doc: str


class TaskInfo(Struct, frozen=True):
    """One task family; `available` is False while its extra is not installed or its package cannot be imported."""

    name: str
    summary: str
    options: list[OptionInfo]
    extra: str
    available: bool


def specs(config: Config) -> dict[str, TaskSpec]:
    """The control plane's view of every task: the definition's defaults with the config over them.

    Raises ConfigError for an unknown environment, an unknown or wrong option, a missing extra, a class that is not an
    environment, or a reward that cannot be imported.
    """
    return {name: _spec(config, task, name) for name, task in config.tasks.items()}


def factory(task: TaskConfig, name: str = "") -> Callable[[], Env]:
    """A function that makes environments of one task. `name` stands in for an empty `task.env`. Raises ConfigError."""
    definition = _definition(task, name)
    options = _options(definition, task, name)
    load = definition.load
    build = load_object(load, f"tasks.{name}.env") if isinstance(load, str) else load
    return lambda: typing.cast(Env, build(options))


def make_env(task: TaskConfig, name: str = "") -> Env:
    """One environment of a task. Raises ConfigError."""
    return factory(task, name)()


def reward_scheme(config: Config) -> str:
    """Where functions run that are named without a scheme."""
    return "thread" if config.runtime == "inline" else "local"


def reward_url(task: TaskConfig, name: str = "", default_scheme: str = "local") -> str:
    """Where the function is that scores the task's trajectories; "" where the sum of step rewards does.

    A `module:function` comes back as it is, after a look whether it exists here and can run there: its attributes
    `scope` ("group" or "trajectory") and `needs_main_thread`, its `check_options(options, key)`, and its
    `inner_rewards(options, key)` (name, options and key of each that it calls itself) say what it needs where it has
    them. Raises ConfigError.
    """
    url = task.reward or _definition(task, name).reward
    scheme, separator, rest = url.partition("://")
    target = url if not separator else rest if scheme in OF_MODULES else ""
    if target and not target.partition(":")[0].endswith(".py"):
        function = load_object(target, f"tasks.{name}.reward")
        makes_nothing = isinstance(function, type) and not any("__call__" in vars(base) for base in function.__mro__)
        if not callable(function) or makes_nothing:
            raise ConfigError(f"tasks.{name}.reward: {url!r} is {function!r}, which cannot be called")
        check_arguments(function, task.reward_options, f"tasks.{name}.reward_options", url)
        _check_needs(function, task, f"tasks.{name}.reward", scheme if separator else default_scheme)
    return url


def _check_needs(function: Any, task: TaskConfig, key: str, scheme: str) -> None:
    shown = task.reward or getattr(function, "__name__", "")
    if (scope := getattr(function, "scope", task.reward_scope)) != task.reward_scope:
        wants = "whole groups" if scope == "group" else "single trajectories"
        raise ConfigError(f'{key}: {shown!r} scores {wants}; set {key}_scope = "{scope}"')
    if check_options := getattr(function, "check_options", None):
        check_options(task.reward_options, f"{key}_options")
    if scheme == "thread":
        for what, reward in _with_inner(f"{key}: {shown!r}", function, task.reward_options, f"{key}_options"):
            if getattr(reward, "needs_main_thread", False):
                raise ConfigError(
                    f"{what} needs the main thread of a process, and on thread:// (runtime inline without a scheme "
                    f"too) it has none; take local:// in {key}"
                )


def _with_inner(
    what: str, reward: Any, options: typing.Mapping[str, Any], key: str
) -> typing.Iterator[tuple[str, Any]]:
    """A reward and those that it calls, however deep: each as `key: name`, and what is named. `key`: of `options`."""
    yield what, reward
    inner_rewards = getattr(reward, "inner_rewards", None)
    for name, inner, where in inner_rewards(options, key) if inner_rewards else ():
        found = load_object(name, f"{where}.reward")
        yield from _with_inner(f"{where}.reward: {name!r}", found, inner, f"{where}.options")


def describe() -> list[TaskInfo]:
    """Every built-in task and every entry point, with options."""
    found = [_info(name, definition) for name, definition in BUILT_IN.items()]
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            found.append(_info(point.name, _from_entry_point(point, point.name)))
        except ConfigError as error:
            found.append(TaskInfo(point.name, str(error), [], "", False))
    return found


# ------------------------------------------------------------------------------------------------------------- lookup
def _definition(task: TaskConfig, name: str) -> TaskDefinition:
    env = task.env or name
    key = f"tasks.{name}.env" if task.env else f"tasks.{name}"
    if env in BUILT_IN:
        definition = BUILT_IN[env]
    elif points := importlib.metadata.entry_points(group=GROUP, name=env):
        definition = _from_entry_point(next(iter(points)), key, task.options)
    elif ":" in env:
        definition = _from_object(env, load_object(env, key), key, task.options)
    else:
        names = [*BUILT_IN, *importlib.metadata.entry_points(group=GROUP).names, "module:Class"]
        raise ConfigError(f"{key}: unknown environment {env!r}{nearest(env, names)}")
    if not _is_available(definition):
        raise ConfigError(f"{key}: {env!r} needs more packages; {to_install(definition.extra)}")
    return definition


def _from_entry_point(
    point: importlib.metadata.EntryPoint, key: str, options: typing.Mapping[str, Any] | None = None
) -> TaskDefinition:
    return _from_object(point.name, load_object(point.value, key), key, options or {})


def _from_object(name: str, value: Any, key: str, options: typing.Mapping[str, Any]) -> TaskDefinition:
    if isinstance(value, TaskDefinition):
        return value
    if isinstance(value, type):
        return definition_of_class(name, value, key, options)
    raise ConfigError(f"{key}: {name!r} is {value!r}; expected an environment class or a TaskDefinition")


def _is_available(definition: TaskDefinition) -> bool:
    return not definition.requires or importlib.util.find_spec(definition.requires) is not None


# ---------------------------------------------------------------------------------------------------------- from config
def _options(definition: TaskDefinition, task: TaskConfig, name: str) -> Struct:
    fields = definition.options.__struct_fields__
    for option in task.options:
        if option not in fields:
            choices = nearest(option, fields) if fields else "; this task has none"
            raise ConfigError(f"tasks.{name}.options.{option}: unknown option{choices}")
    try:
        return msgspec.convert(task.options, definition.options)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        key = f"tasks.{name}.options{where.strip('`').removeprefix('$')}"
        raise ConfigError(f"{key}: {reason[0].lower()}{reason[1:]}") from error


def _spec(config: Config, task: TaskConfig, name: str) -> TaskSpec:
    max_model_tokens = config.rollout.max_model_tokens
    definition = _definition(task, name)
    make = factory(task, name)
    if definition.try_out:
        _try_out(make, name)
    max_tokens = task.max_tokens or definition.max_tokens
    if max_tokens > max_model_tokens:
        raise ConfigError(
            f"tasks.{name}.max_tokens: {max_tokens} is more than rollout.max_model_tokens {max_model_tokens}; "
            "lower the first or raise the second"
        )
    return TaskSpec(
        name=name,
        weight=task.weight,
        tag=task.tag or name,
        max_turns=task.max_turns or definition.max_turns,
        max_turn_tokens=task.max_turn_tokens or definition.max_turn_tokens,
        max_tokens=max_tokens,
        stop=tuple(task.stop),
        system_prompt=definition.system_prompt if task.system_prompt is None else task.system_prompt,
        has_reward=bool(reward_url(task, name, reward_scheme(config))),
        reward_scope=task.reward_scope,
        reset_timeout_s=task.reset_timeout_s,
        step_timeout_s=task.step_timeout_s,
        reward_deadline_s=serverless_of(config, name).deadline_s,
        env_retries=task.env_retries,
        success_reward=definition.success_reward if task.success_reward is None else task.success_reward,
    )


def _try_out(make: Callable[[], Env], name: str) -> None:
    try:
        env = make()
    except ConfigError as error:
        raise ConfigError(f"tasks.{name}.options.{error}") from error
    except Exception as error:
        raise ConfigError(f"tasks.{name}.options: {type(error).__name__}: {error}") from error
    if hasattr(env, "close"):
        env.close()


# ----------------------------------------------------------------------------------------------------------- describing
def _info(name: str, definition: TaskDefinition) -> TaskInfo:
    hints = typing.get_type_hints(definition.options, include_extras=True)
    options = [_option(field, hints[field.name]) for field in msgspec.structs.fields(definition.options)]
    return TaskInfo(name, definition.summary, options, definition.extra, _is_available(definition))


def _option(field: msgspec.structs.FieldInfo, hint: Any) -> OptionInfo:
    if field.default is not msgspec.NODEFAULT:
        default = repr(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        default = repr(field.default_factory())
    else:
        default = ""
    docs = [meta.description for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]
    return OptionInfo(field.name, _type_name(hint), default, next((doc for doc in docs if doc), ""))


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        return _type_name(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
