"""Simulated environments in virtual time: what passes, what fails, and that it looks as on a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollart.control.background import Background
from rollart.control.env_manager import EnvManager, Services, env_ids
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.data.environment import EnvironmentWorker, RemoteEnvironment
from rollart.data.simulated.environment import SimulatedEnvironment
from rollart.data.simulated.episode import draw_episode
from rollart.data.simulated.profile import Spread, TaskProfile
from rollart.data.simulated.renderer import SimulatedRenderer
from rollart.errors import EnvError, EnvTimeout
from rollart.protocols import EnvHandle, Renderer
from rollart.sections import TaskConfig
from rollart.types import GenRequest, GroupSpec, Sampling, TaskSpec, Trajectory
from rollart.virtual_time import run_virtual
from tests.data.fake_handles import FakeHandle
from tests.fakes import FakeInference, FakeStore

from .profiles import LONG, profile

CONFIG = TaskConfig(reset_timeout_s=60.0, step_timeout_s=30.0)


def environment(*, config: TaskConfig = CONFIG, **changes: Any) -> SimulatedEnvironment:
    return SimulatedEnvironment({"maze": profile(**changes)}, {"maze": config})


def timed(work: Callable[[], Awaitable[object]]) -> tuple[Any, float]:
    """The result or the error of `work`, and the virtual seconds that it took."""

    async def main() -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result: Any = await work()
        except EnvError as error:
            result = error
        return result, loop.time() - began

    return run_virtual(main())


def test_an_episode_takes_its_seconds_and_pays_at_its_end() -> None:
    async def play() -> list[Any]:
        env = environment()
        replies = [await env.reset("a", "maze", 1)]
        while not replies[-1].terminated:
            replies.append(await env.step("a", ""))
        await env.close("a")
        assert (await env.stats())["running"] == 0
        return replies

    replies, seconds = timed(play)
    assert seconds == 5.0 + 4 * 2.0
    assert [reply.observation for reply in replies] == ["11 3", "7 3", "7 3", "7 3", ""]
    assert [reply.reward for reply in replies] == [0.0] * 4 + [draw_episode(profile(), 1, "a").reward]


def test_what_others_do_changes_nothing() -> None:
    async def play(env: SimulatedEnvironment, env_id: str) -> tuple[list[Any], float]:
        began = asyncio.get_running_loop().time()
        replies = [await env.reset(env_id, "maze", 7)]
        while not replies[-1].terminated:
            replies.append(await env.step(env_id, ""))
        return replies, asyncio.get_running_loop().time() - began

    async def main(crowd: int) -> tuple[list[Any], float]:
        env = environment(turns=LONG, response_tokens=LONG, step_s=LONG)
        mine, *_ = await asyncio.gather(*(play(env, f"m{number}") for number in range(crowd)))
        return mine

    alone, together = run_virtual(main(1)), run_virtual(main(20))
    assert alone[0] == together[0]
    assert alone[1] == pytest.approx(together[1])


@pytest.mark.parametrize(
    ("changes", "seconds", "kind", "reason"),
    [
        ({"reset_failure_rate": 1.0, "reset_failure_s": Spread(50.0)}, 50.0, EnvError, "simulated failure"),
        ({"reset_failure_rate": 1.0, "reset_failure_s": Spread(90.0)}, 60.0, EnvTimeout, "did not answer within 60 s"),
        ({"reset_s": Spread(61.0)}, 60.0, EnvTimeout, "did not answer within 60 s"),
    ],
)
def test_a_reset_that_fails_takes_its_time_or_the_limit(
    changes: dict[str, Any], seconds: float, kind: type[EnvError], reason: str
) -> None:
    async def main() -> None:
        env = environment(**changes)
        try:
            await env.reset("a", "maze", 1)
        finally:
            with pytest.raises(EnvError, match="no environment 'a' here"):
                await env.step("a", "")

    error, took = timed(main)
    assert type(error) is kind
    assert str(error).startswith("reset of task 'maze'")
    assert reason in str(error)
    assert took == seconds


@pytest.mark.parametrize(
    ("changes", "seconds", "kind", "reason"),
    [
        ({"step_failure_rate": 1.0}, 2.0, EnvError, "step of task 'maze': simulated failure"),
        ({"step_s": Spread(31.0)}, 30.0, EnvTimeout, "step of task 'maze' did not answer within 30 s"),
    ],
)
def test_a_step_that_fails_ends_the_episode(
    changes: dict[str, Any], seconds: float, kind: type[EnvError], reason: str
) -> None:
    async def main() -> None:
        env = environment(**changes)
        await env.reset("a", "maze", 1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(kind) as caught:
            await env.step("a", "")
        assert type(caught.value) is kind
        assert str(caught.value) == reason
        assert asyncio.get_running_loop().time() - began == seconds
        with pytest.raises(EnvError, match="no environment 'a' here"):
            await env.step("a", "")
        await env.close("a")

    run_virtual(main())


def test_errors_of_unknown_ids_and_tasks_are_those_of_a_real_worker() -> None:
    async def said(worker: SimulatedEnvironment | EnvironmentWorker) -> list[str]:
        errors = []
        for call in (worker.step("nobody", ""), worker.reset("a", "chess", 1)):
            with pytest.raises(EnvError) as caught:
                await call
            errors.append(str(caught.value))
        await worker.close("nobody")
        await worker.give_up(["nobody", "a"])
        await worker.shutdown()
        return errors

    real = asyncio.run(said(EnvironmentWorker({"maze": {"env": "sorting"}}, 1)))
    assert run_virtual(said(environment())) == real


def test_a_closed_or_repeated_reset_begins_anew_and_an_episode_does_not_go_on_after_its_end() -> None:
    async def main() -> None:
        env = environment(turns=Spread(1.0))
        first = await env.reset("a", "maze", 1)
        assert (await env.step("a", "")).terminated
        with pytest.raises(EnvError, match="no environment 'a' here"):
            await env.step("a", "")
        assert await env.reset("a", "maze", 1) == first
        await env.close("a")
        await env.close("a")
        with pytest.raises(EnvError, match="no environment 'a' here"):
            await env.step("a", "")

    run_virtual(main())


def test_calls_are_counted_and_cost_no_processor_time() -> None:
    async def main() -> None:
        env = environment()
        await env.reset("a", "maze", 1)
        await env.step("a", "")
        cost = await env.cost()
        await env.step("a", "")
        assert (cost.resets, cost.steps, cost.step_cpu_s) == (1, 1, 0.0), "a copy"

    run_virtual(main())


# ---------------------------------------------------------------------------------------- behind the real control plane
def lived(task: TaskProfile, spec: TaskSpec) -> Trajectory:
    """One trajectory by the real EnvManager, whose engine answers with as many tokens as the prompt's last says."""

    async def main() -> Trajectory:
        worker = SimulatedEnvironment({"maze": task}, {"maze": CONFIG})
        env: EnvHandle = RemoteEnvironment([FakeHandle("environment", worker)])
        renderer: Renderer = SimulatedRenderer()
        engine = FakeInference(FakeStore({0}), num_tokens=answer_length, token_s=0.0)
        background = Background()
        proxy = LLMProxy([engine], background=background)
        services = Services(env, proxy, renderer, Sampling(), background, StageClock())
        trajectory = await EnvManager(services, spec, GroupSpec(0, "maze", 7), "g0-m0-a0").run()
        await background.drain(1.0)
        assert (await worker.stats())["running"] == 0
        return trajectory

    return run_virtual(main())


def answer_length(request: GenRequest) -> int:
    return min(request.prompt[-1], request.sampling.max_tokens)


def test_a_trajectory_is_the_drawn_episode() -> None:
    task = profile(turns=LONG, prompt_tokens=LONG, observation_tokens=LONG, response_tokens=LONG, step_s=LONG)
    episode = draw_episode(task, 7, "g0-m0-a0")
    trajectory = lived(task, TaskSpec("maze", max_turns=1000, max_turn_tokens=10**6, max_tokens=10**6))
    assert trajectory.stop_reason == "done"
    assert [len(turn.observation) for turn in trajectory.turns] == episode.prompts
    assert [len(turn.action) for turn in trajectory.turns] == episode.responses
    assert trajectory.seconds["step"] == pytest.approx(sum(episode.steps_s))
    assert trajectory.reward == episode.reward


def test_the_tasks_limits_hold() -> None:
    assert lived(profile(), TaskSpec("maze", max_turns=2)).stop_reason == "turn_limit"
    assert lived(profile(), TaskSpec("maze", max_tokens=20)).stop_reason == "token_limit"


def test_a_failed_reset_is_tried_again_in_another_environment() -> None:
    flaky = profile(reset_failure_rate=0.5, reset_failure_s=Spread(50.0))
    spec = TaskSpec("maze", reset_timeout_s=60.0, env_retries=5)
    fails = [draw_episode(flaky, 7, env_id).reset_fails for env_id in env_ids("g0-m0-a0", spec)]
    trajectory = lived(flaky, spec)
    assert trajectory.stop_reason == "done"
    assert trajectory.failed_resets_s == [50.0] * fails.index(False)
