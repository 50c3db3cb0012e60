"""The values that travel between planes: plain, typed, without tensors.

Invariant: what a model generated is stored once, as token ids, in `Turn.action`, with one log-probability and one
policy version per token. Nothing here is ever re-tokenised.

Who makes what: RolloutScheduler makes `GroupSpec`; EnvManager makes `GenRequest`, `Turn` and `Trajectory`; an engine
makes `GenResult`; a prefill worker makes `Handoff`; SampleBuffer makes `Group`; TrainingLoop makes `TrainBatch`; a
trainer makes `TrainReport`; a weight store makes `WeightManifest`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

FinishReason = Literal["stop", "length", "abort", "error", "handoff"]
"""Why one generation ended: a stop token or string, the token limit, an ABORT, or an engine fault; "handoff", which no
trajectory ever sees: it goes on on another worker."""

StopReason = Literal[
    "done",  # the environment terminated
    "truncated",  # the environment said it is truncated
    "turn_limit",  # TaskSpec.max_turns reached
    "token_limit",  # TaskSpec.max_tokens reached
    "env_error",  # reset or step failed, hung or answered nonsense, after its retries
    "reward_error",  # the reward function failed
    "generation_error",  # the engine failed the request
    "stale",  # started by weights older than alpha allows
    "redundant",  # enough others finished first
    "cancelled",  # the run stops, or its group was dropped
]
FAILED: frozenset[str] = frozenset({"env_error", "reward_error", "generation_error"})
ABORTED: frozenset[str] = frozenset({"stale", "redundant", "cancelled"})


HELD_OUT = 2**31
"""Seeds below belong to training (warm-up included); seeds from here on to evaluation. All stay below 2**32."""


class Sampling(Struct, frozen=True):
    """How to sample one generation. `temperature=0` is greedy; `top_k=0` and `top_p=1` switch those filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class GenRequest(Struct, frozen=True):
    """One turn of one trajectory: the whole history as token ids. `tag` is the task domain that routing looks at.

    `prompt` is the trajectory's own list, which grows once the request has ended: who keeps it longer, copies it.
    """

    request_id: str
    trajectory_id: str
    prompt: list[int]
    sampling: Sampling
    tag: str = "default"


class GenResult(Struct, frozen=True):
    """What an engine returns. `tokens`, `logprobs` and `versions` have one entry per generated token.

    `logprobs` are taken under the sampling distribution (after temperature, top-k and top-p; for greedy requests under
    temperature 1). A stop token is part of `tokens`. `cached_tokens` counts prompt tokens whose KV was reused.

    Times are the engine's own, 0 where it does not measure them. `queue_s`: until a slot was free. `prefill_s`: its
    share, by tokens, of what steps spent on prompts, also when these are read again after an update. `decode_s`: what
    the steps that gave it a further token spent on decoding; requests of one batch spend it together, so that it is a
    latency, where `prefill_s` is work.

    `received_tokens`: of prompt and response, whose KV another worker had computed (`Handoff`).
    """

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    cached_tokens: int = 0
    error: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    received_tokens: int = 0


class Handoff(Struct, frozen=True):
    """A request on its way from the worker that has read it to the one that decodes it.

    `result`: what is generated so far, the last token by the worker that read; its finish_reason is "handoff", or why
    the request has ended with that token. `version`: of the weights under which that was, -1 where nobody has read.

    That KV is of tokens `start` to the last but one, and is in a file of shared memory (`in_file`), or in `ticket`,
    which may also say where to get it; all of it, from the first token on, can be asked for at `address`. With none of
    these the worker that decodes reads the tokens itself.
    """

    result: GenResult
    version: int = -1
    start: int = 0
    in_file: bool = False
    ticket: bytes = b""
    address: str = ""

    @property
    def has_kv(self) -> bool:
        """Whether there is KV to be had."""
        return self.in_file or bool(self.ticket or self.address)


class TaskSpec(Struct, frozen=True):
    """What the control plane must know of a task; everything else stays in the environment worker."""

    name: str
    weight: float = 1.0
    tag: str = "default"
    max_turns: int = 16
    max_turn_tokens: int = 64
    max_tokens: int = 1024  # prompt and response of the whole trajectory
    stop: tuple[str, ...] = ()
    system_prompt: str = ""
    has_reward: bool = False  # scored by a RewardHandle; otherwise the sum of step rewards is the reward
    reset_timeout_s: float = 30.0
    step_timeout_s: float = 30.0
    reward_deadline_s: float = 600.0
    reward_scope: Literal["trajectory", "group"] = "trajectory"
    env_retries: int = 2
    success_reward: float = 1.0  # a trajectory with at least this reward counts as a success


class GroupSpec(Struct, frozen=True):
    """One group of the data order: the `index`-th of the run. Task and seed follow from the run's seed and `index`."""

    index: int
    task: str
    seed: int

    @property
    def group_id(self) -> str:
        """Unique in a run."""
        return f"g{self.index}"


class Turn(Struct):
    """One generation and the environment's answer to it.

    `observation`: token ids appended before the action (chat markup included, never trained on).
    `action`: generated token ids; `logprobs` and `versions` run along it.
    `step_s`: how long the environment took to answer, without waiting for others that step with it.
    """

    observation: list[int]
    action: list[int]
    logprobs: list[float]
    versions: list[int]
    observation_text: str = ""
    action_text: str = ""
    reward: float = 0.0
    finish_reason: FinishReason = "stop"
    step_s: float = 0.0


class Trajectory(Struct):
    """One life of one environment, from reset to its reward.

    `seconds` holds the time spent by stage: reset, generate, step, score.
    `failed_resets_s`: how long each reset took that failed, before the one that worked or the end.
    """

    trajectory_id: str
    group_id: str
    task: str
    seed: int
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    stop_reason: StopReason = "cancelled"
    cause: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failed_resets_s: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def start_version(self) -> int | None:
        """The policy version of the first generated token, or None before there is one."""
        for turn in self.turns:
            if turn.versions:
                return turn.versions[0]
        return None

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the model generated."""
        return sum(len(turn.action) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """All tokens, prompt and response."""
        return sum(len(turn.observation) + len(turn.action) for turn in self.turns)

    def tokens(self) -> list[int]:
        """The whole sequence of token ids."""
        return [token for turn in self.turns for part in (turn.observation, turn.action) for token in part]

    def loss_mask(self) -> list[bool]:
        """True for each generated token, along `tokens()`."""
        return [bit for turn in self.turns for bit in [False] * len(turn.observation) + [True] * len(turn.action)]

    def behaviour_logprobs(self) -> list[float]:
        """Log-probabilities along `tokens()`; 0.0 where the token was not generated."""
        return [lp for turn in self.turns for part in ([0.0] * len(turn.observation), turn.logprobs) for lp in part]


class Group(Struct):
    """The unit of GRPO: trajectories of one task and seed, all finished and scored."""

    spec: GroupSpec
    trajectories: list[Trajectory]


class TrainBatch(Struct):
    """What one train_step consumes. `version` is the version of the weights that are being trained."""

    step: int
    version: int
    groups: list[Group]


class TrainReport(Struct):
    """What one train_step did. `skipped` means a loss or gradient that was not finite: the weights did not change."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    trained_tokens: int
    seconds: float
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class EngineStats(Struct, frozen=True):
    """Counters of one engine since its start. `busy_s`: monotonic seconds inside steps that produced tokens."""

    version: int = 0
    busy_s: float = 0.0
    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    received_tokens: int = 0
    preempted: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    suspended: bool = False


class ParameterInfo(Struct, frozen=True):
    """Name, shape and dtype of one tensor, as trainer and engine compare them before step 1."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Bucket(Struct, frozen=True):
    """One file or buffer of a published version. `num_bytes` and `checksum` are those of the whole bucket.

    `delta`: what is stored under `key` are `stored_bytes` of difference to the same bucket of the manifest's `base`;
    none where nothing changed.
    """

    key: str
    num_bytes: int
    checksum: int
    names: tuple[str, ...]
    delta: bool = False
    stored_bytes: int = 0


class WeightManifest(Struct, frozen=True):
    """The last thing written of a version: a version without a manifest does not exist.

    `model`: a fingerprint of `parameters`; `checksums`: their algorithm; `base`: the version that some of the buckets
    are differences to; `note`: one line for people where something did not go as usual.
    """

    version: int
    buckets: tuple[Bucket, ...]
    parameters: tuple[ParameterInfo, ...]
    model: str = ""
    checksums: str = "crc32"
    base: int | None = None
    note: str = ""


class EnvReply(Struct, frozen=True):
    """An environment's answer to reset (`reward` 0, not done) or step."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class EnvironmentCost(Struct):
    """Counters of one environment worker since its start. CPU seconds of calls, in their threads, and of all of it."""

    resets: int = 0
    steps: int = 0
    reset_cpu_s: float = 0.0
    step_cpu_s: float = 0.0
    process_cpu_s: float = 0.0


class RewardRequest(Struct, frozen=True):
    """What a reward function sees: the text of one trajectory and what its environment said of it. Nothing else."""

    task: str
    seed: int
    prompts: list[str]
    responses: list[str]
    env_reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    """Of the trajectory, equal however often its score is asked for; "" where nobody asks twice."""


class ShardNews(Struct):
    """What a rollout shard tells, all at once, of what happened since it told last.

    `number` counts the tellings; `stages`: trajectories by stage at this moment; `progress`: trajectory id -> (start
    version, generated tokens); `said`: lines for a person, such as a change of affinity.
    """

    number: int
    stages: dict[str, int]
    progress: dict[str, tuple[int, int]]
    ended: list[Trajectory]
    aborted: list[Trajectory]
    said: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class PoolSpec(Struct, frozen=True):
    """A pool of devices of one class. `nodes`: indices of the devices per node; `share`: bindings per device at once.

    `cost`: of one device, relative to others; `compatible`: classes that stand in when this one has no room, in order;
    `optimised`: "compute", "bandwidth", "general" or "cpu", where the class alone does not tell; `device`: what torch
    calls it ("cpu" or "cuda"); `url`: of a serverless pool, whose devices are calls at once.
    """

    name: str
    device_class: str
    nodes: dict[str, tuple[int, ...]]
    share: int = 1
    cost: float = 1.0
    compatible: tuple[str, ...] = ()
    optimised: str = ""
    device: str = "cpu"
    url: str = ""


class Binding(Struct, frozen=True):
    """Devices of one node of one pool, held by one worker. `asked_class` differs from `device_class` after a fallback.

    `binding_id` is "RUN/WORKER": names of runs are unique in a store. `device`: what torch calls them, cpu or cuda;
    `share`: bindings per device at once.
    """

    binding_id: str
    role: str
    pool: str
    device_class: str
    node: str
    devices: tuple[int, ...]
    asked_class: str
    device: str = "cpu"
    share: int = 1

    @property
    def run(self) -> str:
        """The run that holds it."""
        return self.binding_id.rpartition("/")[0]

    @property
    def worker(self) -> str:
        """The name of the worker on it."""
        return self.binding_id.rpartition("/")[2]

    @property
    def fell_back(self) -> bool:
        """Whether a compatible class stands in for the one asked for."""
        return self.device_class != self.asked_class

    def __str__(self) -> str:
        devices = ",".join(map(str, self.devices))
        return f"{self.device_class}:{devices} of pool {self.pool} on {self.node}"


class NodeInfo(Struct, frozen=True):
    """One machine as a runtime sees it. `devices`: how many of each class; `cuda`: classes that torch calls cuda.

    `address`: where other machines reach it; "" where there are none.
    """

    name: str
    devices: dict[str, int]
    cuda: tuple[str, ...] = ()
    address: str = ""
