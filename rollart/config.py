"""The configuration of a run: frozen, validated, two levels deep, TOML plus `section.key=value` overrides.

Every value is checked before anything heavy is imported. A mistake is one `ConfigError` line that names the key, the
reason and the nearest valid choice. Derived limits (slots, buffer bound, batch split) are computed here, so that
`rollart check` and the run itself can never disagree. What this file leaves out: which tasks and options exist
(`tasks/registry.py`), which devices (`resource/placement.py`), and how one key's value is judged (`checks.py`).
"""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from rollart import toml
from rollart.checks import check
from rollart.checks import nearest as nearest
from rollart.errors import ConfigError, boundary
from rollart.schedule import SCHEDULES, Schedule
from rollart.sections import (
    Count,
    EvalConfig,
    LogConfig,
    ModelConfig,
    PoolConfig,
    ResourcesConfig,
    RoleConfig,
    RolloutConfig,
    Section,
    ServerlessConfig,
    SimulateConfig,
    TaskConfig,
    TrainConfig,
    WeightsConfig,
)

ROLES = ("actor_train", "actor_gen", "prefill", "environment", "reward", "rollout")
ENGINE_KEYS = {
    "slots": "rollout.engine_slots",
    "max_model_tokens": "rollout.max_model_tokens",
    "seed": "seed",
    "url": "engine_options.urls",
    "hands_over": "[roles.prefill]",
    "device": "pools.NAME.device",
    "device_class": "pools.NAME.device_class",
    "tensor_parallel_size": "roles.actor_gen.devices",
}
"""What an engine is told from elsewhere in the config."""


class Config(Section, frozen=True, kw_only=True):
    """The whole file. Top-level keys choose; tables tune."""

    seed: int = 0
    steps: Count = 100
    schedule: Literal["sync", "sync_plus", "one_off", "areal", "rollart"] = "rollart"
    alpha: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """Bound on staleness; may be fractional. Default: what the schedule implies, else 1."""
    runtime: Literal["local", "inline", "ray"] = "local"
    """`local`: one process per worker. `inline`: everything in one process, for debugging. `ray`: Ray actors."""
    engine: Literal["embedded", "emulated", "vllm", "http"] = "embedded"
    """`emulated`: the embedded engine, slowed down to the pace of its device class; for trying out a mix of pools.
    `vllm`: vLLM in each inference worker. `http`: servers of vLLM or SGLang that run already."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Of the engine that is named, such as { gpu_memory_utilization = 0.8 }; `docs/engines.md` lists them."""
    trainer: Literal["embedded"] = "embedded"
    affinity: dict[str, str] | Literal["auto"] = field(default_factory=dict)
    """Task (or its tag) -> device class that generates for it; "default" serves the others. "auto": by measurement."""
    tasks: dict[str, TaskConfig]
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    serverless: dict[str, ServerlessConfig] = field(default_factory=dict)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    simulate: SimulateConfig | None = None
    """Read by `rollart simulate` and `rollart plan`; training does not look at it."""

    @property
    def plan(self) -> Schedule:
        """The schedule's record."""
        return SCHEDULES[self.schedule]

    @property
    def affinity_mode(self) -> Literal["declared", "auto"]:
        """Whether classes of tasks are declared or measured."""
        return "auto" if self.affinity == "auto" else "declared"

    @property
    def effective_alpha(self) -> float:
        """The bound in force."""
        implied = self.plan.alpha
        if implied is not None:
            return implied
        return 1.0 if self.alpha is None else self.alpha


class Limits(Struct, frozen=True):
    """What follows from a config; see design notes on admission in `control/group_book.py`."""

    alpha: float
    slots: int
    """Groups admitted and not yet trained (with `free_slots = "train_start"`: not yet in training), dropped or aborted,
    at most."""
    needed_slots: int
    """Those of them that alpha asks for; the others are redundant."""
    trajectories_in_flight: int
    """Upper bound of running trajectories."""
    buffer_groups: int
    """Upper bound of finished groups that wait for training."""
    groups_in_memory: int
    """Upper bound of groups that run, wait for training or are in training."""
    shards: int
    """Processes that the trajectories are spread over; 1: they run in the driver."""
    trajectories_per_batch: int
    groups_per_minibatch: int


def limits(config: Config) -> Limits:
    """Derived limits: slots = ceil((alpha + 1) x groups per batch) + extra groups (paper section 5)."""
    rollout = config.rollout
    needed = math.ceil((config.effective_alpha + 1) * rollout.groups_per_batch)
    slots = needed + (rollout.groups_per_batch if rollout.extra_groups == "auto" else rollout.extra_groups)
    in_flight = slots * (rollout.group_size + rollout.extra_members)
    return Limits(
        alpha=config.effective_alpha,
        slots=slots,
        needed_slots=needed,
        trajectories_in_flight=in_flight,
        buffer_groups=slots,
        groups_in_memory=slots + (rollout.groups_per_batch if rollout.free_slots == "train_start" else 0),
        shards=1 if unshardable(config) else math.ceil(in_flight / rollout.shard_trajectories),
        trajectories_per_batch=rollout.groups_per_batch * rollout.group_size,
        groups_per_minibatch=rollout.groups_per_batch // config.train.minibatches,
    )


def serverless_of(config: Config, task: str) -> ServerlessConfig:
    """How the reward function of a task is called. A pool with its URL says how many calls run at once."""
    table = config.serverless.get(task) or config.serverless.get("default") or ServerlessConfig()
    url = config.tasks[task].reward
    count = sum(pool.count for pool in config.pools.values() if pool.url and pool.url == url)
    return msgspec.structs.replace(table, max_concurrency=table.max_concurrency or count)


def server_urls(config: Config) -> list[str]:
    """The servers of engine `http`, one for each inference worker; none for other engines."""
    urls = config.engine_options.get("urls") if config.engine == "http" else []
    return urls if isinstance(urls, list) else []


def unshardable(config: Config) -> str:
    """Why the trajectories of this config stay in one process, whatever their number; empty where they need not."""
    if config.plan.lockstep:
        return f"schedule {config.schedule} steps all environments together"
    return "runtime inline is one process" if config.runtime == "inline" else ""


# ------------------------------------------------------------------------------------------------------------ loading
def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `a.b=value` overrides. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `load`, from text."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    for override in overrides:
        toml.apply(data, override)
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> Config:
    """Validate a parsed file. Raises ConfigError."""
    check(Config, data)
    if not data.get("tasks"):
        raise ConfigError("tasks: no task; add a table such as [tasks.frozenlake]")
    with boundary(ConfigError, "config"):
        config = msgspec.convert(data, Config)
    for rule in (
        _check_tasks,
        _check_alpha,
        _check_batch,
        _check_pools,
        _check_engine,
        _check_serverless,
        _check_weights,
        _check_log,
    ):
        rule(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values, without None, ready to be written as TOML."""
    return typing.cast(dict[str, Any], _without_none(msgspec.to_builtins(config)))


def to_toml(config: Config) -> str:
    """The resolved config as TOML that `parse` reads back to an equal config."""
    return toml.write(to_dict(config), nested=("tasks", "pools", "roles", "serverless"))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


# -------------------------------------------------------------------------------------------- rules that join two keys
def _check_tasks(config: Config) -> None:
    if not any(task.weight > 0 for task in config.tasks.values()):
        raise ConfigError("tasks: every weight is 0; give at least one task a weight above 0")
    longest = config.rollout.max_model_tokens
    for name, task in config.tasks.items():
        if not name:
            raise ConfigError("tasks: a task has no name; write [tasks.NAME]")
        if task.max_tokens is not None and task.max_tokens > longest:
            raise ConfigError(
                f"tasks.{toml.key(name)}.max_tokens: {task.max_tokens} is more than rollout.max_model_tokens "
                f"{longest}; lower the first or raise the second"
            )


def _check_alpha(config: Config) -> None:
    implied = config.plan.alpha
    if implied is not None and config.alpha is not None and config.alpha != implied:
        raise ConfigError(
            f"alpha: schedule {config.schedule!r} implies {implied:g}, not {config.alpha:g}; "
            "leave alpha out or take schedule 'rollart' or 'areal'"
        )
    if config.effective_alpha == 0 and config.plan.admission == "continuous":
        raise ConfigError(
            f"alpha: schedule {config.schedule!r} overlaps rollout and training, which needs alpha above 0; "
            "take alpha = 1 or schedule 'sync_plus'"
        )


def _check_batch(config: Config) -> None:
    rollout, train = config.rollout, config.train
    groups = rollout.groups_per_batch
    if rollout.extra_groups == "auto" and config.plan.admission != "continuous":
        raise ConfigError(
            f"rollout.extra_groups: 'auto' paces continuous admission, but schedule {config.schedule!r} admits a batch "
            "at a time; give a number, or take schedule 'rollart'"
        )
    if rollout.free_slots == "train_start" and config.plan.admission != "continuous":
        raise ConfigError(
            f"rollout.free_slots: 'train_start' lets groups in while a batch trains, but schedule {config.schedule!r} "
            "admits a batch at a time; take 'train_end', or schedule 'rollart'"
        )
    if groups % train.minibatches:
        near = min((n for n in range(1, groups + 1) if groups % n == 0), key=lambda n: abs(n - train.minibatches))
        raise ConfigError(
            f"train.minibatches: {train.minibatches} does not divide rollout.groups_per_batch {groups}; "
            f"nearest that does: {near}"
        )
    if rollout.group_size < 2 and train.advantage in ("grpo", "rloo"):
        raise ConfigError(
            f"rollout.group_size: advantage {train.advantage!r} compares members of a group and needs at least 2; "
            "take group_size = 2 or advantage 'reinforce_pp'"
        )


def _check_pools(config: Config) -> None:
    for name in config.roles:
        if name not in ROLES:
            raise ConfigError(f"roles.{toml.key(name)}: not a role{nearest(name, ROLES)}")
    if "rollout" in config.roles and config.roles["rollout"].workers:
        raise ConfigError("roles.rollout.workers: follows from rollout.shard_trajectories; set that instead")
    for name, pool in config.pools.items():
        said = [key for key in ("count", "ids", "nodes") if getattr(pool, key)]
        if len(said) > 1:
            raise ConfigError(f"pools.{toml.key(name)}: {' and '.join(said)} both say which devices; keep one")
        if pool.url and not pool.count:
            raise ConfigError(f"pools.{toml.key(name)}.count: a serverless pool says how many calls run at once")
    if isinstance(config.affinity, dict):
        tags = [*(task.tag or name for name, task in config.tasks.items()), "default"]
        for tag in config.affinity:
            if tag not in tags:
                raise ConfigError(f"affinity.{toml.key(tag)}: no task has this name or tag{nearest(tag, tags)}")


def _check_engine(config: Config) -> None:
    for name in config.engine_options:
        if name in ENGINE_KEYS:
            raise ConfigError(f"engine_options.{name}: follows from {ENGINE_KEYS[name]}; set that instead")
    urls = server_urls(config)
    if config.engine == "http" and (not urls or not all(isinstance(url, str) for url in urls)):
        raise ConfigError('engine_options.urls: name the servers, such as ["http://10.0.0.1:30000"]')
    if len(set(urls)) < len(urls):
        raise ConfigError("engine_options.urls: a server is named twice; each has one inference worker")


def _check_serverless(config: Config) -> None:
    for name in config.serverless:
        if name not in (names := [*config.tasks, "default"]):
            raise ConfigError(f"serverless.{toml.key(name)}: no task has this name{nearest(name, names)}")


def _check_weights(config: Config) -> None:
    weights = config.weights
    for key, differs in (("master", weights.master), ("replicas", weights.replicas != 1)):
        if differs and weights.store != "mooncake":
            raise ConfigError(
                f"weights.{key}: only read with weights.store = 'mooncake'; leave it out or take that store"
            )
    if weights.master and not weights.master.rpartition(":")[2].isdigit():
        raise ConfigError(f"weights.master: {weights.master!r} is not of the form host:port, such as 10.0.0.5:50051")


def _check_log(config: Config) -> None:
    name = config.log.name
    if name in (".", "..", "latest") or any(char in "/\\" or not char.isprintable() for char in name):
        raise ConfigError(f"log.name: {name!r} cannot name a folder; take letters, digits, '-' and '_'")
