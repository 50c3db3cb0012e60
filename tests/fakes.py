"""Fakes of the data plane, through the protocols only: they take time by sleeping, and remember what was done."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from rollart.config import Config, from_dict
from rollart.control.background import Background
from rollart.control.env_manager import Services
from rollart.control.evaluator import EvalResult, Evaluator
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.runner import max_age
from rollart.control.sharding import ShardedRunner
from rollart.control.supervisor import Supervisor
from rollart.control.task_source import TaskSource
from rollart.control.training_loop import StepSummary, TrainingLoop
from rollart.errors import EnvError, GenerationError, WeightsError, WeightsLost, WorkerDied
from rollart.types import (
    EngineStats,
    EnvReply,
    GenRequest,
    GenResult,
    ParameterInfo,
    RewardRequest,
    Sampling,
    TaskSpec,
    TrainBatch,
    TrainReport,
    Trajectory,
    WeightManifest,
)
from tests.fake_shards import FakeShard

PARAMETERS = [ParameterInfo("embed", (8, 4), "float32"), ParameterInfo("head", (4, 8), "float32")]


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return zlib.crc32(text.encode()) / 2**32


@dataclass
class FakeStore:
    """Published versions. Those in `lost` cannot be read before they are rescued; there is no room for `full_at`."""

    versions: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    full_at: int = -1

    def check(self, version: int) -> None:
        """Raises unless it can be read."""
        if version not in self.versions:
            raise WeightsError(f"version {version} was not published")
        if version in self.lost:
            raise WeightsLost(f"version {version} is out of reach")


class FakeInference:
    """Generates `num_tokens(request)` tokens, `token_s` each, under the version held at that token."""

    def __init__(
        self,
        store: FakeStore,
        name: str = "inference-0",
        token_s: float = 0.1,
        num_tokens: Callable[[GenRequest], int] = lambda request: 3,
    ) -> None:
        self.name = name
        self.version = -1
        self.parameter_infos = PARAMETERS
        self.logprob_shift = 0.0
        self.hangs_in = ""
        self.update_s = 0.2
        self.keeps_its_weights = False
        self.dead = ""
        self.failing: Callable[[GenRequest], bool] = lambda request: False
        self.requests: list[GenRequest] = []
        self.aborted: list[str] = []
        self.releases: list[list[str]] = []
        self.in_flight: set[str] = set()
        self.updates: list[tuple[float, int]] = []
        self.prefetched: list[int] = []
        self._store = store
        self._token_s = token_s
        self._num_tokens = num_tokens
        self._going = asyncio.Event()
        self._going.set()
        self._busy_s = 0.0
        self._busy_since = 0.0

    async def generate(self, request: GenRequest) -> GenResult:
        self._alive()
        if self.failing(request):
            raise GenerationError("the engine is out of KV memory")
        self.requests.append(replace(request, prompt=list(request.prompt)))
        self._flight(request.request_id, True)
        versions: list[int] = []
        try:
            for _ in range(min(self._num_tokens(request), request.sampling.max_tokens)):
                await self._going.wait()
                await asyncio.sleep(self._token_s)
                await self._going.wait()
                self._alive()
                if request.request_id in self.aborted:
                    return self._result(request, versions, "abort")
                versions.append(self.version)
            await asyncio.sleep(0)
            return self._result(request, versions, "stop")
        finally:
            self._flight(request.request_id, False)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def release(self, trajectory_ids: list[str]) -> None:
        self._alive()
        self.releases.append(trajectory_ids)

    @property
    def released(self) -> list[str]:
        return [each for ids in self.releases for each in ids]

    @property
    def is_suspended(self) -> bool:
        return not self._going.is_set()

    async def suspend(self) -> None:
        await self._answering("suspend")
        self._going.clear()

    async def prefetch(self, version: int) -> None:
        await self._answering("prefetch")
        self._store.check(version)
        self.prefetched.append(version)

    async def update(self, version: int) -> int:
        self._alive()
        self._store.check(version)
        await asyncio.sleep(self.update_s)
        if not self.keeps_its_weights:
            self.version = version
        self.updates.append((asyncio.get_running_loop().time(), version))
        return self.version

    async def resume(self) -> None:
        await self._answering("resume")
        self._going.set()

    async def logprobs(self, tokens: list[int]) -> list[float]:
        await self._answering("logprobs")
        return [-1.0 - self.version + self.logprob_shift for _ in tokens[1:]]

    async def parameters(self) -> list[ParameterInfo]:
        return self.parameter_infos

    async def stats(self) -> EngineStats:
        await self._answering("stats")
        now = asyncio.get_running_loop().time()
        busy_s = self._busy_s + (now - self._busy_since if self.in_flight else 0.0)
        return EngineStats(version=self.version, busy_s=busy_s)

    async def stop(self) -> None:
        self.dead = "stopped"

    def die(self) -> None:
        """Also what is suspended then ends."""
        self.dead = "killed"
        self._going.set()

    def _alive(self) -> None:
        if self.dead:
            raise WorkerDied(self.dead)

    async def _answering(self, call: str) -> None:
        self._alive()
        if self.hangs_in == call:
            await asyncio.Event().wait()

    def _flight(self, request_id: str, begins: bool) -> None:
        now = asyncio.get_running_loop().time()
        if self.in_flight:
            self._busy_s += now - self._busy_since
        self._busy_since = now
        (self.in_flight.add if begins else self.in_flight.discard)(request_id)

    def _result(self, request: GenRequest, versions: list[int], reason: Any) -> GenResult:
        tokens = list(range(100, 100 + len(versions)))
        return GenResult(request.request_id, tokens, [-0.5] * len(tokens), versions, reason)


@dataclass
class FakeEnv:
    """`reply(call, env_id, task)` may sleep, raise or answer anything; None means the usual answer."""

    turns: int = 2
    reset_s: float = 0.1
    step_s: float = 0.1
    misbehave: Callable[[str, str, str], Any] = lambda call, env_id, task: None
    reward: Callable[[str], float] = share
    opened: set[str] = field(default_factory=set)
    closed: Counter[str] = field(default_factory=Counter)
    resets: list[tuple[str, str, int]] = field(default_factory=list)
    steps: list[tuple[float, str, str]] = field(default_factory=list)
    _tasks: dict[str, str] = field(default_factory=dict)
    _turn: Counter[str] = field(default_factory=Counter)

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:
        assert env_id not in self.opened, f"{env_id} was reset twice"
        self.opened.add(env_id)
        self.resets.append((env_id, task, seed))
        self._tasks[env_id] = task
        await asyncio.sleep(self.reset_s)
        return await self._answer("reset", env_id, EnvReply(f"start of {seed}"))

    async def step(self, env_id: str, action: str) -> EnvReply:
        self.steps.append((asyncio.get_running_loop().time(), env_id, action))
        await asyncio.sleep(self.step_s)
        self._turn[env_id] += 1
        done = self._turn[env_id] >= self.turns
        return await self._answer("step", env_id, EnvReply("go on", self.reward(env_id) if done else 0.0, done))

    async def close(self, env_id: str) -> None:
        self.closed[env_id] += 1

    async def give_up(self, env_ids: list[str]) -> None:
        for env_id in self.opened.intersection(env_ids):
            self.closed[env_id] += 1

    @property
    def left_open(self) -> set[str]:
        return self.opened - set(self.closed)

    async def _answer(self, call: str, env_id: str, usual: EnvReply) -> Any:
        answer = self.misbehave(call, env_id, self._tasks[env_id])
        if answer == "hang":
            await asyncio.sleep(1e9)
        if answer == "raise":
            raise EnvError("the maze has no exit")
        if answer == "none":
            return None
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return usual
        return usual if answer is None else answer


@dataclass
class FakeReward:
    """Scores by the number of responses, or misbehaves."""

    answer: Any = None
    requests: list[RewardRequest] = field(default_factory=list)
    groups: list[list[RewardRequest]] = field(default_factory=list)

    async def score(self, request: RewardRequest) -> float:
        self.requests.append(request)
        await asyncio.sleep(0.05)
        if isinstance(self.answer, Exception):
            raise self.answer
        return float(len(request.responses)) if self.answer is None else self.answer

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[float]:
        self.groups.append(list(requests))
        await asyncio.sleep(0.05)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [float(place) for place, _ in enumerate(requests)]


class FakeTrainer:
    """Takes `train_s` per step; remembers batches and when they were trained."""

    def __init__(self, store: FakeStore, train_s: float = 1.0) -> None:
        self.batches: list[TrainBatch] = []
        self.spans: list[tuple[float, float]] = []
        self.version = 0
        self.rescued: list[int] = []
        self.can_rescue = True
        self.fail_at = -1
        self.parameter_infos = PARAMETERS
        self._store = store
        self._train_s = train_s

    async def train_step(self, batch: TrainBatch) -> TrainReport:
        assert batch.version == self.version
        begin = asyncio.get_running_loop().time()
        await asyncio.sleep(self._train_s)
        if batch.step == self.fail_at:
            raise RuntimeError("out of memory in train_step")
        self.spans.append((begin, asyncio.get_running_loop().time()))
        self.batches.append(batch)
        self.version += 1
        return TrainReport(batch.step, 0.5, 1.0, 1e-3, 10, self._train_s)

    async def publish(self, version: int) -> WeightManifest:
        await asyncio.sleep(0.1)
        if version == self._store.full_at:
            raise WeightsError(f"no room for version {version}")
        self._store.versions.add(version)
        return WeightManifest(version, (), ())

    async def rescue(self, version: int) -> None:
        assert version == self.version, "the trainer has other weights by now"
        self.rescued.append(version)
        if self.can_rescue:
            self._store.lost.discard(version)

    async def logprobs(self, tokens: list[int]) -> list[float]:
        return [-1.0 - self.version for _ in tokens[1:]]

    async def parameters(self) -> list[ParameterInfo]:
        return self.parameter_infos

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str) -> None: ...


class FakeRenderer:
    """One token per word; actions decode to letters."""

    stop_token_ids: tuple[int, ...] = (2,)

    def first(self, system_prompt: str, observation: str) -> list[int]:
        return [1, *(10 + len(word) for word in f"{system_prompt} {observation}".split())]

    def following(self, observation: str, previous_action: Sequence[int]) -> list[int]:
        return [2, *(10 + len(word) for word in observation.split())]

    def decode(self, action: Sequence[int]) -> str:
        return "".join(chr(token) for token in action)


@dataclass
class FakeRecorder:
    """Remembers every trajectory that ended, and whether it was kept."""

    kept: list[Trajectory] = field(default_factory=list)
    lost: list[Trajectory] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, value: float) -> None: ...

    def count(self, name: str, value: float = 1) -> None:
        self.counts[name] += int(value)

    def trajectory(self, trajectory: Any, kept: bool) -> None:
        (self.kept if kept else self.lost).append(trajectory)


class FakeWorker:
    """A worker that dies when told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._death: asyncio.Future[str] | None = None

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        raise WorkerDied("fake")

    async def wait_dead(self) -> str:
        self._death = asyncio.get_running_loop().create_future()
        return await self._death

    def die(self, reason: str) -> None:
        assert self._death is not None
        self._death.set_result(reason)

    async def stop(self) -> None: ...


@dataclass
class FakeHooks:
    """Remembers what the loop reports. `on_step` is called after each step, `on_checkpoint` at each checkpoint."""

    summaries: list[StepSummary] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    evaluations: list[tuple[int, EvalResult]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    save_s: float = 0.0
    on_step: Callable[[StepSummary], None] = lambda summary: None
    on_checkpoint: Callable[[int], None] = lambda step: None

    async def step_done(self, summary: StepSummary) -> None:
        self.summaries.append(summary)
        self.on_step(summary)

    async def checkpoint(self, step: int) -> None:
        self.on_checkpoint(step)
        await asyncio.sleep(self.save_s)
        self.checkpoints.append(step)

    async def evaluated(self, step: int, result: EvalResult) -> None:
        self.evaluations.append((step, result))

    def tell(self, line: str) -> None:
        self.told.append(line)


class FakeRun:
    """A whole run of the control plane over fakes. `options` are config keys, `section.key` written `section__key`."""

    def __init__(
        self,
        *,
        env: FakeEnv | None = None,
        tasks: dict[str, TaskSpec] | None = None,
        train_s: float = 1.0,
        token_s: float = 0.1,
        num_tokens: Callable[[GenRequest], int] = lambda request: 3,
        num_workers: int = 1,
        reward: FakeReward | None = None,
        start_step: int = 0,
        max_drops: int | None = None,
        num_shards: int = 0,
        **options: Any,
    ) -> None:
        self.tasks = tasks or {"maze": TaskSpec("maze")}
        self.config = _config(self.tasks, options)
        self.store = store = FakeStore()
        self.env = env or FakeEnv()
        self.engines = [FakeInference(store, f"inference-{n}", token_s, num_tokens) for n in range(num_workers)]
        self.trainer = FakeTrainer(store, train_s)
        self.trainer.version = start_step
        self.recorder, self.hooks, self.ledger = FakeRecorder(), FakeHooks(), Ledger()
        self.worker = FakeWorker("env-0")
        self.supervisor = Supervisor([self.worker])
        self.background = Background()
        self.proxy = LLMProxy(self.engines, background=self.background)
        self.proxy.on_workers = self.ledger.clock.engines
        self.reward = reward
        services = Services(
            self.env,
            self.proxy,
            FakeRenderer(),
            Sampling(),
            self.background,
            self.ledger.clock,
            reward,
            GroupScores(reward, self.config.rollout.group_size) if reward is not None else None,
        )
        self.runner = ShardedRunner(services, self.ledger.clock, self.tasks) if num_shards else None
        self.proxy.followers = self.runner
        self.shards = [self.new_shard(f"rollout-{n}") for n in range(num_shards)]
        self.source = TaskSource(self.config.seed, self.tasks)
        self.scheduler = RolloutScheduler(
            self.config,
            self.tasks,
            self.source,
            services,
            self.ledger,
            self.recorder,
            self.supervisor.fail,
            max_drops,
            self.runner,
        )
        evaluator = Evaluator(services, self.tasks, self.source, self.config.eval.episodes)
        self.loop = TrainingLoop(
            self.config,
            self.scheduler,
            self.proxy,
            self.trainer,
            evaluator,
            self.supervisor,
            self.ledger,
            self.hooks,
            [1, 2, 3, 4],
            start_step,
        )

    async def train(self) -> FakeRun:
        """Run to the end, and check what must hold after every run."""
        try:
            for shard in self.shards:
                await self.join(shard)
            await self.loop.run()
        finally:
            self.check()
        return self

    def new_shard(self, name: str) -> FakeShard:
        """One that knows the same engines and environments."""
        oldest, size = max_age(self.config), self.config.rollout.group_size
        return FakeShard(name, self.env, self.engines, FakeRenderer(), self.tasks, oldest, self.reward, size)

    async def join(self, shard: FakeShard) -> None:
        """It takes its share from now on."""
        assert self.runner is not None
        await self.runner.join(shard)

    def check(self) -> None:
        """Nothing is left behind, nothing trained twice, nothing trained too old, every trajectory ended once."""
        self.scheduler.book.check()
        rules = self.scheduler.book.rules
        assert not self.env.left_open, f"environments were not closed: {self.env.left_open}"
        assert not self.scheduler.book.num_running
        assert not len(self.background)
        assert not any(self.ledger.clock.counts.values()), self.ledger.clock.counts
        assert all(shard.env.dead or not len(shard.background) for shard in self.shards)
        trained = [t.trajectory_id for batch in self.trainer.batches for g in batch.groups for t in g.trajectories]
        assert len(trained) == len(set(trained)), "a trajectory was trained twice"
        for summary in self.hooks.summaries:
            ages = [max(ages_of(group.trajectories, summary.batch.version)) for group in summary.batch.groups]
            assert max(ages) <= rules.staleness.oldest
            assert sum(age > rules.staleness.whole for age in ages) <= rules.staleness.quota
        ended = [t.trajectory_id for t in self.recorder.kept + self.recorder.lost]
        assert len(ended) == len(set(ended)), "a trajectory ended twice"

    @property
    def trained_specs(self) -> list[tuple[str, int]]:
        return [(g.spec.task, g.spec.seed) for batch in self.trainer.batches for g in batch.groups]

    @property
    def ages(self) -> Counter[int]:
        return self.ledger.ages


def ages_of(trajectories: Sequence[Trajectory], version: int) -> list[int]:
    """The age of each at `version`."""
    return [version - t.start_version for t in trajectories if t.start_version is not None]


def _config(tasks: dict[str, TaskSpec], options: dict[str, Any]) -> Config:
    data: dict[str, Any] = {
        "steps": 6,
        "tasks": {name: {} for name in tasks},
        "rollout": {"groups_per_batch": 2, "group_size": 2, "zero_variance": "keep"},
        "eval": {"every": 0, "episodes": 2},
        "log": {"checkpoint_every": 0},
    }
    for key, value in options.items():
        section, _, leaf = key.partition("__")
        if leaf:
            data.setdefault(section, {})[leaf] = value
        else:
            data[key] = value
    return from_dict(data)
