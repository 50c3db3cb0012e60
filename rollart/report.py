"""What `rollart check` and `rollart tasks` print: plain text, valid TOML where it stands below a config.

Invariant: every number comes from `config.limits` or a `TaskSpec`, the same that a run obeys.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollart.config import GROUPS, Config, layout, limits, unshardable
from rollart.data.places import TINY, model_said
from rollart.errors import to_install
from rollart.types import TaskSpec

if TYPE_CHECKING:
    from rollart.resource.placement import Placement
    from rollart.resource.pool import PoolRow
    from rollart.tasks.registry import OptionInfo, TaskInfo


def derived(config: Config, specs: Mapping[str, TaskSpec], placement: Placement | None) -> str:
    """What follows from a config, as TOML comments."""
    rollout, train, bounds = config.rollout, config.train, limits(config)
    members = f"{rollout.group_size} + {rollout.extra_members}" if rollout.extra_members else f"{rollout.group_size}"
    top_k = f"top_k {rollout.top_k}" if rollout.top_k else "no top_k"
    until = "trained" if rollout.free_slots == "train_end" else "in training"
    rows = {
        "alpha": f"{bounds.alpha:g} (schedule {config.schedule}): no older trajectory is trained on, in versions",
        "slots": f"{bounds.slots} groups admitted and not yet {until}, dropped or aborted",
        "in flight": f"at most {bounds.trajectories_in_flight} trajectories ({bounds.slots} groups of {members})",
        "shards": _shards(config),
        "engine": f"{_engine(config)}: {rollout.engine_slots} requests at once, {rollout.max_model_tokens} tokens each",
        "buffer": f"at most {bounds.buffer_groups} finished groups",
        "in memory": f"at most {bounds.groups_in_memory} groups, with those in training",
        "batch": f"{rollout.groups_per_batch} groups x {rollout.group_size} = "
        f"{bounds.trajectories_per_batch} trajectories",
        "mini-batches": f"{train.minibatches} per batch, of {bounds.groups_per_minibatch} groups",
        "model": model_said(config.model.name),
        "trainer": _trainer(config),
        "weights": _weights(config),
        "sampling": f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, {top_k}",
        "pools": _pools(placement),
        "workers": _workers(placement),
        "prefill": _prefill(config, placement),
        **{f"task {name}": _task(spec, specs) for name, spec in specs.items()},
    }
    width = max(map(len, rows))
    return "\n".join(["# What follows from it", *(f"#   {name:<{width}}  {text}" for name, text in rows.items())])


def warnings(config: Config) -> list[str]:
    """What a run can do but hardly means to, each in one line."""
    if config.model.name == TINY and not config.model.warmup_steps:
        return [
            "model.warmup_steps: model 'tiny' has never seen text; without a warm-up it finds a valid action by chance "
            "alone, and mostly learns nothing; set it, such as model.warmup_steps=800"
        ]
    return []


def pools(rows: Sequence[PoolRow]) -> str:
    """The live view as a table: one line per pool and node."""
    lines = [("POOL", "CLASS", "NODE", "DEVICES", "FREE", "FAILED", "COST", "HELD BY")]
    for row in rows:
        numbers = (str(row.total), str(row.free), str(row.failed), f"{row.cost:g}")
        lines.append((row.pool, row.device_class, row.node, *numbers, ", ".join(row.holders) or "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _shards(config: Config) -> str:
    """Where the trajectories are managed."""
    bounds, most = limits(config), config.rollout.shard_trajectories
    if bounds.shards > 1:
        return f"{bounds.shards} rollout processes, each for at most {most} trajectories in flight"
    why = unshardable(config)
    if why and bounds.trajectories_in_flight > most:
        return f"none, though more than {most} trajectories are in flight: {why}"
    return "none: the driver manages all trajectories"


def _engine(config: Config) -> str:
    """What generates."""
    return f"{config.engine} ({config.engine_options.get('kind')})" if config.engine == "http" else config.engine


def _weights(config: Config) -> str:
    """How versions travel from the trainer to the engines."""
    weights = config.weights
    how = f"store {weights.store}, {weights.keep} versions kept"
    if weights.store == "mooncake":
        master = f"the master at {weights.master}" if weights.master else "a master of the run's own"
        copies = f"{weights.replicas} cop{'y' if weights.replicas == 1 else 'ies'} each"
        how = f"{how}, {copies}, over {weights.protocol}, with {master}"
    return f"{how}, a whole one every {weights.delta}, else differences" if weights.delta > 1 else how


def _trainer(config: Config) -> str:
    """How its ranks share the work."""
    train = config.train
    if config.trainer not in GROUPS:
        how = f"{config.trainer}: one process, {train.precision}"
    else:
        how = f"{config.trainer}: {layout(config)}, {train.precision}"
    adapter = f", an adapter of rank {train.lora.r} on {', '.join(train.lora.targets)}" if train.lora.r else ""
    return how + adapter + (", activations computed again" if train.activation_checkpointing else "")


def _pools(placement: Placement | None) -> str:
    if placement is None:
        return "what the Ray cluster has, seen when the run starts"
    shown = []
    for pool in placement.pools:
        number = sum(map(len, pool.nodes.values()))
        shared = f", {pool.share} workers each" if pool.share > 1 else ""
        shown.append(f"{pool.name}: {number} x {pool.device_class} ({pool.device}{shared})")
    return "; ".join(shown)


def _workers(placement: Placement | None) -> str:
    if placement is None:
        return "placed when the run starts"
    counts = Counter((each.role, each.device_class) for each in placement.wanted)
    return ", ".join(f"{role} {number} on {name}" for (role, name), number in counts.items())


def _prefill(config: Config, placement: Placement | None) -> str:
    """Who reads prompts."""
    if "prefill" not in config.roles:
        return "every inference worker reads its own prompts"
    if placement is None:
        return "apart, on workers of role prefill"
    on = {
        role: " and ".join(f"{number} on {name}" for name, number in _by_class(placement, role).items())
        for role in ("prefill", "actor_gen")
    }
    return f"apart: {on['prefill']} read prompts, {on['actor_gen']} decode"


def _by_class(placement: Placement, role: str) -> Counter[str]:
    return Counter(each.device_class for each in placement.of_role(role))


def _task(spec: TaskSpec, specs: Mapping[str, TaskSpec]) -> str:
    share = spec.weight / (sum(other.weight for other in specs.values()) or 1)
    return (
        f"{share:.0%} of the groups, at most {spec.max_turns} x {spec.max_turn_tokens} generated tokens, "
        f"{spec.max_tokens} tokens in all; success from reward {spec.success_reward:g}"
    )


def described(task: TaskInfo) -> str:
    """A task, its options, and how to set them."""
    lines = [f"{task.name}: {task.summary}"]
    if not task.available:
        lines.append(f"    not installed; {to_install(task.extra)}")
    for option in task.options:
        lines += _option(option)
    if task.options:
        first = task.options[0]
        lines.append(f"    set one with tasks.{task.name}.options.{first.name}={_as_toml(first.default) or 'VALUE'}")
    return "\n".join(lines)


def _option(option: OptionInfo) -> list[str]:
    default = f"default {_as_toml(option.default)}" if option.default else "required"
    heading = f"    {option.name} ({option.type}, {default})"
    return [heading, *textwrap.wrap(option.doc, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)]


def _as_toml(default: str) -> str:
    return {"True": "true", "False": "false"}.get(default, default)
