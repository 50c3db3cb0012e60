from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollart.control.background import Background
from rollart.control.env_manager import EnvManager, Services
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.control.lockstep import Lockstep
from rollart.errors import RewardError
from rollart.types import EnvReply, GroupSpec, Sampling, TaskSpec, Trajectory
from rollart.virtual_time import run_virtual
from tests.fakes import FakeEnv, FakeInference, FakeRenderer, FakeReward, FakeStore

SPEC = GroupSpec(0, "maze", 7)


class World:
    """One environment, one engine, one trajectory."""

    def __init__(self, env: FakeEnv | None = None, reward: FakeReward | None = None, **engine: Any) -> None:
        self.env = env or FakeEnv(reward=lambda env_id: 0.75)
        self.engine = FakeInference(FakeStore({0}), **engine)
        self.engine.version = 3
        self.background = Background()
        self.proxy = LLMProxy([self.engine], background=self.background, version=3)
        self.services = Services(
            self.env, self.proxy, FakeRenderer(), Sampling(top_k=5), self.background, StageClock(), reward
        )

    async def live(self, task: TaskSpec, **options: Any) -> Trajectory:
        trajectory = await EnvManager(self.services, task, SPEC, "t", **options).run()
        await self.background.drain(1.0)
        assert not self.env.left_open
        assert not self.services.clock.num_running
        return trajectory


def lived(world: Callable[[], World], task: TaskSpec, **options: Any) -> tuple[World, Trajectory]:
    async def main() -> tuple[World, Trajectory]:
        made = world()
        return made, await made.live(task, **options)

    return run_virtual(main())


def test_a_trajectory_holds_exactly_what_engine_and_renderer_gave() -> None:
    world, t = lived(World, TaskSpec("maze", system_prompt="be good", tag="grid", stop=("!",)))
    assert t.stop_reason == "done"
    assert t.reward == 0.75
    assert [turn.observation_text for turn in t.turns] == ["start of 7", "go on"]
    assert t.tokens() == [1, 12, 14, 15, 12, 11, 100, 101, 102, 2, 12, 12, 100, 101, 102]
    assert [i for i, generated in enumerate(t.loss_mask()) if generated] == [6, 7, 8, 12, 13, 14]
    assert [turn.versions for turn in t.turns] == [[3, 3, 3], [3, 3, 3]]
    first, second = world.engine.requests
    assert second.prompt == t.tokens()[:12]
    assert (first.tag, first.sampling.stop, first.sampling.top_k, first.sampling.max_tokens) == ("grid", ("!",), 5, 64)
    assert t.seconds == pytest.approx({"reset": 0.1, "generate": 0.6, "step": 0.2, "score": 0.0})
    assert [turn.step_s for turn in t.turns] == pytest.approx([0.1, 0.1])
    assert t.failed_resets_s == []
    assert world.engine.released == ["t"]
    assert world.env.steps[0][2] == "def"


def test_turn_and_token_limits_end_a_trajectory() -> None:
    endless = lambda: World(FakeEnv(turns=99))  # noqa: E731
    assert lived(endless, TaskSpec("maze", max_turns=3))[1].stop_reason == "turn_limit"
    _, t = lived(endless, TaskSpec("maze", max_tokens=12))
    assert (t.stop_reason, t.num_tokens) == ("token_limit", 12)
    _, t = lived(endless, TaskSpec("maze", max_turn_tokens=2, max_turns=1))
    assert len(t.turns[0].action) == 2
    _, t = lived(endless, TaskSpec("maze", max_tokens=3))
    assert (t.stop_reason, t.turns) == ("token_limit", [])


def test_an_environment_that_says_truncated_ends_the_trajectory() -> None:
    cut = lambda: World(FakeEnv(misbehave=lambda *_: EnvReply("cut", 0.5, truncated=True, info={"why": "time"})))  # noqa: E731
    _, t = lived(cut, TaskSpec("maze"))
    assert (t.stop_reason, t.reward, t.info) == ("truncated", 0.5, {"why": "time"})


def test_a_reward_sees_what_reset_and_all_steps_said_beside_the_text() -> None:
    said = {"reset": {"answer": 4, "turn": 0}, "step": {"turn": 1}}
    told = lambda: World(FakeEnv(misbehave=lambda call, *_: EnvReply("on", terminated=call == "step", info=said[call])))  # noqa: E731
    _, t = lived(told, TaskSpec("maze"))
    assert t.info == {"answer": 4, "turn": 1}


def test_an_empty_generation_is_the_action_of_no_text() -> None:
    world, t = lived(lambda: World(num_tokens=lambda request: 0), TaskSpec("maze"))
    assert t.stop_reason == "done"
    assert t.start_version is None
    assert [action for _, _, action in world.env.steps] == ["", ""]


@pytest.mark.parametrize("failures", [1, 2])
def test_reset_is_tried_again_in_a_fresh_environment_with_growing_pauses(failures: int) -> None:
    bad = {"t", "t-r1"} if failures == 2 else {"t"}
    env = FakeEnv(misbehave=lambda call, env_id, task: "raise" if env_id in bad else None)
    _, t = lived(lambda: World(env), TaskSpec("maze"))
    assert t.stop_reason == "done"
    assert [env_id for env_id, _, _ in env.resets] == ["t", "t-r1", "t-r2"][: failures + 1]
    assert t.seconds["reset"] > (0.35, 1.05)[failures - 1]
    assert t.failed_resets_s == pytest.approx([0.1] * failures), "without the pauses between them"


@pytest.mark.parametrize("retries", [0, 2])
def test_reset_that_hangs_is_given_up_after_its_retries(retries: int) -> None:
    env = FakeEnv(misbehave=lambda *_: "hang")
    _, t = lived(lambda: World(env), TaskSpec("maze", reset_timeout_s=10.0, env_retries=retries))
    assert t.stop_reason == "env_error"
    assert "reset of task 'maze' did not answer within 10 s" in t.cause
    assert len(env.resets) == retries + 1
    assert len(t.failed_resets_s) == retries + 1
    assert all(seconds >= 10.0 for seconds in t.failed_resets_s)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("none", "answered NoneType, not an EnvReply"),
        (EnvReply(None), "gave an observation of NoneType, not str"),  # type: ignore[arg-type]
        (EnvReply("x", float("nan")), "gave the reward nan"),
        ("raise", "the maze has no exit"),
        ("hang", "step of task 'maze' did not answer within 30 s"),
    ],
)
def test_a_step_that_goes_wrong_is_data_on_the_trajectory(answer: Any, cause: str) -> None:
    env = FakeEnv(misbehave=lambda call, env_id, task: answer if call == "step" else None)
    _, t = lived(lambda: World(env), TaskSpec("maze"))
    assert t.stop_reason == "env_error"
    assert cause in t.cause
    assert len(t.turns) == 1


def test_the_seconds_of_a_step_do_not_hold_the_wait_for_others_that_step_with_it() -> None:
    async def main() -> Trajectory:
        world, lockstep = World(), Lockstep()
        for member in ("t", "other"):
            lockstep.join(member)
        asyncio.get_running_loop().call_later(50.0, lockstep.leave, "other")
        return await world.live(TaskSpec("maze"), lockstep=lockstep)

    t = run_virtual(main())
    assert [turn.step_s for turn in t.turns] == pytest.approx([0.1, 0.1])
    assert t.seconds["step"] > 45.0


def test_a_reward_function_scores_the_text_of_the_trajectory() -> None:
    reward = FakeReward()
    _, t = lived(lambda: World(reward=reward), TaskSpec("maze", has_reward=True))
    assert t.reward == 2.0
    assert reward.requests[0].responses == ["def", "def"]
    assert t.seconds["score"] == pytest.approx(0.05)


def test_a_trajectory_without_a_word_is_not_scored_and_keeps_its_cause() -> None:
    reward = FakeReward(RewardError("no answer to score"))
    _, t = lived(lambda: World(reward=reward), TaskSpec("maze", has_reward=True, max_tokens=1))
    assert (t.stop_reason, t.turns, reward.requests) == ("token_limit", [], [])


@pytest.mark.parametrize("answer", [RewardError("no judge"), ValueError("bug"), float("inf"), "high"])
def test_a_reward_that_fails_is_a_reward_error(answer: Any) -> None:
    _, t = lived(lambda: World(reward=FakeReward(answer)), TaskSpec("maze", has_reward=True))
    assert t.stop_reason == "reward_error"
    assert t.cause


def test_a_task_that_wants_a_reward_function_needs_a_reward_worker() -> None:
    _, t = lived(World, TaskSpec("maze", has_reward=True))
    assert (t.stop_reason, "no reward worker" in t.cause) == ("reward_error", True)


def test_a_turn_does_not_begin_when_the_trajectory_is_too_old() -> None:
    async def main(max_age: int | None) -> Trajectory:
        world = World(FakeEnv(turns=3, step_s=1.0))
        asyncio.get_running_loop().call_later(0.9, setattr, world.proxy, "version", 5)
        return await world.live(TaskSpec("maze"), max_age=max_age)

    assert [run_virtual(main(age)).stop_reason for age in (1, 2, None)] == ["stale", "done", "done"]


def test_progress_tells_a_lower_bound_of_the_start_and_then_the_start() -> None:
    told: list[tuple[str, int, int]] = []
    lived(World, TaskSpec("maze"), progress=lambda *what: told.append(what))
    assert told == [("t", 3, 0), ("t", 3, 3), ("t", 3, 6)]


@pytest.mark.parametrize("when", [0.0, 0.05, 0.25, 0.45])
def test_a_cancelled_trajectory_gives_everything_back(when: float) -> None:
    async def main() -> World:
        world = World()
        task = asyncio.ensure_future(EnvManager(world.services, TaskSpec("maze"), SPEC, "t").run())
        await asyncio.sleep(when)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await world.background.drain(1.0)
        return world

    world = run_virtual(main())
    assert not world.env.left_open
    assert not world.engine.in_flight
    assert not world.services.clock.num_running
    assert world.proxy.num_in_flight == 0
    assert bool(world.engine.aborted) == (when == 0.25)
