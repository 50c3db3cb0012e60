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
from rollart.engine_options import check_engine_options
from rollart.errors import ConfigError, boundary
from rollart.schedule import SCHEDULES, Schedule
from rollart.sections import (
    Count,
    EvalConfig,
    LogConfig,
    MegatronConfig,
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
GROUPS = ("fsdp2", "megatron")
"""Trainers that are several ranks."""
COARSE = {"bfloat16": 0.02, "float16": 0.0025, "half": 0.0025}
"""Two computations of a log-probability in bfloat16, which has 8 bits, easily differ by as much; float16 has 11."""
MERGING = ("embedded", "emulated")
"""Engines that take an adapter."""


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
    trainer: Literal["embedded", "fsdp2", "megatron"] = "embedded"
    """`embedded`: one process. `fsdp2`, `megatron`: as many ranks as `roles.actor_train.workers`, one device each."""
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


class Layout(Struct, frozen=True):
    """How the ranks of a trainer share the work: `data` of them take a share of each batch, the rest of the model."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """Shares of a batch."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        shares = {name: getattr(self, name) for name in ("data", "tensor", "pipeline", "context")}
        shown = " x ".join(f"{number} {name}" for name, number in shares.items() if number > 1 or name == "data")
        experts = f", {self.expert} expert" if self.expert > 1 else ""
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''} = {shown}{experts}"


def layout(config: Config) -> Layout:
    """The ranks of the trainer, and what each of them shares with others."""
    role, train = config.roles.get("actor_train"), config.train
    asked = role.workers if role else 0
    ranks = max(1, sum(asked.values()) if isinstance(asked, dict) else asked)
    sizes = train.megatron if config.trainer == "megatron" else MegatronConfig()
    return Layout(ranks, train.tensor_parallel, sizes.pipeline_parallel, sizes.context_parallel, sizes.expert_parallel)


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
    _check_alpha_alone(data)
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
        _check_trainer,
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


def _check_alpha_alone(data: Mapping[str, Any]) -> None:
    """What alpha may be depends on the schedule, so that the general words for a number say too little."""
    alpha, plan = data.get("alpha", 1), SCHEDULES.get(str(data.get("schedule", "rollart")))
    if plan is None or (type(alpha) in (int, float) and 0 <= alpha <= 1000):
        return
    shown = alpha if isinstance(alpha, int | float) and not isinstance(alpha, bool) else toml.value(alpha)
    rule = (
        f"schedule {plan.name!r} implies {plan.alpha:g}; leave alpha out"
        if plan.alpha is not None
        else "give a number above 0, at most 1000, such as 1 or 0.5"
    )
    raise ConfigError(f"alpha: {shown} is no bound on staleness, which is a number of versions; {rule}")


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
    check_engine_options(config.engine, config.engine_options, config.rollout)


def _check_serverless(config: Config) -> None:
    for name in config.serverless:
        if name not in (names := [*config.tasks, "default"]):
            raise ConfigError(f"serverless.{toml.key(name)}: no task has this name{nearest(name, names)}")


def _check_weights(config: Config) -> None:
    weights = config.weights
    said = {"master": weights.master, "replicas": weights.replicas != 1, "protocol": weights.protocol != "tcp"}
    for key, differs in said.items():
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


def _check_trainer(config: Config) -> None:
    train = config.train
    if config.trainer != "megatron" and train.megatron != MegatronConfig():
        raise ConfigError(f"train.megatron: trainer {config.trainer!r} does not look at it; take trainer = 'megatron'")
    if train.lora.r:
        _check_lora(config)
    if train.canary_tolerance < COARSE.get(train.precision, 0):
        raise too_fine(config, f"a trainer in {train.precision} agrees with its engines")
    dtype = str(config.engine_options.get("dtype", ""))
    if train.canary_tolerance < COARSE.get(dtype, 0):
        raise too_fine(config, f"an engine in {dtype} agrees with the trainer")
    if config.trainer in GROUPS:
        _check_ranks(config)
    elif train.tensor_parallel > 1 or train.precision != "float32":
        key = "tensor_parallel" if train.tensor_parallel > 1 else "precision"
        raise ConfigError(f"train.{key}: trainer {config.trainer!r} is one process in float32; take trainer = 'fsdp2'")


def too_fine(config: Config, than: str) -> ConfigError:
    """Why a run would take its engines' precision for wrong weights."""
    return ConfigError(
        f"train.canary_tolerance: {config.train.canary_tolerance:g} is finer than {than}; take "
        "train.canary_tolerance = 0.1"
    )


def _check_ranks(config: Config) -> None:
    role, parts, rollout = config.roles.get("actor_train"), layout(config), config.rollout
    share = parts.tensor * parts.pipeline * parts.context
    if role and role.devices != 1:
        raise ConfigError(
            f"roles.actor_train.devices: a rank of trainer {config.trainer!r} has one device; take devices = 1 and "
            f"workers = {parts.ranks * role.devices}"
        )
    if parts.ranks % share:
        raise ConfigError(
            f"roles.actor_train.workers: {parts.ranks} do not divide into groups of {share} that hold the model "
            f"together (train.tensor_parallel, train.megatron); take a multiple of {share}, such as "
            f"{max(1, round(parts.ranks / share)) * share}"
        )
    if parts.ranks > 1 and config.runtime == "inline":
        raise ConfigError("runtime: 'inline' is one process, but the trainer is several; take runtime = 'local'")
    most = rollout.groups_per_batch // config.train.minibatches * rollout.group_size
    if parts.data > most:
        raise ConfigError(
            f"roles.actor_train.workers: {parts.data} ranks would share the {most} trajectories of a mini-batch; "
            f"take at most {most * share} workers, or larger mini-batches"
        )
    holding = parts.ranks // parts.pipeline
    if holding % parts.expert:
        near = min((n for n in range(1, holding + 1) if holding % n == 0), key=lambda n: abs(n - parts.expert))
        raise ConfigError(
            f"train.megatron.expert_parallel: {parts.expert} does not divide the {holding} ranks that hold equal "
            f"layers; take {near}"
        )


def _check_lora(config: Config) -> None:
    train = config.train
    if not train.lora.targets:
        raise ConfigError("train.lora.targets: no layer is adapted; name some, such as ['q_proj', 'v_proj']")
    if config.trainer == "megatron":
        raise ConfigError("train.lora: trainer 'megatron' trains all weights; take trainer 'fsdp2' or train.lora.r = 0")
    if train.tensor_parallel > 1:
        raise ConfigError("train.lora: not together with train.tensor_parallel above 1; set one of them back")
    if config.engine not in MERGING:
        raise ConfigError(f"train.lora: engine {config.engine!r} takes whole weights; take 'embedded', or r = 0")
