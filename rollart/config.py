"""The configuration of a run: frozen, validated, two levels deep, TOML plus `section.key=value` overrides.

Every value is checked before anything heavy is imported. A mistake is one `ConfigError` line that names the key, the
reason and the nearest valid choice. Derived limits (slots, buffer bound, batch split) are computed here, so that
`rollart check` and the run itself can never disagree. What this file leaves out: which tasks and options exist
(`tasks/registry.py`) and which devices (`resource/devices.py`); `pipeline.py` brings the three together.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from rollart.errors import ConfigError
from rollart.schedule import SCHEDULES, Schedule

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table in the file."""


class TaskConfig(Section, kw_only=True):
    """`[tasks.NAME]`: one task of the mixture."""

    env: str = ""
    """A task of `rollart tasks`, `module:Class`, or an entry point of group `rollart.tasks`; default: NAME."""
    weight: NonNegative = 1.0
    """Share of the groups, relative to the other tasks."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the environment; `rollart tasks` lists them."""
    reward: str = ""
    """`module:function` that scores a finished trajectory; default: what the task brings, else the sum of step rewards."""
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
    env_retries: Whole = 2


class ModelConfig(Section, kw_only=True):
    """`[model]`: any Hugging Face causal LM."""

    name: str = "tiny"
    """`tiny`, a folder in Hugging Face format, or a name on the hub."""
    warmup_steps: Whole = 0
    """Supervised steps on well-formed but random actions before step 1."""
    warmup_episodes: Count = 512
    """Random episodes that the warm-up learns from."""
    warmup_learning_rate: Positive = 3e-3


class RolloutConfig(Section, kw_only=True):
    """`[rollout]`: how trajectories are made."""

    groups_per_batch: Count = 16
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
    temperature: Positive = 1.0
    top_p: Fraction = 1.0
    top_k: Whole = 0
    engine_slots: Count = 64
    """Requests that the engine runs at once."""
    max_model_tokens: Count = 1024
    """Longest sequence that the engine holds."""
    device: str = "cpu"
    env_workers: Count = 1
    env_threads: Count = 32
    """Environments that one environment worker steps at once."""


class TrainConfig(Section, kw_only=True):
    """`[train]`: the learner."""

    learning_rate: Positive = 1e-3
    lr_warmup_steps: Whole = 5
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
    device: str = "cpu"


class EvalConfig(Section, kw_only=True):
    """`[eval]`: greedy evaluation on held-out seeds."""

    every: Whole = 50
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    episodes: Count = 64
    """Episodes per task."""


class WeightsConfig(Section, kw_only=True):
    """`[weights]`: the store between trainer and engines."""

    store: Literal["file"] = "file"
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    keep: Annotated[int, Meta(ge=2)] = 3
    """Versions kept."""


class LogConfig(Section, kw_only=True):
    """`[log]`: the run folder."""

    folder: str = "runs"
    name: str = ""
    """Default: the config's name and the time."""
    trajectories_every: Whole = 10
    """Steps between samples of readable trajectories; 0 keeps none."""
    trajectories: Count = 4
    """Trajectories per sample and task."""
    tensorboard: bool = True
    checkpoint_every: Whole = 50
    """Steps between checkpoints; 0 keeps only the last."""
    checkpoints_kept: Count = 2


class Config(Section, kw_only=True):
    """The whole file. Top-level keys choose; tables tune."""

    seed: int = 0
    steps: Count = 100
    schedule: Literal["sync", "sync_plus", "one_off", "areal", "rollart"] = "rollart"
    alpha: NonNegative | None = None
    """Bound on staleness; may be fractional. Default: what the schedule implies, else 1."""
    runtime: Literal["local", "inline"] = "local"
    """`local`: one process per worker. `inline`: everything in one process, for debugging."""
    engine: Literal["embedded"] = "embedded"
    trainer: Literal["embedded"] = "embedded"
    tasks: dict[str, TaskConfig]
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
    trajectories_per_batch: int
    groups_per_minibatch: int


def limits(config: Config) -> Limits:
    """Derived limits: slots = ceil((alpha + 1) x groups per batch) + extra groups (paper section 5)."""
    rollout = config.rollout
    slots = math.ceil((config.effective_alpha + 1) * rollout.groups_per_batch) + rollout.extra_groups
    return Limits(
        alpha=config.effective_alpha,
        slots=slots,
        trajectories_in_flight=slots * (rollout.group_size + rollout.extra_members),
        buffer_groups=slots,
        trajectories_per_batch=rollout.groups_per_batch * rollout.group_size,
        groups_per_minibatch=rollout.groups_per_batch // config.train.minibatches,
    )


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
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> Config:
    """Validate a parsed file. Raises ConfigError."""
    _check_keys(Config, data, "")
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(error)) from error
    _check_combinations(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values, without None, ready to be written as TOML."""
    return typing.cast(dict[str, Any], _without_none(msgspec.to_builtins(config)))


def to_toml(config: Config) -> str:
    """The resolved config as TOML that `parse` reads back to an equal config."""
    data = to_dict(config)
    tables = {key: data.pop(key) for key in list(data) if isinstance(data[key], dict)}
    tasks = tables.pop("tasks")
    lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
    for name, table in [*((f"tasks.{_toml_key(name)}", table) for name, table in tasks.items()), *tables.items()]:
        lines += ["", f"[{name}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def nearest(word: str, choices: Sequence[str]) -> str:
    """`; did you mean 'x'?` or the list of choices, to end an error line with."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(sorted(choices))}"


def _apply(data: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    *parents, leaf = path.strip().split(".")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
    try:
        table[leaf] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[leaf] = text


def _check_keys(kind: type[Struct], data: Mapping[str, Any], path: str) -> None:
    hints = typing.get_type_hints(kind)
    names = list(kind.__struct_fields__)
    for key, value in data.items():
        if key not in names:
            raise ConfigError(f"{path}{key}: unknown key{nearest(key, names)}")
        inner = hints[key]
        if isinstance(inner, type) and issubclass(inner, Section) and isinstance(value, dict):
            _check_keys(inner, value, f"{path}{key}.")
        elif key == "tasks" and isinstance(value, dict):
            for name, task in value.items():
                if isinstance(task, dict):
                    _check_keys(TaskConfig, task, f"tasks.{name}.")


def _readable(error: msgspec.ValidationError) -> str:
    reason, _, where = str(error).partition(" - at ")
    key = where.strip("`").removeprefix("$.").removeprefix("$").replace("[...]", ".*") or "config"
    if "missing required field `tasks`" in reason:
        return "tasks: no task; add a table such as [tasks.frozenlake]"
    return f"{key}: {reason[0].lower()}{reason[1:]}"


def _check_combinations(config: Config) -> None:
    rollout, train = config.rollout, config.train
    if not config.tasks:
        raise ConfigError("tasks: no task; add a table such as [tasks.frozenlake]")
    if not any(task.weight > 0 for task in config.tasks.values()):
        raise ConfigError("tasks: every weight is 0; give at least one task a weight above 0")
    implied = config.plan.alpha
    if implied is not None and config.alpha not in (None, implied):
        raise ConfigError(
            f"alpha: schedule {config.schedule!r} implies {implied:g}, not {config.alpha:g}; "
            "leave alpha out or take schedule 'rollart' or 'areal'"
        )
    if config.alpha is not None and not math.isfinite(config.alpha):
        raise ConfigError("alpha: must be finite")
    if config.effective_alpha == 0 and config.plan.admission == "continuous":
        raise ConfigError(
            f"alpha: schedule {config.schedule!r} overlaps rollout and training, which needs alpha above 0; "
            "take alpha = 1 or schedule 'sync_plus'"
        )
    if rollout.groups_per_batch % train.minibatches:
        fits = max(n for n in range(1, train.minibatches + 1) if rollout.groups_per_batch % n == 0)
        raise ConfigError(
            f"train.minibatches: {train.minibatches} does not divide rollout.groups_per_batch "
            f"{rollout.groups_per_batch}; nearest that does: {fits}"
        )
    if rollout.group_size < 2 and train.advantage in ("grpo", "rloo"):
        raise ConfigError(
            f"rollout.group_size: advantage {train.advantage!r} compares members of a group and needs at least 2; "
            "take group_size = 2 or advantage 'reinforce_pp'"
        )
    for name, task in config.tasks.items():
        if task.max_tokens is not None and task.max_tokens > rollout.max_model_tokens:
            raise ConfigError(
                f"tasks.{name}.max_tokens: {task.max_tokens} is more than rollout.max_model_tokens "
                f"{rollout.max_model_tokens}; lower the first or raise the second"
            )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else msgspec.json.encode(key).decode()


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return repr(value)
