"""EnvManager: the life of one trajectory, from reset to its reward, as one coroutine (paper section 4).

Invariants: `run` raises nothing but CancelledError, because every other fault is data on its trajectory; the
environment is closed and its KV released on every way out, also when reset was only half done; what the model
generated is kept as tokens and never re-tokenised. There is no barrier with other trajectories, unless a `Lockstep` is
passed in. What it leaves out: who starts it, and whether its trajectory is trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from rollart.config import Config
from rollart.control.background import Background
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.control.lockstep import Lockstep
from rollart.errors import EnvError, EnvTimeout, GenerationError, RewardError
from rollart.protocols import EnvHandle, Renderer, RewardHandle
from rollart.types import (
    EnvReply,
    GenRequest,
    GenResult,
    GroupSpec,
    RewardRequest,
    Sampling,
    StopReason,
    TaskSpec,
    Trajectory,
    Turn,
)

T = TypeVar("T")

FAULT: dict[str, StopReason] = {
    "reset": "env_error",
    "generate": "generation_error",
    "step": "env_error",
    "score": "reward_error",
}
"""What a fault is called that happens in a stage."""

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Services:
    """What all trajectories of a run share. `sampling` holds temperature and filters; limits come from the task."""

    env: EnvHandle
    proxy: LLMProxy
    renderer: Renderer
    sampling: Sampling
    background: Background
    clock: StageClock
    reward: RewardHandle | None = None
    group_scores: GroupScores | None = None
    """Of tasks whose reward sees a whole group."""


def sampling_of(config: Config) -> Sampling:
    """Temperature and filters of a run."""
    rollout = config.rollout
    return Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)


def env_ids(trajectory_id: str, task: TaskSpec) -> list[str]:
    """Every id under which a trajectory may hold an environment: one per attempt to reset it."""
    return [trajectory_id, *(f"{trajectory_id}-r{attempt}" for attempt in range(1, task.env_retries + 1))]


def request_ids(trajectory_id: str, task: TaskSpec) -> list[str]:
    """Every id under which it may have a request: one per turn."""
    return [f"{trajectory_id}-t{turn}" for turn in range(task.max_turns)]


def _no_progress(trajectory_id: str, start_version: int, num_tokens: int) -> None:
    """Nobody listens."""


class EnvManager:
    """One trajectory of `spec` in `task`. `trajectory` can be read at any time, also after a cancellation.

    max_age: end as stale when a turn would begin at a greater age; None checks nothing.
    progress: told (trajectory id, start version, tokens generated) before the first generation and after each turn.
    lockstep: environments step together; with `score_together` also scored only when all have ended.
    """

    def __init__(
        self,
        services: Services,
        task: TaskSpec,
        spec: GroupSpec,
        trajectory_id: str,
        *,
        max_age: int | None = None,
        progress: Callable[[str, int, int], None] = _no_progress,
        lockstep: Lockstep | None = None,
        score_together: bool = False,
    ) -> None:
        self.trajectory = Trajectory(trajectory_id, spec.group_id, task.name, spec.seed)
        self._services = services
        self._task = task
        self._id = trajectory_id
        self._env_id = trajectory_id
        self._max_age = max_age
        self._progress = progress
        self._lockstep = lockstep
        self._score_together = score_together
        self._history: list[int] = []
        self._num_generated = 0
        self._stage: str | None = None
        self._since = 0.0
        self._env_open = False

    async def run(self) -> Trajectory:
        """Live the whole life. Never raises, except CancelledError."""
        try:
            await self._live()
        except Exception as error:
            self.trajectory.stop_reason = FAULT[self._stage or "reset"]
            self.trajectory.cause = _describe(error)
        finally:
            self._end_episode()
            self._enter(None)
        return self.trajectory

    async def _live(self) -> None:
        self.trajectory.stop_reason = await self._episode()
        self._end_episode()
        if self.trajectory.stop_reason in ("cancelled", "stale") or not self.trajectory.turns:
            return  # Nothing was said: there is nothing to score, and its stop reason is the cause to report.
        self._enter("score")
        if self._lockstep is not None and self._score_together:
            await self._lockstep.all_left()
        self.trajectory.reward = await self._score()

    async def _episode(self) -> StopReason:
        """Reset, then generate and step until something ends it; why it ended."""
        task, renderer = self._task, self._services.renderer
        reply = await self._reset()
        observation = renderer.first(task.system_prompt, reply.observation)
        while True:
            turn = Turn(observation, [], [], [], observation_text=reply.observation)
            if (reason := await self._generate(turn)) is not None:
                return reason
            reply = await self._step(turn)
            if (reason := self._ended_by(reply)) is not None:
                return reason
            observation = renderer.following(reply.observation, turn.action)

    def _ended_by(self, reply: EnvReply) -> StopReason | None:
        if reply.terminated:
            return "done"
        if reply.truncated:
            return "truncated"
        return "turn_limit" if len(self.trajectory.turns) >= self._task.max_turns else None

    # ------------------------------------------------------------------------------------------------------- reset
    async def _reset(self) -> EnvReply:
        """Reset with bounded retries, exponential backoff and jitter drawn from the trajectory's id."""
        self._enter("reset")
        for attempt, env_id in enumerate(env_ids(self._id, self._task)):
            self._env_id = env_id
            self._env_open = True
            began = asyncio.get_running_loop().time()
            try:
                return await self._reset_once()
            except Exception:
                self.trajectory.failed_resets_s.append(asyncio.get_running_loop().time() - began)
                self._close_env()
                if attempt == self._task.env_retries:
                    raise
            jitter = random.Random(self._env_id).random()
            await asyncio.sleep(min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S) * (0.5 + jitter))
        raise AssertionError("the last attempt returns or raises")

    async def _reset_once(self) -> EnvReply:
        task = self._task
        reset = self._services.env.reset(self._env_id, task.name, self.trajectory.seed)
        return self._checked(await _fenced(reset, task.reset_timeout_s, EnvTimeout, f"reset of task {task.name!r}"))

    # ---------------------------------------------------------------------------------------------------- generate
    async def _generate(self, turn: Turn) -> StopReason | None:
        """Fill in the turn's action and keep it; a reason when the episode must end here."""
        self._enter("generate")
        self._history += turn.observation
        max_tokens = min(self._task.max_turn_tokens, self._task.max_tokens - len(self._history))
        if max_tokens < 1:
            return "token_limit"
        if self._too_old():
            return "stale"
        if not self.trajectory.turns:
            self._progress(self._id, self._services.proxy.version, 0)
        result = _whole(await self._services.proxy.generate(self._request(max_tokens)))
        self._keep(turn, result)
        return "cancelled" if result.finish_reason == "abort" else None

    def _request(self, max_tokens: int) -> GenRequest:
        task, services = self._task, self._services
        sampling = replace(
            services.sampling, max_tokens=max_tokens, stop=task.stop, stop_token_ids=services.renderer.stop_token_ids
        )
        request_id = f"{self._id}-t{len(self.trajectory.turns)}"
        return GenRequest(request_id, self._id, self._history, sampling, task.tag)

    def _keep(self, turn: Turn, result: GenResult) -> None:
        turn.action, turn.logprobs, turn.versions = result.tokens, result.logprobs, result.versions
        turn.finish_reason = result.finish_reason
        turn.action_text = self._services.renderer.decode(result.tokens)
        self._history += result.tokens
        self._num_generated += len(result.tokens)
        self.trajectory.turns.append(turn)
        start = self.trajectory.start_version
        if start is not None:
            self._progress(self._id, start, self._num_generated)

    def _too_old(self) -> bool:
        start = self.trajectory.start_version
        return start is not None and self._max_age is not None and self._services.proxy.version - start > self._max_age

    # --------------------------------------------------------------------------------------------- step and reward
    async def _step(self, turn: Turn) -> EnvReply:
        self._enter("step")
        if self._lockstep is not None:
            await self._lockstep.wait(self._id)
        task, began = self._task, asyncio.get_running_loop().time()
        step = self._services.env.step(self._env_id, turn.action_text)
        reply = self._checked(await _fenced(step, task.step_timeout_s, EnvTimeout, f"step of task {task.name!r}"))
        turn.step_s = asyncio.get_running_loop().time() - began
        turn.reward = reply.reward
        return reply

    def _checked(self, reply: EnvReply) -> EnvReply:
        if not isinstance(reply, EnvReply):
            raise EnvError(f"task {self._task.name!r} answered {type(reply).__name__}, not an EnvReply")
        if not isinstance(reply.observation, str):
            raise EnvError(
                f"task {self._task.name!r} gave an observation of {type(reply.observation).__name__}, not str"
            )
        if not _is_number(reply.reward):
            raise EnvError(f"task {self._task.name!r} gave the reward {reply.reward!r}, not a finite number")
        self.trajectory.info = {**self.trajectory.info, **reply.info}
        return reply

    async def _score(self) -> float:
        turns = self.trajectory.turns
        env_reward = float(sum(turn.reward for turn in turns))
        if not self._task.has_reward:
            return env_reward
        if self._services.reward is None:
            raise RewardError(f"task {self._task.name!r} wants a reward function, but the run has no reward worker")
        request = RewardRequest(
            self._task.name,
            self.trajectory.seed,
            [turn.observation_text for turn in turns],
            [turn.action_text for turn in turns],
            env_reward,
            self.trajectory.info,
        )
        request = replace(request, key=f"{self._id}-{_digest(request)}")
        if self._task.reward_scope == "group" and self._services.group_scores is not None:
            reward = await self._services.group_scores.score(self.trajectory.group_id, self._id, request)
        else:
            score, what = self._services.reward.score(request), f"reward of task {self._task.name!r}"
            reward = await _fenced(score, self._task.reward_deadline_s, RewardError, what)
        if not _is_number(reward):
            raise RewardError(f"reward of task {self._task.name!r} is {reward!r}, not a finite number")
        return float(reward)

    # ------------------------------------------------------------------------------------------------- on every way
    def _end_episode(self) -> None:
        """Give back what the episode held; harmless when repeated."""
        self._close_env()
        self._services.proxy.release(self._id)
        if self._lockstep is not None:
            self._lockstep.leave(self._id)

    def _close_env(self) -> None:
        if self._env_open:
            self._env_open = False
            self._services.background.spawn(self._services.env.close(self._env_id), f"close of task {self._task.name}")

    def _enter(self, stage: str | None) -> None:
        now = asyncio.get_running_loop().time()
        if self._stage is not None:
            seconds = self.trajectory.seconds
            seconds[self._stage] = seconds.get(self._stage, 0.0) + now - self._since
        self._services.clock.change(self._stage, stage)
        self._stage, self._since = stage, now


async def _fenced(call: Awaitable[T], limit_s: float, kind: type[Exception], what: str) -> T:
    """A second fence behind the worker's own timeout, a little later: a worker that does not answer at all."""
    try:
        async with asyncio.timeout(limit_s * 1.1 + 1.0):
            return await call
    except TimeoutError as error:
        if isinstance(error, kind):
            raise
        raise kind(f"{what} did not answer within {limit_s:g} s: {error}".removesuffix(": ")) from error


def _whole(result: GenResult) -> GenResult:
    """Raises GenerationError for a failed or inconsistent result."""
    if result.finish_reason == "error":
        raise GenerationError(result.error or "the engine failed the request without saying why")
    if not len(result.tokens) == len(result.logprobs) == len(result.versions):
        raise GenerationError(
            f"the engine returned {len(result.tokens)} tokens with {len(result.logprobs)} log-probabilities "
            f"and {len(result.versions)} versions"
        )
    return result


def _digest(request: RewardRequest) -> str:
    """Of what is scored: one id may stand for several trajectories, such as those of evaluations."""
    return hashlib.blake2b("\0".join([*request.prompts, *request.responses]).encode(), digest_size=8).hexdigest()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _describe(error: Exception) -> str:
    """The message, after the type where the type says more."""
    ours = isinstance(error, EnvError | RewardError | GenerationError)
    return str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
