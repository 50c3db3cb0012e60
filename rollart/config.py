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

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


ROLES = ("actor_train", "actor_gen", "environment", "reward", "rollout")


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table in the file."""


class TaskConfig(Section, frozen=True, kw_only=True):
    """`[tasks.NAME]`: one task of the mixture."""

    env: str = ""
    """A task of `rollart tasks`, `module:Class`, or an entry point of group `rollart.tasks`; default: NAME."""
    weight: NonNegative = 1.0
    """Share of the groups, relative to the other tasks."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the environment; `rollart tasks` lists them."""
    reward: str = ""
    """What scores a finished trajectory: `module:function`, or a URL such as local://module:function or
    https://host/path; default: the task's own, else the sum of step rewards."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments, where `reward` names a class."""
    reward_scope: Literal["trajectory", "group"] = "trajectory"
    """`group`: the function gets the list of a group's trajectories and gives a list of numbers."""
    tag: str = ""
    """Task domain for routing; default: NAME."""
    system_prompt: str | None = None
    """Default: the task's own."""
    max_turns: Count | None = None
    max_turn_tokens: Count | None = None
    max_tokens: Count | None = None
    """Prompt and response tokens of the whole trajectory."""
    stop: list[str] = field(default_factory=list)
    """Stop strings, besides the end-of-turn token."""
    reset_timeout_s: Positive = 30.0
    step_timeout_s: Positive = 30.0
    reward_timeout_s: Positive = 30.0
    """Of one call; waiting for a place and further tries come on top (`serverless.NAME.deadline_s`)."""
    env_retries: Whole = 2


class ModelConfig(Section, frozen=True, kw_only=True):
    """`[model]`: any Hugging Face causal LM."""

    name: str = "tiny"
    """`tiny`, a folder in Hugging Face format, or a name on the hub."""
    warmup_steps: Whole = 0
    """Supervised steps on well-formed but random actions before step 1."""
    warmup_episodes: Count = 512
    """Random episodes that the warm-up learns from."""
    warmup_learning_rate: Positive = 3e-3
    warmup_observation_weight: NonNegative = 1.0
    """Weight of what the environment says, against 1 for actions: predicting it teaches how the world answers."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """`[rollout]`: how trajectories are made."""

    groups_per_batch: Annotated[int, Meta(ge=1, le=1_000_000)] = 16
    group_size: Count = 8
    extra_groups: Whole = 0
    """Groups started beyond the slots that a batch needs (redundancy)."""
    extra_members: Whole = 0
    """Members started per group beyond `group_size` (redundancy)."""
    on_target: Literal["abort", "keep"] = "abort"
    """What becomes of redundant groups when the batch is full."""
    member_retries: Whole = 2
    """Re-runs of one member that failed or grew stale, before its group is dropped."""
    zero_variance: Literal["replace", "keep"] = "replace"
    """Groups whose rewards are all equal teach nothing: replace them by new ones, or train on them all the same."""
    replace_limit: NonNegative = 0.5
    """At most this many replaced groups per batch, as a share of `groups_per_batch`; beyond it they are kept."""
    temperature: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0
    top_p: Fraction = 1.0
    top_k: Whole = 0
    engine_slots: Count = 64
    """Requests that the engine runs at once."""
    max_model_tokens: Count = 1024
    """Longest sequence that the engine holds."""
    env_threads: Count = 32
    """Environments that one environment worker steps at once."""
    shard_trajectories: Count = 4096
    """Trajectories in flight that one process manages; beyond it they are spread over shard processes."""


class TrainConfig(Section, frozen=True, kw_only=True):
    """`[train]`: the learner."""

    learning_rate: Positive = 1e-3
    lr_warmup_steps: Whole = 5
    lr_decay_steps: Whole = 0
    """Steps over which the rate falls linearly to a tenth, after which it stays there; 0 keeps it constant."""
    weight_decay: NonNegative = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    grad_clip: Positive = 1.0
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    advantage: Literal["grpo", "rloo", "reinforce_pp"] = "grpo"
    clip_low: Positive = 0.2
    clip_high: Positive = 0.28
    tis_cap: Positive = 2.0
    """Truncation of the importance weight between the proximal and the behaviour policy."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the policy before step 1; 0 keeps no reference model."""
    entropy_coef: NonNegative = 0.0
    minibatches: Count = 1
    """Optimizer steps per batch."""
    micro_batch_tokens: Count = 8192
    """Padded tokens per forward and backward pass."""
    max_nonfinite: Count = 3
    """Skipped steps in a row (NaN or infinite loss) after which the run stops."""
    canary_tolerance: Positive = 1e-3
    """Largest difference of a log-probability between engine and trainer after an update."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """`[eval]`: greedy evaluation on held-out seeds."""

    every: Whole = 50
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    episodes: Count = 64
    """Episodes per task."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    """`[weights]`: the store between trainer and engines."""

    store: Literal["file"] = "file"
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    keep: Annotated[int, Meta(ge=2)] = 3
    """Versions kept."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """`[pools.NAME]`: devices of one class. Without any such table, what the machine or the cluster has is found."""

    device_class: str = ""
    """H800, H20, A100, CPU or any other name; default: NAME."""
    count: Whole = 0
    """Devices in all; 0: as many as are found."""
    ids: str = ""
    """Indices of the devices on this machine instead of a count, such as "0-7" or "0,2"."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Node -> ids, such as { node-a = "0-7", node-b = "0-3" }, instead of a count."""
    share: Whole = 0
    """Workers that one device carries at once; 0: 1, for CPU cores 64."""
    cost: NonNegative = 1.0
    """Of one device, relative to the other pools."""
    compatible: list[str] = field(default_factory=list)
    """Classes that stand in when no device of this class is free, in order."""
    optimised: Literal["", "compute", "bandwidth", "general", "cpu"] = ""
    """What the class is good at, for the defaults of roles; known classes need not say it."""
    device: Literal["", "cpu", "cuda"] = ""
    """What torch calls the devices; default: cpu for class CPU, else cuda."""
    url: str = ""
    """Of a serverless pool: where its function is."""


class RoleConfig(Section, frozen=True, kw_only=True):
    """`[roles.NAME]`: where the workers of actor_train, actor_gen, environment, reward or rollout (shards) run."""

    device_class: str = ""
    """Default: compute-optimised for actor_train, bandwidth-optimised for actor_gen, else CPU."""
    workers: Whole | dict[str, Count] = 0
    """A number, or a number per class such as { H800 = 2, H20 = 6 }; 0: one per class, and for environment as many as
    the measured cost of steps asks for."""
    devices: Count = 1
    """Devices of each worker."""


class ResourcesConfig(Section, frozen=True, kw_only=True):
    """`[resources]`: where the view of all pools is kept, so that runs see what others hold."""

    store: str = "memory"
    """memory (this run alone), file:/path/to/folder, or redis://host:6379/0."""
    name: str = "default"
    """Runs with the same store and name share their pools."""
    lease_s: Annotated[float, Meta(ge=0.5)] = 30.0
    """How long after its last sign of life the devices of a run that was killed stay its own."""


class ServerlessConfig(Section, frozen=True, kw_only=True):
    """`[serverless.TASK]`: how the reward function of a task is called and paid; `[serverless.default]`: the others."""

    max_concurrency: Whole = 0
    """Calls at once, for local:// processes; 0: cores for local://, 256 for HTTP, and adapted to latency below that."""
    idle_s: Positive = 30.0
    """local://: after this time without a call a process ends."""
    memory_bytes: Whole = 4 << 30
    """local://: limit on the data of one process; 0: none."""
    deadline_s: Positive = 600.0
    """Longest that a trajectory waits for its reward, queue and tries included."""
    max_attempts: Count = 5
    """Deliveries of one call when the endpoint fails. What the function itself raises is never tried again."""
    backoff_s: Positive = 0.2
    max_backoff_s: Positive = 10.0
    hedge: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """A second delivery once a call takes longer than this share of the others, such as 0.95; 0: never."""
    batch: Count = 1
    """Calls that travel together."""
    batch_wait_s: NonNegative = 0.005
    """Longest that a call waits for others to travel with."""
    max_payload_bytes: Count = 6_000_000
    """Default: what AWS Lambda takes."""
    breaker_failures: Count = 5
    """Failures in a row after which an endpoint is left alone for `breaker_s`; calls wait, or take the fallback."""
    breaker_s: Positive = 5.0
    fallback: str = ""
    """URL that answers while the endpoint is away, such as local://module:function."""
    media: Literal["json", "msgpack"] = "json"
    """How events travel over HTTP; `rollart serve-reward` reads both."""
    token_env: str = ""
    """Environment variable that holds the endpoint's bearer token."""
    price_per_call: NonNegative = 0.0
    price_per_second: NonNegative = 0.0
    """Of billed time; both add up to the cost in summary.json."""


class LogConfig(Section, frozen=True, kw_only=True):
    """`[log]`: the run folder."""

    folder: str = "runs"
    name: str = ""
    """Default: the config's name and the time."""
    trajectories_every: Whole = 10
    """Steps between samples of readable trajectories; 0 keeps none."""
    trajectories: Count = 4
    """Trajectories per sample and task."""
    tensorboard: bool = True
    prometheus: str = ""
    """host:port of this machine where Prometheus finds the figures, such as 127.0.0.1:9464 (0: any port)."""
    checkpoint_every: Whole = 50
    """Steps between checkpoints; 0 keeps only the last."""
    checkpoints_kept: Count = 2


class Config(Section, frozen=True, kw_only=True):
    """The whole file. Top-level keys choose; tables tune."""

    seed: int = 0
    steps: Count = 100
    schedule: Literal["sync", "sync_plus", "one_off", "areal", "rollart"] = "rollart"
    alpha: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """Bound on staleness; may be fractional. Default: what the schedule implies, else 1."""
    runtime: Literal["local", "inline", "ray"] = "local"
    """`local`: one process per worker. `inline`: everything in one process, for debugging. `ray`: Ray actors."""
    engine: Literal["embedded", "emulated"] = "embedded"
    """`emulated`: the embedded engine, slowed down to the pace of its device class; for trying out a mix of pools."""
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
    """Groups admitted and not yet trained, dropped or aborted."""
    trajectories_in_flight: int
    """Upper bound of running trajectories."""
    buffer_groups: int
    """Upper bound of finished groups that wait for training."""
    shards: int
    """Processes that the trajectories are spread over; 1: they run in the driver."""
    trajectories_per_batch: int
    groups_per_minibatch: int


def limits(config: Config) -> Limits:
    """Derived limits: slots = ceil((alpha + 1) x groups per batch) + extra groups (paper section 5)."""
    rollout = config.rollout
    slots = math.ceil((config.effective_alpha + 1) * rollout.groups_per_batch) + rollout.extra_groups
    in_flight = slots * (rollout.group_size + rollout.extra_members)
    return Limits(
        alpha=config.effective_alpha,
        slots=slots,
        trajectories_in_flight=in_flight,
        buffer_groups=slots,
        shards=1 if unshardable(config) else math.ceil(in_flight / rollout.shard_trajectories),
        trajectories_per_batch=rollout.groups_per_batch * rollout.group_size,
        groups_per_minibatch=rollout.groups_per_batch // config.train.minibatches,
    )


def serverless_of(config: Config, task: str) -> ServerlessConfig:
    """How the reward function of a task is called."""
    return config.serverless.get(task) or config.serverless.get("default") or ServerlessConfig()


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
    for rule in (_check_tasks, _check_alpha, _check_batch, _check_pools, _check_serverless, _check_log):
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


def _check_serverless(config: Config) -> None:
    for name in config.serverless:
        if name not in (names := [*config.tasks, "default"]):
            raise ConfigError(f"serverless.{toml.key(name)}: no task has this name{nearest(name, names)}")


def _check_log(config: Config) -> None:
    name = config.log.name
    if name in (".", "..", "latest") or any(char in "/\\" or not char.isprintable() for char in name):
        raise ConfigError(f"log.name: {name!r} cannot name a folder; take letters, digits, '-' and '_'")
