"""The tables of a config file: every key of a run with its type, bounds, default and meaning.

Invariant: nothing here is computed; a value that msgspec accepts is checked against others in `config.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


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
    success_reward: float | None = None
    """The reward from which an episode counts as a success; default: the task's own, else 1."""
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
    extra_groups: Whole | Literal["auto"] = 0
    """Groups started beyond the slots that a batch needs (redundancy). "auto": as many as keep the trainer from waiting
    while the engines have room, at most a batch; none is ended for being slow (`on_target` is then keep)."""
    extra_members: Whole = 0
    """Members started per group beyond `group_size` (redundancy)."""
    on_target: Literal["abort", "keep"] = "abort"
    """What becomes of redundant groups when the batch is full."""
    free_slots: Literal["train_end", "train_start"] = "train_end"
    """When new groups may take the slots of a batch: as its training ends, or already as it starts, after its update.
    With train_start engines go on while the trainer works; alpha bounds ages as before, within it more is older, and
    one more batch is in memory."""
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


class LoraConfig(Section, frozen=True, kw_only=True):
    """`[train.lora]`: train a low-rank adapter alone, W = W0 + (alpha / r) B A, and send only that to the engines."""

    r: Whole = 0
    """Rank of the adapter; 0 trains all weights."""
    alpha: Positive = 16.0
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Linear layers that are adapted, by the last part of their name."""


class MegatronConfig(Section, frozen=True, kw_only=True):
    """`[train.megatron]`: how trainer megatron lays its ranks out, besides `train.tensor_parallel`."""

    pipeline_parallel: Count = 1
    """Ranks that hold a share of the layers each."""
    context_parallel: Count = 1
    """Ranks that each hold a share of every sequence."""
    expert_parallel: Count = 1
    """Ranks that share out the experts of a mixture."""


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
    tensor_parallel: Count = 1
    """Ranks that share every matrix; the ranks of the trainer divided by it each take a share of the batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What a trainer of several ranks multiplies in; weights, sums of gradients and the optimizer stay float32."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers, and compute the rest again for the gradient: less memory, a third more work."""
    collective_timeout_s: Positive = 600.0
    """How long a rank waits for the others before it counts as broken."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


class EvalConfig(Section, frozen=True, kw_only=True):
    """`[eval]`: greedy evaluation on held-out seeds."""

    every: Whole = 50
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    episodes: Count = 64
    """Episodes per task."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    """`[weights]`: the store between trainer and engines."""

    store: Literal["file", "mooncake"] = "file"
    """`file`: in shared memory, or in the run folder. `mooncake`: a Mooncake store, with files as its stand-in."""
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    keep: Annotated[int, Meta(ge=2)] = 3
    """Versions kept."""
    asynchronous: bool = True
    """Weights are published and read ahead while the rollout goes on; otherwise while it is suspended."""
    delta: Whole = 0
    """A whole version every so many, between them only what changed; 0 or 1: every version whole."""
    update_timeout_s: Positive = 600.0
    """Longest that an engine may take to read a version, or to load it and say so, or for any other answer but a
    generation; then it is ended and replaced."""
    master: str = ""
    """mooncake: host:port of a master that runs already, with store nodes; default: both are started with the run."""
    replicas: Count = 1
    """mooncake: copies of every bucket, each on a store node of its own."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """mooncake: how bytes travel."""


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
    """`[roles.NAME]`: where the workers of actor_train, actor_gen, environment, reward or rollout (shards) run.

    There is one more, prefill: with a table for it its workers read all prompts, and those of actor_gen only decode.
    """

    device_class: str = ""
    """Default: compute-optimised for actor_train and prefill, bandwidth-optimised for actor_gen, else CPU."""
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
    backoff_s: Annotated[float, Meta(gt=0, le=3600)] = 0.2
    max_backoff_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    hedge: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """A second delivery once a call takes longer than this share of the others, such as 0.95; 0: never."""
    batch: Count = 1
    """Calls that travel together."""
    batch_wait_s: NonNegative = 0.005
    """Longest that a call waits for others to travel with."""
    max_payload_bytes: Annotated[int, Meta(ge=1000)] = 6_000_000
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


class FaultConfig(Section, frozen=True, kw_only=True):
    """One entry of `simulate.faults`: something breaks at a moment of virtual time."""

    at_s: NonNegative
    pool: str = ""
    """All nodes of this pool go."""
    node: str = ""
    """This node goes; a pool's nodes are POOL-0, POOL-1 and so on, each with `devices_per_node` devices."""
    worker: str = ""
    """This worker's process dies, such as inference-3; its devices stay."""


class SimulateConfig(Section, frozen=True, kw_only=True):
    """`[simulate]`: what `rollart simulate` and `rollart plan` put in the place of real work."""

    model: str = "Qwen3-8B"
    """Qwen3-8B, Qwen3-14B, Qwen3-32B, Qwen3-30B-A3B, or a folder or file with a Hugging Face config.json."""
    profile: str = "paper"
    """Workload and efficiencies: paper, or a file as `rollart profile RUN` writes it."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Task -> its name in the profile; default: its own."""
    warmup_steps: Whole = 1
    """First steps that are not measured, while the buffer fills."""
    prefill: str = ""
    """Device class that only prefills for the others; "": every engine does both."""
    devices_per_node: Count = 8
    faults: list[FaultConfig] = field(default_factory=list)


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
