"""The workload model: what trajectories of a task are like, how much of a device's peak is reached, how fast links are.

A profile is one TOML file. `paper` is shipped, with a reason beside every number; `rollart profile RUN` makes one of a
recorded run. Invariant: what `load_profile` returns can be simulated, `to_toml` writes text that reads back to an equal
profile, and every complaint is one `ConfigError` line that names the file and the key. What this file leaves out: how
an episode is drawn (`episode.py`) and how its time passes (`environment.py`, `reward.py`).
"""

from __future__ import annotations

import math
import random
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import msgspec
from msgspec import NODEFAULT, Meta, Struct, field
from msgspec.structs import fields

from rollart import toml
from rollart.checks import check, nearest
from rollart.errors import ConfigError, boundary
from rollart.sections import Count, Fraction, NonNegative, Positive, Section

SHIPPED = {"paper": Path(__file__).with_name("paper.toml")}
"""Profiles that are named without a path."""
LINKS = ("push", "pull", "load", "kv")
NORMAL = NormalDist()
SMALLEST = 2.0**-53
"""Of the shares that a random number can be, the smallest above 0: the ends of a distribution are infinite."""

Share = Annotated[float, Meta(ge=0, le=1)]
Tail = Literal["constant", "lognormal", "gaussian", "uniform", "geometric", "recorded"]


class Spread(Section, frozen=True):
    """A distribution of seconds or tokens, kept within `low` and `high`; `mean` is that before these bounds.

    sigma: lognormal: of the logarithm; gaussian: standard deviation; uniform: half the width.
    geometric: whole numbers from 1 on, as of trials up to the first success.
    recorded: one of `values`, each as likely as the others; they are in order.
    """

    mean: NonNegative
    tail: Tail = "constant"
    sigma: NonNegative = 0.0
    low: NonNegative = 0.0
    high: NonNegative | None = None
    values: tuple[NonNegative, ...] = ()

    def draw(self, rng: random.Random) -> float:
        """One value. It takes exactly one random number, whatever the tail."""
        return self.at(rng.random())

    def draws(self, rng: random.Random, count: int) -> list[float]:
        """`count` values, as that many calls of `draw` give."""
        curve, within, uniform = self._curve(), self.within, rng.random
        return [within(curve(uniform() or SMALLEST)) for _ in range(count)]

    def at(self, share: float) -> float:
        """The value below which `share` of all draws lie (inverse transform sampling). It grows with `share`."""
        return self.within(self._curve()(min(max(share, SMALLEST), 1 - SMALLEST)))

    def _curve(self) -> Callable[[float], float]:
        """The quantile function before the bounds."""
        mean, sigma, normal, exp = self.mean, self.sigma, NORMAL.inv_cdf, math.exp
        if self.tail == "lognormal":
            scale = mean * exp(-sigma * sigma / 2)  # so that the mean is kept
            return lambda share: scale * exp(sigma * normal(share))
        if self.tail == "gaussian":
            return lambda share: mean + sigma * normal(share)
        if self.tail == "uniform":
            return lambda share: mean + sigma * (2 * share - 1)
        if self.tail == "geometric" and mean > 1:
            per_trial = math.log1p(-1 / mean)
            return lambda share: 1 + math.floor(math.log1p(-share) / per_trial)
        if self.tail == "recorded":
            return lambda share: self.values[int(share * len(self.values))]
        return lambda _: mean

    def within(self, value: float) -> float:
        """`value` moved between `low` and `high`."""
        if value < self.low:
            return self.low
        return value if self.high is None or value < self.high else self.high


NOTHING = Spread(0.0)


class TaskProfile(Section, frozen=True, kw_only=True):
    """`[tasks.NAME]`: trajectories of one task. Tokens include chat markup; every turn is drawn on its own."""

    turns: Spread
    prompt_tokens: Spread
    """Of the first observation."""
    observation_tokens: Spread = NOTHING
    """Of each later one."""
    response_tokens: Spread
    """Generated in one turn."""
    difficulty_sigma: NonNegative = 0.0
    """Of the logarithm of a factor on `turns` that all members of a group share."""
    turns_shared: Share = 0.0
    """Correlation of `turns` among the members of a group, as of a Gaussian copula; 1: all have the same."""
    equal_rewards: Share = 0.0
    """Share of groups whose members all get the same reward, so that `rollout.zero_variance` may replace them."""
    reset_s: Spread = NOTHING
    step_s: Spread = NOTHING
    """Of each turn, the overhead of the call included."""
    reset_failure_rate: Share = 0.0
    reset_failure_s: Spread = NOTHING
    """How long a reset takes that fails."""
    step_failure_rate: Share = 0.0
    reward_s: Spread = NOTHING
    """Seconds that one reward call keeps a reward device busy."""
    reward_overhead_s: Spread = NOTHING
    """Seconds of a reward call beyond those."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Key -> where its number comes from."""


class Efficiency(Section, frozen=True, kw_only=True):
    """`[efficiency]`: what is reached of the figures of a device class, the same for all classes."""

    prefill: Fraction
    """Share of peak FLOPS."""
    decode: Fraction
    """Share of memory bandwidth."""
    train: Fraction
    """Share of peak FLOPS, the passes that only compute log-probabilities included."""
    step_overhead_s: NonNegative
    """Host time of one engine step."""
    tp_efficiency: Fraction
    """Per doubling of the devices of one engine."""
    memory: Fraction
    """Share of a device's memory that weights and KV may fill."""
    chunk_tokens: Count
    """Prompt tokens of one engine step at most."""
    slots_max: Count
    """Requests that one engine runs at once, at most."""
    train_overhead_s: NonNegative
    """Per train step."""
    reasons: dict[str, str] = field(default_factory=dict)


class Link(Section, frozen=True, kw_only=True):
    """`[links.NAME]`: a way that bytes take."""

    latency_s: NonNegative
    bytes_per_s: Positive
    reasons: dict[str, str] = field(default_factory=dict)

    def seconds(self, num_bytes: float) -> float:
        """latency + bytes / rate."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Profile(Section, frozen=True, kw_only=True):
    """The whole file. Links: `push` (trainer -> store), `pull` (store -> engine's host), `load` (host -> device), `kv`
    (prefilling -> decoding device).
    """

    engine: Literal["roofline", "emulated"] = "roofline"
    """`emulated`: engines at exactly the pace of engine `emulated`, to compare with real runs of it."""
    train_s_per_token: Positive | None = None
    """Seconds of a train step per generated token, as a real run measured them, instead of FLOPs and `efficiency`."""
    reasons: dict[str, str] = field(default_factory=dict)
    efficiency: Efficiency
    links: dict[str, Link]
    tasks: dict[str, TaskProfile]


# ------------------------------------------------------------------------------------------------------------ reading
def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by its name, or a TOML file. Raises ConfigError."""
    path = SHIPPED.get(name_or_path) or Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        names = ", ".join(map(repr, SHIPPED))
        raise ConfigError(
            f"simulate.profile: {name_or_path}: {error.strerror or error}; name a file of "
            f"`rollart profile`, or a shipped profile: {names}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"simulate.profile: {name_or_path}: not UTF-8 text") from error
    return parse_profile(text, name_or_path)


def parse_profile(text: str, source: str = "profile") -> Profile:
    """As `load_profile`, from text that came from `source`."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    try:
        check(Profile, data)
        _check_complete(Profile, data, "")
        with boundary(ConfigError, "profile"):
            profile = msgspec.convert(data, Profile)
        _check_rules(profile)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return profile


def _check_complete(kind: type[Struct], data: Mapping[str, Any], path: str) -> None:
    for each in fields(kind):
        here = f"{path}{each.name}"
        if each.name not in data:
            if each.required:
                raise ConfigError(f"{here}: missing; docs/simulate.md lists what a profile holds")
        elif _is_table(each.type):
            _check_complete(each.type, data[each.name], f"{here}.")
        elif typing.get_origin(each.type) is dict and _is_table(inner := typing.get_args(each.type)[1]):
            for name, table in data[each.name].items():
                _check_complete(inner, table, f"{here}.{toml.key(name)}.")


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _check_rules(profile: Profile) -> None:
    if not profile.tasks:
        raise ConfigError("tasks: no task; add a table such as [tasks.maths]")
    for name in profile.links:
        if name not in LINKS:
            raise ConfigError(f"links.{toml.key(name)}: not a link{nearest(name, LINKS)}")
    for name in LINKS:
        if name not in profile.links:
            raise ConfigError(f"links.{name}: missing; add a table [links.{name}]")
    for path, spread in _spreads(profile):
        _check_spread(path, spread)


def _spreads(profile: Profile) -> Iterator[tuple[str, Spread]]:
    for name, task in profile.tasks.items():
        for key in TaskProfile.__struct_fields__:
            if isinstance(value := getattr(task, key), Spread):
                yield f"tasks.{toml.key(name)}.{key}", value


def _check_spread(path: str, spread: Spread) -> None:
    if spread.high is not None and spread.high < spread.low:
        raise ConfigError(f"{path}.high: {spread.high:g} is below low, {spread.low:g}")
    if spread.tail == "geometric" and spread.mean < 1:
        raise ConfigError(f"{path}.mean: {spread.mean:g} is below 1, where a geometric tail begins")
    if (spread.tail == "recorded") != bool(spread.values):
        raise ConfigError(f"{path}.values: go with tail = 'recorded', and it with them")
    if list(spread.values) != sorted(spread.values):
        raise ConfigError(f"{path}.values: not in order, from the smallest to the largest")
    if spread.sigma and spread.tail in ("constant", "geometric", "recorded"):
        raise ConfigError(f"{path}.sigma: means nothing with tail {spread.tail!r}; add tail = 'lognormal' or leave it")


# ------------------------------------------------------------------------------------------------------------ writing
def to_toml(profile: Profile) -> str:
    """Text that `parse_profile` reads back to an equal profile. Defaults are left out."""
    return "\n\n".join("\n".join(block) for block in _blocks(_plain(profile), "")) + "\n"


def _blocks(table: Mapping[str, Any], header: str) -> Iterator[list[str]]:
    """Values first, then one block per table below; a distribution is a value."""
    below = {name: value for name, value in table.items() if isinstance(value, dict) and "mean" not in value}
    lines = [f"{toml.key(name)} = {toml.value(value)}" for name, value in table.items() if name not in below]
    if lines:
        yield [f"[{header}]", *lines] if header else lines
    for name, value in below.items():
        yield from _blocks(value, f"{header}.{toml.key(name)}".removeprefix("."))


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        pairs = ((each, getattr(value, each.name)) for each in fields(type(value)))
        return {each.name: _plain(inner) for each, inner in pairs if inner != _default(each)}
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _default(each: msgspec.structs.FieldInfo) -> Any:
    return each.default_factory() if each.default_factory is not NODEFAULT else each.default
