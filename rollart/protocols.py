"""Every seam on one page: what a user plugs in, and the handles through which control calls data.

Calls go one way. Control awaits handles; nothing behind a handle ever calls control. Tests pass fakes through these
protocols and patch nothing. What this file leaves out: any implementation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from rollart.types import (
    Binding,
    EngineStats,
    EnvReply,
    GenRequest,
    GenResult,
    GroupSpec,
    Handoff,
    NodeInfo,
    ParameterInfo,
    RewardRequest,
    Sampling,
    ShardNews,
    StopReason,
    TaskSpec,
    TrainBatch,
    TrainReport,
    WeightManifest,
)

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------ what users plug in
@runtime_checkable
class Env(Protocol):
    """A text environment in GEM's calling convention. `close()` is called when it exists."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. The same seed gives the same episode."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Apply the model's text. Returns (observation, reward, terminated, truncated, info)."""
        ...


@runtime_checkable
class SupportsWarmup(Protocol):
    """An environment that can say what a well-formed but random action looks like, for the supervised warm-up."""

    def sample_action(self, rng: random.Random) -> str:
        """A well-formed action, drawn without regard to its merit."""
        ...


class RewardFunction(Protocol):
    """A stateless reward: one number for one trajectory."""

    def __call__(self, request: RewardRequest) -> float: ...


# ---------------------------------------------------------------------------------------------------- inside workers
Tensors = Iterable[tuple[str, Any]]
"""(parameter name, CPU tensor) pairs; typed loosely so that this file needs no torch. May be read once, lazily."""


class FrozenTensors(tuple[tuple[str, Any], ...]):
    """Tensors that nobody changes any more: an engine that is given them may keep them instead of copying them."""

    __slots__ = ()


class Engine(Protocol):
    """A continuous-batching generator. Not thread-safe: its command loop calls it between two steps.

    Contract (tests/data/test_engine_contract.py): batching changes neither greedy tokens nor log-probabilities;
    suspend, update with equal weights, resume equals never suspended; abort frees KV; log-probabilities equal a plain
    forward pass.
    """

    def add(self, request: GenRequest) -> None:
        """Enqueue. Raises GenerationError when the request can never run (too long, empty prompt)."""
        ...

    def abort(self, request_id: str) -> GenResult | None:
        """Cancel and free its KV; the partial result, or None when it is not running."""
        ...

    def release(self, trajectory_id: str) -> None:
        """Forget the KV kept for a trajectory between its turns."""
        ...

    def suspend(self) -> None:
        """No step advances until `resume`; running requests keep their tokens."""
        ...

    def update(self, version: int, tensors: Tensors) -> None:
        """Load weights in place; all KV becomes stale and running requests are recomputed before they go on.

        `tensors` may be lazy, and is read once; of `FrozenTensors` the memory may be kept. `stats().version` says
        `version` once the weights are those, and not before.
        """
        ...

    def resume(self) -> None:
        """Let steps advance again."""
        ...

    def step(self) -> list[GenResult]:
        """Advance by one prefill or decode step; the requests that finished in it."""
        ...

    def has_work(self) -> bool:
        """Whether `step` would advance anything now."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token given those before it, without the cache; length len(tokens) - 1."""
        ...

    def parameters(self) -> list[ParameterInfo]:
        """Names and shapes that `update` expects."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the start."""
        ...


Payload = bytes | bytearray | memoryview
"""KV on its way between two engines of one kind, or what such an engine needs to get it."""


@runtime_checkable
class HandsOver(Protocol):
    """What an engine can do besides, where requests are read on one worker and decoded on another.

    `so_far`: what was generated of the request before. Contract (tests/data/handoff_contract.py): the tokens,
    log-probabilities and versions are those of an engine that does both; KV of other weights is never used.
    """

    @property
    def grain(self) -> int:
        """KV is kept between requests for so many tokens at a time: `kept`, and every `start`, is a multiple of it."""
        ...

    def add_prefill(self, request: GenRequest, so_far: GenResult) -> None:
        """As `Engine.add`, for the next token alone: unless that ends the request, its finish_reason is "handoff"."""
        ...

    def payload(self, request: GenRequest, so_far: GenResult, start: int) -> Payload | None:
        """KV of the tokens from `start` to the last but one, as kept for the trajectory; None when it is not.

        Of a request that the last step did not end it may lack the last tokens, fewer than `grain`.
        """
        ...

    def kept(self, request: GenRequest, so_far: GenResult) -> int:
        """Of how many of the request's first tokens KV is kept for its trajectory."""
        ...

    def add_decode(self, request: GenRequest, so_far: GenResult, start: int, payload: Payload | None) -> None:
        """As `Engine.add`, for all that follows `so_far`. `payload`: KV from token `start` on, of the engine's weights;
        that of the tokens before is `kept`. Without it, all is read here.

        Raises GenerationError also when the payload is not that of such an engine.
        """
        ...


class Trainer(Protocol):
    """Owns the trained weights and the optimizer."""

    def train_step(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step (or several mini-batches of it) on one batch."""
        ...

    def warmup(
        self,
        sequences: Sequence[tuple[list[int], list[float]]],
        steps: int,
        learning_rate: float,
        batch_tokens: int,
        progress: Callable[[int, float], None],
    ) -> tuple[float, float]:
        """Supervised next-token steps before step 1 on (token ids, weight per token); the first and last loss.

        `progress` hears (steps done, loss).
        """
        ...

    def tensors(self) -> Tensors:
        """The current weights on CPU, one at a time."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """As `Engine.logprobs`, under the trainer's weights."""
        ...

    def parameters(self) -> list[ParameterInfo]:
        """Names and shapes that `tensors` yields."""
        ...

    def save(self, folder: str) -> None:
        """Write weights in Hugging Face format, optimizer and random state into an empty folder."""
        ...

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        ...


class WeightStore(Protocol):
    """Versions of the weights as buckets. A version exists once its manifest is written, and never changes."""

    def publish(self, version: int, tensors: Tensors) -> WeightManifest:
        """Write buckets, then the manifest; drop versions beyond the number kept.

        Raises WeightsError; WeightsLost when `rescue` can help.
        """
        ...

    def rescue(self, version: int, tensors: Tensors) -> WeightManifest:
        """Publish a version elsewhere that could not be published, or was lost. Raises WeightsError."""
        ...

    def fetch(self, version: int, model: Sequence[ParameterInfo] | None = None) -> Iterator[tuple[str, Any]]:
        """Read and verify one version, bucket by bucket; nobody changes these tensors any more.

        Raises WeightsError when it is missing, damaged, or not of `model`: at once, or before anything of the bucket
        concerned is given out. Raises WeightsLost when `rescue` can help.
        """
        ...

    def quick(self, version: int) -> bool:
        """Whether fetching it takes a few milliseconds at most, or fails as fast."""
        ...


# --------------------------------------------------------------------------------------------------- runtime
class WorkerHandle(Protocol):
    """One running worker, seen from the driver."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, returns: type[T] | Any = Any) -> Any:
        """Call a method of the worker's object. Its errors come back as ours, with worker and remote traceback.

        Raises WorkerDied when the process is gone, before or during the call.
        """
        ...

    async def wait_dead(self) -> str:
        """Return, with the reason, once the worker is gone."""
        ...

    async def stop(self) -> None:
        """Ask it to end, then make sure."""
        ...


@runtime_checkable
class Addressed(Protocol):
    """A worker handle that other workers of the run can be given; a runtime may have none."""

    async def address(self) -> str:
        """Where others reach the worker, for `data.peers.connect`; it begins to listen when first asked."""
        ...


class Runtime(Protocol):
    """Where workers run. `target` is `module:Class`; `kwargs` must be msgpack-able."""

    async def nodes(self) -> list[NodeInfo]:
        """The machines that are there now, and what they have."""
        ...

    async def spawn(
        self, name: str, target: str, kwargs: Mapping[str, Any], binding: Binding | None = None
    ) -> WorkerHandle:
        """Start a worker on the node and devices of its binding (default: anywhere) and build its object.

        Raises what the construction raised, or ResourceError when the node cannot take it.
        """
        ...

    async def shutdown(self) -> None:
        """End all workers that this object started, and nothing else."""
        ...


@runtime_checkable
class Losable(Protocol):
    """A runtime, or the object of a worker, that depends on something that can die."""

    async def wait_lost(self) -> str:
        """What has died: a runtime starts nothing any more, and workers may answer for a moment longer; a worker is as
        good as dead, and is ended.
        """
        ...


# ------------------------------------------------------------------------------------- the four handles of control
class InferenceHandle(Protocol):
    """One inference worker. Every call returns between two engine steps."""

    @property
    def name(self) -> str: ...

    async def generate(self, request: GenRequest) -> GenResult:
        """ADD; returns when the request has finished or was aborted (finish_reason 'abort', partial tokens)."""
        ...

    async def decode(self, request: GenRequest, handoff: Handoff) -> GenResult:
        """As `generate`, for what follows `handoff.result`; the result has all of it.

        finish_reason 'handoff': the KV is of other weights by now, and the request is to be read again. Only where
        there are prefill workers.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def release(self, trajectory_ids: list[str]) -> None: ...

    async def suspend(self) -> None: ...

    async def prefetch(self, version: int) -> None:
        """Read a published version into memory while generation goes on."""
        ...

    async def update(self, version: int) -> int:
        """Load a version (prefetched or not); the version that the engine then holds.

        Raises WeightsError when it is missing, damaged, of another model or older than the one held.
        """
        ...

    async def resume(self) -> None: ...

    async def logprobs(self, tokens: list[int]) -> list[float]: ...

    async def parameters(self) -> list[ParameterInfo]: ...

    async def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """End the worker; what it was asked then raises WorkerDied."""
        ...


@runtime_checkable
class Reads(Protocol):
    """What an inference worker can that reads prompts for others to decode."""

    async def prefill(self, request: GenRequest, so_far: GenResult, have: int) -> Handoff:
        """The token after `so_far`. `have`: of how many tokens the worker that decodes is believed to keep the KV."""
        ...


class PrefillHandle(InferenceHandle, Reads, Protocol):
    """An inference worker that reads prompts, and decodes none."""


class EnvHandle(Protocol):
    """The environment workers. `env_id` is the trajectory's id; timeouts raise EnvTimeout, everything else EnvError."""

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply: ...

    async def step(self, env_id: str, action: str) -> EnvReply: ...

    async def close(self, env_id: str) -> None:
        """Never raises; closing twice is harmless."""
        ...

    async def give_up(self, env_ids: list[str]) -> None:
        """Close episodes that another process began, wherever they are; unknown ids are nothing to do. Never raises."""
        ...


class RewardHandle(Protocol):
    """Scores finished trajectories. Raises RewardError."""

    async def score(self, request: RewardRequest) -> float: ...

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[float]:
        """One number for each trajectory of one group."""
        ...


class ShardHandle(Protocol):
    """One process that runs trajectories; see `control/shard.py`. Every call raises WorkerDied when it is gone."""

    @property
    def name(self) -> str: ...

    async def order(self, starts: dict[str, GroupSpec], aborts: dict[str, StopReason]) -> None:
        """Start trajectories by id, abort others; those that have ended are left alone."""
        ...

    async def news(self) -> ShardNews:
        """Wait for something to tell, then tell all of it. Raises what must end the run."""
        ...

    async def suspend(self) -> ShardNews:
        """No request leaves until `resume`; all news so far."""
        ...

    async def update(self, version: int) -> None:
        """The engines hold `version`."""
        ...

    async def resume(self) -> None:
        """Requests may leave."""
        ...

    async def close(self) -> None:
        """Wait until all trajectories, and what they left to close, have ended."""
        ...


class Followers(Protocol):
    """Those who must obey the weights protocol besides the engines."""

    async def suspend(self) -> None: ...

    async def update(self, version: int) -> None: ...

    async def resume(self) -> None: ...


class TrainHandle(Protocol):
    """The trainer of a run."""

    async def train_step(self, batch: TrainBatch) -> TrainReport: ...

    async def publish(self, version: int) -> WeightManifest:
        """Publish the current weights as `version`; returns when the manifest is written."""
        ...

    async def rescue(self, version: int) -> None:
        """Publish `version` once more, elsewhere. Raises WeightsError where the trainer has other weights by now."""
        ...

    async def logprobs(self, tokens: list[int]) -> list[float]: ...

    async def parameters(self) -> list[ParameterInfo]: ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str) -> None: ...


class Renderer(Protocol):
    """Turns text into the tokens of a chat, one observation at a time; generated tokens are kept as they are."""

    stop_token_ids: tuple[int, ...]

    def first(self, system_prompt: str, observation: str) -> list[int]:
        """Tokens of the conversation's start, ending where the assistant begins to write."""
        ...

    def following(self, observation: str, previous_action: Sequence[int]) -> list[int]:
        """Tokens that close the assistant's turn (unless its stop token was generated) and open the next."""
        ...

    def decode(self, action: Sequence[int]) -> str:
        """The text of generated tokens, without the stop token."""
        ...


class Recorder(Protocol):
    """Where measurements go. Never raises into the caller."""

    def add(self, name: str, value: float) -> None:
        """One observation of a distribution (a mean, minimum and maximum are kept)."""
        ...

    def count(self, name: str, value: float = 1) -> None:
        """Add to a sum."""
        ...

    def trajectory(self, trajectory: Any, kept: bool) -> None:
        """A trajectory that ended; `kept` is False when nobody will train on it."""
        ...


Tasks = Mapping[str, TaskSpec]
EvalSampling = Callable[[TaskSpec], Sampling]
